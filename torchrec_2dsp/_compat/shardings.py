"""Adapters to private attributes of TorchRec's shardings and sharded modules.

The plugin's subclasses of TorchRec's shardings replace a part of what these build.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import record_function
from torchrec.distributed.batched_embedding_kernel import (
    BatchedFusedEmbedding,
    BatchedFusedEmbeddingBag,
    EmbeddingFusedOptimizer,
)
from torchrec.distributed.dist_data import KJTAllToAll, PooledEmbeddingsReduceScatter
from torchrec.distributed.embedding import EmbeddingCollectionSharder, ShardedEmbeddingCollection
from torchrec.distributed.embedding_lookup import GroupedEmbeddingsLookup
from torchrec.distributed.embedding_sharding import EmbeddingShardingContext
from torchrec.distributed.embedding_types import GroupedEmbeddingConfig
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
from torchrec.distributed.sharding.cw_sequence_sharding import CwSequenceEmbeddingSharding
from torchrec.distributed.sharding.cw_sharding import CwPooledEmbeddingSharding
from torchrec.distributed.sharding.grid_sharding import (
    GridPooledEmbeddingDist,
    GridPooledEmbeddingSharding,
)
from torchrec.distributed.sharding.rw_sequence_sharding import RwSequenceEmbeddingSharding
from torchrec.distributed.sharding.rw_sharding import (
    RwPooledEmbeddingDist,
    RwPooledEmbeddingSharding,
    RwSparseFeaturesDist,
)
from torchrec.distributed.sharding.tw_sequence_sharding import TwSequenceEmbeddingSharding
from torchrec.distributed.sharding.tw_sharding import (
    TwPooledEmbeddingDist,
    TwPooledEmbeddingSharding,
    TwSparseFeaturesDist,
)
from torchrec.distributed.sharding.twrw_sharding import (
    TwRwPooledEmbeddingDist,
    TwRwPooledEmbeddingSharding,
)
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.distributed.types import NoWait, ShardingEnv2D
from torchrec.optim.keyed import CombinedOptimizer
from torchrec.streamable import Pipelineable

Sharding = (
    TwPooledEmbeddingSharding
    | CwPooledEmbeddingSharding
    | RwPooledEmbeddingSharding
    | TwRwPooledEmbeddingSharding
    | GridPooledEmbeddingSharding
    | TwSequenceEmbeddingSharding
    | CwSequenceEmbeddingSharding
    | RwSequenceEmbeddingSharding
)
"""TorchRec's shardings, of which the plugin has subclasses."""

Context = TypeVar("Context", bound=EmbeddingShardingContext)

MakeReduceScatter = Callable[[dist.ProcessGroup, Any], Any]
"""Makes a reduce-scatter of pooled embeddings from its group and its codecs."""


def replace_reduce_scatter(output_dist: RwPooledEmbeddingDist, make: MakeReduceScatter) -> None:
    """Let the output exchange of row-wise tables use another reduce-scatter."""
    output_dist._dist = make(output_dist._pg, output_dist._codecs)


def replace_reduce_scatter_in_node(
    output_dist: TwRwPooledEmbeddingDist | GridPooledEmbeddingDist, make: MakeReduceScatter
) -> None:
    """Let the output exchange of tables that are row-wise in a node use another reduce-scatter."""
    output_dist._create_output_dist_modules()
    output_dist._intra_dist = make(output_dist._intra_pg, output_dist._intra_codecs)


def parts_of_reduce_scatter(
    reduce_scatter: PooledEmbeddingsReduceScatter,
) -> tuple[dist.ProcessGroup, Any]:
    """The group and the codecs of a reduce-scatter."""
    return reduce_scatter._pg, reduce_scatter._codecs


def parts_of_lookup(lookup: GroupedEmbeddingsLookup) -> tuple[list[nn.Module], list[int]]:
    """The kernels of a lookup, and how many features each looks up."""
    return list(lookup._emb_modules), lookup._feature_splits


def replace_optimizer(
    kernel: BatchedFusedEmbeddingBag | BatchedFusedEmbedding, optimizer: EmbeddingFusedOptimizer
) -> None:
    """Let a kernel show another fused optimizer."""
    kernel._optim = optimizer


def dedups_ids(sharder: EmbeddingCollectionSharder) -> bool:
    """Whether a sharder's modules look up each id of a batch once."""
    return sharder._use_index_dedup


def id_exchange_of(input_dist: RwSparseFeaturesDist | TwSparseFeaturesDist) -> KJTAllToAll:
    """The all-to-all of ids inside an input exchange."""
    return input_dist._dist


def lookups_of(
    module: ShardedEmbeddingBagCollection | ShardedEmbeddingCollection,
) -> list[nn.Module]:
    """The lookups of a sharded module, one per sharding."""
    return module._lookups


def input_dists_of(
    module: ShardedEmbeddingBagCollection | ShardedEmbeddingCollection,
) -> list[nn.Module]:
    """The input exchanges of a sharded module, one per sharding."""
    return module._input_dists


def output_dists_of(
    module: ShardedEmbeddingBagCollection | ShardedEmbeddingCollection,
) -> list[nn.Module]:
    """The output exchanges of a sharded module, one per sharding."""
    return module._output_dists


def shardings_of(module: ShardedEmbeddingBagCollection | ShardedEmbeddingCollection) -> list[Any]:
    """The shardings of a sharded module, in the order of its exchanges and lookups."""
    if isinstance(module, ShardedEmbeddingBagCollection):
        return _shardings_of_bags(module)
    return _shardings_of_sequences(module)


def _shardings_of_bags(module: ShardedEmbeddingBagCollection) -> list[Any]:
    return list(module._embedding_shardings)


def _shardings_of_sequences(module: ShardedEmbeddingCollection) -> list[Any]:
    return list(module._sharding_type_to_sharding.values())


def fused_params_of(
    module: ShardedEmbeddingBagCollection | ShardedEmbeddingCollection,
) -> dict[str, dict[str, Any]]:
    """The fused parameters of each table, by name, in the user's units."""
    if isinstance(module, ShardedEmbeddingBagCollection):
        return {
            info.embedding_config.name: info.fused_params or {}
            for infos in module.sharding_type_to_sharding_infos.values()
            for info in infos
        }
    return {
        table.name: config.fused_params or {}
        for sharding in _shardings_of_sequences(module)
        for configs in getattr(sharding, "_grouped_embedding_configs_per_rank", [])
        for config in configs
        for table in config.embedding_tables
    }


def wrap_optimizer(
    module: ShardedEmbeddingBagCollection | ShardedEmbeddingCollection,
    wrap: Callable[[CombinedOptimizer], CombinedOptimizer],
) -> None:
    """Put another optimizer in the place of a sharded module's own one."""
    module._optim = wrap(module._optim)


@dataclass(frozen=True)
class ShardingFacts:
    """What a sharding knows of its tables and its ranks."""

    configs_per_rank: list[list[GroupedEmbeddingConfig]]
    """The configs of the kernels, for each rank of the group."""
    configs: list[GroupedEmbeddingConfig]
    """The configs of this rank's kernels."""
    group: dist.ProcessGroup
    """The ranks that share the tables."""
    device: torch.device
    """The device of the tables."""
    env: ShardingEnv2D
    """The environment that TorchRec was given."""


def facts_of(sharding: Sharding) -> ShardingFacts:
    """What a sharding keeps to itself."""
    group, device = sharding._pg, sharding._device
    assert group is not None
    per_rank = sharding._grouped_embedding_configs_per_rank
    return ShardingFacts(
        configs_per_rank=per_rank,
        configs=per_rank[sharding._rank],
        group=group,
        device=torch.device("cpu") if device is None else device,
        env=cast(ShardingEnv2D, sharding._env),
    )


def regroup(
    sharding: RwPooledEmbeddingSharding | RwSequenceEmbeddingSharding,
    configs_per_rank: list[list[GroupedEmbeddingConfig]],
) -> None:
    """Let a sharding have other kernels for its tables."""
    sharding._grouped_embedding_configs_per_rank = configs_per_rank
    sharding._grouped_embedding_configs = configs_per_rank[sharding._rank]


def callbacks_of(output_dist: TwPooledEmbeddingDist) -> Iterable[Callable[[Any], Any]]:
    """What TorchRec does with the output of a table-wise or column-wise exchange."""
    return output_dist._callbacks or ()


def widened(
    context: EmbeddingShardingContext, kind: type[Context], notes: Mapping[str, Any]
) -> Context:
    """A sharding's context of a batch, as a kind of context that knows more.

    Args:
        context: TorchRec's, left as it is.
        kind: a subclass of its type.
        notes: what the other kind knows besides, by the names of its fields.
    """
    stock = {field.name: getattr(context, field.name) for field in fields(context)}
    return kind(**stock, **notes)


In = TypeVar("In", bound=Pipelineable)
Out = TypeVar("Out")


class OpenTrainPipeline(TrainPipelineSparseDist[In, Out]):
    """TorchRec's sparse pipeline, with what its `progress` does under public names.

    A subclass puts them in an order of its own, and may take batches in another way.
    """

    @property
    def model(self) -> nn.Module:
        """The model that is trained."""
        return self._model

    @property
    def is_attached(self) -> bool:
        """Whether the model's lookups run in the pipeline."""
        return self._model_attached

    @property
    def pipelined_modules(self) -> list[Any]:
        """The sharded modules whose ids are distributed ahead."""
        return cast(list[Any], self._pipelined_modules)

    @property
    def takes_batch_after_forward(self) -> bool:
        """Whether the user wants the next batch to be taken after the forward."""
        return self._enqueue_batch_after_forward

    def attach_again(self) -> None:
        """Attach the model if it was detached."""
        if not self._model_attached:
            self.attach(self._model)

    def begin_step(self) -> None:
        """Let the modules look up the first batch, when it is there, with gradients of zero."""
        self._set_module_context(self.contexts[0])
        if self._model.training:
            with record_function("## zero_grad ##"):
                self._optimizer.zero_grad()
        self._wait_for_batch()
        if self._clear_data_dist_inputs:
            self.clear_sparse_data_dist_inputs(self.contexts[0])

    def run_forward(self) -> tuple[torch.Tensor, Out]:
        """The losses and the output of the first batch."""
        with record_function(f"## forward {self.contexts[0].index} ##"):
            return self._model_fwd(self.batches[0])

    def update(self, losses: torch.Tensor) -> None:
        """The backward of the first batch, and the step of the optimizer."""
        self._backward(losses)
        every = self._dmp_collection_sync_interval_batches
        self.sync_embeddings(self._model, every, self.contexts[0])
        self._optimizer_step()

    def arrived(self, context: Any, name: str) -> Any:
        """What a batch's input exchange gives, which is kept for the batch's lookup.

        Args:
            context: the pipeline's, of the batch.
            name: of the module whose ids are exchanged.
        """
        requests = context.input_dist_tensors_requests
        if not isinstance(requests[name], NoWait):
            with self._stream_context(cast(Any, self._data_dist_stream)):
                given = requests[name].wait()
            if self._data_dist_stream is not None:
                current = torch.get_device_module(self._device).current_stream()
                current.wait_stream(self._data_dist_stream)
                given.record_stream(current)
            requests[name] = NoWait(given)
        return requests[name].wait()

    def next_batch(self, dataloader_iter: Iterator[In]) -> In | None:
        """The next batch, or `None` at the end."""
        return TrainPipelineSparseDist._next_batch(self, dataloader_iter)

    def _next_batch(self, dataloader_iter: Iterator[In]) -> In | None:
        return self.next_batch(dataloader_iter)
