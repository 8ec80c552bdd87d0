"""`TrainConfig`: a training program's config."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from torchrec_2dsp.errors import ConfigError
from torchrec_2dsp.mesh import Mesh2D, RankLayout
from torchrec_2dsp.plan.parameter_sharding import RowStorage
from torchrec_2dsp.programs.config.config_file import CalibrationPath, OutputPath, PathBesideConfig
from torchrec_2dsp.programs.config.dense import DDPConfig, DensePartConfig, LocalConfig, check_dense
from torchrec_2dsp.programs.config.section import Kinds, Section
from torchrec_2dsp.programs.config.sections import (
    ExchangeConfig,
    ReplicationConfig,
    ScheduledOptimizerConfig,
    SplitConfig,
)
from torchrec_2dsp.programs.data.dataset import Dataset, Split
from torchrec_2dsp.programs.data.logs.batches import LogDataset, TableData
from torchrec_2dsp.programs.data.logs.sections import (
    AvazuConfig,
    CriteoConfig,
    InteractionsConfig,
    TableConfig,
)
from torchrec_2dsp.programs.data.logs.sequence_data import SequenceData
from torchrec_2dsp.programs.data.synthetic import SyntheticConfig
from torchrec_2dsp.programs.data.synthetic_sequences import SyntheticSequencesConfig
from torchrec_2dsp.programs.models.kinds import PlannedModelConfig, TrainedModelConfig, metrics_of
from torchrec_2dsp.programs.models.model import ShardingTypes, table_name
from torchrec_2dsp.programs.models.own_model import OwnModelConfig
from torchrec_2dsp.programs.models.sequence import SequenceModelConfig
from torchrec_2dsp.programs.models.two_tower import TwoTowerConfig

_EXCHANGE = ("exchange", "owners", "row_transport", "stored_as", "hot_rows", "prefetch_rows")
"""Run keys for the exchange."""
_COPIES = (
    *("sync", "sync_policy", "synced_rows", "transport", "delay", "drift_every", "dense_above"),
)
"""Run keys for the replica sync."""


class LoopConfig(Section):
    """The number of steps, the evaluation interval, and progress reports."""

    steps: int = Field(default=200, ge=1)
    """Steps to train, if the data has as many batches."""

    global_batch_size: int = Field(default=1024, ge=1)
    """Samples per step, over all ranks."""

    accumulate: int = Field(default=1, ge=1)
    """Batches per step (gradient accumulation): trained one after the other, then applied in one
    update, as the whole step's batch would be."""

    eval_every: int = Field(default=0, ge=0)
    """Steps between evaluations; 0 evaluates only at the end."""

    eval_steps: int = Field(default=20, ge=0)
    """Held-out batches of `global_batch_size` per evaluation; 0 for all."""

    metric: str = ""
    """The metric that compares evaluations: loss, ne or auc for clicks; loss, recall@k or ndcg@k
    for rankings. Empty for ne, or for the last ranking metric."""

    patience: int = Field(default=0, ge=0)
    """Stop after this many evaluations in a row without improvement; 0 for never."""

    report_every: int = Field(default=10, ge=1)
    """Steps between progress reports."""

    final_steps: int = Field(default=20, ge=1)
    """The final train loss is the mean over this many last steps."""

    device: Literal["cpu", "cuda"] = "cpu"
    """The device on which each rank computes."""

    timeout_s: float = Field(default=1800, gt=0, le=1e9)
    """Seconds that a rank may keep the others waiting before all give up and name it. Work on a
    single rank, such as building a vocabulary, has to finish in time."""

    tensorboard_dir: OutputPath = ""
    """The folder for TensorBoard scalars; empty for none."""

    @property
    def batch_size(self) -> int:
        """Samples per batch over all ranks; a step has `accumulate` batches."""
        return self.global_batch_size // self.accumulate

    @model_validator(mode="after")
    def _check_batches(self) -> Self:
        if self.global_batch_size % self.accumulate:
            raise ValueError(
                f"accumulate={self.accumulate} does not divide "
                f"global_batch_size={self.global_batch_size}; a step is cut into equal batches"
            )
        if not self.eval_every:
            self.refuse_unread(
                ["patience"], "counts evaluations; set eval_every, or leave patience out"
            )
        return self


class CheckpointConfig(Section):
    """Checkpoints to keep, and how to save them."""

    folder: OutputPath = ""
    """The checkpoint folder or its address, with a subfolder for each run; empty for none."""

    every: int = Field(default=1000, ge=1)
    """Steps between checkpoints; a run also saves at its end."""

    keep_last: int = Field(default=2, ge=1)
    """Newest checkpoints to keep."""

    keep_best: int = Field(default=1, ge=0)
    """Checkpoints to keep for the best evaluations so far; 0 saves none."""

    asynchronous: bool = False
    """True if training goes on while a checkpoint is written, which takes memory for a copy."""

    @model_validator(mode="after")
    def _check_folder(self) -> Self:
        if not self.folder:
            self.refuse_unread(
                ["every", "keep_last", "keep_best", "asynchronous"],
                "is for checkpoints; set folder, or leave it out",
            )
        return self


class OutputConfig(Section):
    """A program's output, besides checkpoints."""

    folder: OutputPath = ""
    """The folder for the config, the record and each run's plan and traces; empty for none."""

    traced_steps: int = Field(default=10, ge=0)
    """Steps to trace in the middle of each run, or of its next 1,000 steps, so that a page says
    where they go; at most a third of the run, and 0 for none."""

    watchers: tuple[str, ...] = ()
    """Classes such as ``"my_module:MyWatcher"``, which rank 0 calls with the config: each makes a
    `TrainWatcher`, notified of plans, trained steps and evaluations."""

    @model_validator(mode="after")
    def _check_folder(self) -> Self:
        if "://" in self.folder:
            raise ValueError(f"folder={self.folder} is an address; give a local folder")
        if self.traced_steps and not self.folder:
            self.refuse_unread(
                ["traced_steps"], "is for the output folder; set folder, or leave it out"
            )
        return self


DataConfig = Annotated[
    SyntheticConfig
    | SyntheticSequencesConfig
    | TableConfig
    | CriteoConfig
    | AvazuConfig
    | InteractionsConfig,
    Kinds(),
]
"""The section ``[data]``: each kind has a method ``dataset()`` that builds the `Dataset`."""

_ENDLESS = ("synthetic", "synthetic_sequences")
"""Data kinds whose batches never end."""


def splits_of(dataset: Dataset, loop: LoopConfig) -> str:
    """Name a log's rows for training and evaluation; empty for data without files."""
    if isinstance(dataset, TableData):
        rows, held_out = (dataset.num_rows(split) for split in (Split.TRAIN, Split.EVAL))
        return (
            f"{rows:,} rows to train on, {held_out:,} rows held out: {dataset.held_out.words}"
            f"{_evaluated(dataset, loop)}"
        )
    if isinstance(dataset, SequenceData):
        log = dataset.log
        left_out = f", {log.num_left_out:,} others have too few" if log.num_left_out else ""
        return (
            f"{log.num_users:,} users with {len(log.items):,} uses of {len(log.item_values):,} "
            f"items{left_out}; held out: the last of each user{_evaluated(dataset, loop)}"
        )
    return ""


def _evaluated(dataset: LogDataset, loop: LoopConfig) -> str:
    """Report the number of held-out rows per evaluation, unless it takes all."""
    num_batches = dataset.num_batches(Split.EVAL, loop.global_batch_size)
    num_used = min(num_batches, loop.eval_steps or num_batches)
    num_rows = num_used * loop.global_batch_size
    if num_rows >= dataset.num_rows(Split.EVAL):
        return ""
    reason = (
        "loop.eval_steps"
        if num_used < num_batches
        else 'whole batches; data.rest = "pad" takes all'
    )
    return f"; an evaluation takes {num_rows:,} of them ({reason})"


class RunConfig(SplitConfig, ReplicationConfig, ExchangeConfig):
    """One training of the model: mesh, replica sync, exchange and splits."""

    stock: bool = False
    """True if TorchRec alone plans, shards and trains, as a baseline: its planner, its sharders and
    its `DistributedModelParallel`, on the same batches and from the same initial tables."""

    num_groups: int = Field(default=1, ge=0)
    """Table replicas; 1 is plain TorchRec. 0 lets the planner choose, and is the default for a run
    with a calibration, access statistics or a plan."""

    layout: RankLayout = RankLayout.STRIDED
    """Rank placement in groups."""

    sharding_types: ShardingTypes = ()
    """Sharding types that the planner may choose from; empty for the model's."""

    dense: DensePartConfig = DDPConfig()
    """The data parallelism for the dense part."""

    calibration: CalibrationPath = ""
    """The measured network and machines, for plans by predicted cost: a file, or the name of a
    calibration that ships. Empty for TorchRec's search."""

    access: PathBesideConfig = ""
    """A file or folder with access statistics, for plans by cost and for hot rows."""

    plan: PathBesideConfig = ""
    """A file with the plan to train by; empty for a planner."""

    @property
    def is_planned_by_cost(self) -> bool:
        """True if the planner predicts steps and chooses what this config leaves open."""
        return not self.plan and bool(self.calibration or not self.num_groups)

    @property
    def says_sync(self) -> bool:
        """True if a key sets the replica sync, which a plan file has as well."""
        fields = type(self).model_fields
        return any(getattr(self, name) != fields[name].get_default() for name in _COPIES)

    @model_validator(mode="before")
    @classmethod
    def _leave_mesh_open(cls, tree: Any) -> Any:
        if not isinstance(tree, dict) or "num_groups" in tree:
            return tree
        is_open = any(tree.get(name) for name in ("calibration", "access", "plan"))
        return {**tree, "num_groups": 0} if is_open else tree

    @model_validator(mode="after")
    def _check_unread(self) -> Self:
        if self.stock:
            self.refuse_unread(
                [name for name in type(self).model_fields if name != "stock"],
                "is this package's, and stock=true is TorchRec alone; leave one out",
            )
        if self.plan:
            self._check_left_out(
                ("calibration", "access", "sharding_types", "layout", *_EXCHANGE),
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
        if self.num_groups == 1:
            # Each rank has a copy of all hot rows.
            self.refuse_unread(
                ["layout", *(() if self.hot_rows else _COPIES)],
                "is for copies of the tables, and num_groups=1 has one; set num_groups, or leave "
                "it out",
            )
        return self

    def _check_left_out(self, names: Sequence[str], why: str) -> None:
        self.refuse_unread(
            [name for name in names if getattr(self, name)],
            f"can't be given as well: {why}; leave it out",
        )


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
    """The training data: synthetic clicks, unless another kind is named."""

    model: TrainedModelConfig = PlannedModelConfig()
    """The model to train: a DLRM, unless another kind is named."""

    optimizer: ScheduledOptimizerConfig = ScheduledOptimizerConfig()
    """Update rules for the weights."""

    loop: LoopConfig = LoopConfig()
    """Training length and progress reports."""

    checkpoint: CheckpointConfig = CheckpointConfig()
    """Checkpoints to keep."""

    output: OutputConfig = OutputConfig()
    """Other output."""

    runs: dict[str, RunConfig] = Field(min_length=1)
    """The runs by name, in training order."""

    @property
    def metric(self) -> str:
        """The metric that compares evaluations."""
        return self.loop.metric or metrics_of(self.model)[-1]

    @model_validator(mode="after")
    def _check_program(self) -> Self:
        unusable = [name for name in self.runs if not name or set(name) & set("./\\ ")]
        if unusable:
            raise ValueError(f"runs: the name {unusable[0]!r} has a dot, a slash or a space")
        for feature in self._looked_up():
            table_name(feature)
        metrics = metrics_of(self.model)
        if self.loop.metric and self.loop.metric not in metrics:
            raise ValueError(
                f"loop.metric={self.loop.metric!r} isn't computed for model.kind="
                f"{self.model.kind!r}; use one of {', '.join(metrics)}"
            )
        if self.data.kind in _ENDLESS and not self.loop.eval_steps:
            raise ValueError(
                f"loop.eval_steps=0 evaluates on all held-out batches, and data of the kind "
                f"{self.data.kind!r} has no end; give a number"
            )
        if self.checkpoint.keep_best and not self.loop.eval_every:
            self.checkpoint.refuse_unread(
                ["keep_best"],
                "is for loop.eval_every; set it, or leave keep_best out",
                key="checkpoint.",
            )
        in_8_bits = any(run.stored_as is RowStorage.INT8 for run in self.runs.values())
        if getattr(self.model, "table_dtype", "") == "fp32" and not in_8_bits:
            self.optimizer.refuse_unread(
                ["stochastic_rounding"],
                "is for tables in 16 or 8 bits; set model.table_dtype, or leave it out",
                key="optimizer.",
            )
        for name, run in self.runs.items():
            self._check_run(name, run)
        return self

    def _looked_up(self) -> tuple[str, ...]:
        """Return the features that have tables of their names."""
        model = self.model
        if isinstance(model, TwoTowerConfig):
            return (*model.user_features, *model.item_features)
        if isinstance(model, SequenceModelConfig):
            return (model.feature,)
        features: Sequence[Any] = getattr(self.data, "features", ())
        return () if isinstance(model, OwnModelConfig) else tuple(part.name for part in features)

    def _check_run(self, name: str, run: RunConfig) -> None:
        rule = self.optimizer
        optimizer = rule.dense_optimizer, rule.dense_clip_norm
        check_dense(f"runs.{name}", run.dense, self.model.kind, run.calibration, *optimizer)
        if isinstance(run.dense, LocalConfig):
            self._check_meetings(name, run.dense.local_steps)
        on_gpus, every = self.loop.device == "cuda", getattr(run.dense, "recut_every", 0)
        if on_gpus and every:
            raise ValueError(
                f"runs.{name}.dense.recut_every={every} chooses cuts by the layers' times, and on "
                "a GPU only their launches are timed; leave it out"
            )
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
        if run.stock and self.loop.accumulate > 1:
            raise ValueError(
                f"runs.{name} is TorchRec alone, whose tables learn in each backward, and a step "
                f"of loop.accumulate={self.loop.accumulate} batches has several; leave one out"
            )
        if run.stock and self.optimizer.stochastic_rounding:
            raise ValueError(
                f"runs.{name} is TorchRec alone, which doesn't round at random on a CPU, and on a "
                "GPU by other draws on each rank; leave optimizer.stochastic_rounding or the run "
                "out"
            )
        if run.stock and getattr(self.model, "table_dtype", "") == "bf16":
            raise ValueError(
                f"runs.{name} is TorchRec alone, which can't look up tables in bf16; set "
                "model.table_dtype='fp16', or leave the run out"
            )
        if run.stock and isinstance(self.model, OwnModelConfig):
            raise ValueError(
                f"runs.{name} is TorchRec alone, which draws tables anew, and those of "
                f"model.kind={self.model.kind!r} come from its factory; leave the run out"
            )

    def _check_meetings(self, name: str, local_steps: int) -> None:
        stops = {"loop.steps": self.loop.steps, "loop.eval_every": self.loop.eval_every}
        if self.checkpoint.folder:
            stops["checkpoint.every"] = self.checkpoint.every
        for key, steps in stops.items():
            if steps % local_steps:
                raise ValueError(
                    f"runs.{name}.dense.local_steps={local_steps} doesn't divide {key}={steps}, so "
                    "ranks would have different weights then"
                )

    def mesh(self, run: str, world_size: int) -> Mesh2D | None:
        """Return a run's mesh for ``world_size`` ranks; `None` if it is planned."""
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
        for name in self.runs:
            self.mesh(name, world_size)
        size, batch_size = self.loop.global_batch_size, self.loop.batch_size
        if batch_size % world_size:
            parts = world_size * self.loop.accumulate
            cut = "" if self.loop.accumulate == 1 else f" and accumulate={self.loop.accumulate}"
            raise ConfigError(
                f"loop.global_batch_size={size} is not a multiple of the {world_size} ranks{cut}; "
                f"use {(size // parts + 1) * parts}"
            )

    def only(self, names: Sequence[str]) -> "TrainConfig":
        """Return the config with only these runs; with all of them if no name is given."""
        unknown = [name for name in names if name not in self.runs]
        if unknown:
            raise ConfigError(
                f"there is no run {unknown[0]!r}; the config has {', '.join(self.runs)}"
            )
        runs = {name: run for name, run in self.runs.items() if not names or name in names}
        return self.model_copy(update={"runs": runs})
