"""A benchmark's config: contestants, their workload, and how carefully they are compared."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from torchrec_2dsp.errors import ConfigError
from torchrec_2dsp.mesh import Mesh2D, RankLayout
from torchrec_2dsp.plan.parameter_sharding import base_type
from torchrec_2dsp.programs.config.config_file import CalibrationPath
from torchrec_2dsp.programs.config.dense import (
    DDPConfig,
    DensePartConfig,
    PipelinedConfig,
    check_dense,
)
from torchrec_2dsp.programs.config.section import Kinds, Section, Seed
from torchrec_2dsp.programs.config.sections import (
    ExchangeConfig,
    ModelConfig,
    OptimizerConfig,
    ReplicationConfig,
)
from torchrec_2dsp.programs.data.synthetic import SyntheticConfig
from torchrec_2dsp.programs.data.synthetic_sequences import SyntheticSequencesConfig
from torchrec_2dsp.programs.models.sequence import SequenceModelConfig

BenchData = Annotated[SyntheticConfig | SyntheticSequencesConfig, Kinds()]
"""Synthetic clicks or sequences."""

BenchModel = Annotated[ModelConfig | SequenceModelConfig, Kinds()]
"""A click or sequence model."""


class ScheduleConfig(Section):
    """The training length, and deadlines after which a contestant counts as stuck."""

    batch_size: int = Field(default=1024, ge=1)
    """Samples per rank and step."""

    rounds: int = Field(default=7, ge=5)
    """Blocks per contestant. In a round each contestant trains one block, in a random order."""

    block_s: float = Field(default=2.0, gt=0)
    """A block's approximate length in seconds."""

    max_block_steps: int = Field(default=40, ge=1)
    """The most steps in a block."""

    warmup_steps: int = Field(default=4, ge=3)
    """Steps before the first block: allocations, connections, DDP's choice of buckets."""

    traced_steps: int = Field(default=4, ge=1)
    """Steps in the traced block, whose times only count for the split by phase."""

    deadline_s: float = Field(default=180.0, gt=0, le=1e9)
    """The seconds a contestant may take to answer "build", "trace" or a block before it is out."""

    seed: Seed = 0
    """The seed for the bootstrap and the contestants' order."""

    device: Literal["cpu", "cuda"] = "cpu"
    """The device on which each rank computes."""


class NetworkConfig(Section):
    """The network between the ranks."""

    interface: str = ""
    """The network interface, such as eth0, on which to count bytes, others' traffic included; if
    empty, each collective's payload is counted instead."""

    description: str = ""
    """The network as the report describes it."""


class LossConfig(Section):
    """Loss bounds: which contestants must train the same, and how closely.

    NE bounds are relative differences in normalized entropy over all trained steps. All contestants
    train on the same batches, so these equal relative differences in mean losses.
    """

    num_steps: int = Field(default=10, ge=1)
    """The number of first losses to compare step by step: rounding grows later."""

    exact_bound: float = Field(default=1e-4, gt=0)
    """The largest difference in a first step's loss, for contestants with the arithmetic of one
    table on the global batch. Others aren't compared step by step."""

    exact_ne_bound: float = Field(default=1e-3, gt=0)
    """The NE bound for contestants with the arithmetic of one table."""

    fp16_ne_bound: float = Field(default=2e-3, gt=0)
    """The NE bound for fp16 communication, which keeps 11 bits per number."""

    bf16_ne_bound: float = Field(default=3e-3, gt=0)
    """The NE bound for bf16 communication, which keeps 8 bits per number."""

    int8_ne_bound: float = Field(default=3e-3, gt=0)
    """The NE bound for int8 communication: 8 bits, scaled by a row's largest number."""

    int4_ne_bound: float = Field(default=1e-2, gt=0)
    """The NE bound for int4 and mx4 communication: 4 bits, scaled by the largest number."""

    nearly_ne_bound: float = Field(default=5e-2, gt=0)
    """The NE bound for another algorithm: averaged replicas, late updates, and optimizer state by
    column shard."""

    spread_factor: float = Field(default=3.0, ge=0)
    """Everyone's NE may differ by this factor times the largest difference among TorchRec's own
    exact contestants, where that exceeds the bound; 0 for never."""

    def ne_bound_of(self, arithmetic: str) -> float:
        """Return the NE bound for communication in a transport; ``fp32`` is exact."""
        bounds = {
            "fp32": self.exact_ne_bound,
            "fp16": self.fp16_ne_bound,
            "bf16": self.bf16_ne_bound,
            "int8": self.int8_ne_bound,
            "int4": self.int4_ne_bound,
            "mx4": self.int4_ne_bound,
        }
        return bounds[arithmetic]


class _Contestant(Section):
    ne_bound: float | Literal["by_kind"] = "by_kind"
    """The largest relative NE difference from the reference; losses aren't compared step by step
    then. "by_kind" uses the bounds in `LossConfig`."""


class _Planned(_Contestant):
    sharding_types: tuple[str, ...] = ()
    """Sharding types that the planner may choose from; empty for all of TorchRec's."""

    bandwidths: Literal["default", "measured"] = "measured"
    """The planner's bandwidths: its own defaults, or those measured here."""

    full_duplex: bool = False
    """True to send and receive at once in all-to-alls (gloo only; see `FullDuplexGroup`)."""

    dense: DensePartConfig = DDPConfig()
    """The way to reduce dense gradients over ranks."""

    @field_validator("sharding_types")
    @classmethod
    def _check_types(cls, types: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(base_type(name) for name in types)

    def _choice(self) -> str:
        types = ", ".join(self.sharding_types).replace("_", "-") or "any sharding type"
        bandwidths = "measured" if self.bandwidths == "measured" else "default"
        return f"{types} (planner told {bandwidths} bandwidths)"

    def _others(self) -> str:
        duplex = ", full-duplex all-to-all" if self.full_duplex else ""
        return duplex + (f", {self.dense.text}" if self.dense.text else "")


class StockContestant(_Planned):
    """TorchRec's planner, sharder and `DistributedModelParallel`."""

    kind: Literal["stock"] = "stock"
    qcomms: Literal["fp32", "fp16", "bf16", "int8", "mx4"] = "fp32"
    """The wire format for pooled embeddings and gradients in TorchRec's quantised communication."""

    def describe(self) -> str:
        """Describe the contestant in words."""
        qcomms = "" if self.qcomms == "fp32" else f", {self.qcomms} communication"
        return f"TorchRec, {self._choice()}{qcomms}{self._others()}"


class TwoDContestant(_Planned, ReplicationConfig, ExchangeConfig):
    """A contestant with this package's planner, sharder and `ModelParallel2D`."""

    kind: Literal["two_d", "parallelized"]
    """"parallelized" does what `parallelize` does for a user who shows it the first batch: it knows
    neither row frequencies nor the dense part's time, and measures the ranks unless there is a
    calibration."""

    precision: Literal["exact", "any"] = "exact"
    """The precision, as in `parallelize`: "any" permits rounding rows and vectors that travel."""

    num_groups: int | Literal["hosts", "ranks_per_host", "any"] = "hosts"
    """The number of table replicas; "any" lets the planner choose."""

    by_cost: bool = False
    """True to let the planner predict steps with the calibration, and choose exchanges as well."""

    layout: RankLayout = RankLayout.CONTIGUOUS
    """Group placement."""

    qcomms: Literal["fp32", "fp16", "bf16"] = "fp32"
    """The wire format for embeddings and gradients in TorchRec's quantised communication."""

    @model_validator(mode="before")
    @classmethod
    def _search_all(cls, tree: Any) -> Any:
        is_call = isinstance(tree, dict) and tree.get("kind") == "parallelized"
        return {"by_cost": True, "num_groups": "any"} | tree if is_call else tree

    @model_validator(mode="after")
    def _check_search(self) -> Self:
        if self.precision != "exact" and self.kind != "parallelized":
            raise ValueError('precision is for kind = "parallelized"')
        if self.kind == "parallelized":
            own = [*ReplicationConfig.model_fields, *_Planned.model_fields, "layout"]
            self.refuse_unread(
                [name for name in own if name not in ("moment_scale", "dense", "ne_bound")],
                'is chosen by kind = "parallelized"; leave it out',
            )
            if self.num_groups != "any" or not self.by_cost:
                raise ValueError(
                    'kind = "parallelized" chooses groups by cost; leave num_groups and by_cost out'
                )
        if self.num_groups == "any" and not (self.by_cost and self.sync == "GradientSync"):
            raise ValueError('num_groups = "any" is for by_cost = true and sync = "GradientSync"')
        if self.by_cost and self.exchange_text:
            raise ValueError(f"by_cost = true chooses by itself; leave out: {self.exchange_text}")
        if self.by_cost:
            self.refuse_unread(["prefetch_rows"], "is chosen by by_cost = true; leave it out")
        return self

    def describe(self) -> str:
        """Describe the contestant in words."""
        rows = f", {self.exchange_text}" if self.exchange_text else ""
        rows += ", rows prefetched" if self.prefetch_rows else ""
        rows += "" if self.qcomms == "fp32" else f", {self.qcomms} communication"
        dealt = f"{self.layout.value} groups (as many as {str(self.num_groups).replace('_', ' ')})"
        mesh = "any groups" if self.num_groups == "any" else dealt
        if self.kind == "parallelized":
            return f"parallelize(precision={self.precision!r}), {self.sync_config}{self._others()}"
        chosen = "by predicted cost" if self.by_cost else self._choice()
        return f"2D, {mesh}, {self.sync_config}, {chosen}{rows}{self._others()}"


class CeilingContestant(_Contestant):
    """Another contestant whose collectives cost nothing: they return what was recorded once.

    The same compute on the same values gives a lower bound on the step time with any communication.
    """

    kind: Literal["ceiling"]
    of: str
    """The repeated contestant."""

    def describe(self) -> str:
        """Describe the contestant in words."""
        return f"{self.of} with collectives that cost nothing"


PlannedContestant = StockContestant | TwoDContestant
Contestant = Annotated[
    StockContestant | TwoDContestant | CeilingContestant, Field(discriminator="kind")
]


class BenchConfig(Section):
    """A benchmark: every contestant trains the same model on the same batches.

    Example:
        >>> from torchrec_2dsp.programs.bench.config import BenchConfig
        >>> from torchrec_2dsp.programs.config.config_file import make_config
        >>> tree = {
        ...     "title": "demo",
        ...     "data": {"features": [{"name": "user", "num_rows": 1_000}]},
        ...     "contestants": {
        ...         "stock": {"kind": "stock"},
        ...         "floor": {"kind": "ceiling", "of": "stock"},
        ...     },
        ... }
        >>> make_config(BenchConfig, tree).reference
        'stock'
    """

    title: str = "benchmark"
    """The report's title."""

    data: BenchData
    """Synthetic clicks, by default, with features, their cardinalities and their skew; or synthetic
    sequences."""

    model: BenchModel = ModelConfig()
    """The model to train, for clicks or for sequences."""

    optimizer: OptimizerConfig = OptimizerConfig()
    """The rules that update the weights."""

    schedule: ScheduleConfig = ScheduleConfig()
    """Training length and deadlines."""

    network: NetworkConfig = NetworkConfig()
    """The network between the ranks."""

    loss: LossConfig = LossConfig()
    """Loss bounds."""

    calibration: CalibrationPath = ""
    """The calibration file to predict steps with: relative to the config file, or the
    name of one that ships, such as `emulated_1gbit`."""

    contestants: dict[str, Contestant]
    """The contestants by name. The first stock one with fp32 on the wire is the reference."""

    @model_validator(mode="after")
    def _check_kinds_and_contestants(self) -> "BenchConfig":
        if isinstance(self.data, SyntheticConfig) is isinstance(self.model, SequenceModelConfig):
            raise ValueError(
                f"model.kind={self.model.kind!r} can't train on data.kind={self.data.kind!r}; use "
                '"sequence" and "synthetic_sequences" together'
            )
        if self.model.table_dtype == "bf16":
            raise ValueError(
                "model.table_dtype='bf16': TorchRec, with which all is compared, can't look up "
                "tables in bf16; use 'fp16'"
            )
        needs = self.model.kind, self.calibration, self.optimizer.dense_optimizer
        for name, own in self.planned.items():
            check_dense(f"contestants.{name}", own.dense, *needs)
            if isinstance(own.dense, PipelinedConfig) and own.dense.recut_every:
                raise ValueError(
                    f"contestants.{name}.dense.recut_every is for training, and a benchmark leaves "
                    "layers where they are; leave it out"
                )
        unusable = [name for name in self.contestants if not name or set(name) & set("./\\ |")]
        if unusable:
            raise ValueError(
                f"contestants: the name {unusable[0]!r} has one of . / \\ | or a space"
            )
        if not any(is_reference(contestant) for contestant in self.contestants.values()):
            raise ValueError(
                'contestants: none has kind = "stock" with qcomms = "fp32", so there is nothing to '
                "compare with; add one"
            )
        for name, contestant in self.contestants.items():
            if isinstance(contestant, CeilingContestant) and not isinstance(
                self.contestants.get(contestant.of), StockContestant | TwoDContestant
            ):
                raise ValueError(
                    f"contestants.{name}.of={contestant.of!r} isn't a contestant that trains; "
                    "use one of " + ", ".join(self.planned)
                )
        return self

    @property
    def planned(self) -> "dict[str, PlannedContestant]":
        """The contestants that train with their own plans."""
        return {
            name: contestant
            for name, contestant in self.contestants.items()
            if not isinstance(contestant, CeilingContestant)
        }

    def planned_by(self, name: str) -> "PlannedContestant":
        """Return a contestant, or the one that a ceiling repeats."""
        contestant = self.contestants[name]
        is_ceiling = isinstance(contestant, CeilingContestant)
        return self.planned[contestant.of] if is_ceiling else contestant

    @property
    def reference(self) -> str:
        """The contestant whose losses the others are compared with."""
        return next(
            name for name, contestant in self.contestants.items() if is_reference(contestant)
        )

    def mesh(self, name: str, world_size: int, local_world_size: int) -> Mesh2D:
        """Return a contestant's mesh."""
        contestant = self.planned_by(name)
        if isinstance(contestant, StockContestant) or contestant.num_groups == "any":
            return Mesh2D(1, world_size)
        num_groups = {
            "hosts": world_size // local_world_size,
            "ranks_per_host": local_world_size,
        }.get(str(contestant.num_groups), contestant.num_groups)
        if not isinstance(num_groups, int) or num_groups < 1 or world_size % num_groups:
            raise ConfigError(
                f"contestants.{name}.num_groups={contestant.num_groups} does not divide the "
                f"{world_size} ranks"
            )
        return Mesh2D(num_groups, world_size // num_groups, contestant.layout)

    def check_world(self, world_size: int, local_world_size: int) -> None:
        """Raise `ConfigError` at the first contestant that this world can't run."""
        for name in self.planned:
            self.mesh(name, world_size, local_world_size)

    def only(self, names: "list[str]") -> "BenchConfig":
        """Return the config with these contestants and the reference; all if no name is given."""
        if unknown := [name for name in names if name not in self.contestants]:
            raise ConfigError(
                f"there is no contestant {unknown[0]!r}; the config has "
                + ", ".join(self.contestants)
            )
        if not names:
            return self
        needed = {self.reference, *names}
        for name in names:
            contestant = self.contestants[name]
            if isinstance(contestant, CeilingContestant):
                needed.add(contestant.of)
        contestants = {
            name: contestant for name, contestant in self.contestants.items() if name in needed
        }
        return self.model_copy(update={"contestants": contestants})


def is_reference(contestant: object) -> bool:
    """Return whether a contestant trains exactly as unchanged TorchRec does."""
    return (
        isinstance(contestant, StockContestant)
        and contestant.qcomms == "fp32"
        and not contestant.full_duplex
        and contestant.dense == DDPConfig()
    )
