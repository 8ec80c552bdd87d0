"""`SparseCodec`: a few entries of a large flat tensor, where they are and what they are.

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
        >>> from torchrec_2dsp.codecs.rows import FlatCodec
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


_SAMPLE = 2**16
"""A threshold is measured with at least half as many elements. Of 0.5 % of them, the number that
lies above it errs by about 7 %."""
_MARGIN = 1.2
"""So many times the elements that are asked for should lie above a measured threshold, because it
errs; the smallest ones are left out."""
_JUST_BELOW = 1 - 2**-20
"""The threshold lies so much below the smallest element that passes."""


@dataclass(frozen=True)
class ThresholdRule:
    """How thresholds are found."""

    refresh: int = 1
    """Every so many steps the threshold is measured."""

    is_exact: bool = False
    """Whether it is measured with all elements, instead of a sample."""

    def measure(self, values: torch.Tensor, capacity: int) -> float:
        """The size above which ``capacity`` of the values are, or a few more."""
        size = values.numel()
        stride = 1 if self.is_exact else max(1, size // _SAMPLE)
        # An odd stride, or all of the sample might come from a few columns of a matrix.
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
        """
        Args:
            rule: how the threshold is found.
            capacity: the most elements that are chosen, and about how many.
        """
        self._rule, self._capacity = rule, capacity
        self._size = 0.0
        self._step = 0

    def choose(self, values: torch.Tensor) -> Entries:
        """The largest elements of a flat tensor, at most `capacity`; none that is zero."""
        if self._step % self._rule.refresh == 0:
            self._size = self._rule.measure(values, self._capacity)
        self._step += 1
        positions = torch.nn.functional.hardshrink(values, self._size).nonzero().view(-1)
        return largest(Entries(positions, values[positions]), self._capacity)

    def state_dict(self) -> dict[str, Any]:
        """The threshold, and how often it was used."""
        return {"size": self._size, "step": self._step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a threshold."""
        self._size, self._step = float(state["size"]), int(state["step"])


def largest(entries: Entries, capacity: int) -> Entries:
    """The entries of largest size, at most ``capacity``, in ascending order of their positions."""
    if entries.positions.numel() <= capacity:
        return entries
    chosen = entries.values.abs().topk(capacity, sorted=False).indices.sort().values
    return Entries(entries.positions[chosen], entries.values[chosen])


class ErrorFeedback:
    """Keeps a *residual* for each tensor: all that was to be sent, less all that was.

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
        """The residual after new values were added to it.

        Args:
            name: of the tensor.
            values: what is to be sent from now on, of the same shape each time.

        Returns:
            The residual itself, which the next call changes.
        """
        residual = self.drain(name, values.device)
        if residual is None:
            residual = torch.zeros_like(values, dtype=torch.float32)
        self._residuals[name] = residual
        return residual.add_(values)

    def take_off(self, name: str, positions: torch.Tensor, sent: torch.Tensor) -> None:
        """Take what was sent off the residual.

        Args:
            name: of the tensor.
            positions: where, along its first dimension, each once: elements, or rows.
            sent: the values as the receivers have them.
        """
        self._residuals[name].index_add_(0, positions, sent, alpha=-1)

    def give_back(self, name: str, positions: torch.Tensor, values: torch.Tensor) -> None:
        """Add what had been sent, and wasn't used after all."""
        self._residuals[name].index_add_(0, positions, values)

    def drain(self, name: str, device: torch.device) -> torch.Tensor | None:
        """The residual of a tensor, which is zero from now on; `None` if there is none.

        Args:
            name: of the tensor.
            device: where the tensor is; a residual that was loaded may be elsewhere.
        """
        residual = self._residuals.pop(name, None)
        return None if residual is None else residual.to(device)

    def square_norm(self) -> float:
        """The sum of the squares of all residuals."""
        return sum(float(residual.square().sum()) for residual in self._residuals.values())

    def state_dict(self) -> dict[str, Any]:
        """The residuals by name."""
        return {name: residual.clone() for name, residual in self._residuals.items()}

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Take over residuals."""
        self.load_sum([state])

    def load_sum(self, states: Sequence[Mapping[str, torch.Tensor]]) -> None:
        """Take over the sum of the residuals of several ranks."""
        self._residuals = {}
        for state in states:
            for name, residual in state.items():
                self.add(name, residual)
