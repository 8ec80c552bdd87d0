"""`GradientReport`: what exchanging dense gradients has cost."""

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist

from torchrec_2dsp.codecs.rows import FlatCodec
from torchrec_2dsp.codecs.sparse import Entries, SparseCodec, largest


@dataclass(frozen=True, kw_only=True)
class GradientReport:
    """What a rank has sent of its dense gradients.

    Example:
        >>> from torchrec_2dsp.dense.gradient_sums import GradientReport
        >>> step = GradientReport(num_steps=1, num_entries=50, num_elements=10_000)
        >>> (step + step).density
        0.005
    """

    num_steps: int = 0
    """How many steps there were."""

    num_thresholded_steps: int = 0
    """How many of them weren't dense."""

    num_bytes: float = 0.0
    """The bytes that the rank has sent to others, if an all-reduce is a ring."""

    dense_bytes: float = 0.0
    """The bytes that an all-reduce in float32 would have sent."""

    num_entries: int = 0
    """How many elements were chosen, of those that are thresholded."""

    num_elements: int = 0
    """From how many elements they were chosen."""

    @property
    def density(self) -> float:
        """The share of elements that were chosen; 0 before any was."""
        return self.num_entries / self.num_elements if self.num_elements else 0.0

    def __add__(self, other: "GradientReport") -> "GradientReport":
        return GradientReport(
            **{name: value + getattr(other, name) for name, value in vars(self).items()}
        )

    def __sub__(self, earlier: "GradientReport") -> "GradientReport":
        return GradientReport(
            **{name: value - getattr(earlier, name) for name, value in vars(self).items()}
        )


class UnusedParameters:
    """The parameters of one of DDP's buckets that have no gradient on this rank.

    If no rank used a parameter, DDP leaves it without one, whatever a hook has computed. What a
    hook has kept from earlier steps may be due nevertheless.
    """

    def __init__(self, bucket: dist.GradBucket) -> None:
        params = bucket.parameters()
        self._is_unused = [param.grad is None for param in params]
        self._params: Sequence[torch.Tensor] = params
        self._views: Sequence[torch.Tensor] = bucket.gradients() if any(self._is_unused) else ()

    def give(self, means: torch.Tensor) -> torch.Tensor:
        """Let those parameters have gradients for which one has come, and return all of them."""
        if not self._views:
            return means
        parts = means.split([param.numel() for param in self._params])
        for param, view, part, is_unused in zip(
            self._params, self._views, parts, self._is_unused, strict=True
        ):
            if is_unused and part.any():
                # A view of the bucket, into which DDP writes the means afterwards.
                param.grad = view
        return means


_FLOAT_BYTES = 4
_OWNERS_GAIN = 3.0
"""Owners have to send so many times less than a gather to be chosen: they apply fewer entries in a
step, and take two messages after one another."""
_SPARE = 1.25
"""The room of a message to an owner, in units of what it gets on average."""
_SPARE_ENTRIES = 8


class GradientRoute(enum.StrEnum):
    """How the sum over all ranks is made."""

    DENSE = "dense"
    """All elements are added up by an all-reduce."""

    GATHER = "gather"
    """Each rank gets the entries of all others."""

    OWNERS = "owners"
    """Each element has an owner that adds up its entries and sends the largest sums to all."""


@dataclass(frozen=True)
class BucketSize:
    """The size of a bucket of gradients, and how much of it may be sent."""

    num_elements: int
    """The elements of the bucket."""

    capacity: int
    """The most entries that a rank chooses of it."""

    num_ranks: int
    """How many ranks add up their gradients."""

    values: FlatCodec
    """How the values of entries look."""

    @property
    def gather_codec(self) -> SparseCodec:
        """The form of a rank's entries for all others."""
        return SparseCodec(self.num_elements, self.capacity, self.values)

    @property
    def owner_codec(self) -> SparseCodec:
        """The form of a rank's entries for one owner, and of the sums that an owner sends."""
        of_owner = math.ceil(self.capacity / self.num_ranks * _SPARE) + _SPARE_ENTRIES
        return SparseCodec(
            math.ceil(self.num_elements / self.num_ranks),
            min(of_owner, self.capacity),
            self.values,
        )

    def sent_bytes(self, route: GradientRoute) -> float:
        """The bytes that a rank sends to others; an all-reduce is taken to be a ring.

        Example:
            200x fewer entries are 100x fewer bytes on 4 ranks, and not even 10x on 64, unless
            owners add up.

            >>> import torch
            >>> from torchrec_2dsp.codecs.rows import FlatCodec
            >>> from torchrec_2dsp.codecs.rows import FloatRows
            >>> from torchrec_2dsp.dense.gradient_sums import BucketSize, GradientRoute
            >>> for num_ranks in (4, 64):
            ...     values = FlatCodec(FloatRows(torch.bfloat16), block=2)
            ...     bucket = BucketSize(4_000_000, 20_000, num_ranks, values)
            ...     all_bytes = bucket.sent_bytes(GradientRoute.DENSE)
            ...     for route in (GradientRoute.GATHER, GradientRoute.OWNERS):
            ...         print(num_ranks, route.value, round(all_bytes / bucket.sent_bytes(route)))
            4 gather 100
            4 owners 159
            64 gather 6
            64 owners 156
        """
        others = self.num_ranks - 1
        if route is GradientRoute.GATHER:
            return float(others * self.gather_codec.num_bytes)
        if route is GradientRoute.OWNERS:
            return 2.0 * others * self.owner_codec.num_bytes
        return 2.0 * others / self.num_ranks * self.num_elements * _FLOAT_BYTES

    def cheapest_route(self) -> GradientRoute:
        """The route that sends least, as long as owners are worth it."""
        gathered = self.sent_bytes(GradientRoute.GATHER)
        owned = self.sent_bytes(GradientRoute.OWNERS)
        is_owned = self.num_elements >= self.num_ranks and owned * _OWNERS_GAIN <= gathered
        best = GradientRoute.OWNERS if is_owned else GradientRoute.GATHER
        sends_less = self.sent_bytes(best) < self.sent_bytes(GradientRoute.DENSE)
        return best if sends_less else GradientRoute.DENSE


@dataclass(frozen=True)
class StartedSum:
    """A sum that is being made."""

    sent: Entries
    """What this rank has sent, as others have it, in ascending order."""

    left_out: Entries
    """Sums that aren't sent on, which this rank has to keep, in ascending order."""

    total: torch.futures.Future[torch.Tensor]
    """The sum over all ranks, flat, equal in every bit on all of them."""


class SparseSum(Protocol):
    """A way to add up entries over the ranks of a group."""

    def start(self, entries: Entries, total: torch.Tensor) -> StartedSum:
        """Add up entries."""
        ...


class GatheredSum:
    """Each rank sends its entries to all others."""

    def __init__(self, codec: SparseCodec, group: dist.ProcessGroup) -> None:
        self._codec, self._group = codec, group

    def start(self, entries: Entries, total: torch.Tensor) -> StartedSum:
        """Add up entries.

        Collectives:
            One all-gather of `codec.num_bytes` bytes, not waited for.
        """
        message = self._codec.encode(entries)
        arriving = _gather(message, self._group)

        def add_up(future: torch.futures.Future[object]) -> torch.Tensor:
            future.wait()
            total.zero_()
            # In the order of ranks, so that all ranks compute the same bits.
            for received in arriving.messages.split(message.numel()):
                total.index_add_(0, *self._codec.decode(received))
            return total

        sent = Entries(entries.positions, self._codec.rounded(entries.values))
        nothing = Entries(sent.positions[:0], sent.values[:0])
        return StartedSum(sent, nothing, arriving.future.then(add_up))


class OwnedSum:
    """Owners add up what all ranks send of their elements, and send the largest sums to all.

    The owner of element i is rank i % num_ranks. Of sums that don't fit into a message, and of
    rounding, the owner keeps the rest.
    """

    def __init__(self, codec: SparseCodec, group: dist.ProcessGroup) -> None:
        self._codec, self._group = codec, group
        self._rank, self._num_ranks = dist.get_rank(group), dist.get_world_size(group)

    def start(self, entries: Entries, total: torch.Tensor) -> StartedSum:
        """Add up entries.

        Collectives:
            One all-to-all of `codec.num_bytes` bytes for each rank, waited for; then one
            all-gather of `codec.num_bytes` bytes, not waited for.
        """
        codec, num_ranks = self._codec, self._num_ranks
        owners = entries.positions % num_ranks
        parts = [
            largest(
                Entries(entries.positions[is_own] // num_ranks, entries.values[is_own]),
                codec.capacity,
            )
            for is_own in (owners == owner for owner in range(num_ranks))
        ]
        messages = torch.cat([codec.encode(part) for part in parts])
        received = torch.empty_like(messages)
        dist.all_to_all_single(received, messages, group=self._group)
        sums = total.new_zeros(codec.num_elements)
        for message in received.split(codec.num_bytes):
            sums.index_add_(0, *codec.decode(message))
        touched = sums.nonzero().view(-1)
        chosen = largest(Entries(touched, sums[touched]), codec.capacity)
        reply = codec.encode(chosen)
        arriving = _gather(reply, self._group)
        sums.index_add_(0, chosen.positions, codec.rounded(chosen.values), alpha=-1)
        rest = sums.nonzero().view(-1)

        def spread(future: torch.futures.Future[object]) -> torch.Tensor:
            future.wait()
            total.zero_()
            for owner, owned in enumerate(arriving.messages.split(reply.numel())):
                positions, values = codec.decode(owned)
                total.index_add_(0, positions * num_ranks + owner, values)
            return total

        sent = [
            Entries(part.positions * num_ranks + owner, codec.rounded(part.values))
            for owner, part in enumerate(parts)
        ]
        return StartedSum(
            sent=_joined(sent),
            left_out=Entries(rest * num_ranks + self._rank, sums[rest]),
            total=arriving.future.then(spread),
        )


@dataclass(frozen=True)
class _Arriving:
    messages: torch.Tensor
    """A message of each rank, one after the other."""
    future: torch.futures.Future[object]


def _gather(message: torch.Tensor, group: dist.ProcessGroup) -> _Arriving:
    messages = message.new_empty(message.numel() * dist.get_world_size(group))
    work = dist.all_gather_into_tensor(messages, message, group=group, async_op=True)
    assert work is not None
    return _Arriving(messages, work.get_future())


def _joined(parts: Sequence[Entries]) -> Entries:
    """All entries, in ascending order of their positions."""
    positions, order = torch.cat([part.positions for part in parts]).sort()
    return Entries(positions, torch.cat([part.values for part in parts])[order])
