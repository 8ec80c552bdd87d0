"""Pooled exchange of non-empty bags, first step: which bags of a batch have ids, and where.

A bag without ids sums up to nothing, and both ends know how many ids it has: the rank that sends
them, and the owner that gets them. So neither tells the other which sums it leaves out.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_2dsp._compat.shardings import widened
from torchrec_2dsp._compat.torchrec import EmbeddingShardingContext, KJTAllToAll
from torchrec_2dsp.rows.gradients import RowSum


@dataclass(frozen=True)
class Channel:
    """The features of one dimension, whose bags travel together."""

    dim: int
    features: tuple[tuple[int, ...], ...]
    """For each owner, the places of these features among its own."""
    is_summed: bool
    """Whether all owners have parts of the same bags; or each has bags of its own."""

    @property
    def num_features(self) -> int:
        """How many features of the output travel in this channel."""
        return len(self.features[0]) if self.is_summed else sum(map(len, self.features))

    @property
    def bases(self) -> tuple[int, ...]:
        """For each owner, where its first feature is in the output."""
        if self.is_summed:
            return (0,) * len(self.features)
        return tuple(sum(map(len, self.features[:owner])) for owner in range(len(self.features)))


def channels_of(dims: Sequence[Sequence[int]], *, is_summed: bool) -> tuple[Channel, ...]:
    """The channels of a sharding.

    Args:
        dims: of each owner's features.
        is_summed: see `Channel`.

    Example:
        >>> from torchrec_2dsp.shard.nonempty.bags import channels_of
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
    """The local samples' bags that have ids, owner by owner, in a channel."""

    counts: list[int]
    """How many come from each owner."""
    places: torch.Tensor
    """Where each belongs in the output, which stands sample by sample."""
    num_bags: int
    """How many bags the output has, empty ones included."""
    sums: RowSum | None
    """How parts of the same bag are added; `None` if each comes whole."""

    def record_stream(self, stream: torch.Stream) -> None:
        """Keep the tensors alive for ``stream``."""
        self.places.record_stream(stream)  # pyright: ignore[reportArgumentType]
        if self.sums is not None:
            self.sums.record_stream(stream)


@dataclass
class NonEmptyContext(EmbeddingShardingContext):
    """TorchRec's context of a batch in one sharding, with the bags that will come."""

    filled: list[FilledBags] = field(default_factory=list)
    """The bags that will come, channel by channel."""

    def record_stream(self, stream: torch.Stream) -> None:
        """Keep the tensors alive for ``stream``."""
        super().record_stream(stream)
        for bags in self.filled:
            bags.record_stream(stream)


class FilledBagsFinder:
    """Finds which bags of a batch have ids, when TorchRec exchanges the ids."""

    def __init__(self, channels: Sequence[Channel], num_features: Sequence[int]) -> None:
        """
        Args:
            channels: the channels of the sharding.
            num_features: how many features each owner has.
        """
        self._channels = tuple(channels)
        self._num_features = list(num_features)
        self._filled: list[FilledBags] = []

    def listen(self, exchange: KJTAllToAll) -> None:
        """Look at all that goes through an exchange whose features stand owner by owner."""
        # A hook, because TorchRec's pipelines replace `forward` by one that fuses exchanges.
        exchange.register_forward_pre_hook(lambda _, arguments: self._look_at(arguments[0]))

    def widened_context(self, context: EmbeddingShardingContext) -> NonEmptyContext:
        """The context of the batch that was exchanged last, with its filled bags."""
        filled, self._filled = self._filled, []
        return widened(context, NonEmptyContext, {"filled": filled})

    def _look_at(self, features: KeyedJaggedTensor) -> None:
        by_feature = features.lengths().view(sum(self._num_features), features.stride())
        by_owner = by_feature.split(self._num_features)
        self._filled = [_find(channel, by_owner) for channel in self._channels]


def _find(channel: Channel, lengths: Sequence[torch.Tensor]) -> FilledBags:
    """The bags of a channel that have ids.

    Args:
        channel: which features.
        lengths: of all bags, by owner `[features, batch]`.
    """
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
    """Whether bags have ids, in the order in which they travel: `[batch, features]`.

    Args:
        lengths: `[all features, batch]`.
        features: some of the features.
    """
    is_all = len(features) == len(lengths)
    chosen_lengths = lengths if is_all else lengths[list(features)]
    return chosen_lengths.t() > 0
