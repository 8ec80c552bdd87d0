"""`GatheredSum` and `OwnedSum`: the sum over all ranks of a few entries of each."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist

from torchrec_2dsp.codecs.sparse import Entries, SparseCodec
from torchrec_2dsp.codecs.threshold import largest


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
        """Add up entries.

        Args:
            entries: of this rank, in ascending order, at most as many as a message has room for.
            total: a flat float32 tensor, written when the entries have come.
        """
        ...


class GatheredSum:
    """Each rank sends its entries to all others."""

    def __init__(self, codec: SparseCodec, group: dist.ProcessGroup) -> None:
        """
        Args:
            codec: the form of a rank's entries.
            group: the ranks.
        """
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
        """
        Args:
            codec: the form of entries for an owner, and of an owner's sums.
            group: the ranks.
        """
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
