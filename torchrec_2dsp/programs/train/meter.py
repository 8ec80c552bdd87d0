"""`Meter`: losses of all ranks, gathered now and then rather than in every step."""

import math
import resource
from collections.abc import Mapping
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


@dataclass(frozen=True)
class Window:
    """Some steps of all ranks together, and what they took."""

    measured: Measured
    """The losses and the labels of the steps."""

    seconds: float
    """The time that the steps took, as the mean over the ranks."""

    memory_bytes: tuple[int, ...]
    """The most memory that each rank has used since it began."""


class Meter:
    """Collects what a rank's steps gave, until all ranks put theirs together.

    The mean of what ranks say is the mean over the global batch: all have batches of one size, or
    each weighs its loss by the size of its own (`weigh_losses_`).
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group = group
        self._device = device
        self._rows: list[torch.Tensor] = []
        self._seconds = 0.0

    def add(self, loss: torch.Tensor, labels: torch.Tensor) -> None:
        """One step of this rank."""
        labels = labels.double()
        self._rows.append(
            torch.stack([loss.double(), labels.sum(), labels.new_tensor(len(labels))])
        )

    def add_seconds(self, seconds: float) -> None:
        """The time that steps of this rank took."""
        self._seconds += seconds

    def gather(self) -> Window:
        """The mean over the ranks of all that was added since the last time.

        Collectives:
            One all-reduce, of three float64 numbers for each step, one for each rank and one more.
        """
        rows, self._rows = torch.stack(self._rows).to(self._device), []
        num_ranks, rank = dist.get_world_size(self._group), dist.get_rank(self._group)
        memory = torch.zeros(num_ranks, dtype=torch.float64, device=self._device)
        memory[rank] = peak_bytes(self._device)
        seconds = memory.new_tensor([self._seconds])
        self._seconds = 0.0
        numbers = torch.cat([rows.reshape(-1), memory, seconds])
        dist.all_reduce(numbers, group=self._group)
        numbers = numbers.cpu()
        losses, clicks, samples = numbers[: rows.numel()].view(-1, 3).t()
        return Window(
            Measured(tuple((losses / num_ranks).tolist()), float(clicks.sum() / samples.sum())),
            seconds=numbers[-1].item() / num_ranks,
            memory_bytes=tuple(map(int, numbers[-1 - num_ranks : -1].tolist())),
        )


def mean_per_step(
    group: dist.ProcessGroup, device: torch.device, num_steps: int, totals: Mapping[str, int]
) -> dict[str, float]:
    """Totals of a rank, averaged over the ranks and over steps.

    Args:
        group: all ranks.
        device: this rank's device.
        num_steps: how many steps the totals are of; without a step they stay totals.
        totals: by name, the same names on all ranks.

    Collectives:
        One all-reduce, of a float64 number for each total.
    """
    means = torch.tensor(list(totals.values()), dtype=torch.float64, device=device)
    dist.all_reduce(means, group=group)
    means = means.cpu() / (dist.get_world_size(group) * max(1, num_steps))
    return dict(zip(totals, means.tolist(), strict=True))


def peak_bytes(device: torch.device) -> int:
    """The most memory that this process has used: of its GPU, or resident in the host's."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
