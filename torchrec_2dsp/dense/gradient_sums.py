"""Sums of few gradient elements over all ranks, and reports on their cost.

GATHER   each rank sends its entries to all others, and all compute the same sum
OWNERS   each rank sends an entry to the element's owner, which sums them and sends the largest
         sums to all; the rest stays in its residual
"""

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from torchrec_2dsp.codecs.rows import FlatCodec
from torchrec_2dsp.codecs.sparse import Entries, SparseCodec, largest

TensorFuture = torch.futures.Future[torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class GradientReport:
    """A rank's dense gradient traffic.

    Example:
        >>> from torchrec_2dsp.dense.gradient_sums import GradientReport
        >>> step = GradientReport(num_steps=1, num_entries=50, num_elements=10_000)
        >>> (step + step).density
        0.005
    """

    num_steps: int = 0
    num_thresholded_steps: int = 0
    """The number of steps that weren't dense."""

    num_bytes: float = 0.0
    """Bytes sent to other ranks, counting an all-reduce as a ring."""

    dense_bytes: float = 0.0
    """Bytes that a float32 all-reduce would have sent."""

    num_entries: int = 0
    """Elements chosen among the thresholded ones."""

    num_elements: int = 0
    """Elements among which they were chosen."""

    @property
    def density(self) -> float:
        """The share of elements that were chosen; 0 before the first choice."""
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
    """The parameters in a DDP bucket without a gradient on this rank.

    If no rank used a parameter, DDP leaves it without a gradient, whatever a hook computes. A
    hook may still owe it a gradient from earlier steps.
    """

    def __init__(self, bucket: dist.GradBucket) -> None:
        params = bucket.parameters()
        self._is_unused = [param.grad is None for param in params]
        self._params: Sequence[torch.Tensor] = params
        self._views: Sequence[torch.Tensor] = bucket.gradients() if any(self._is_unused) else ()

    def give(self, means: torch.Tensor) -> torch.Tensor:
        """Give those parameters the gradients that have arrived for them; return all means."""
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
"""The factor by which owners must send fewer bytes than a gather to be chosen: they apply fewer
entries per step, and take two messages in sequence."""
_SPARE = 1.25
"""The capacity of a message to an owner, relative to its mean load."""
_SPARE_ENTRIES = 8


class GradientRoute(enum.StrEnum):
    """A way to compute the sum over all ranks."""

    DENSE = "dense"
    """An all-reduce of all elements."""

    GATHER = "gather"
    """Each rank gets all others' entries."""

    OWNERS = "owners"
    """Each element's owner sums its entries and sends the largest sums to all."""


@dataclass(frozen=True)
class BucketSize:
    """A gradient bucket's size, and how much of it may be sent."""

    num_elements: int
    capacity: int
    """The most entries that a rank chooses."""

    num_ranks: int
    values: FlatCodec
    """The codec for entries' values."""

    @property
    def gather_codec(self) -> SparseCodec:
        """The codec for a rank's entries, sent to all others."""
        return SparseCodec(self.num_elements, self.capacity, self.values)

    @property
    def owner_codec(self) -> SparseCodec:
        """The codec for a rank's entries to one owner, and for an owner's sums."""
        of_owner = math.ceil(self.capacity / self.num_ranks * _SPARE) + _SPARE_ENTRIES
        return SparseCodec(
            math.ceil(self.num_elements / self.num_ranks),
            min(of_owner, self.capacity),
            self.values,
        )

    def sent_bytes(self, route: GradientRoute) -> float:
        """Return the bytes that a rank sends to others; an all-reduce counts as a ring.

        Example:
            200x fewer entries are 100x fewer bytes on 4 ranks, and not even 10x on 64, unless
            owners sum them.

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
        """Return the route that sends least, if owners gain enough."""
        gathered = self.sent_bytes(GradientRoute.GATHER)
        owned = self.sent_bytes(GradientRoute.OWNERS)
        is_owned = self.num_elements >= self.num_ranks and owned * _OWNERS_GAIN <= gathered
        best = GradientRoute.OWNERS if is_owned else GradientRoute.GATHER
        sends_less = self.sent_bytes(best) < self.sent_bytes(GradientRoute.DENSE)
        return best if sends_less else GradientRoute.DENSE


@dataclass(frozen=True)
class StartedSum:
    """A sum in flight."""

    sent: Entries
    """This rank's sent entries, as others decode them, in ascending order."""

    left_out: Entries
    """Sums that this rank keeps instead of sending, in ascending order."""

    total: torch.futures.Future[torch.Tensor]
    """The sum over all ranks, flat and bitwise equal on all of them."""


def gather_sum(
    entries: Entries, total: torch.Tensor, codec: SparseCodec, group: dist.ProcessGroup
) -> StartedSum:
    """Send ascending entries to all other ranks; sum into ``total``, a flat float32 tensor.

    Collectives:
        One all-gather of `codec.num_bytes` bytes, not waited for.
    """
    arriving, future = _gather(codec.encode(entries), group)

    def add_up(_: object) -> torch.Tensor:
        future.wait()
        total.zero_()
        # In rank order, so that all ranks compute the same bits.
        for received in arriving:
            total.index_add_(0, *codec.decode(received))
        return total

    sent = Entries(entries.positions, codec.rounded(entries.values))
    nothing = Entries(sent.positions[:0], sent.values[:0])
    return StartedSum(sent, nothing, future.then(add_up))


def owners_sum(
    entries: Entries, total: torch.Tensor, codec: SparseCodec, group: dist.ProcessGroup
) -> StartedSum:
    """Send ascending entries to their owners, and the largest sums to all; as in `gather_sum`.

    Element i belongs to rank i % num_ranks. The owner keeps rounding errors and sums that don't
    fit into a message.

    Collectives:
        One all-to-all of `codec.num_bytes` bytes per rank, waited for; then one all-gather of
        `codec.num_bytes` bytes, not waited for.
    """
    num_ranks = dist.get_world_size(group)
    owners = entries.positions % num_ranks
    parts = [
        largest(
            Entries(entries.positions[is_own] // num_ranks, entries.values[is_own]), codec.capacity
        )
        for is_own in (owners == owner for owner in range(num_ranks))
    ]
    messages = torch.cat([codec.encode(part) for part in parts])
    received = torch.empty_like(messages)
    dist.all_to_all_single(received, messages, group=group)
    sums = total.new_zeros(codec.num_elements)
    for message in received.split(codec.num_bytes):
        sums.index_add_(0, *codec.decode(message))
    touched = sums.nonzero().view(-1)
    chosen = largest(Entries(touched, sums[touched]), codec.capacity)
    arriving, future = _gather(codec.encode(chosen), group)
    sums.index_add_(0, chosen.positions, codec.rounded(chosen.values), alpha=-1)
    rest = sums.nonzero().view(-1)

    def spread(_: object) -> torch.Tensor:
        future.wait()
        total.zero_()
        for owner, owned in enumerate(arriving):
            positions, values = codec.decode(owned)
            total.index_add_(0, positions * num_ranks + owner, values)
        return total

    positions, order = torch.cat(
        [part.positions * num_ranks + owner for owner, part in enumerate(parts)]
    ).sort()
    values = torch.cat([codec.rounded(part.values) for part in parts])
    return StartedSum(
        sent=Entries(positions, values[order]),
        left_out=Entries(rest * num_ranks + dist.get_rank(group), sums[rest]),
        total=future.then(spread),
    )


def _gather(
    message: torch.Tensor, group: dist.ProcessGroup
) -> tuple[Sequence[torch.Tensor], torch.futures.Future[object]]:
    """Return each rank's message, and the future of their arrival."""
    messages = message.new_empty(message.numel() * dist.get_world_size(group))
    work = dist.all_gather_single(messages, message, group=group, async_op=True)
    assert work is not None
    return messages.split(message.numel()), work.get_future()


def all_reduce(values: torch.Tensor, group: dist.ProcessGroup) -> TensorFuture:
    """Start an all-reduce in place, as DDP's hooks return it.

    Collectives:
        One all-reduce, not waited for.
    """
    work = dist.all_reduce(values, group=group, async_op=True)
    assert work is not None
    return work.get_future().then(lambda future: future.value()[0])


def done(values: torch.Tensor) -> TensorFuture:
    """Return values as a future that is done, for DDP's hooks.

    DDP reads from the start of their memory, even if they are elsewhere in it.
    """
    values = values.clone() if values.storage_offset() else values
    future: TensorFuture = torch.futures.Future(devices=[values.device] if values.is_cuda else None)
    future.set_result(values)
    return future
