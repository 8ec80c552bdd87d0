"""Pooled exchange for non-empty bags: TorchRec's sharding types without the zeros.

TorchRec sends a vector for every bag, even without ids: a sample may have no value, or only hot
ones. Here both ends fill such bags with zeros. They know the bags' lengths, so neither announces
the bags that it leaves out. Pooling, shards and their order stay TorchRec's.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import nn
from torchrec.distributed.types import Awaitable
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_2dsp._compat.torchrec import EmbeddingShardingContext, SequenceEmbeddingsAllToAll
from torchrec_2dsp.rows.gradients import RowSum
from torchrec_2dsp.shard.kernels import PooledLookup


@dataclass(frozen=True)
class Channel:
    """Features with the same dim, whose bags travel together."""

    dim: int
    features: tuple[tuple[int, ...], ...]
    """These features' positions among each owner's features."""
    is_summed: bool
    """True if all owners have parts that add up to a bag."""

    @property
    def num_features(self) -> int:
        """The number of this channel's output features."""
        return len(self.features[0]) if self.is_summed else sum(map(len, self.features))

    @property
    def bases(self) -> tuple[int, ...]:
        """Each owner's first position in the output."""
        if self.is_summed:
            return (0,) * len(self.features)
        return tuple(sum(map(len, self.features[:owner])) for owner in range(len(self.features)))


def channels_of(dims: Sequence[Sequence[int]], *, is_summed: bool) -> tuple[Channel, ...]:
    """Return a sharding's channels.

    Example:
        >>> from torchrec_2dsp.shard.nonempty import channels_of
        >>> for channel in channels_of([[8, 4, 8], [8]], is_summed=False):
        ...     print(channel.dim, channel.features, channel.bases)
        4 ((1,), ()) (0, 1)
        8 ((0, 2), (0,)) (0, 2)
    """
    return tuple(
        Channel(
            dim,
            tuple(
                tuple(place for place, own_dim in enumerate(of_owner) if own_dim == dim)
                for of_owner in dims
            ),
            is_summed,
        )
        for dim in sorted({dim for of_owner in dims for dim in of_owner})
    )


@dataclass(frozen=True)
class FilledBags:
    """A channel's filled bags of the local samples, owner by owner."""

    counts: list[int]
    places: torch.Tensor
    """The bags' positions in the output, which is sorted by sample."""
    num_bags: int
    """The number of bags in the output, including empty ones."""
    sums: RowSum | None
    """The sums over partial bags; `None` if each bag arrives whole."""

    def record_stream(self, stream: torch.Stream) -> None:
        """Keep the tensors alive for ``stream``."""
        self.places.record_stream(stream)  # pyright: ignore[reportArgumentType]
        if self.sums is not None:
            self.sums.record_stream(stream)


@dataclass
class NonEmptyContext(EmbeddingShardingContext):
    """TorchRec's batch context in one sharding, with the bags that will arrive."""

    filled: list[FilledBags] = field(default_factory=list)
    """The bags that will arrive, channel by channel."""

    def record_stream(self, stream: torch.Stream) -> None:
        """Keep the tensors alive for ``stream``."""
        super().record_stream(stream)
        for bags in self.filled:
            bags.record_stream(stream)


def find_filled(channel: Channel, lengths: Sequence[torch.Tensor]) -> FilledBags:
    """Return a channel's filled bags."""
    places = []
    batch_size = lengths[0].shape[1]
    for base, features, of_owner in zip(channel.bases, channel.features, lengths, strict=True):
        sample, feature = filled_bags(of_owner, features).nonzero(as_tuple=True)
        places.append(sample * channel.num_features + feature + base)
    every = torch.cat(places)
    return FilledBags(
        counts=[len(of_owner) for of_owner in places],
        places=every,
        num_bags=batch_size * channel.num_features,
        sums=RowSum(every) if channel.is_summed else None,
    )


def filled_bags(lengths: torch.Tensor, features: Sequence[int]) -> torch.Tensor:
    """Flag filled bags, in the order in which they travel: `[batch, features]`."""
    is_all = len(features) == len(lengths)
    chosen_lengths = lengths if is_all else lengths[list(features)]
    return chosen_lengths.t() > 0


@dataclass(frozen=True)
class OwnedBags:
    """A rank's pooled shards for all ranks' samples."""

    pooled: torch.Tensor
    """`[samples, columns of all features]`."""
    lengths: torch.Tensor
    """The number of ids in each bag, `[features, samples]`."""


class NonEmptyLookup(PooledLookup):
    """A lookup that also tells which bags had ids."""

    def forward(self, sparse_features: KeyedJaggedTensor) -> OwnedBags:  # type: ignore[override]
        """Return all ranks' bags in one batch."""
        pooled = super().forward(sparse_features)
        num_features = len(sparse_features.keys())
        return OwnedBags(
            pooled, sparse_features.lengths().view(num_features, sparse_features.stride())
        )


class NonEmptyExchange(nn.Module):
    """TorchRec's output exchange for filled bags only."""

    def __init__(
        self,
        dims: Sequence[Sequence[int]],
        channels: Sequence[Channel],
        group: Any,
        device: torch.device,
        codecs: Any,
        callbacks: Sequence[Any],
    ) -> None:
        super().__init__()
        self._rank = group.rank()
        self._dims = [list(of_owner) for of_owner in dims]
        self._channels = tuple(channels)
        self._callbacks = list(callbacks)
        self._exchanges = nn.ModuleList(
            SequenceEmbeddingsAllToAll(group, [1] * group.size(), device, codecs) for _ in channels
        )

    def forward(self, owned: OwnedBags, sharding_ctx: NonEmptyContext) -> "ExchangedBags":
        """Start the exchange.

        Collectives:
            One all-to-all for each dim, waited for by the returned awaitable; one more in the
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
        """Return a channel's bags, sample by sample: `[bags, dim]`.

        They depend on the pooled tensor even if there are none, so that all ranks have a backward.
        """
        own_features = channel.features[self._rank]
        pooled = owned.pooled
        if len(own_features) != len(owned.lengths):
            columns = pooled.split(self._dims[self._rank], dim=1)
            pooled = torch.cat(
                [pooled[:, :0], *(columns[feature] for feature in own_features)], dim=1
            )
        return pooled.reshape(len(pooled) * len(own_features), channel.dim)


class ExchangedBags(Awaitable[torch.Tensor]):
    """Bags in flight, with zeros for empty ones: `[batch, columns of all features]`."""

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
    """Selects bags; in the backward the other bags get no gradient."""

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
    """Puts bags into place, and adds partial bags in owner order."""

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
