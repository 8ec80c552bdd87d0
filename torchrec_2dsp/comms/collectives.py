"""Ragged all-to-alls, several tensors in one message, and fewer waits for a GPU."""

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
import torch.distributed as dist


@lru_cache(maxsize=256)
@torch.inference_mode(mode=False)
def constant(numbers: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Return numbers on a device, copied only once, because each copy waits for a GPU."""
    return torch.tensor(numbers, dtype=torch.int64, device=device)


_streams: dict[torch.device, torch.cuda.Stream] = {}


def beside_kernels(device: torch.device) -> AbstractContextManager[None]:
    """Let a block's work on the device overtake the kernels in the current stream.

    Waiting for one of the block's numbers then doesn't wait for those kernels. The block must not
    need their results, except by a collective's ``wait``.
    """
    if device.type == "cuda" and device not in _streams:
        _streams[device] = torch.cuda.Stream(device)
    return torch.cuda.stream(_streams.get(device))


@dataclass(frozen=True)
class Arriving:
    """Tensors in flight from all ranks in a group."""

    values: torch.Tensor
    """The other ranks' values in rank order, then this rank's own."""
    sent: torch.Tensor
    """The send buffer, which must outlive the collective."""
    work: dist.Work
    counts: tuple[int, ...]
    """The first dim's size for each rank's tensor."""
    rank: int
    """This rank's index in the group."""

    def wait(self) -> torch.Tensor:
        """Wait for the values, and return them."""
        self.work.wait()
        return self.values

    def by_rank(self) -> list[torch.Tensor]:
        """Wait, then return one tensor per rank."""
        return self._by_rank(self.wait())

    def places(self) -> torch.Tensor:
        """Return the indices in `values` of rank 0's values, then of rank 1's, and so on."""
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
    """Send every rank its part; parts may differ in their first dim (``counts`` to receive).

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


def all_gather_ragged(
    local: torch.Tensor, sizes: Sequence[int], group: dist.ProcessGroup
) -> list[torch.Tensor]:
    """Gather tensors that may differ in their first dim, one per rank.

    Collectives:
        One all-to-all on ``group``: gloo has no ragged all-gather.
    """
    if len(sizes) == 1:
        return [local]
    return start_all_to_all_ragged([local] * len(sizes), sizes, group).by_rank()


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """View a contiguous tensor as bytes, which gloo sends whatever the type."""
    return tensor.view(-1).view(torch.uint8)


def broadcast_first(tensor: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Give all ranks the first rank's tensor.

    Collectives:
        A broadcast, waited for.
    """
    data = tensor.detach()
    data = as_bytes(data) if data.is_contiguous() else data
    dist.broadcast(data, group_src=0, group=group)


_ALIGNMENT = 8
"""Tensors start at multiples of this many bytes, whatever their type."""


class Packed(NamedTuple):
    """A tensor's shape and type in a buffer."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """The tensor's bytes in the buffer, padding included."""
        num_bytes = math.prod(self.shape) * self.dtype.itemsize
        return num_bytes + -num_bytes % _ALIGNMENT


def pack(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Copy tensors into one uint8 buffer.

    Example:
        >>> import torch
        >>> from torchrec_2dsp.comms.collectives import Packed, pack, unpack
        >>> buffer = pack([torch.tensor([1, 2], dtype=torch.int32), torch.tensor([0.5])])
        >>> unpack(buffer, [Packed((2,), torch.int32), Packed((1,), torch.float32)])
        [tensor([1, 2], dtype=torch.int32), tensor([0.5000])]
    """
    parts = []
    for tensor in tensors:
        data = as_bytes(tensor.contiguous())
        parts += [data, data.new_zeros(-data.numel() % _ALIGNMENT)]
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8)


def unpack(buffer: torch.Tensor, layout: Sequence[Packed]) -> list[torch.Tensor]:
    """Return views of the tensors that `pack` copied into ``buffer``."""
    tensors, start = [], 0
    for packed in layout:
        end = start + math.prod(packed.shape) * packed.dtype.itemsize
        tensors.append(buffer[start:end].view(packed.dtype).view(packed.shape))
        start += packed.num_bytes
    return tensors
