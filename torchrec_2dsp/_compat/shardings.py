"""Adapters to private attributes of TorchRec's shardings and sharded modules.

This package's subclasses of TorchRec's shardings replace parts of what these build.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import SparseType
from torch import nn
from torch.profiler import record_function
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding.rw_sharding import RwSparseFeaturesDist
from torchrec.distributed.sharding.tw_sharding import TwSparseFeaturesDist
from torchrec.distributed.sharding.twrw_sharding import TwRwSparseFeaturesDist
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.distributed.train_pipeline.runtime_forwards import (
    BaseForward,
    EmbeddingPipelinedForward,
    PipelinedForward,
)
from torchrec.distributed.types import NoWait
from torchrec.optim.fused import FusedOptimizer
from torchrec.optim.keyed import CombinedOptimizer
from torchrec.streamable import Pipelineable

from torchrec_2dsp._compat.torchrec import (
    BatchedFusedEmbedding,
    BatchedFusedEmbeddingBag,
    CwPooledEmbeddingSharding,
    CwSequenceEmbeddingSharding,
    DpPooledEmbeddingSharding,
    DpSequenceEmbeddingSharding,
    EmbeddingFusedOptimizer,
    EmbeddingShardingContext,
    GridPooledEmbeddingDist,
    GridPooledEmbeddingSharding,
    GroupedEmbeddingConfig,
    GroupedEmbeddingsLookup,
    GroupedPooledEmbeddingsLookup,
    KJTAllToAll,
    PooledEmbeddingsReduceScatter,
    RwPooledEmbeddingDist,
    RwPooledEmbeddingSharding,
    RwSequenceEmbeddingSharding,
    ShardedEmbeddingCollection,
    ShardingEnv2D,
    TwPooledEmbeddingDist,
    TwPooledEmbeddingSharding,
    TwRwPooledEmbeddingDist,
    TwRwPooledEmbeddingSharding,
    TwSequenceEmbeddingSharding,
)

Sharding = (
    TwPooledEmbeddingSharding
    | CwPooledEmbeddingSharding
    | RwPooledEmbeddingSharding
    | TwRwPooledEmbeddingSharding
    | GridPooledEmbeddingSharding
    | TwSequenceEmbeddingSharding
    | CwSequenceEmbeddingSharding
    | RwSequenceEmbeddingSharding
    | DpPooledEmbeddingSharding
    | DpSequenceEmbeddingSharding
)
"""TorchRec's shardings with a subclass here."""

Context = TypeVar("Context", bound=EmbeddingShardingContext)

MakeReduceScatter = Callable[[dist.ProcessGroup, Any], Any]
"""Builds a reduce-scatter of pooled embeddings from its group and codecs."""


def replace_reduce_scatter(output_dist: RwPooledEmbeddingDist, make: MakeReduceScatter) -> None:
    """Replace the reduce-scatter in a row-wise output exchange."""
    output_dist._dist = make(output_dist._pg, output_dist._codecs)


def replace_reduce_scatter_in_node(
    output_dist: TwRwPooledEmbeddingDist | GridPooledEmbeddingDist, make: MakeReduceScatter
) -> None:
    """Replace the reduce-scatter in an output exchange that is row-wise inside nodes."""
    output_dist._create_output_dist_modules()
    output_dist._intra_dist = make(output_dist._intra_pg, output_dist._intra_codecs)


def parts_of_reduce_scatter(
    reduce_scatter: PooledEmbeddingsReduceScatter,
) -> tuple[dist.ProcessGroup, Any]:
    """Return a reduce-scatter's group and codecs."""
    return reduce_scatter._pg, reduce_scatter._codecs


def parts_of_lookup(lookup: GroupedEmbeddingsLookup) -> tuple[list[nn.Module], list[int]]:
    """Return a lookup's kernels, and the number of features that each looks up."""
    return list(lookup._emb_modules), lookup._feature_splits


def return_type_of_others(
    lookup: GroupedEmbeddingsLookup | GroupedPooledEmbeddingsLookup, facts: "ShardingFacts"
) -> None:
    """Let the lookup of a rank without tables return numbers of the other ranks' type."""
    config = next(config for configs in facts.configs_per_rank for config in configs)
    dtype = (config.fused_params or {}).get("output_dtype", SparseType.FP32).as_dtype()
    nothing = lookup._dummy_embs_tensor
    lookup._dummy_embs_tensor = nothing.detach().to(dtype).requires_grad_(nothing.requires_grad)


class PlainStateOptimizer(EmbeddingFusedOptimizer):
    """TorchRec's fused optimizer of a kernel, with given state instead of state made of shards."""

    def __init__(
        self, tbe: Any, params: dict[str, Any], state: dict[Any, Any], group: dict[str, Any]
    ) -> None:
        self._emb_module = tbe
        FusedOptimizer.__init__(self, params, state, [group])


def replace_optimizer(
    kernel: BatchedFusedEmbeddingBag | BatchedFusedEmbedding, optimizer: EmbeddingFusedOptimizer
) -> None:
    """Replace the fused optimizer that a kernel exposes."""
    kernel._optim = optimizer


def dedups_ids(sharder: EmbeddingCollectionSharder) -> bool:
    """Return whether a sharder's modules look up each distinct id once."""
    return sharder._use_index_dedup


def id_exchange_of(
    input_dist: RwSparseFeaturesDist | TwSparseFeaturesDist | TwRwSparseFeaturesDist,
) -> KJTAllToAll:
    """Return the ids' all-to-all inside an input exchange."""
    return input_dist._dist


def lookups_of(
    module: ShardedEmbeddingBagCollection | ShardedEmbeddingCollection,
) -> list[nn.Module]:
    """Return a sharded module's lookups, one per sharding."""
    return module._lookups


def output_dists_of(
    module: ShardedEmbeddingBagCollection | ShardedEmbeddingCollection,
) -> list[nn.Module]:
    """Return a sharded module's output exchanges, one per sharding."""
    return module._output_dists


def shardings_of(module: ShardedEmbeddingBagCollection | ShardedEmbeddingCollection) -> list[Any]:
    """Return a sharded module's shardings, in lookup order."""
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
    """Return each table's fused parameters by name, in the user's units."""
    return {
        table.name: config.fused_params or {}
        for sharding in shardings_of(module)
        for configs in getattr(sharding, "_grouped_embedding_configs_per_rank", [])
        for config in configs
        for table in config.embedding_tables
    }


def wrap_optimizer(
    module: ShardedEmbeddingBagCollection | ShardedEmbeddingCollection,
    wrap: Callable[[CombinedOptimizer], CombinedOptimizer],
) -> None:
    """Replace a sharded module's optimizer by a wrapped one."""
    module._optim = wrap(module._optim)


def renew_optimizer(model: DistributedModelParallel) -> None:
    """Join the current fused optimizers of a wrapper's modules."""
    model._optim = model._init_optim(model.module)


def load_as(module: nn.Module, parts: Callable[[], Iterable[nn.Module]]) -> None:
    """Call the parts' load hooks when a module's state dict is loaded."""

    def before(_: nn.Module, *load: Any) -> None:
        for part in parts():
            _before_load(part, load)

    def after(_: nn.Module, keys: Any) -> None:
        for part in parts():
            _after_load(part, keys)

    module.register_load_state_dict_pre_hook(before)
    module.register_load_state_dict_post_hook(after)


def before_loads(module: nn.Module, check: Callable[..., None]) -> None:
    """Show ``check`` a state, its prefix and metadata before TorchRec's hook cuts it."""
    handle = module.register_load_state_dict_pre_hook(lambda _, *load: check(*load[:3]))
    hooks: Any = module._load_state_dict_pre_hooks
    hooks.move_to_end(handle.id, last=False)


def _before_load(module: nn.Module, load: tuple[Any, ...]) -> None:
    for hook in module._load_state_dict_pre_hooks.values():
        hook(*load)


def _after_load(module: nn.Module, keys: Any) -> None:
    for hook in module._load_state_dict_post_hooks.values():
        hook(module, keys)


def is_in_pipeline(module: nn.Module) -> bool:
    """Return whether a train pipeline runs a sharded module's lookups."""
    return isinstance(module.forward, BaseForward)


def distributed_ahead(module: nn.Module) -> Any:
    """Return the context of the batch that a pipeline lets a module look up next, if any."""
    forward = module.forward
    if not isinstance(forward, PipelinedForward | EmbeddingPipelinedForward):
        return None
    return forward.get_context().module_contexts.get(forward.name)


def distributed_again(module: nn.Module, context: Any) -> bool:
    """Tell whether a re-attached pipeline distributes a batch it holds to this context."""
    if distributed_ahead(module) is not context:
        return False
    forward = cast(Any, module.forward)
    return forward.name in forward.get_context().input_dist_tensors_requests


@dataclass(frozen=True)
class ShardingFacts:
    """A sharding's tables and ranks."""

    configs_per_rank: list[list[GroupedEmbeddingConfig]]
    """The kernels' configs for each rank in the group."""
    configs: list[GroupedEmbeddingConfig]
    """This rank's kernel configs."""
    group: dist.ProcessGroup
    """The ranks that share the tables."""
    device: torch.device
    """The tables' device."""
    env: ShardingEnv2D
    """The environment given to TorchRec."""


def facts_of(sharding: Sharding) -> ShardingFacts:
    """Return a sharding's private facts."""
    env = cast(ShardingEnv2D, sharding._env)
    is_whole = isinstance(sharding, DpPooledEmbeddingSharding | DpSequenceEmbeddingSharding)
    device, per_rank = sharding._device, sharding._grouped_embedding_configs_per_rank
    return ShardingFacts(
        configs_per_rank=per_rank,
        configs=per_rank[env.rank],
        group=env.process_group if is_whole else env.sharding_pg,
        device=torch.device("cpu") if device is None else device,
        env=env,
    )


def regroup(
    sharding: RwPooledEmbeddingSharding | RwSequenceEmbeddingSharding,
    configs_per_rank: list[list[GroupedEmbeddingConfig]],
) -> None:
    """Replace a sharding's kernels for its tables."""
    sharding._grouped_embedding_configs_per_rank = configs_per_rank
    sharding._grouped_embedding_configs = configs_per_rank[sharding._rank]


def callbacks_of(output_dist: TwPooledEmbeddingDist) -> Iterable[Callable[[Any], Any]]:
    """Return TorchRec's callbacks on a table-wise or column-wise exchange's output."""
    return output_dist._callbacks or ()


def widened(
    context: EmbeddingShardingContext, kind: type[Context], notes: Mapping[str, Any]
) -> Context:
    """Copy a batch's context into a subclass with more fields, from ``notes``."""
    stock = {field.name: getattr(context, field.name) for field in fields(context)}
    return kind(**stock, **notes)


In = TypeVar("In", bound=Pipelineable)
Out = TypeVar("Out")


class OpenTrainPipeline(TrainPipelineSparseDist[In, Out]):
    """TorchRec's sparse pipeline, with `progress` split into public parts.

    Subclasses put these in their own order, and may take batches in another way.
    """

    @property
    def model(self) -> nn.Module:
        """The trained model."""
        return self._model

    @property
    def is_attached(self) -> bool:
        """True if the model's lookups run in the pipeline."""
        return self._model_attached

    @property
    def pipelined_modules(self) -> list[Any]:
        """The sharded modules whose ids are distributed ahead."""
        return cast(list[Any], self._pipelined_modules)

    @property
    def takes_batch_after_forward(self) -> bool:
        """True if the next batch should be taken after the forward."""
        return self._enqueue_batch_after_forward

    def attach_again(self) -> None:
        """Attach the model if it was detached."""
        if not self._model_attached:
            self.attach(self._model)

    def begin_step(self) -> None:
        """Wait for the first batch, zero gradients, and let the modules look it up."""
        self._set_module_context(self.contexts[0])
        if self._model.training:
            with record_function("## zero_grad ##"):
                self._optimizer.zero_grad()
        self._wait_for_batch()
        if self._clear_data_dist_inputs:
            self.clear_sparse_data_dist_inputs(self.contexts[0])

    def run_forward(self) -> tuple[torch.Tensor, Out]:
        """Return the first batch's losses and output."""
        with record_function(f"## forward {self.contexts[0].index} ##"):
            return self._model_fwd(self.batches[0])

    def update(self, losses: torch.Tensor) -> None:
        """Run the first batch's backward and the optimizer's step."""
        self._backward(losses)
        every = self._dmp_collection_sync_interval_batches
        self.sync_embeddings(self._model, every, self.contexts[0])
        self._optimizer_step()

    def arrived(self, context: Any, name: str) -> Any:
        """Wait for a module's input exchange, and keep its result for the lookup."""
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
        """Return the next batch, or `None` at the end."""
        return TrainPipelineSparseDist._next_batch(self, dataloader_iter)

    def _next_batch(self, dataloader_iter: Iterator[In]) -> In | None:
        return self.next_batch(dataloader_iter)
