"""Where TorchRec keeps the data-parallel parts of a model, and the wrapper that made them."""

from collections.abc import Iterator
from typing import Any, cast

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed.embedding import ShardedEmbeddingCollection
from torchrec.distributed.embedding_lookup import GroupedPooledEmbeddingsLookup
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
from torchrec.distributed.model_parallel import (
    DataParallelWrapper,
    DefaultDataParallelWrapper,
    DistributedModelParallel,
)

from torchrec_2dsp._compat.shardings import lookups_of

__all__ = [
    "DataParallelWrapper",
    "DefaultDataParallelWrapper",
    "data_parallel_lookups",
    "data_parallel_module",
    "data_parallel_parts",
    "data_parallel_tables",
    "data_parallel_wrapper",
    "has_synced",
    "wrapped_module",
]


def data_parallel_module(model: DistributedModelParallel) -> DistributedDataParallel | None:
    """The DDP module around everything that isn't sharded; `None` if all is."""
    wrapped = model._dmp_wrapped_module
    return wrapped if isinstance(wrapped, DistributedDataParallel) else None


def wrapped_module(model: DistributedModelParallel) -> nn.Module:
    """The model with its sharded tables, before anything data-parallel is around it."""
    return model._dmp_wrapped_module


def data_parallel_wrapper(model: nn.Module) -> DataParallelWrapper | None:
    """The wrapper that a model was given; `None` for a model that TorchRec doesn't wrap."""
    return getattr(model, "_data_parallel_wrapper", None)


def data_parallel_lookups(
    module: ShardedEmbeddingBagCollection | ShardedEmbeddingCollection,
) -> list[DistributedDataParallel]:
    """The lookups of tables that TorchRec's ``data_parallel`` repeats on every rank."""
    return [part for part in lookups_of(module) if isinstance(part, DistributedDataParallel)]


def data_parallel_parts(model: nn.Module) -> list[DistributedDataParallel]:
    """All DDP modules of a model, those of ``data_parallel`` tables included."""
    parts = [part for part in model.modules() if isinstance(part, DistributedDataParallel)]
    for module in model.modules():
        if isinstance(module, ShardedEmbeddingBagCollection | ShardedEmbeddingCollection):
            parts += data_parallel_lookups(module)
    return parts


def has_synced(part: DistributedDataParallel) -> bool:
    """Whether DDP has added up gradients once, and knows its graph if that is static."""
    return not part.static_graph or part._static_graph_delay_allreduce_enqueued


def data_parallel_tables(
    model: DistributedModelParallel,
) -> Iterator[tuple[DistributedDataParallel, dict[int, list[tuple[int, int]]]]]:
    """The DDP modules of ``data_parallel`` tables of bags.

    With each come the rows and columns of the tables that its parameters hold, by a parameter's id.
    """
    for module in model.modules():
        if isinstance(module, ShardedEmbeddingBagCollection):
            for lookup in data_parallel_lookups(module):
                yield lookup, _table_sizes(cast(GroupedPooledEmbeddingsLookup, lookup.module))


def _table_sizes(lookup: GroupedPooledEmbeddingsLookup) -> dict[int, list[tuple[int, int]]]:
    """The rows and columns of the tables of each parameter of a lookup, by the parameter's id."""
    kernels = cast(list[Any], lookup._emb_modules)
    return {
        id(kernel.emb_module.weights): [
            (table.local_rows, table.local_cols) for table in kernel.config.embedding_tables
        ]
        for kernel in kernels
    }
