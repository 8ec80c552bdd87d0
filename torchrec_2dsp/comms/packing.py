"""`pack` and `unpack`: several tensors as one buffer of bytes, to travel in one message."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

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
        >>> from torchrec_2dsp.comms.packing import Packed, pack, unpack
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
