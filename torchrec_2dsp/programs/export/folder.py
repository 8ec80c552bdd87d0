"""`ServingInputs` and `ExportRecord`: what lies beside an exported model."""

from typing import Any, ClassVar, Literal

from pydantic import ConfigDict

from torchrec_2dsp.programs.config.section import JsonFile
from torchrec_2dsp.programs.export.served import ServedFeature, ServedModel
from torchrec_2dsp.programs.train.config import TrainConfig

MODEL_FILE, FEATURES_FILE, EXPORT_FILE = "model.pt", "features.json", "export.json"
"""The model, what it takes, and how it compares with what was trained."""


class ServingInputs(JsonFile):
    """What an exported model takes, and what it gives."""

    what_it_is: ClassVar[str] = "the features.json of an exported model"

    format: Literal[1] = 1
    """The format of this file."""

    kind: str
    """The kind of model."""

    num_dense: int
    """How many dense features a sample has."""

    dense: tuple[str, ...]
    """The columns of a log that they are, in their order; empty for data without columns."""

    features: tuple[ServedFeature, ...]
    """The sparse features, in the order in which a request gives their ids."""

    outputs: tuple[str, ...]
    """The names of the tensors that the model gives."""

    functions: tuple[str, ...] = ()
    """The names of what the model can do beside answering a call."""


class ExportRecord(JsonFile):
    """How an exported model compares with the one that was trained."""

    what_it_is: ClassVar[str] = "the export.json of an exported model"
    # A model that diverged has figures for which JSON has no numbers.
    model_config = ConfigDict(ser_json_inf_nan="strings")

    format: Literal[1] = 1
    """The format of this file."""

    run: str
    """The run's name in its config."""

    checkpoint: str
    """The folder of the checkpoint."""

    num_samples: int
    """On how many held-out samples the models were compared."""

    largest_difference: float
    """The largest difference between two scores of a sample."""

    trained: dict[str, float]
    """The metrics of the model as it was trained."""

    served: dict[str, float]
    """The metrics of the model as it serves."""

    metric: str
    """The metric that was bounded."""

    worse_by: float
    """How much worse the served model is by this metric; negative if it is better."""

    max_loss: float
    """How much worse it was allowed to be."""

    table_bytes: int
    """The bytes of the tables as they were trained."""

    served_table_bytes: int
    """The bytes of the tables as they serve."""

    environment: dict[str, str]
    """The versions of the packages that made the file."""


def serving_inputs(
    config: TrainConfig, served: ServedModel, outputs: tuple[str, ...]
) -> ServingInputs:
    """The content of features.json."""
    columns: Any = getattr(config.data, "dense", ())
    return ServingInputs(
        kind=config.model.kind,
        num_dense=served.num_dense,
        dense=tuple(column.column for column in columns) if served.num_dense else (),
        features=served.features,
        outputs=outputs,
        functions=served.functions,
    )
