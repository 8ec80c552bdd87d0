"""All-to-alls and all-gathers of different sizes, which not every backend of torch offers."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Arriving:
    """Tensors from all ranks of a group, on their way."""

    values: torch.Tensor
    """The values of the other ranks in rank order, then this rank's own."""
    sent: torch.Tensor
    """The send buffer, kept alive until it has been sent."""
    work: dist.Work
    counts: tuple[int, ...]
    """The first dimension of each rank's tensor."""
    rank: int
    """This rank's number in the group."""

    def wait(self) -> torch.Tensor:
        """The values, after waiting for them."""
        self.work.wait()
        return self.values

    def by_rank(self) -> list[torch.Tensor]:
        """One tensor per rank, after waiting for all."""
        return self._by_rank(self.wait())

    def places(self) -> torch.Tensor:
        """The indices in `values` of rank 0's values, then of rank 1's, and so on."""
        places = torch.arange(self.values.shape[0], device=self.values.device)
        return torch.cat(self._by_rank(places))

    def _by_rank(self, values: torch.Tensor) -> list[torch.Tensor]:
        others = [count for rank, count in enumerate(self.counts) if rank != self.rank]
        parts = list(values.split([*others, self.counts[self.rank]]))
        parts.insert(self.rank, parts.pop())
        return parts


def start_all_to_all_ragged(
    parts: Sequence[torch.Tensor], counts: Sequence[int], group: dist.ProcessGroup
) -> Arriving:
    """Send every rank its part; parts may differ in their first dimension.

    Args:
        parts: this rank's part for each rank.
        counts: the first dimension of each rank's part for this one.
        group: the ranks that take part, at least two.

    Collectives:
        One all-to-all, not waited for. Nothing is sent to this rank itself, and nothing is copied
        for a single peer.
    """
    rank = dist.get_rank(group)
    own_part = parts[rank]
    others = [part for other, part in enumerate(parts) if other != rank]
    values = own_part.new_empty((sum(counts), *own_part.shape[1:]))
    num_received = values.shape[0] - own_part.shape[0]
    received = [0 if other == rank else count for other, count in enumerate(counts)]
    sent = [0 if other == rank else part.shape[0] for other, part in enumerate(parts)]
    buffer = torch.cat(others) if len(others) > 1 else others[0]
    work = dist.all_to_all_single(
        values[:num_received], buffer, received, sent, group=group, async_op=True
    )
    assert work is not None
    values[num_received:] = own_part
    return Arriving(values, buffer, work, tuple(counts), rank)


def start_all_gather_ragged(
    local: torch.Tensor, counts: Sequence[int], group: dist.ProcessGroup
) -> Arriving:
    """Send every rank this one's tensor; tensors may differ in their first dimension.

    Args:
        local: this rank's tensor.
        counts: the first dimension of every rank's tensor, known to all.
        group: the ranks that take part, at least two.

    Collectives:
        That of `start_all_to_all_ragged`: gloo has no all-gather of different sizes.
    """
    return start_all_to_all_ragged([local] * len(counts), counts, group)


def all_gather_ragged(
    local: torch.Tensor, sizes: Sequence[int], group: dist.ProcessGroup
) -> list[torch.Tensor]:
    """One tensor per rank, which may differ in their first dimension, after waiting for all.

    Collectives:
        One all-to-all on ``group``.
    """
    if len(sizes) == 1:
        return [local]
    return start_all_gather_ragged(local, sizes, group).by_rank()


_ALIGNMENT = 8
"""A tensor of any type may start at multiples of this many bytes."""


class Packed(NamedTuple):
    """The shape and type of a tensor in a buffer."""

    shape: tuple[int, ...]
    """The tensor's sizes."""
    dtype: torch.dtype
    """The type of the tensor's elements."""

    @property
    def num_bytes(self) -> int:
        """The bytes that the tensor takes in the buffer, padding included."""
        num_bytes = math.prod(self.shape) * self.dtype.itemsize
        return num_bytes + -num_bytes % _ALIGNMENT


def pack(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """One uint8 buffer with the bytes of all tensors.

    Example:
        >>> import torch
        >>> from torchrec_2dsp.comms.collectives import Packed, pack, unpack
        >>> buffer = pack([torch.tensor([1, 2], dtype=torch.int32), torch.tensor([0.5])])
        >>> unpack(buffer, [Packed((2,), torch.int32), Packed((1,), torch.float32)])
        [tensor([1, 2], dtype=torch.int32), tensor([0.5000])]
    """
    parts = []
    for tensor in tensors:
        data = tensor.contiguous().view(-1).view(torch.uint8)
        parts += [data, data.new_zeros(-data.numel() % _ALIGNMENT)]
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8)


def unpack(buffer: torch.Tensor, layout: Sequence[Packed]) -> list[torch.Tensor]:
    """Views of the tensors that `pack` put into ``buffer``."""
    tensors, start = [], 0
    for packed in layout:
        end = start + math.prod(packed.shape) * packed.dtype.itemsize
        tensors.append(buffer[start:end].view(packed.dtype).view(packed.shape))
        start += packed.num_bytes
    return tensors
