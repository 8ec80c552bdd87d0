"""TorchRec internals that this package builds on, imported only here.

A test checks that each name still exists, so that a TorchRec upgrade fails in one readable place.
"""

import copy
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch.nn.utils.parametrize import is_parametrized
from torchrec.distributed import comm as _comm
from torchrec.distributed.batched_embedding_kernel import (
    BatchedFusedEmbedding,
    BatchedFusedEmbeddingBag,
    EmbeddingFusedOptimizer,
)
from torchrec.distributed.comm import get_local_size, intra_and_cross_node_pg_2D
from torchrec.distributed.comm_ops import get_gradient_division
from torchrec.distributed.dist_data import (
    KJTAllToAll,
    KJTAllToAllSplitsAwaitable,
    PooledEmbeddingsAwaitable,
    PooledEmbeddingsReduceScatter,
    SequenceEmbeddingsAllToAll,
)
from torchrec.distributed.embedding import ShardedEmbeddingCollection
from torchrec.distributed.embedding_kernel import BaseEmbedding
from torchrec.distributed.embedding_lookup import (
    GroupedEmbeddingsLookup,
    GroupedPooledEmbeddingsLookup,
)
from torchrec.distributed.embedding_sharding import (
    BaseEmbeddingDist,
    EmbeddingSharding,
    EmbeddingShardingContext,
    KJTListSplitsAwaitable,
)
from torchrec.distributed.embedding_types import (
    BaseEmbeddingLookup,
    EmbeddingComputeKernel,
    GroupedEmbeddingConfig,
)
from torchrec.distributed.planner.types import Enumerator, SharderDataMap
from torchrec.distributed.sharding.cw_sequence_sharding import CwSequenceEmbeddingSharding
from torchrec.distributed.sharding.cw_sharding import CwPooledEmbeddingSharding
from torchrec.distributed.sharding.dp_sequence_sharding import DpSequenceEmbeddingSharding
from torchrec.distributed.sharding.dp_sharding import DpPooledEmbeddingSharding
from torchrec.distributed.sharding.grid_sharding import (
    GridPooledEmbeddingDist,
    GridPooledEmbeddingSharding,
)
from torchrec.distributed.sharding.rw_sequence_sharding import RwSequenceEmbeddingSharding
from torchrec.distributed.sharding.rw_sharding import (
    RwPooledEmbeddingDist,
    RwPooledEmbeddingSharding,
)
from torchrec.distributed.sharding.sequence_sharding import SequenceShardingContext
from torchrec.distributed.sharding.tw_sequence_sharding import TwSequenceEmbeddingSharding
from torchrec.distributed.sharding.tw_sharding import (
    TwPooledEmbeddingDist,
    TwPooledEmbeddingSharding,
)
from torchrec.distributed.sharding.twrw_sharding import (
    TwRwPooledEmbeddingDist,
    TwRwPooledEmbeddingSharding,
)
from torchrec.distributed.types import DMPCollectionContext, ShardingEnv2D
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.optim.clipping import GradientClipping, GradientClippingOptimizer
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.sparse.tensor_dict import maybe_td_to_kjt

from torchrec_2dsp.errors import UnsupportedError


def sharder_data_of(enumerator: Enumerator | None) -> SharderDataMap:
    """Return an enumerator's records on its sharders, by module type."""
    return getattr(enumerator, "_sharder_data_map", {})


NodeGroups = tuple[dist.ProcessGroup | None, dist.ProcessGroup | None, int | None]
"""A sharding group's ranks on one host, its ranks with the same position on their hosts, and the
node group's size."""


def swap_node_groups(groups: NodeGroups) -> NodeGroups:
    """Set one mesh's node groups in TorchRec's module globals, and return the previous ones.

    TorchRec creates these groups once per process and reuses them for every later mesh, which
    sends a second mesh's collectives to the first one's ranks.
    """
    before = (_comm._INTRA_PG_2D, _comm._CROSS_PG_2D, _comm._NODE_GROUP_SIZE_2D)
    _comm._INTRA_PG_2D, _comm._CROSS_PG_2D, _comm._NODE_GROUP_SIZE_2D = groups
    return before


@dataclass
class InBackwardOptimizers:
    """A parameter's optimizer classes and arguments from `apply_optimizer_in_backward`."""

    classes: list[type[torch.optim.Optimizer]]
    kwargs: list[dict[str, Any]]

    def attach_to(self, param: torch.nn.Parameter) -> None:
        """Copy the classes and arguments to ``param``."""
        param._optimizer_classes = list(self.classes)  # type: ignore[attr-defined]
        param._optimizer_kwargs = [dict(kwargs) for kwargs in self.kwargs]  # type: ignore[attr-defined]


def in_backward_optimizers(param: torch.nn.Parameter) -> InBackwardOptimizers | None:
    """Copy what `apply_optimizer_in_backward` left on ``param``, if anything."""
    classes = getattr(param, "_optimizer_classes", None)
    if not classes:
        return None
    kwargs: list[dict[str, Any]] = getattr(param, "_optimizer_kwargs", [{}])
    return InBackwardOptimizers(list(classes), [dict(entry) for entry in kwargs])


def without_weights(collection: Any) -> Any:
    """Copy a collection onto the meta device, with its tables' own optimizers."""
    blanks: dict[int, Any] = {}
    for weight in collection.parameters():
        blank = torch.nn.Parameter(weight.detach().to("meta"), requires_grad=False)
        blanks[id(weight)] = blank
        if (optimizers := in_backward_optimizers(weight)) is not None:
            optimizers.attach_to(blank)
    return _on_meta(copy.deepcopy(collection, blanks))


def _on_meta(collection: EmbeddingBagCollection | EmbeddingCollection) -> Any:
    collection._device = torch.device("meta")
    return collection


def carried_by(module: torch.nn.Module) -> str | None:
    """Describe settings on a collection or table that change its outputs or gradients, if any."""
    if is_parametrized(module):
        return "a parametrization"
    hooks = (module._forward_hooks, module._forward_pre_hooks)
    if any((*hooks, module._backward_hooks, module._backward_pre_hooks)):
        return "hooks on its forward or backward"
    if "forward" in vars(module):
        return "a forward set on the instance"
    for name in ("padding_idx", "max_norm", "scale_grad_by_freq"):
        value = getattr(module, name, None)
        if value is not None and value is not False:
            return f"{name}={value}"
    weight = getattr(module, "weight", None)
    names = ("_backward_hooks", "_post_accumulate_grad_hooks")
    return "hooks on its weight" if any(getattr(weight, name, None) for name in names) else None


def jagged_features(batch: Any, needed: Iterable[str]) -> KeyedJaggedTensor:
    """Return a batch as TorchRec's jagged features.

    A `TensorDict`'s features are found by name, while TorchRec uses their place in the first batch.
    Features that aren't jagged are left out of the result.
    """
    if isinstance(batch, TensorDict):
        jagged = {
            name
            for name, part in batch.items()
            if isinstance(part, torch.Tensor) and part.layout is torch.jagged
        }
        names = [name for name in dict.fromkeys(needed) if name in jagged]
        if names:
            return maybe_td_to_kjt(cast(Any, batch), names)
        device = next((part.device for part in batch.values()), None) or torch.device("cpu")
        return KeyedJaggedTensor.empty(device=device)
    if not isinstance(batch, KeyedJaggedTensor):
        raise UnsupportedError(
            "a batch must be a KeyedJaggedTensor, or a TensorDict of jagged nested tensors, but it "
            f"is a {type(batch).__name__}; convert it first"
        )
    return batch


class ColumnWiseSequences(ShardedEmbeddingCollection):
    """TorchRec's sharded sequences, with other names allowed for column-wise types."""

    @abstractmethod
    def is_column_wise(self, sharding_type: str) -> bool:
        """Return whether tables with this type are sharded by columns."""

    def order_column_shards(self, configs: Sequence[Any], plan: Mapping[str, Any]) -> None:
        """Keep the outputs' columns in order; ``plan`` has TorchRec's type names."""
        self._generate_permute_indices_per_feature(list(configs), dict(plan))

    def _embedding_dim_for_sharding_type(self, sharding_type: str) -> int:
        """Return the width of a sharding's rows; TorchRec requires equal column-wise shards."""
        if not self.is_column_wise(sharding_type):
            return ShardedEmbeddingCollection._embedding_dim_for_sharding_type(self, sharding_type)
        shards: Any = self._sharding_type_to_sharding[sharding_type].embedding_shard_metadata()
        return shards[0].shard_sizes[1]


def clipped_as_whole(optimizer: GradientClippingOptimizer) -> list[torch.Tensor]:
    """Return the parameters that clipping by norm takes as whole on each rank.

    It doesn't clip a `DTensor` among them, because that one's local tensor has no gradient.
    """
    is_by_norm = optimizer._clipping is GradientClipping.NORM
    return list(optimizer._replicate_params) if is_by_norm else []
