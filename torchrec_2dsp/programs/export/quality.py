"""`compare`: the served model beside the trained one, on held-out batches."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice

import torch
import torch.distributed as dist
from torch import nn
from torchrec.datasets.utils import Batch

from torchrec_2dsp.errors import ConfigError, ExportError
from torchrec_2dsp.programs.data.dataset import Dataset, Split
from torchrec_2dsp.programs.export.served import Answer, ServedModel
from torchrec_2dsp.programs.models.kinds import has_clicks, ranking_of
from torchrec_2dsp.programs.models.ranking_metrics import ranking_metrics
from torchrec_2dsp.programs.train.config import TrainConfig
from torchrec_2dsp.programs.train.evaluation import ClickMetrics
from torchrec_2dsp.programs.train.sections import LESS_IS_BETTER
from torchrec_2dsp.programs.train.stepping import closing_batches

_ROUNDING = 1e-5
"""How far a script's scores may be from those of the module that it was made of, relative to the
largest: the same arithmetic, of which the compiler may round some in another order."""


class HeldOutBatches:
    """The held-out batches of a config, as often as they are asked for."""

    def __init__(self, config: TrainConfig, dataset: Dataset) -> None:
        """
        Args:
            config: says how many batches there are, and how large they are.
            dataset: the data as the model takes it.
        """
        self._config, self._dataset = config, dataset

    def __iter__(self) -> Iterator[Batch]:
        loop = self._config.loop
        batches = self._dataset.batches(
            Split.EVAL, global_batch_size=loop.batch_size, rank=0, world_size=1
        )
        with closing_batches(batches) as opened:
            yield from islice(opened, loop.eval_steps or None)


def scores_of(
    answers: Callable[..., Answer], served: ServedModel, batches: HeldOutBatches
) -> list[torch.Tensor]:
    """The scores that a module, or a script, gives the samples of each batch."""
    with torch.no_grad():
        return [served.scores(answers, batch) for batch in batches]


@dataclass(frozen=True)
class ServedQuality:
    """A model's answers to the held-out batches."""

    scores: list[torch.Tensor]
    """The scores of each batch's samples."""

    metrics: dict[str, float]
    """The metrics by which the training program evaluates a model of this kind."""


def measure(
    model: nn.Module,
    served: ServedModel,
    batches: HeldOutBatches,
    config: TrainConfig,
    group: dist.ProcessGroup,
) -> ServedQuality:
    """Evaluate a model that isn't sharded, with or without quantised tables.

    Args:
        model: in evaluation mode.
        served: how it serves.
        batches: the held-out ones.
        config: says which metrics there are.
        group: of this process alone.

    Collectives:
        Those of `ClickMetrics.gather` and of `ranking_metrics`, in a group of one.
    """
    scores = scores_of(served.module(), served, batches)
    clicks = ClickMetrics(group, torch.device("cpu"))
    with torch.no_grad():
        for batch in batches:
            _, (loss, logits, labels) = model(batch)
            clicks.add(loss, logits, labels)
    metrics = clicks.gather(0).metrics
    if not has_clicks(config.model):
        metrics = {"loss": metrics["loss"]}
    rankings = ranking_metrics(model, batches, ranking_of(config.model), group)
    return ServedQuality(scores, {**metrics, **rankings})


def largest_difference(one_way: list[torch.Tensor], other_way: list[torch.Tensor]) -> float:
    """How far two lists of scores are apart, at most.

    Raises:
        ConfigError: there are no scores to compare.
    """
    if not one_way:
        raise ConfigError("there are no held-out batches to compare on; hold some samples out")
    pairs = zip(one_way, other_way, strict=True)
    return max(float((scores - others).abs().max()) for scores, others in pairs)


def check_script(script_scores: list[torch.Tensor], module_scores: list[torch.Tensor]) -> None:
    """Raise unless a file that was read again scores as the module that it was made of.

    Raises:
        ExportError: it doesn't.
    """
    difference = largest_difference(script_scores, module_scores)
    largest = max(float(scores.abs().max()) for scores in module_scores)
    # A comparison that no number that isn't one passes.
    if not difference <= _ROUNDING * max(1.0, largest):
        raise ExportError(
            f"the file's scores are up to {difference:.3g} away from those of the module that it "
            "was made of, which should be equal; this is a defect of this package or of "
            "TorchScript: don't serve the file, and report it"
        )


def check_loss(metric: str, trained: float, served: float, max_loss: float) -> float:
    """How much worse the served model is by a metric; negative if it is better.

    Args:
        metric: the metric's name.
        trained: its value for the model that was trained.
        served: its value for the model that serves.
        max_loss: how much worse it may be.

    Raises:
        ExportError: it is worse than that, or a value is no number.
    """
    worse = served - trained if metric in LESS_IS_BETTER else trained - served
    if not worse <= max_loss:
        raise ExportError(
            f"{metric} is {trained:.6g} as trained and {served:.6g} as served, worse by "
            f"{worse:.3g}, and --max-loss allows {max_loss:g}; allow more, or train tables whose "
            "rows have no outliers"
        )
    return worse
