"""Pooled exchange of non-empty bags: TorchRec's sharding types, without the zeros.

TorchRec sends a vector for every bag, also for one without ids, be it that a sample has no value
there or that all its rows are hot. Here only bags with ids travel (`bags.py`), and the
others are zeros at both ends. Nothing else changes: which ranks have which tables, what is pooled
where, and in which order is TorchRec's.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from torchrec.distributed.types import Awaitable, CommOp, ShardingType
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_2dsp._compat.shardings import (
    ShardingFacts,
    callbacks_of,
    facts_of,
    id_exchange_of,
)
from torchrec_2dsp._compat.torchrec import (
    CwPooledEmbeddingSharding,
    EmbeddingShardingContext,
    RwPooledEmbeddingSharding,
    SequenceEmbeddingsAllToAll,
    TwPooledEmbeddingDist,
    TwPooledEmbeddingSharding,
)
from torchrec_2dsp.shard.lookups import PooledLookup, pooled_lookup
from torchrec_2dsp.shard.nonempty.bags import (
    Channel,
    FilledBags,
    FilledBagsFinder,
    NonEmptyContext,
    channels_of,
    filled_bags,
)

NonEmptySharding = TwPooledEmbeddingSharding | CwPooledEmbeddingSharding | RwPooledEmbeddingSharding
"""TorchRec's shardings whose bags can travel without the empty ones."""


@dataclass(frozen=True)
class OwnedBags:
    """What a rank's shards make of all ranks' samples."""

    pooled: torch.Tensor
    """`[samples, columns of all features]`."""
    lengths: torch.Tensor
    """Ids of each bag, `[features, samples]`."""


class NonEmptyLookup(PooledLookup):
    """A lookup that tells which bags had ids."""

    def forward(self, sparse_features: KeyedJaggedTensor) -> OwnedBags:  # type: ignore[override]
        """The bags of one batch of all ranks."""
        pooled = super().forward(sparse_features)
        num_features = len(sparse_features.keys())
        return OwnedBags(
            pooled, sparse_features.lengths().view(num_features, sparse_features.stride())
        )


class NonEmptyExchange(nn.Module):
    """TorchRec's output exchange, of bags with ids only."""

    def __init__(
        self,
        dims: Sequence[Sequence[int]],
        channels: Sequence[Channel],
        group: Any,
        device: torch.device,
        codecs: Any,
        callbacks: Sequence[Any],
    ) -> None:
        """
        Args:
            dims: of each owner's features.
            channels: the same by dimension.
            group: the owners.
            device: of the bags.
            codecs: for quantised communication, by TorchRec's names, if any.
            callbacks: what TorchRec does with the output.
        """
        super().__init__()
        self._rank = group.rank()
        self._dims = [list(of_owner) for of_owner in dims]
        self._channels = tuple(channels)
        self._callbacks = list(callbacks)
        self._exchanges = nn.ModuleList(
            SequenceEmbeddingsAllToAll(group, [1] * group.size(), device, codecs) for _ in channels
        )

    def forward(self, owned: OwnedBags, sharding_ctx: NonEmptyContext) -> "ExchangedBags":
        """Start to exchange.

        Collectives:
            One all-to-all for each dimension, waited for by what is returned; one more in the
            backward.
        """
        coming = []
        for channel, exchange, filled in zip(
            self._channels, self._exchanges, sharding_ctx.filled, strict=True
        ):
            is_filled = filled_bags(owned.lengths, channel.features[self._rank])
            per_rank = is_filled.sum(dim=1).split(sharding_ctx.batch_size_per_rank)
            counts = torch.stack([of_rank.sum() for of_rank in per_rank])
            coming.append(
                exchange(
                    _Taken.apply(self._bags(owned, channel), is_filled),
                    lengths=counts[None],
                    input_splits=filled.counts,
                    output_splits=counts.tolist(),
                )
            )
        bags = ExchangedBags(coming, sharding_ctx.filled, self._channels, self._dims)
        bags.callbacks.extend(self._callbacks)
        return bags

    def _bags(self, owned: OwnedBags, channel: Channel) -> torch.Tensor:
        """A channel's bags, sample by sample: `[bags, dim]`. Where there are none they hang on the
        pooled tensor as well, so that all ranks have a backward."""
        own_features = channel.features[self._rank]
        pooled = owned.pooled
        if len(own_features) != len(owned.lengths):
            columns = pooled.split(self._dims[self._rank], dim=1)
            pooled = torch.cat(
                [pooled[:, :0], *(columns[feature] for feature in own_features)], dim=1
            )
        return pooled.reshape(len(pooled) * len(own_features), channel.dim)


class ExchangedBags(Awaitable[torch.Tensor]):
    """Bags that come, and zeros where none do: `[batch, columns of all features]`."""

    def __init__(
        self,
        coming: Sequence[Awaitable[torch.Tensor]],
        filled: Sequence[FilledBags],
        channels: Sequence[Channel],
        dims: Sequence[Sequence[int]],
    ) -> None:
        super().__init__()
        self._coming = coming
        self._filled = filled
        self._channels = channels
        self._dims = dims

    def _wait_impl(self) -> torch.Tensor:
        by_channel: list[torch.Tensor] = [
            cast(torch.Tensor, _Put.apply(coming.wait(), filled)).view(
                -1, channel.num_features * channel.dim
            )
            for coming, filled, channel in zip(
                self._coming, self._filled, self._channels, strict=True
            )
        ]
        if len(by_channel) == 1:
            return by_channel[0]
        columns = {
            channel.dim: iter(bags.split(channel.dim, dim=1))
            for bags, channel in zip(by_channel, self._channels, strict=True)
        }
        owners = self._dims[:1] if self._channels[0].is_summed else self._dims
        return torch.cat([next(columns[dim]) for of_owner in owners for dim in of_owner], dim=1)


class _Taken(torch.autograd.Function):
    """Some of the bags. In the backward the others get no gradient."""

    @staticmethod
    def forward(ctx: Any, bags: torch.Tensor, is_taken: torch.Tensor) -> torch.Tensor:
        ctx.places = is_taken.reshape(-1).nonzero().view(-1)
        ctx.num_bags = bags.shape[0]
        return bags.index_select(0, ctx.places)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        (grad,) = grads
        whole = grad.new_zeros((ctx.num_bags, grad.shape[1]))
        return whole.index_copy_(0, ctx.places, grad), None


class _Put(torch.autograd.Function):
    """Bags put where they belong; parts of one bag added in the order of owners."""

    @staticmethod
    def forward(ctx: Any, come: torch.Tensor, filled: FilledBags) -> torch.Tensor:
        ctx.places = filled.places
        whole = come.new_zeros((filled.num_bags, come.shape[1]))
        if filled.sums is None:
            return whole.index_copy_(0, filled.places, come)
        return whole.index_copy_(0, filled.sums.keys, filled.sums.of(come))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0].index_select(0, ctx.places), None


class NonEmptyBags:
    """What a sharding makes that exchanges non-empty bags: its finder of them, and its exchange."""

    def __init__(self, facts: ShardingFacts, codecs: Any, *, is_summed: bool) -> None:
        """
        Args:
            facts: of the sharding.
            codecs: how bags look on the wire, if not as they are.
            is_summed: whether owners have parts of the same bags, see `Channel`.
        """
        self._facts, self._codecs, self._is_summed = facts, codecs, is_summed
        self._dims = [
            [dim for config in configs for dim in config.embedding_dims()]
            for configs in facts.configs_per_rank
        ]
        self._channels = channels_of(self._dims, is_summed=is_summed)
        self._finder = FilledBagsFinder(self._channels, [len(dims) for dims in self._dims])

    @classmethod
    def of(cls, sharding: NonEmptySharding, *, is_summed: bool) -> "NonEmptyBags":
        """The parts of a sharding.

        Args:
            sharding: the sharding, just made.
            is_summed: see `Channel`.
        """
        registry = sharding.qcomm_codecs_registry or {}
        codecs = registry.get(CommOp.SEQUENCE_EMBEDDINGS_ALL_TO_ALL.name)
        return cls(facts_of(sharding), codecs, is_summed=is_summed)

    def heard(self, input_dist: Any) -> Any:
        """TorchRec's input exchange, whose ids are looked at on their way."""
        self._finder.listen(id_exchange_of(input_dist))
        return input_dist

    def output_dist(self, device: torch.device | None, stock: Any) -> NonEmptyExchange:
        """What exchanges the bags, in place of TorchRec's output exchange.

        Args:
            device: of the bags.
            stock: TorchRec's output exchange, which knows the order of columns.
        """
        callbacks = callbacks_of(stock) if isinstance(stock, TwPooledEmbeddingDist) else ()
        return NonEmptyExchange(
            self._dims,
            self._channels,
            self._facts.group,
            device or self._facts.device,
            self._codecs,
            list(callbacks),
        )

    def lookup(self, device: torch.device | None, feature_processor: Any) -> NonEmptyLookup:
        """What looks up this rank's shards."""
        kind = ShardingType.ROW_WISE if self._is_summed else None
        return pooled_lookup(self._facts, device, feature_processor, kind, NonEmptyLookup)

    def widened_context(self, context: EmbeddingShardingContext) -> NonEmptyContext:
        """The context of the batch whose ids were sent last, with its filled bags."""
        return self._finder.widened_context(context)
