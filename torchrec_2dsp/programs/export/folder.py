"""The records that lie beside an exported model."""

from typing import Any, ClassVar, Literal

from pydantic import ConfigDict

from torchrec_2dsp.programs.config.section import JsonFile
from torchrec_2dsp.programs.export.served import ServedFeature, ServedModel
from torchrec_2dsp.programs.train.config import TrainConfig

MODEL_FILE, FEATURES_FILE, EXPORT_FILE = "model.pt", "features.json", "export.json"
"""The model, what it takes, and how it compares with what was trained."""


class ServingInputs(JsonFile):
    """An exported model's inputs and outputs."""

    what_it_is: ClassVar[str] = "the features.json of an exported model"

    format: Literal[1] = 1
    """The file's format."""

    kind: str
    """The model's kind."""

    num_dense: int
    """The number of dense features."""

    dense: tuple[str, ...]
    """Their columns in a log, in order; empty for data without columns."""

    features: tuple[ServedFeature, ...]
    """The sparse features, in the order in which a request gives their ids."""

    outputs: tuple[str, ...]
    """The names of the model's output tensors."""

    functions: tuple[str, ...] = ()
    """The names of the model's functions beside the call."""


class ExportRecord(JsonFile):
    """The comparison of an exported model with the trained one."""

    what_it_is: ClassVar[str] = "the export.json of an exported model"
    # A model that diverged has figures for which JSON has no numbers.
    model_config = ConfigDict(ser_json_inf_nan="strings")

    format: Literal[1] = 1
    """The file's format."""

    run: str
    """The run's name in its config."""

    checkpoint: str
    """The checkpoint's folder."""

    num_samples: int
    """On how many held-out samples the models were compared."""

    largest_difference: float
    """The largest difference between a sample's two scores."""

    trained: dict[str, float]
    """The trained model's metrics."""

    served: dict[str, float]
    """The served model's metrics."""

    metric: str
    """The metric that was bounded."""

    worse_by: float
    """The served model's loss by this metric; negative if it is better."""

    max_loss: float
    """The largest loss that was allowed."""

    table_bytes: int
    """The trained tables' bytes."""

    served_table_bytes: int
    """The served tables' bytes."""

    environment: dict[str, str]
    """The versions of the packages that wrote the file."""


def serving_inputs(
    config: TrainConfig, served: ServedModel, outputs: tuple[str, ...]
) -> ServingInputs:
    """Describe a served model's inputs and outputs."""
    columns: Any = getattr(config.data, "dense", ())
    return ServingInputs(
        kind=config.model.kind,
        num_dense=served.num_dense,
        dense=tuple(column.column for column in columns) if served.num_dense else (),
        features=served.features,
        outputs=outputs,
        functions=served.functions,
    )
