"""Measure training steps and held-out batches over all ranks.

```text
each step        Meter.add     --all-reduce, now and then--------------> StepsTrained, on all ranks
held-out batches ClickMetrics  --gather scores--> rank 0 --broadcast---> Evaluation, on all ranks
```
"""

import math
import resource
from collections.abc import Mapping, Sequence
from contextlib import closing
from itertools import islice

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torchrec.distributed.model_parallel import DistributedModelParallel

from torchrec_2dsp.comms.groups import world_group
from torchrec_2dsp.errors import ConfigError
from torchrec_2dsp.programs.data.dataset import Batches, Dataset, Split
from torchrec_2dsp.programs.models.kinds import has_clicks, ranking_of
from torchrec_2dsp.programs.models.ranking import ranking_metrics
from torchrec_2dsp.programs.train.config import TrainConfig
from torchrec_2dsp.programs.train.record import Evaluation, StepsTrained, normalized_entropy


class Meter:
    """Collects a rank's steps, until all ranks combine theirs.

    The mean over ranks is the mean over the global batch: either all batches have one size, or each
    weighs its loss by its size (`weigh_losses_`).
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group, self._device = group, device
        self._rows: list[torch.Tensor] = []
        self._seconds = 0.0

    def add(self, loss: torch.Tensor, labels: torch.Tensor) -> None:
        """Add one step on this rank."""
        labels = labels.double()
        self._rows.append(
            torch.stack([loss.double(), labels.sum(), labels.new_tensor(len(labels))])
        )

    def add_seconds(self, seconds: float) -> None:
        """Add the time for this rank's steps."""
        self._seconds += seconds

    def gather(self, step: int) -> StepsTrained:
        """Average everything since the last call over the ranks, up to ``step``.

        Collectives:
            One all-reduce: three float64 numbers per step, one per rank, and one more.
        """
        rows, self._rows = torch.stack(self._rows).to(self._device), []
        num_ranks, rank = dist.get_world_size(self._group), dist.get_rank(self._group)
        memory = torch.zeros(num_ranks, dtype=torch.float64, device=self._device)
        memory[rank] = _peak_bytes(self._device)
        seconds = memory.new_tensor([self._seconds])
        self._seconds = 0.0
        numbers = torch.cat([rows.reshape(-1), memory, seconds])
        dist.all_reduce(numbers, group=self._group)
        numbers = numbers.cpu()
        losses, clicks, samples = numbers[: rows.numel()].view(-1, 3).t()
        return StepsTrained.of_losses(
            (losses / num_ranks).tolist(),
            float(clicks.sum() / samples.sum()),
            step=step,
            seconds=numbers[-1].item() / num_ranks,
            memory_bytes=tuple(map(int, numbers[-1 - num_ranks : -1].tolist())),
        )


def mean_per_step(
    group: dist.ProcessGroup, device: torch.device, num_steps: int, totals: Mapping[str, int]
) -> dict[str, float]:
    """Average totals, which have the same names on all ranks, over ranks and steps, if any.

    Collectives:
        One all-reduce: a float64 number per total.
    """
    means = torch.tensor(list(totals.values()), dtype=torch.float64, device=device)
    dist.all_reduce(means, group=group)
    means = means.cpu() / (dist.get_world_size(group) * max(1, num_steps))
    return dict(zip(totals, means.tolist(), strict=True))


def _peak_bytes(device: torch.device) -> int:
    """Return this process's peak memory: on its GPU, or resident on the host."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def area_under_roc(scores: torch.Tensor, labels: torch.Tensor) -> float:
    """Return the share of click and non-click pairs in which the click scores higher.

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
    # Twice the correctly ordered pairs, as integers.
    doubled = int((clicks * (2 * others_below + others)).sum())
    return doubled / (2 * num_pairs)


class ClickMetrics:
    """Collects a rank's held-out batches, until all ranks combine theirs."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._losses: list[torch.Tensor] = []
        self._scores: list[torch.Tensor] = []
        self._labels: list[torch.Tensor] = []

    def add(self, loss: torch.Tensor, logits: torch.Tensor, labels: torch.Tensor) -> None:
        """Add one batch on this rank: its mean log loss, and each sample's logit and label."""
        self._losses.append(loss.double().reshape(()))
        self._scores.append(logits.detach().float().reshape(-1))
        self._labels.append(labels.detach().float().reshape(-1))

    def gather(self, step: int) -> Evaluation:
        """Compute the metrics over all ranks' batches, after ``step`` steps; equal on all ranks.

        Collectives:
            A gather of objects to rank 0, with two float64 numbers per batch and two float32
            numbers per sample; and a broadcast of the evaluation.
        """
        own: _HeldOut | None = None
        if self._losses:
            sizes = torch.tensor([labels.numel() for labels in self._labels], dtype=torch.float64)
            by_batch = torch.stack([torch.stack(self._losses).cpu() * sizes, sizes], dim=1)
            samples = torch.stack([torch.cat(self._scores), torch.cat(self._labels)]).cpu()
            own = by_batch, samples
        is_first = dist.get_rank(self._group) == 0
        of_ranks = [own] * dist.get_world_size(self._group) if is_first else None
        dist.gather_object(own, of_ranks, group=self._group, group_dst=0)
        held_out = [part for part in of_ranks or () if part is not None]
        evaluation = [_evaluation(held_out, step) if held_out else None]
        dist.broadcast_object_list(evaluation, group=self._group, group_src=0)
        if evaluation[0] is None:
            raise ConfigError("there are no held-out batches to evaluate on; hold some samples out")
        return evaluation[0]


_HeldOut = tuple[torch.Tensor, torch.Tensor]
"""A rank's sum of losses and number of samples for each batch; all scores, and all labels."""


def _evaluation(of_ranks: Sequence[_HeldOut], step: int) -> Evaluation:
    by_batch = pad_sequence([batches for batches, _ in of_ranks]).sum(dim=1)
    scores, labels = torch.cat([samples for _, samples in of_ranks], dim=1)
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


def held_out_batches(
    config: TrainConfig, dataset: Dataset, device: torch.device | None = None
) -> Batches:
    """Yield this rank's part of an evaluation's held-out batches.

    Where a step's batch is cut for memory, so are these; together they have the same rows.
    """
    world, loop = world_group(), config.loop
    batches = dataset.batches(
        Split.EVAL,
        global_batch_size=loop.batch_size,
        rank=world.rank(),
        world_size=world.size(),
        batches_per_step=loop.accumulate,
    )
    with closing(batches) as opened:
        for batch in islice(opened, loop.eval_steps * loop.accumulate or None):
            yield batch if device is None else batch.to(device)


@torch.no_grad()
def evaluated(
    config: TrainConfig,
    model: nn.Module,
    dataset: Dataset,
    step: int,
    device: torch.device | None = None,
) -> Evaluation:
    """Evaluate a model; the metrics cover all ranks and are equal on all of them.

    Args:
        config: the config, which sets the metrics and the number of batches.
        model: the model, sharded or whole, in evaluation mode and in no pipeline.
        dataset: the held-out batches.
        step: the steps trained before.
        device: the model's; by default the batches'.

    Collectives:
        The model's lookups, `ClickMetrics.gather` and `ranking_metrics`.
    """
    world, metrics = world_group(), ClickMetrics(world_group())
    with closing(held_out_batches(config, dataset, device)) as batches:
        for batch in batches:
            _, (loss, scores, labels) = model(batch)
            metrics.add(loss, scores, labels)
    evaluation, ranking = metrics.gather(step), ranking_of(config.model)
    values = evaluation.metrics
    if not has_clicks(config.model):
        values = {"loss": values["loss"]}
    unwrapped = model.module if isinstance(model, DistributedModelParallel) else model
    with closing(held_out_batches(config, dataset, device)) as batches:
        rankings = ranking_metrics(unwrapped, batches, ranking, world)
    return evaluation.model_copy(update={"metrics": {**values, **rankings}})
