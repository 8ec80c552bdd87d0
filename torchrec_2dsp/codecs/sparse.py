"""`SparseCodec`: a few entries of a large flat tensor, with their positions and values.

positions and values   --encode-->   num_bytes bytes   --decode-->   capacity entries

message:  entries of each block (int32) | place inside its block (16 bits) | values
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from torchrec_2dsp.codecs.rows import FlatCodec

_BLOCK = 2**16
"""The number of elements in a block, so that a place inside it takes 16 bits."""
_HALF = 2**15
"""Subtracted from unsigned 16-bit numbers, because torch computes with signed ones."""


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
        >>> from torchrec_2dsp.codecs.rows import FlatCodec, FloatRows
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
    """The tensor's size."""

    capacity: int
    """The most entries in a message. Unused room is sent, too."""

    values: FlatCodec
    """The codec for the entries' values."""

    @property
    def num_bytes(self) -> int:
        """A message's size in bytes."""
        return sum(self._section_bytes)

    @property
    def _num_blocks(self) -> int:
        return -(-self.num_elements // _BLOCK)

    @property
    def _section_bytes(self) -> tuple[int, int, int]:
        # Each part begins at a multiple of four bytes, and so does a message that follows another.
        num_bytes = (2 * self.capacity, self.values.num_bytes(self.capacity))
        places, values = (size + -size % 4 for size in num_bytes)
        return 4 * self._num_blocks, places, values

    def encode(self, entries: Entries) -> torch.Tensor:
        """Encode at most `capacity` entries, in ascending order, each position once."""
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
        """Return a message's `capacity` entries; unused room holds zeros at position 0."""
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
        """Return values as they will arrive."""
        size = values.numel()
        filled = torch.nn.functional.pad(values, (0, self.capacity - size))
        return self.values.decode(self.values.encode(filled), self.capacity)[:size]


_SAMPLE = 2**16
"""A threshold is measured with at least half as many elements. If 0.5 % exceed it, their count
errs by about 7 %."""
_MARGIN = 1.2
"""The factor by which more elements than requested should exceed a measured threshold,
because it errs; the smallest of them are dropped."""
_JUST_BELOW = 1 - 2**-20
"""Keeps the threshold just below the smallest element that passes."""


@dataclass(frozen=True)
class ThresholdRule:
    """Measures thresholds."""

    refresh: int = 1
    """The number of steps between measurements."""

    is_exact: bool = False
    """True if all elements are measured instead of a sample."""

    def measure(self, values: torch.Tensor, capacity: int) -> float:
        """Return the magnitude that ``capacity`` of the values exceed, or a few more."""
        size = values.numel()
        stride = 1 if self.is_exact else max(1, size // _SAMPLE)
        # An odd stride, or the sample might come from only a few of a matrix's columns.
        sample = values[:: stride | 1].abs()
        margin = 1.0 if sample.numel() == size else _MARGIN
        num_above = math.ceil(capacity * margin * sample.numel() / size)
        smallest = sample.kthvalue(sample.numel() - min(num_above, sample.numel()) + 1)
        return float(smallest.values) * _JUST_BELOW


class Threshold:
    """Chooses the largest elements of a tensor that changes from step to step.

    Example:
        >>> import torch
        >>> from torchrec_2dsp.codecs.sparse import Threshold, ThresholdRule
        >>> threshold = Threshold(ThresholdRule(), capacity=2)
        >>> threshold.choose(torch.tensor([0.1, -7.0, 0.0, 3.0, 0.2])).positions
        tensor([1, 3])
    """

    def __init__(self, rule: ThresholdRule, capacity: int) -> None:
        self._rule, self._capacity = rule, capacity
        self._size = 0.0
        self._step = 0

    def choose(self, values: torch.Tensor) -> Entries:
        """Return a flat tensor's largest elements, at most `capacity`, none of them zero."""
        if self._step % self._rule.refresh == 0:
            self._size = self._rule.measure(values, self._capacity)
        self._step += 1
        positions = torch.nn.functional.hardshrink(values, self._size).nonzero().view(-1)
        return largest(Entries(positions, values[positions]), self._capacity)

    def state_dict(self) -> dict[str, Any]:
        """Return the threshold, and how often it was used."""
        return {"size": self._size, "step": self._step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a threshold."""
        self._size, self._step = float(state["size"]), int(state["step"])


def largest(entries: Entries, capacity: int) -> Entries:
    """Return at most ``capacity`` entries, the largest in magnitude, by ascending position."""
    if entries.positions.numel() <= capacity:
        return entries
    chosen = entries.values.abs().topk(capacity, sorted=False).indices.sort().values
    return Entries(entries.positions[chosen], entries.values[chosen])


class ErrorFeedback:
    """Keeps a *residual* for each tensor: everything due minus everything sent.

    Example:
        >>> import torch
        >>> from torchrec_2dsp.codecs.sparse import ErrorFeedback
        >>> feedback = ErrorFeedback()
        >>> due = feedback.add("layer", torch.tensor([5.0, 1.0]))
        >>> feedback.take_off("layer", torch.tensor([0]), torch.tensor([5.0]))
        >>> feedback.add("layer", torch.tensor([5.0, 1.0]))
        tensor([5., 2.])
    """

    def __init__(self) -> None:
        self._residuals: dict[str, torch.Tensor] = {}

    def add(self, name: str, values: torch.Tensor) -> torch.Tensor:
        """Add new values, always of one shape, to a residual, and return it.

        The next call changes the returned tensor.
        """
        residual = self.drain(name, values.device)
        if residual is None:
            residual = torch.zeros_like(values, dtype=torch.float32)
        self._residuals[name] = residual
        return residual.add_(values)

    def take_off(self, name: str, positions: torch.Tensor, sent: torch.Tensor) -> None:
        """Subtract the sent values, as received, from the residual.

        ``positions`` are distinct elements, or rows along its first dim.
        """
        self._residuals[name].index_add_(0, positions, sent, alpha=-1)

    def give_back(self, name: str, positions: torch.Tensor, values: torch.Tensor) -> None:
        """Add values back that were sent but not used after all."""
        self._residuals[name].index_add_(0, positions, values)

    def drain(self, name: str, device: torch.device) -> torch.Tensor | None:
        """Return a tensor's residual on a device, and reset it; `None` without one."""
        residual = self._residuals.pop(name, None)
        return None if residual is None else residual.to(device)

    def square_norm(self) -> float:
        """Sum the squares of all residuals."""
        return sum(float(residual.square().sum()) for residual in self._residuals.values())

    def state_dict(self) -> dict[str, Any]:
        """Return the residuals by name."""
        return {name: residual.clone() for name, residual in self._residuals.items()}

    def load_sum(self, states: Sequence[Mapping[str, torch.Tensor]]) -> None:
        """Restore the sum of several ranks' residuals."""
        self._residuals = {}
        for state in states:
            for name, residual in state.items():
                self.add(name, residual)
