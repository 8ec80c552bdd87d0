"""`TrainConfig`: what a training program does."""

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, field_validator, model_validator

from torchrec_2dsp.errors import ConfigError
from torchrec_2dsp.mesh.mesh2d import Mesh2D, RankLayout
from torchrec_2dsp.plan.parameter_sharding import type_2d
from torchrec_2dsp.programs.config.dense import DenseGradientsConfig
from torchrec_2dsp.programs.config.sections import (
    ExchangeConfig,
    ModelConfig,
    OptimizerConfig,
    ReplicationConfig,
    Section,
    SplitConfig,
)
from torchrec_2dsp.programs.data.synthetic import SyntheticConfig


def _check_known(types: tuple[str, ...]) -> tuple[str, ...]:
    for name in types:
        type_2d(name)
    return types


ShardingTypes = Annotated[tuple[str, ...], AfterValidator(_check_known)]
"""Names of sharding types, TorchRec's or their 2D forms."""


class PlannedModelConfig(ModelConfig):
    """The model, and what its planner may do."""

    sharding_types: ShardingTypes = ("table_wise", "row_wise")
    """The types that the planner may choose from. Column-wise shards have a row-wise moment each,
    and data-parallel tables are trained by the dense optimizer: with those, runs on different
    meshes train by different rules."""

    @field_validator("sharding_types")
    @classmethod
    def _check_types(cls, types: tuple[str, ...]) -> tuple[str, ...]:
        if not types:
            raise ValueError("it is empty; name at least one sharding type")
        return types


class LoopConfig(Section):
    """How long to train, and what to tell meanwhile."""

    steps: int = Field(default=200, ge=1)
    """How many batches to train on."""

    global_batch_size: int = Field(default=1024, ge=1)
    """Samples of all ranks together in a step."""

    eval_steps: int = Field(default=20, ge=1)
    """Held-out batches to evaluate on afterwards."""

    report_every: int = Field(default=10, ge=1)
    """Steps between two reports of the progress."""

    final_steps: int = Field(default=20, ge=1)
    """The final train loss is the mean over so many last steps."""

    device: Literal["cpu", "cuda"] = "cpu"
    """The device on which each rank computes."""

    tensorboard_dir: str = ""
    """The folder of TensorBoard scalars; empty for none."""


class RunConfig(SplitConfig, ReplicationConfig, ExchangeConfig):
    """One training of the model: a mesh, a way to keep its replicas equal, an exchange, splits."""

    num_groups: int = Field(default=1, ge=1)
    """How many copies of the tables there are; 1 is plain TorchRec."""

    layout: RankLayout = RankLayout.STRIDED
    """How ranks are dealt to groups."""

    sharding_types: ShardingTypes = ()
    """The types that the planner may choose from, if not those of the model."""

    dense: DenseGradientsConfig = DenseGradientsConfig()
    """How ranks add up the gradients of what isn't sharded."""


class TrainConfig(Section):
    """A training program: every run trains the same model on the same data.

    Example:
        >>> from torchrec_2dsp.programs.config.config_file import make_config
        >>> from torchrec_2dsp.programs.train.config import TrainConfig
        >>> data = {"features": [{"name": "user", "num_rows": 1_000}]}
        >>> tree = {"data": data, "runs": {"exact": {"num_groups": 2}}}
        >>> config = make_config(TrainConfig, tree)
        >>> config.mesh("exact", world_size=4).group_size
        2
    """

    data: SyntheticConfig
    """The data to train on."""

    model: PlannedModelConfig = PlannedModelConfig()
    """The model to train."""

    optimizer: OptimizerConfig = OptimizerConfig()
    """The rules by which weights are updated."""

    loop: LoopConfig = LoopConfig()
    """How long to train, and what to report."""

    runs: dict[str, RunConfig]
    """The runs by name, in the order in which they are trained."""

    @model_validator(mode="after")
    def _check_names(self) -> "TrainConfig":
        if not self.runs:
            raise ValueError("runs is empty; describe at least one")
        unusable = [name for name in self.runs if not name or set(name) & set("./\\ ")]
        if unusable:
            raise ValueError(f"runs: the name {unusable[0]!r} has a dot, a slash or a space")
        return self

    @model_validator(mode="after")
    def _check_meetings(self) -> "TrainConfig":
        for name, run in self.runs.items():
            if run.dense.kind == "local" and self.loop.steps % run.dense.local_steps:
                raise ValueError(
                    f"runs.{name}.dense.local_steps={run.dense.local_steps} doesn't divide "
                    f"loop.steps={self.loop.steps}, so ranks would end with different weights"
                )
        return self

    def mesh(self, run: str, world_size: int) -> Mesh2D:
        """The mesh of a run in a world of ``world_size`` ranks."""
        num_groups = self.runs[run].num_groups
        if world_size % num_groups:
            fitting = [n for n in range(1, world_size + 1) if world_size % n == 0]
            raise ConfigError(
                f"runs.{run}.num_groups={num_groups} does not divide the {world_size} ranks; "
                f"use one of {', '.join(map(str, fitting))}, or start another number of ranks"
            )
        return Mesh2D(num_groups, world_size // num_groups, self.runs[run].layout)

    def check_world(self, world_size: int) -> None:
        """Raise `ConfigError` at the first value that ``world_size`` ranks can't run."""
        for run in self.runs:
            self.mesh(run, world_size)
        size = self.loop.global_batch_size
        if size % world_size:
            raise ConfigError(
                f"loop.global_batch_size={size} is not a multiple of the {world_size} ranks; use "
                f"{(size // world_size + 1) * world_size}"
            )

    def only(self, names: Sequence[str]) -> "TrainConfig":
        """The config with these runs alone; all of them for no name."""
        unknown = [name for name in names if name not in self.runs]
        if unknown:
            raise ConfigError(
                f"there is no run {unknown[0]!r}; the config has {', '.join(self.runs)}"
            )
        runs = {name: run for name, run in self.runs.items() if not names or name in names}
        return self.model_copy(update={"runs": runs})
