"""`Meter`: losses of all ranks, gathered now and then rather than in every step."""

import math
import resource
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import torch
import torch.distributed as dist
from torchrec.datasets.utils import Batch
from torchrec.distributed.model_parallel import DistributedModelParallel

from torchrec_2dsp.comms.groups import world_group
from torchrec_2dsp.errors import ConfigError
from torchrec_2dsp.programs.data.dataset import Split
from torchrec_2dsp.programs.models.kinds import has_clicks, ranking_of
from torchrec_2dsp.programs.models.model import rank_device
from torchrec_2dsp.programs.models.ranking import ranking_metrics
from torchrec_2dsp.programs.train.config import TrainConfig
from torchrec_2dsp.programs.train.record import LESS_IS_BETTER
from torchrec_2dsp.programs.train.steps import closing_batches, evaluating


def normalized_entropy(loss: float, click_rate: float) -> float:
    """A log loss relative to that of always predicting ``click_rate``: 1 is as bad as knowing
    nothing, and `nan` if all labels are equal.

    Reference: He et al., Practical lessons from predicting clicks on ads at Facebook, 2014.

    Example:
        >>> import math
        >>> from torchrec_2dsp.programs.train.metrics import normalized_entropy
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


def area_under_roc(scores: torch.Tensor, labels: torch.Tensor) -> float:
    """The share of pairs of a click and another sample in which the click has the higher score.

    Pairs with equal scores count half. `nan` if there are no pairs, or a score is `nan`.

    Args:
        scores: one number for each sample; any increasing function of them gives the same.
        labels: 1 for a click, 0 for another sample.

    Example:
        >>> import torch
        >>> from torchrec_2dsp.programs.train.metrics import area_under_roc
        >>> area_under_roc(torch.tensor([0.1, 0.4, 0.4, 0.8]), torch.tensor([0.0, 0.0, 1.0, 1.0]))
        0.875
    """
    if scores.isnan().any():
        return math.nan
    _, places = torch.unique(scores, return_inverse=True)
    num_places = int(places.max()) + 1 if places.numel() else 0
    is_click = labels > 0.5
    clicks = torch.bincount(places[is_click], minlength=num_places)
    others = torch.bincount(places[~is_click], minlength=num_places)
    num_pairs = int(clicks.sum()) * int(others.sum())
    if not num_pairs:
        return math.nan
    others_below = others.cumsum(0) - others
    # Twice the number of pairs in order, in whole numbers.
    doubled = int((clicks * (2 * others_below + others)).sum())
    return doubled / (2 * num_pairs)


@dataclass(frozen=True)
class Evaluation:
    """A run's evaluation on held-out batches."""

    step: int
    """How many steps were trained before."""

    losses: tuple[float, ...]
    """The mean loss of each held-out batch, over all ranks."""

    click_rate: float
    """The share of positive labels."""

    metrics: dict[str, float]
    """The metrics by name: loss, ne, auc and calibration of clicks; loss, recall and NDCG of
    rankings."""

    @property
    def ne(self) -> float:
        """The normalized entropy; `nan` for a model that doesn't predict clicks."""
        return self.metrics.get("ne", math.nan)


def is_better(metric: str, value: float, than: float) -> bool:
    """Whether a metric's value is better than another one; `nan` is worse than all."""
    if math.isnan(value):
        return False
    if math.isnan(than):
        return True
    return value < than if metric in LESS_IS_BETTER else value > than


def best_of(evaluations: Sequence[Evaluation], metric: str) -> Evaluation | None:
    """The first evaluation that no other one beats; none if no value is a number."""
    best = None
    for evaluation in evaluations:
        value = evaluation.metrics[metric]
        if is_better(metric, value, math.nan if best is None else best.metrics[metric]):
            best = evaluation
    return best


def num_since_best(evaluations: Sequence[Evaluation], metric: str) -> int:
    """How many evaluations came after the best one; all of them if none has a number."""
    best = best_of(evaluations, metric)
    return len(evaluations) - (0 if best is None else 1 + evaluations.index(best))


class ClickMetrics:
    """Collects a rank's held-out batches, until all ranks put theirs together."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group, self._device = group, device
        self._losses: list[torch.Tensor] = []
        self._scores: list[torch.Tensor] = []
        self._labels: list[torch.Tensor] = []

    def add(self, loss: torch.Tensor, logits: torch.Tensor, labels: torch.Tensor) -> None:
        """One batch of this rank.

        Args:
            loss: the mean log loss of the batch.
            logits: one for each sample.
            labels: one for each sample.
        """
        self._losses.append(loss.double().reshape(()))
        self._scores.append(logits.detach().float().reshape(-1))
        self._labels.append(labels.detach().float().reshape(-1))

    def gather(self, step: int) -> Evaluation:
        """The metrics of all that was added, by all ranks; equal on all of them.

        Args:
            step: how many steps were trained before.

        Collectives:
            An all-gather of the number of batches and samples; one of two float64 numbers for each
            batch; and one of two float32 numbers for each sample, of as many as any rank has.
        """
        sizes = torch.tensor([labels.numel() for labels in self._labels], dtype=torch.float64)
        sums = torch.stack(self._losses).cpu() * sizes if self._losses else sizes
        num_batches, num_samples = len(self._losses), int(sizes.sum())
        counts = self._all_gather(torch.tensor([[num_batches, num_samples]]))
        most_batches, most_samples = counts.amax(dim=0).tolist()
        if not most_batches:
            raise ConfigError("there are no held-out batches to evaluate on; hold some samples out")
        rows = torch.zeros(most_batches, 2, dtype=torch.float64)
        rows[:num_batches, 0], rows[:num_batches, 1] = sums, sizes
        by_batch = self._all_gather(rows[None]).sum(dim=0)
        samples = torch.zeros(most_samples, 2)
        if num_samples:
            samples[:num_samples, 0] = torch.cat(self._scores).cpu()
            samples[:num_samples, 1] = torch.cat(self._labels).cpu()
        by_rank = self._all_gather(samples[None])
        scores, labels = torch.cat(
            [part[:count] for part, (_, count) in zip(by_rank, counts.tolist(), strict=True)]
        ).T
        return _evaluation(step, by_batch, scores, labels)

    def _all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensors of all ranks, one after the other along their first dimension."""
        own = tensor.to(self._device)
        parts = [torch.empty_like(own) for _ in range(dist.get_world_size(self._group))]
        dist.all_gather(parts, own, group=self._group)
        return torch.cat(parts).cpu()


def _evaluation(
    step: int, by_batch: torch.Tensor, scores: torch.Tensor, labels: torch.Tensor
) -> Evaluation:
    """The metrics of all samples.

    Args:
        step: how many steps were trained before.
        by_batch: the sum of the losses and the number of samples of each batch.
        scores: the logits of all samples.
        labels: the labels of all samples.
    """
    loss_sum, num_samples = by_batch.sum(dim=0).tolist()
    clicks = labels.double().sum().item()
    loss = loss_sum / num_samples if num_samples else math.nan
    click_rate = clicks / num_samples if num_samples else math.nan
    predicted = torch.sigmoid(scores.double()).sum().item()
    return Evaluation(
        step=step,
        losses=tuple((by_batch[:, 0] / by_batch[:, 1]).tolist()),
        click_rate=click_rate,
        metrics={
            "loss": loss,
            "ne": normalized_entropy(loss, click_rate),
            "auc": area_under_roc(scores, labels),
            "calibration": predicted / clicks if clicks else math.nan,
        },
    )


def evaluated(
    config: TrainConfig,
    model: DistributedModelParallel,
    batches_of: Callable[[Split], Iterator[Batch]],
    step: int,
) -> Evaluation:
    """Evaluate a model; the metrics are those of all ranks, and equal on all of them.

    Args:
        config: says what is evaluated, and on how many batches.
        model: the sharded model, in no pipeline.
        batches_of: gives this rank's batches of a split.
        step: how many steps were trained before.

    Collectives:
        Those of the model's lookups, of `ClickMetrics.gather` and of `ranking_metrics`.
    """
    world, device = world_group(), rank_device(config.loop.device)

    def held_out(batches: Iterator[Batch]) -> Iterator[Batch]:
        return (batch.to(device) for batch in islice(batches, config.loop.eval_steps or None))

    metrics = ClickMetrics(world, device)
    with closing_batches(batches_of(Split.EVAL)) as batches, evaluating(model):
        for batch in held_out(batches):
            _, (loss, scores, labels) = model(batch)
            metrics.add(loss, scores, labels)
    evaluation, ranking = metrics.gather(step), ranking_of(config.model)
    of_clicks = evaluation.metrics
    if not has_clicks(config.model):
        of_clicks = {"loss": of_clicks["loss"]}
    if ranking.among == "none":
        return replace(evaluation, metrics=of_clicks)
    with closing_batches(batches_of(Split.EVAL)) as batches, evaluating(model), torch.no_grad():
        rankings = ranking_metrics(model.module, held_out(batches), ranking, world)
    return replace(evaluation, metrics={**of_clicks, **rankings})
