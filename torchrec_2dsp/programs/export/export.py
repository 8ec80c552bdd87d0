"""Write a trained model to a folder that serves without this package."""

import os
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import ClassVar, Literal

from pydantic import ConfigDict
from torch import nn
from torchrec.modules.embedding_configs import data_type_to_dtype

from torchrec_2dsp.errors import ConfigError
from torchrec_2dsp.programs.config.section import JsonFile
from torchrec_2dsp.programs.data.dataset import Dataset
from torchrec_2dsp.programs.export.kinds import saying_what_stops, served_model
from torchrec_2dsp.programs.export.quality import (
    check_answers,
    check_finite,
    check_loss,
    check_script,
    first_request,
    largest_difference,
    measure,
    scores_of,
)
from torchrec_2dsp.programs.export.requests import dense_columns, write_encoding
from torchrec_2dsp.programs.export.served import (
    EXPORT_FILE,
    FEATURES_FILE,
    MODEL_FILE,
    ServingInputs,
    load_script,
    quantize_,
    quantized_bytes,
)
from torchrec_2dsp.programs.export.source import ExportSource, trained_model
from torchrec_2dsp.programs.models.kinds import dataset_for
from torchrec_2dsp.programs.models.model import tables_of
from torchrec_2dsp.programs.models.own_model import OwnModelConfig
from torchrec_2dsp.programs.train.metrics import held_out_batches
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
        max_loss: how much worse the config's metric may be than that of the trained model.

    Returns:
        How the two compare, which is also in export.json.

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
    trained = measure(model, served, held_out, config)
    check_finite(trained.scores)
    table_bytes = sum(
        table.num_embeddings * table.embedding_dim * data_type_to_dtype(table.data_type).itemsize
        for table in tables_of(model)
    )
    factory = config.model.factory if isinstance(config.model, OwnModelConfig) else ""
    with saying_what_stops(factory):
        quantize_(model)
        quantized = measure(model, served, held_out, config)
        served.script().save(str(folder / MODEL_FILE))
        script = load_script(folder / MODEL_FILE)
        script_scores = scores_of(served, script, held_out_batches(config, held_out))
        check_script(script_scores, quantized.scores)
        request = first_request(served, held_out_batches(config, held_out))
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
    before, after = trained.metrics[config.metric], quantized.metrics[config.metric]
    record = ExportRecord(
        run=source.run,
        checkpoint=str(source.checkpoint),
        num_samples=sum(scores.numel() for scores in trained.scores),
        largest_difference=largest_difference(trained.scores, quantized.scores),
        trained=trained.metrics,
        served=quantized.metrics,
        metric=config.metric,
        worse_by=check_loss(config.metric, before, after, max_loss),
        max_loss=max_loss,
        table_bytes=table_bytes,
        served_table_bytes=quantized_bytes(model),
        environment=environment(),
    )
    record.save(folder / EXPORT_FILE)
    return record
