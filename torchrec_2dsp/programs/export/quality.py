"""Compare the served model with the trained one, on held-out batches."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torchrec.datasets.utils import Batch

from torchrec_2dsp.errors import ConfigError, ExportError, UnsupportedError
from torchrec_2dsp.programs.data.dataset import Dataset
from torchrec_2dsp.programs.export.kinds import ServedModel
from torchrec_2dsp.programs.export.served import Answer, Request, first_sample
from torchrec_2dsp.programs.models.kinds import has_clicks
from torchrec_2dsp.programs.train.config import TrainConfig
from torchrec_2dsp.programs.train.metrics import evaluated, held_out_batches
from torchrec_2dsp.programs.train.record import LESS_IS_BETTER

_ROUNDING = 1e-5
"""The largest relative difference between a script's scores and its module's: the compiler may
round in another order."""
_NOTHING_HELD_OUT = "there are no held-out batches to compare on; hold some samples out"


def scores_of(
    served: ServedModel, answers: Callable[..., Answer], batches: Iterable[Batch]
) -> list[torch.Tensor]:
    """Score each batch's samples with a served model's module or script."""
    with torch.no_grad():
        return [served.scores(answers, batch) for batch in batches]


def first_request(served: ServedModel, batches: Iterable[Batch]) -> Request:
    """Return the request for the first held-out batch that has one."""
    for batch in batches:
        request = served.request(batch)
        if request is not None:
            return request
    raise ConfigError(_NOTHING_HELD_OUT)


@dataclass(frozen=True)
class ServedQuality:
    """A model's answers to the held-out batches."""

    scores: list[torch.Tensor]
    metrics: dict[str, float]


def measure(
    model: nn.Module, served: ServedModel, dataset: Dataset, config: TrainConfig
) -> ServedQuality:
    """Evaluate a model that isn't sharded, with or without quantised tables.

    Collectives:
        Same as `evaluated`, in a world of one.
    """
    logits: list[torch.Tensor] = []

    def note(_module: nn.Module, _inputs: Any, output: Any) -> None:
        logits.append(output[1][1].reshape(-1))

    scores = scores_of(served, served.module(), held_out_batches(config, dataset))
    with model.register_forward_hook(note):
        metrics = evaluated(config, model, dataset, step=0).metrics
    if has_clicks(config.model):
        for evaluated_logits, served_scores in zip(logits, scores, strict=True):
            # A diverged model's differences aren't numbers, which its metrics say.
            is_finite = bool(evaluated_logits.isfinite().all())
            if is_finite and not _are_equal(evaluated_logits, served_scores):
                raise UnsupportedError(
                    "the model scores samples otherwise where their labels are zeros, and requests "
                    "have no labels; let labels count in the loss alone"
                )
    return ServedQuality(scores, metrics)


def _are_equal(scores: torch.Tensor, expected: torch.Tensor) -> bool:
    """Return whether scores are equal up to rounding; NaN never is."""
    difference = float((scores - expected).abs().max())
    return difference <= _ROUNDING * max(1.0, float(expected.abs().max()))


def largest_difference(one_way: list[torch.Tensor], other_way: list[torch.Tensor]) -> float:
    """Return the largest difference between two lists of scores."""
    if not sum(scores.numel() for scores in one_way):
        raise ConfigError(_NOTHING_HELD_OUT)
    return float((torch.cat(one_way) - torch.cat(other_way)).abs().max())


def check_finite(scores: list[torch.Tensor]) -> None:
    """Raise `ExportError` if a trained model's scores aren't finite."""
    if num_others := sum(int((~part.isfinite()).sum()) for part in scores):
        raise ExportError(
            f"{num_others} of {sum(part.numel() for part in scores)} scores of the trained model "
            "aren't finite, so it diverged; export an earlier checkpoint, or train "
            "with a lower learning rate"
        )


def check_answers(
    answers: Callable[..., Answer], module: nn.Module, request: Request, num_features: int
) -> tuple[str, ...]:
    """Raise unless a reloaded file answers as its module does.

    A request is sent as a whole and as its first sample alone: a file has to answer requests of any
    size.

    Raises:
        ExportError: an answer differs.
    """
    names: tuple[str, ...] = ()
    with torch.no_grad():
        for part in (request, first_sample(request, num_features)):
            answer, expected = answers(*part), module(*part)
            names = tuple(answer)
            for name in names:
                check_script([answer[name]], [expected[name]])
    return names


def check_script(script_scores: list[torch.Tensor], module_scores: list[torch.Tensor]) -> None:
    """Raise `ExportError` unless a reloaded file scores as its module does."""
    difference = largest_difference(script_scores, module_scores)
    if not _are_equal(torch.cat(script_scores), torch.cat(module_scores)):
        raise ExportError(
            f"the file's scores are up to {difference:.3g} away from those of the module that it "
            "was made of, which should be equal; this is a defect of this package or of "
            "TorchScript: don't serve the file, and report it"
        )


def check_loss(metric: str, trained: float, served: float, max_loss: float) -> float:
    """Return by how much a metric is worse as served, at most ``max_loss``; negative if better."""
    worse = served - trained if metric in LESS_IS_BETTER else trained - served
    if not worse <= max_loss:
        raise ExportError(
            f"{metric} is {trained:.6g} as trained and {served:.6g} as served, worse by "
            f"{worse:.3g}, and --max-loss allows {max_loss:g}; allow more, or train tables whose "
            "rows have no outliers"
        )
    return worse
