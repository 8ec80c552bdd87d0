"""What thresholded gradients must come to, computed by sorting, on all ranks' gradients at once."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from torchrec_2dsp.codecs.rows import FlatCodec, Transport


@dataclass
class ThresholdOracle:
    """The mean gradients of several ranks that send their largest elements, by sorting."""

    density: float
    values: Transport
    dense_below: int
    warm_up: int
    residuals: dict[tuple[int, str], torch.Tensor] = field(default_factory=dict)
    """What each rank hasn't sent of each parameter."""
    num_steps: int = 0

    def mean(
        self, gradients: Sequence[dict[str, torch.Tensor]], *, flush: bool = False
    ) -> dict[str, torch.Tensor]:
        """What all ranks get, from the gradients of each."""
        is_dense = flush or self.num_steps < self.warm_up
        self.num_steps += 1
        num_ranks = len(gradients)
        means = {}
        for name, first in gradients[0].items():
            is_whole = is_dense or first.numel() < self.dense_below or self.density == 1
            total = torch.zeros(first.numel(), dtype=torch.float64)
            for rank, by_name in enumerate(gradients):
                none = torch.zeros(first.numel())
                due = by_name[name].reshape(-1) + self.residuals.get((rank, name), none)
                sent = due if is_whole else self._largest(due)
                self.residuals[rank, name] = due - sent
                total += sent
            means[name] = (total / num_ranks).float().view_as(first)
        return means

    def _largest(self, due: torch.Tensor) -> torch.Tensor:
        """The tensor, with zeros in place of all but its largest elements."""
        capacity = -int(-self.density * due.numel() // 1)
        chosen = due.abs().argsort(descending=True)[:capacity].sort().values
        codec = FlatCodec(self.values.codec)
        rounded = codec.decode(codec.encode(due[chosen]), capacity)
        return torch.zeros_like(due).index_copy(0, chosen, rounded)
