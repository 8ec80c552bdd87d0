"""`ClickMetrics`: what held-out batches say of a model that predicts clicks, exactly over all
ranks."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from torchrec_2dsp.errors import ConfigError
from torchrec_2dsp.programs.train.auc import area_under_roc
from torchrec_2dsp.programs.train.meter import normalized_entropy
from torchrec_2dsp.programs.train.sections import LESS_IS_BETTER


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
