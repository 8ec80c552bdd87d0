"""`ThresholdOracle`: gradients of which ranks send the largest elements, by sorting."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from torchrec_2dsp.codecs.rows import FlatCodec, Transport


@dataclass
class ThresholdOracle:
    """Computes the mean gradients of ranks that send their largest elements, by sorting."""

    density: float
    values: Transport
    dense_below: int
    warm_up: int
    preconditioner: str = "none"
    residuals: dict[tuple[int, str], torch.Tensor] = field(default_factory=dict)
    """What each rank hasn't sent of each parameter."""
    moments: dict[tuple[int, str], tuple[Any, Any, int]] = field(default_factory=dict)
    num_steps: int = 0

    def mean(
        self, gradients: Sequence[dict[str, torch.Tensor]], *, flush: bool = False
    ) -> dict[str, torch.Tensor]:
        """Return what all ranks get, from the gradients of each."""
        is_dense = flush or self.num_steps < self.warm_up
        is_warm = self.num_steps >= self.warm_up
        self.num_steps += 1
        num_ranks = len(gradients)
        means = {}
        for name, first in gradients[0].items():
            is_small = first.numel() < self.dense_below or self.density == 1
            is_whole = is_dense or is_small
            is_divided = is_warm and not is_small
            total = torch.zeros(first.numel(), dtype=torch.float64)
            for rank, by_name in enumerate(gradients):
                none = torch.zeros(first.numel())
                own = by_name[name].reshape(-1)
                if is_divided:
                    own = self._update(rank, name, own.double(), num_ranks).float()
                due = own + self.residuals.get((rank, name), none)
                sent = due if is_whole else self._largest(due)
                self.residuals[rank, name] = due - sent
                total += sent
            total /= num_ranks
            if not is_divided:
                updates = [self._update(rank, name, total, 1) for rank in range(num_ranks)]
                total = updates[0]
            means[name] = total.float().view_as(first)
        return means

    def _update(self, rank: int, name: str, mean: torch.Tensor, num_ranks: int) -> torch.Tensor:
        """Return Adam's or AdaGrad's direction for a gradient of a rank."""
        if self.preconditioner == "none":
            return mean
        first, second, steps = self.moments.get((rank, name), (0.0, 0.0, 0))
        steps += 1
        square = mean**2 / num_ranks
        if self.preconditioner == "adagrad":
            second = second + square
            update = mean / (second**0.5 + 1e-10)
        else:
            first, second = 0.9 * first + 0.1 * mean, 0.999 * second + 0.001 * square
            update = first / (1 - 0.9**steps) / ((second / (1 - 0.999**steps)) ** 0.5 + 1e-8)
        self.moments[rank, name] = first, second, steps
        return update

    def _largest(self, due: torch.Tensor) -> torch.Tensor:
        """Return the tensor, with zeros in place of all but its largest elements."""
        capacity = -int(-self.density * due.numel() // 1)
        chosen = due.abs().argsort(descending=True)[:capacity].sort().values
        codec = FlatCodec(self.values.codec)
        rounded = codec.decode(codec.encode(due[chosen]), capacity)
        return torch.zeros_like(due).index_copy(0, chosen, rounded)
