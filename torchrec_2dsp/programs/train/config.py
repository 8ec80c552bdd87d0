"""`TrainConfig`: what a training program does."""

from collections.abc import Sequence
from typing import Any, Self

from pydantic import Field, model_validator

from torchrec_2dsp.errors import ConfigError
from torchrec_2dsp.mesh.mesh2d import Mesh2D, RankLayout
from torchrec_2dsp.programs.config.balance import SamplesConfig
from torchrec_2dsp.programs.config.config_file import CalibrationPath, PathBesideConfig
from torchrec_2dsp.programs.config.dense import DenseGradientsConfig
from torchrec_2dsp.programs.config.kinds import with_kinds
from torchrec_2dsp.programs.config.schedule import ScheduledOptimizerConfig
from torchrec_2dsp.programs.config.section import Section
from torchrec_2dsp.programs.config.sections import (
    ExchangeConfig,
    ReplicationConfig,
    SplitConfig,
)
from torchrec_2dsp.programs.models.balance import check_balance, check_speeds_fit
from torchrec_2dsp.programs.models.kinds import metrics_of
from torchrec_2dsp.programs.models.own_model import OwnModelConfig
from torchrec_2dsp.programs.models.planned_section import ShardingTypes
from torchrec_2dsp.programs.train.datasets import (
    ENDLESS,
    DataConfig,
    PlannedModelConfig,
    TrainedModelConfig,
)
from torchrec_2dsp.programs.train.sections import CheckpointConfig, LoopConfig, OutputConfig


class RunConfig(SamplesConfig, SplitConfig, ReplicationConfig, ExchangeConfig):
    """One training of the model: a mesh, a way to keep its replicas equal, an exchange, splits, and
    which rank trains which samples."""

    stock: bool = False
    """Whether TorchRec alone plans, shards and trains, to compare with: its planner, its sharders
    and its `DistributedModelParallel`, on the same batches and from the same tables."""

    num_groups: int = Field(default=1, ge=0)
    """How many copies of the tables there are; 1 is plain TorchRec. 0 leaves it to the planner, as
    does a run that says nothing but has a calibration, access statistics or a plan."""

    layout: RankLayout = RankLayout.STRIDED
    """How ranks are dealt to groups."""

    sharding_types: ShardingTypes = ()
    """The types that the planner may choose from, if not those of the model."""

    dense: DenseGradientsConfig = DenseGradientsConfig()
    """How ranks add up the gradients of what isn't sharded."""

    calibration: CalibrationPath = ""
    """What the network and the machines take, for a plan by predicted cost: a file, or the name of
    a calibration that ships. Empty for TorchRec's search."""

    access: PathBesideConfig = ""
    """A file or a folder of access statistics, for a plan by cost and for hot rows."""

    plan: PathBesideConfig = ""
    """A file with the plan to train by; empty for a planner."""

    @property
    def is_planned_by_cost(self) -> bool:
        """Whether the planner predicts steps, and chooses what this config leaves open."""
        return not self.plan and bool(self.calibration or not self.num_groups)

    @model_validator(mode="before")
    @classmethod
    def _leave_mesh_open(cls, tree: Any) -> Any:
        if not isinstance(tree, dict) or "num_groups" in tree:
            return tree
        is_open = any(tree.get(name) for name in ("calibration", "access", "plan"))
        return {**tree, "num_groups": 0} if is_open else tree

    @model_validator(mode="after")
    def _check_stock(self) -> Self:
        fields = type(self).model_fields
        for name in fields if self.stock else ():
            value = getattr(self, name)
            if name != "stock" and value != fields[name].default:
                # A default that is made anew each time is empty.
                if fields[name].default_factory is not None and not value:
                    continue
                shown = getattr(value, "value", value)
                raise ValueError(
                    f"stock=true is TorchRec alone, and {name}={shown!r} is this package's; leave "
                    "one out"
                )
        return self

    @model_validator(mode="after")
    def _check_plan(self) -> Self:
        if self.plan:
            self._check_left_out(
                ("calibration", "access", "sharding_types", "num_groups", "layout", *_EXCHANGE),
                f"plan={self.plan!r} says it already",
            )
        elif self.is_planned_by_cost:
            self._check_left_out(
                _EXCHANGE,
                "the planner chooses it by predicted cost; to choose it yourself give num_groups "
                "and no calibration",
            )
        elif self.access and not self.hot_rows:
            raise ValueError(
                f"access={self.access!r} is for a plan by cost and for hot rows; give a "
                "calibration, leave num_groups out, or set hot_rows"
            )
        if not self.num_groups and self.moment_scale == "expected":
            raise ValueError("moment_scale='expected' needs num_groups; give it")
        return self

    def _check_left_out(self, names: Sequence[str], why: str) -> None:
        for name in names:
            value = getattr(self, name)
            if value and value != type(self).model_fields[name].default:
                raise ValueError(f"{name}={value!r} can't be given as well: {why}; leave it out")


_EXCHANGE = ("exchange", "owners", "row_transport", "hot_rows")
"""The keys of a run that say how rows travel."""


class TrainConfig(Section):
    """A training program: every run trains the same model on the same data.

    Example:
        >>> from torchrec_2dsp.programs.config.config_file import make_config
        >>> from torchrec_2dsp.programs.train.config import TrainConfig
        >>> data = {"features": [{"name": "user", "num_rows": 1_000}]}
        >>> tree = {"data": data, "runs": {"exact": {"num_groups": 2}}}
        >>> config = make_config(TrainConfig, tree)
        >>> config.mesh("exact", world_size=4)
        Mesh2D(num_groups=2, group_size=2, layout=<RankLayout.STRIDED: 'strided'>)
    """

    data: DataConfig
    """The data to train on: synthetic clicks, if it doesn't name another kind."""

    model: TrainedModelConfig = PlannedModelConfig()
    """The model to train: a DLRM, if it doesn't name another kind."""

    optimizer: ScheduledOptimizerConfig = ScheduledOptimizerConfig()
    """The rules by which weights are updated."""

    loop: LoopConfig = LoopConfig()
    """How long to train, and what to report."""

    checkpoint: CheckpointConfig = CheckpointConfig()
    """Which checkpoints to leave."""

    output: OutputConfig = OutputConfig()
    """What else to leave."""

    runs: dict[str, RunConfig]
    """The runs by name, in the order in which they are trained."""

    @model_validator(mode="after")
    def _check_names(self) -> Self:
        if not self.runs:
            raise ValueError("runs is empty; describe at least one")
        unusable = [name for name in self.runs if not name or set(name) & set("./\\ ")]
        if unusable:
            raise ValueError(f"runs: the name {unusable[0]!r} has a dot, a slash or a space")
        return self

    @model_validator(mode="before")
    @classmethod
    def _name_kinds(cls, tree: Any) -> Any:
        return with_kinds(tree)

    @model_validator(mode="after")
    def _check_metric(self) -> Self:
        metrics = metrics_of(self.model)
        if self.loop.metric and self.loop.metric not in metrics:
            raise ValueError(
                f"loop.metric={self.loop.metric!r} isn't computed for model.kind="
                f"{self.model.kind!r}; use one of {', '.join(metrics)}"
            )
        return self

    @property
    def metric(self) -> str:
        """The metric by which evaluations are compared."""
        return self.loop.metric or metrics_of(self.model)[-1]

    @model_validator(mode="after")
    def _check_meetings(self) -> Self:
        stops = {"loop.steps": self.loop.steps, "loop.eval_every": self.loop.eval_every}
        if self.checkpoint.folder:
            stops["checkpoint.every"] = self.checkpoint.every
        for name, run in self.runs.items():
            for key, steps in stops.items() if run.dense.kind == "local" else ():
                if steps % run.dense.local_steps:
                    raise ValueError(
                        f"runs.{name}.dense.local_steps={run.dense.local_steps} doesn't divide "
                        f"{key}={steps}, so ranks would have different weights then"
                    )
        return self

    @model_validator(mode="after")
    def _check_loop(self) -> Self:
        if self.data.kind in ENDLESS and not self.loop.eval_steps:
            raise ValueError(
                f"loop.eval_steps=0 evaluates on all held-out batches, and data of the kind "
                f"{self.data.kind!r} has no end; give a number"
            )
        for name, run in self.runs.items():
            check_balance(f"runs.{name}", run, self.model, self.loop.device)
            run.dense.check_calibration(f"runs.{name}", run.calibration)
            if self.loop.accumulate > 1 and run.prefetch_rows:
                raise ValueError(
                    f"runs.{name}.prefetch_rows is for a pipeline, and a step of "
                    f"loop.accumulate={self.loop.accumulate} batches is trained without one; leave "
                    "one out"
                )
            if run.hot_rows and self.data.kind != "synthetic" and not run.access:
                raise ValueError(
                    f"runs.{name}.hot_rows={run.hot_rows} needs to know which rows are used most; "
                    "give access=, a folder of access statistics"
                )
        return self

    @model_validator(mode="after")
    def _check_stock_runs(self) -> Self:
        stock = next((name for name, run in self.runs.items() if run.stock), None)
        if stock is not None and self.loop.accumulate > 1:
            raise ValueError(
                f"runs.{stock} is TorchRec alone, whose tables learn in each backward, and a step "
                f"of loop.accumulate={self.loop.accumulate} batches has several; leave one out"
            )
        if stock is not None and isinstance(self.model, OwnModelConfig):
            raise ValueError(
                f"runs.{stock} is TorchRec alone, which draws tables anew, and those of "
                f"model.kind={self.model.kind!r} come from its factory; leave the run out"
            )
        return self

    def mesh(self, run: str, world_size: int) -> Mesh2D | None:
        """The mesh of a run in a world of ``world_size`` ranks; `None` if it is planned."""
        num_groups = self.runs[run].num_groups
        if not num_groups:
            return None
        if world_size % num_groups:
            fitting = [n for n in range(1, world_size + 1) if world_size % n == 0]
            raise ConfigError(
                f"runs.{run}.num_groups={num_groups} does not divide the {world_size} ranks; "
                f"use one of {', '.join(map(str, fitting))}, or start another number of ranks"
            )
        return Mesh2D(num_groups, world_size // num_groups, self.runs[run].layout)

    def check_world(self, world_size: int) -> None:
        """Raise `ConfigError` at the first value that ``world_size`` ranks can't run."""
        for name, run in self.runs.items():
            self.mesh(name, world_size)
            check_speeds_fit(f"runs.{name}", run.balance, world_size)
        size, batch_size = self.loop.global_batch_size, self.loop.batch_size
        if batch_size % world_size:
            parts = world_size * self.loop.accumulate
            cut = "" if self.loop.accumulate == 1 else f" and accumulate={self.loop.accumulate}"
            raise ConfigError(
                f"loop.global_batch_size={size} is not a multiple of the {world_size} ranks{cut}; "
                f"use {(size // parts + 1) * parts}"
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
