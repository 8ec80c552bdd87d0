"""`Threshold`: which elements of a tensor are large enough to be sent, without sorting it."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from torchrec_2dsp.codecs.sparse import Entries

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
        >>> from torchrec_2dsp.codecs.threshold import Threshold, ThresholdRule
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
