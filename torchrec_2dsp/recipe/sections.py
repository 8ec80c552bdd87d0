"""The parts of a config file that say what is trained."""

from pydantic import BaseModel, ConfigDict, Field


class Section(BaseModel):
    """A part of a config file: values of a fixed set of keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class ModelConfig(Section):
    """TorchRec's DLRM over one table per sparse feature."""

    dim: int = Field(default=16, ge=4, multiple_of=4)
    """The embedding dimension of all tables."""

    dense_layers: tuple[int, ...] = (64,)
    """Sizes of the hidden layers under the interaction; a last one of size `dim` is added."""

    over_layers: tuple[int, ...] = (64,)
    """Sizes of the hidden layers over the interaction; a last one of size 1 is added."""

    seed: int = Field(default=0, ge=0)
    """Of the initial weights."""


class OptimizerConfig(Section):
    """Row-wise AdaGrad for the tables, SGD for everything else."""

    lr: float = Field(default=0.02, ge=0, allow_inf_nan=False)
    """Learning rate of the tables."""

    eps: float = Field(default=1e-8, ge=0, allow_inf_nan=False)
    """Added to the root of the moment."""

    dense_lr: float = Field(default=0.1, ge=0, allow_inf_nan=False)
    """Learning rate of the other parameters."""
