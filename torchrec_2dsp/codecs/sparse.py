"""`SparseCodec`: a few entries of a large flat tensor, where they are and what they are.

positions and values   --encode-->   num_bytes bytes   --decode-->   capacity entries

message:  entries of each block (int32) | place inside its block (16 bits) | values
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch

from torchrec_2dsp.codecs.flat import FlatCodec

_BLOCK = 2**16
"""How many elements a block has, so that a place inside it takes 16 bits."""
_HALF = 2**15
"""What is taken off an unsigned number of 16 bits, because torch computes with signed ones."""


class Entries(NamedTuple):
    """Some elements of a flat tensor."""

    positions: torch.Tensor
    """The elements' places in the tensor, int64."""
    values: torch.Tensor
    """The elements, float32."""


@dataclass(frozen=True)
class SparseCodec:
    """Encodes at most `capacity` entries in a message whose size both ends know.

    Example:
        >>> import torch
        >>> from torchrec_2dsp.codecs.flat import FlatCodec
        >>> from torchrec_2dsp.codecs.rows import FloatRows
        >>> from torchrec_2dsp.codecs.sparse import Entries, SparseCodec
        >>> values = FlatCodec(FloatRows(torch.bfloat16), block=2)
        >>> codec = SparseCodec(num_elements=100_000, capacity=4, values=values)
        >>> entries = Entries(torch.tensor([7, 65_543, 99_999]), torch.tensor([1.0, -2.0, 3.0]))
        >>> message = codec.encode(entries)
        >>> message.nbytes, codec.num_bytes
        (24, 24)
        >>> come = torch.zeros(100_000).index_add(0, *codec.decode(message))
        >>> come[entries.positions]
        tensor([ 1., -2.,  3.])
    """

    num_elements: int
    """The size of the tensor."""

    capacity: int
    """The most entries of a message. Room that isn't used is sent, too."""

    values: FlatCodec
    """How the values of the entries look."""

    @property
    def num_bytes(self) -> int:
        """The bytes of a message."""
        return sum(self._section_bytes)

    @property
    def _num_blocks(self) -> int:
        return -(-self.num_elements // _BLOCK)

    @property
    def _section_bytes(self) -> tuple[int, int, int]:
        # Each part begins at a multiple of four bytes, and so does a message behind another one.
        num_bytes = (2 * self.capacity, self.values.num_bytes(self.capacity))
        places, values = (size + -size % 4 for size in num_bytes)
        return 4 * self._num_blocks, places, values

    def encode(self, entries: Entries) -> torch.Tensor:
        """Entries as they travel, uint8.

        Args:
            entries: at most `capacity`, in ascending order, each position once.
        """
        positions, values = entries
        num_entries = positions.numel()
        if num_entries > self.capacity:
            raise ValueError(f"{num_entries} entries don't fit into capacity={self.capacity}")
        message = positions.new_zeros(self.num_bytes, dtype=torch.uint8)
        counts, places, encoded = message.split(self._section_bytes)
        ends = torch.arange(1, self._num_blocks + 1, device=positions.device) * _BLOCK
        before = torch.searchsorted(positions, ends)
        counts.view(torch.int32).copy_(before.diff(prepend=before.new_zeros(1)))
        places.view(torch.int16)[:num_entries] = (positions % _BLOCK - _HALF).to(torch.int16)
        missing = self.capacity - num_entries
        filled = self.values.encode(torch.nn.functional.pad(values, (0, missing)))
        encoded[: filled.numel()] = filled
        return message

    def decode(self, message: torch.Tensor) -> Entries:
        """The `capacity` entries of a message; room that wasn't used holds zeros at position 0."""
        counts, places, encoded = message.split(self._section_bytes)
        ends = counts.view(torch.int32).cumsum(0)
        numbers = torch.arange(self.capacity, device=message.device)
        blocks = torch.searchsorted(ends, numbers, right=True)
        is_used = blocks < self._num_blocks
        inside = places.view(torch.int16)[: self.capacity].long() + _HALF
        values = self.values.decode(encoded[: self.values.num_bytes(self.capacity)], self.capacity)
        return Entries(
            torch.where(is_used, blocks * _BLOCK + inside, 0), torch.where(is_used, values, 0.0)
        )

    def rounded(self, values: torch.Tensor) -> torch.Tensor:
        """Values as they will come."""
        size = values.numel()
        filled = torch.nn.functional.pad(values, (0, self.capacity - size))
        return self.values.decode(self.values.encode(filled), self.capacity)[:size]
