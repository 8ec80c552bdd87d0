"""Write a trained model to a folder that serves without this package, and compare the two."""

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar, Literal

import torch
from pydantic import ConfigDict
from torch import nn
from torchrec.datasets.utils import Batch
from torchrec.modules.embedding_configs import data_type_to_dtype

from torchrec_2dsp.errors import ConfigError, ExportError, UnsupportedError
from torchrec_2dsp.programs.config.section import JsonFile
from torchrec_2dsp.programs.data.dataset import Dataset
from torchrec_2dsp.programs.export.kinds import ServedModel, saying_what_stops, served_model
from torchrec_2dsp.programs.export.requests import dense_columns, write_encoding
from torchrec_2dsp.programs.export.served import (
    EXPORT_FILE,
    FEATURES_FILE,
    MODEL_FILE,
    Answer,
    Request,
    ServingInputs,
    first_sample,
    load_script,
    quantize_,
    quantized_bytes,
)
from torchrec_2dsp.programs.export.source import ExportSource, trained_model
from torchrec_2dsp.programs.models.kinds import dataset_for, has_clicks
from torchrec_2dsp.programs.models.model import tables_of
from torchrec_2dsp.programs.models.own_model import OwnModelConfig
from torchrec_2dsp.programs.train.config import TrainConfig
from torchrec_2dsp.programs.train.metrics import evaluated, held_out_batches
from torchrec_2dsp.programs.train.record import LESS_IS_BETTER
from torchrec_2dsp.programs.train.results import environment

DEFAULT_MAX_LOSS = 0.001
"""The default limit on a served model's metric loss."""


class ExportRecord(JsonFile):
    """An exported model's comparison with the trained one."""

    what_it_is: ClassVar[str] = "the export.json of an exported model"
    # JSON has no numbers for the figures of a model that diverged.
    model_config = ConfigDict(ser_json_inf_nan="strings")

    format: Literal[1] = 1
    run: str
    checkpoint: str
    num_samples: int
    largest_difference: float
    """The largest difference between a sample's two scores."""

    trained: dict[str, float]
    served: dict[str, float]
    metric: str
    worse_by: float
    """The served model's loss in this metric; negative if it is better."""

    max_loss: float
    table_bytes: int
    served_table_bytes: int
    environment: dict[str, str]


def export_model(
    source: ExportSource, output: Path, *, max_loss: float = DEFAULT_MAX_LOSS
) -> ExportRecord:
    """Export a trained model; `torch.distributed` must be initialised, with a single rank.

    The folder appears as a whole, after the file has been read again, scores as it should, and is
    good enough.

    Args:
        source: the run and its checkpoint.
        output: the folder, which mustn't exist or must be empty.
        max_loss: how much worse the config's metric may be than the trained model's.

    Returns:
        The comparison, which is also in export.json.

    Raises:
        ConfigError: the folder is there already, or there are no held-out samples.
        CheckpointError: the checkpoint didn't finish, is damaged, or is another model's.
        UnsupportedError: the model is a user's own, and something in it can't be exported.
        ExportError: the served model is worse than ``max_loss`` allows, or the trained model's
            scores aren't finite.
    """
    check_output(output)
    config = source.config
    dataset = config.data.dataset()
    model = trained_model(source, dataset)
    with _folder_beside(output) as folder:
        draft = Path(folder, output.name)
        draft.mkdir()
        record = _written(source, dataset, model, draft, max_loss)
        os.replace(draft, output)
    return record


def check_output(output: Path) -> None:
    """Raise `ConfigError` if a model can't be written to a folder, before any work."""
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ConfigError(f"--output {output} exists and isn't an empty folder; use another")
    if not output.name:
        raise ConfigError(f"--output {output} is replaced as a whole; name the folder")
    if output.is_symlink() or os.path.ismount(output):
        raise ConfigError(
            f"--output {output} is a link or a mounted volume, which can't be replaced as a whole; "
            "name a folder in it"
        )
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        _folder_beside(output).cleanup()
    except OSError as error:
        raise ConfigError(f"--output {output} can't be written: {error.strerror}") from error


def _folder_beside(output: Path) -> TemporaryDirectory[str]:
    return TemporaryDirectory(dir=output.parent, prefix=f"{output.name}.", suffix=".draft")


def _written(
    source: ExportSource, dataset: Dataset, model: nn.Module, folder: Path, max_loss: float
) -> ExportRecord:
    """Write all files; read the model's again and compare it with the trained one."""
    config = source.config
    served = served_model(model, config.model, dataset)
    held_out = dataset_for(config.model, dataset)
    scores, metrics = measure(model, served, held_out, config)
    check_finite(scores)
    table_bytes = sum(
        table.num_embeddings * table.embedding_dim * data_type_to_dtype(table.data_type).itemsize
        for table in tables_of(model)
    )
    factory = config.model.factory if isinstance(config.model, OwnModelConfig) else ""
    with saying_what_stops(factory):
        quantize_(model)
        served_scores, served_metrics = measure(model, served, held_out, config)
        served.script().save(str(folder / MODEL_FILE))
        script = load_script(folder / MODEL_FILE)
        script_scores = scores_of(served, script, held_out_batches(config, held_out))
        check_script(script_scores, served_scores)
        # There is one: without any, there are no scores either.
        requests = map(served.request, held_out_batches(config, held_out))
        request = next(filter(None, requests))
        outputs = check_answers(script, served.module(), request, len(served.features))
    inputs = ServingInputs(
        kind=config.model.kind,
        num_dense=served.num_dense,
        dense=dense_columns(config.data) if served.num_dense else (),
        features=served.features,
        outputs=outputs,
        functions=served.functions,
    )
    inputs.save(folder / FEATURES_FILE)
    write_encoding(config, dataset, folder)
    before, after = metrics[config.metric], served_metrics[config.metric]
    record = ExportRecord(
        run=source.run,
        checkpoint=str(source.checkpoint),
        num_samples=sum(part.numel() for part in scores),
        largest_difference=largest_difference(scores, served_scores),
        trained=metrics,
        served=served_metrics,
        metric=config.metric,
        worse_by=check_loss(config.metric, before, after, max_loss),
        max_loss=max_loss,
        table_bytes=table_bytes,
        served_table_bytes=quantized_bytes(model),
        environment=environment(),
    )
    record.save(folder / EXPORT_FILE)
    return record


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


def measure(
    model: nn.Module, served: ServedModel, dataset: Dataset, config: TrainConfig
) -> tuple[list[torch.Tensor], dict[str, float]]:
    """Return the scores and metrics of a model, with or without quantised tables.

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
            # A diverged model's differences aren't numbers, as its metrics show.
            is_finite = bool(evaluated_logits.isfinite().all())
            if is_finite and not _are_equal(evaluated_logits, served_scores):
                raise UnsupportedError(
                    "the model scores samples otherwise where their labels are zeros, and requests "
                    "have no labels; let labels count in the loss alone"
                )
    return scores, metrics


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
