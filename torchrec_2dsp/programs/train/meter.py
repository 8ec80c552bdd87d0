"""`Meter`: losses of all ranks, gathered now and then rather than in every step."""

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist


def normalized_entropy(loss: float, click_rate: float) -> float:
    """A log loss relative to that of always predicting ``click_rate``: 1 is as bad as knowing
    nothing, and `nan` if all labels are equal.

    Reference: He et al., Practical lessons from predicting clicks on ads at Facebook, 2014.

    Example:
        >>> import math
        >>> from torchrec_2dsp.programs.train.meter import normalized_entropy
        >>> normalized_entropy(math.log(2), click_rate=0.5)
        1.0
    """
    if not 0.0 < click_rate < 1.0:
        return math.nan
    rate = click_rate
    return loss / -(rate * math.log(rate) + (1.0 - rate) * math.log(1.0 - rate))


@dataclass(frozen=True)
class Measured:
    """Some steps of all ranks together."""

    losses: tuple[float, ...]
    """The mean log loss of each step's global batch."""

    click_rate: float
    """The share of positive labels over all of the steps."""

    @property
    def loss(self) -> float:
        """The mean over the steps."""
        return sum(self.losses) / len(self.losses)

    @property
    def ne(self) -> float:
        """The normalized entropy over the steps."""
        return normalized_entropy(self.loss, self.click_rate)


class Meter:
    """Collects what a rank's steps gave, until all ranks put theirs together.

    All ranks have batches of one size, so that a mean of means is the mean.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group = group
        self._device = device
        self._rows: list[torch.Tensor] = []

    def add(self, loss: torch.Tensor, labels: torch.Tensor) -> None:
        """One step of this rank."""
        self._rows.append(torch.stack([loss.double(), labels.double().mean()]))

    def gather(self) -> Measured:
        """The mean over the ranks of all that was added since the last time.

        Collectives:
            One all-reduce, of two float64 numbers for each step.
        """
        rows, self._rows = torch.stack(self._rows).to(self._device), []
        dist.all_reduce(rows, group=self._group)
        rows = rows.cpu() / dist.get_world_size(self._group)
        return Measured(tuple(rows[:, 0].tolist()), rows[:, 1].mean().item())
