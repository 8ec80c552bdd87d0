"""The parts of a training config that say how long a run trains, and what it leaves behind."""

from typing import Literal, Self

from pydantic import Field, model_validator

from torchrec_2dsp.programs.config.config_file import OutputPath
from torchrec_2dsp.programs.config.section import Section

LESS_IS_BETTER = ("loss", "ne")
"""Metrics of which less is better: the log loss and the normalized entropy. Of others, such as the
area under the ROC curve, more is better."""


class LoopConfig(Section):
    """How long to train, how often to evaluate, and what to tell meanwhile."""

    steps: int = Field(default=200, ge=1)
    """How many steps to train, if the data has as many batches."""

    global_batch_size: int = Field(default=1024, ge=1)
    """Samples of all ranks together in a step."""

    accumulate: int = Field(default=1, ge=1)
    """How many batches a step is cut into: they are trained one after the other, and make one
    update, that of the whole."""

    eval_every: int = Field(default=0, ge=0)
    """After how many steps to evaluate; 0 for the end alone."""

    eval_steps: int = Field(default=20, ge=0)
    """How many held-out batches to evaluate on; 0 for all there are."""

    metric: str = ""
    """The metric by which evaluations are compared: loss, ne or auc of clicks, loss, recall@k or
    ndcg@k of rankings. Empty for ne, or for the last of the rankings."""

    patience: int = Field(default=0, ge=0)
    """After how many evaluations in a row that are no better than the best to stop; 0 for never."""

    report_every: int = Field(default=10, ge=1)
    """Steps between two reports of the progress."""

    final_steps: int = Field(default=20, ge=1)
    """The final train loss is the mean over so many last steps."""

    device: Literal["cpu", "cuda"] = "cpu"
    """The device on which each rank computes."""

    timeout_s: float = Field(default=1800, gt=0)
    """How many seconds a rank may keep the others waiting before all of them give up, and name it.
    What one rank does alone, such as making a vocabulary, has to be done in time."""

    tensorboard_dir: OutputPath = ""
    """The folder of TensorBoard scalars; empty for none."""

    @property
    def batch_size(self) -> int:
        """Samples of all ranks together in a batch, of which a step has `accumulate`."""
        return self.global_batch_size // self.accumulate

    @model_validator(mode="after")
    def _check_batches(self) -> Self:
        if self.global_batch_size % self.accumulate:
            raise ValueError(
                f"accumulate={self.accumulate} does not divide "
                f"global_batch_size={self.global_batch_size}; a step is cut into equal batches"
            )
        if self.patience and not self.eval_every:
            raise ValueError(
                f"patience={self.patience} counts evaluations; set eval_every, or leave it out"
            )
        return self


class CheckpointConfig(Section):
    """Which checkpoints a run leaves, and how it saves them."""

    folder: OutputPath = ""
    """The folder of the checkpoints, with a folder for each run; empty for none."""

    every: int = Field(default=1000, ge=1)
    """Steps between two checkpoints; a run saves at its end as well."""

    keep_last: int = Field(default=2, ge=1)
    """How many of the newest checkpoints stay."""

    keep_best: int = Field(default=1, ge=0)
    """How many checkpoints stay of evaluations that were the best so far; 0 saves none of them."""

    asynchronous: bool = False
    """Whether a run trains on while a checkpoint is written, which takes memory for a copy."""


class OutputConfig(Section):
    """What a program leaves behind, beside checkpoints."""

    folder: OutputPath = ""
    """The folder of the config, the record and each run's plan and traces; empty for none."""
