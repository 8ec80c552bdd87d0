"""Where TorchRec keeps the data-parallel parts of a model, and the wrapper that made them."""

from collections.abc import Iterator
from typing import Any, cast

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
from torchrec.distributed.model_parallel import (
    DataParallelWrapper,
    DefaultDataParallelWrapper,
    DistributedModelParallel,
)

__all__ = [
    "DataParallelWrapper",
    "DefaultDataParallelWrapper",
    "data_parallel_module",
    "data_parallel_tables",
    "data_parallel_wrapper",
]


def data_parallel_module(model: DistributedModelParallel) -> DistributedDataParallel | None:
    """The DDP module around everything that isn't sharded; `None` if all is."""
    wrapped = model._dmp_wrapped_module
    return wrapped if isinstance(wrapped, DistributedDataParallel) else None


def data_parallel_wrapper(model: nn.Module) -> DataParallelWrapper | None:
    """The wrapper that a model was given; `None` for a model that TorchRec doesn't wrap."""
    return getattr(model, "_data_parallel_wrapper", None)


def data_parallel_tables(
    model: DistributedModelParallel,
) -> Iterator[tuple[DistributedDataParallel, dict[int, list[tuple[int, int]]]]]:
    """The DDP modules of ``data_parallel`` tables of bags.

    With each come the rows and columns of the tables that its parameters hold, by a parameter's id.
    """
    for module in model.modules():
        if not isinstance(module, ShardedEmbeddingBagCollection):
            continue
        for lookup in module._lookups:
            if isinstance(lookup, DistributedDataParallel):
                kernels = cast(Any, lookup.module)._emb_modules
                yield (
                    lookup,
                    {
                        id(kernel.emb_module.weights): [
                            (table.local_rows, table.local_cols)
                            for table in kernel.config.embedding_tables
                        ]
                        for kernel in kernels
                    },
                )
