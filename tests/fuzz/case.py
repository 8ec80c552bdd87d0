"""A case: all options that a fuzzing run varies, as plain data on one JSON line."""

from dataclasses import dataclass

import torch
from pydantic import ConfigDict, TypeAdapter

import torchrec_2dsp as tdsp
from torchrec_2dsp.plan.sync import parse_policy


class Strict:
    """Options read from JSON; unknown names are errors."""

    __pydantic_config__ = ConfigDict(extra="forbid")


@dataclass(frozen=True, kw_only=True)
class DenseCase(Strict):
    """The dense part; fields that its kind doesn't have are ignored."""

    kind: str = "ddp"
    """TorchRec's own ``"ddp"``, its ``"fp16"`` hook, ``"thresholded"``, ``"fully_sharded"``,
    ``"tensor_parallel"``, ``"pipelined"``, ``"delayed"``, or ``"local"`` for ranks that meet."""
    hidden: tuple[int, ...] = ()
    """The widths of its hidden layers."""
    shortcut: bool = False
    """True if a layer goes beside them, which some batches don't use."""
    optimizer: str = "sgd"
    clip: float = 0.0
    """The largest norm of its gradients; 0 for any."""
    warm_up: int = 1
    """The number of first steps that ``"delayed"`` and ``"thresholded"`` train as in DDP."""
    density: float = 1.0
    """The share of elements that ``"thresholded"`` sends, or ``"local"`` when ranks meet."""
    values: str = "fp32"
    """The format in which these travel."""
    route: str = "auto"
    """The route they take."""
    refresh: int = 1
    """After how many steps ``"thresholded"`` looks for other thresholds."""
    exact_thresholds: bool = False
    """True if it finds them by all elements, and not by a sample."""
    small_buckets: bool = False
    """True if each parameter has a bucket of its own there."""
    num_copies: int = 1
    """The number of copies that ranks hold, if they have parts or shares of the layers."""
    tp: int = 1
    """The number of ranks that compute the layers together, if they are ``"tensor_parallel"``."""
    schedule: str = "1F1B"
    """The order in which the two stages of ``"pipelined"`` work."""
    num_micro_batches: int = 1
    """Into how many parts it cuts the batches of a pipeline."""
    layout: str = "contiguous"
    """The layout of a pipeline's ranks."""
    fully_shard: bool = False
    """True if its pipelines have shares of layers."""
    local_steps: int = 1
    """After how many steps ``"local"`` ranks meet."""
    residual_decay: float = 1.0
    """The share of the unsent rest that is kept until the next meeting."""

    @property
    def has_shortcut(self) -> bool:
        """Tell whether there is a shortcut; pipeline stages and split layers have none."""
        return self.shortcut and self.kind not in ("tensor_parallel", "pipelined")

    @property
    def max_norm(self) -> float:
        """Return ``clip``, or 0 for split layers, which can't be clipped.

        torch computes the norm on one mesh, and split layers are on another than whole ones.
        """
        return 0.0 if self.kind == "tensor_parallel" else self.clip

    @property
    def leaves_out(self) -> bool:
        """Tell whether ranks choose what they send; the oracle then uses their choice."""
        return self.kind in ("thresholded", "local") and self.density < 1

    @property
    def is_apart(self) -> bool:
        """Tell whether ranks' weights or moments differ, while a checkpoint saves only one copy."""
        return self.kind == "local" and (self.local_steps > 1 or self.optimizer != "sgd")


@dataclass(frozen=True, kw_only=True)
class TableCase(Strict):
    """A table and its sharding in the plan."""

    rows: int = 16
    dim: int = 4
    features: tuple[int, ...] = (0,)
    """Numbers of the module's features that look it up; tables with a number in common share it."""
    pooling: str = "sum"
    """The pooling of a bag's rows: their ``"sum"`` or ``"mean"``."""
    dtype: str = "fp32"
    sharding: str = "row_wise"
    """TorchRec's name of a sharding type."""
    place: int = 0
    """The start of a table that not all ranks hold: counts ranks, or hosts."""
    exchange: str = "pooled"
    transport: str = "fp32"
    """The format in which rows or bags, and their gradients, travel."""
    owners: str = "block"
    hot: str = "none"
    """The share of hot rows: ``"none"``, ``"some"`` or ``"all"``."""
    once: bool = False
    """True if there is one copy in the world."""
    frozen: bool = False
    """True if it isn't trained."""
    demand: str = "none"
    """The field before that is a constraint where the plan is searched: ``"sharding"``,
    ``"exchange"``, ``"transport"``, ``"hot"`` or ``"once"``."""
    chosen_hot: tuple[int, ...] = ()
    """A searched plan's hot rows, or the ones that ``"some"`` must have."""
    chosen_blocks: int = 0
    """The column shards of a searched plan."""

    @property
    def hot_rows(self) -> tuple[int, ...]:
        """The rows that the plan makes hot."""
        if self.chosen_hot:
            return self.chosen_hot
        if self.hot == "all":
            return tuple(range(self.rows))
        return tuple(range(0, min(self.rows, 6), 2)) if self.hot == "some" else ()

    @property
    def refreshed_hot_rows(self) -> tuple[int, ...]:
        """The hot rows after a refresh."""
        return tuple(row + 1 for row in self.hot_rows if row + 1 < self.rows) or self.hot_rows

    @property
    def num_blocks(self) -> int:
        """Return the table's number of column shards; each has its own row-wise moments."""
        if self.chosen_blocks:
            return self.chosen_blocks
        if self.sharding in ("column_wise", "table_column_wise", "grid_shard"):
            return max(1, self.dim // 4)
        return 1


HASHED_POLICIES = ("hash", "hash ttl", "hash ttls", "hash lru")
"""The policies of maps that hash ids."""


@dataclass(frozen=True, kw_only=True)
class ModuleCase(Strict):
    """One of the model's embedding modules."""

    kind: str = "bags"
    """``"bags"``, ``"weighted"`` bags, bags weighted by ``"positions"``, or ``"sequences"``."""
    frozen_positions: bool = False
    """True if position weights aren't trained."""
    by_feature: bool = False
    """True if each feature has a module for its position weights, and most don't share one."""
    again: bool = False
    """True if a forward looks the batch up twice, and goes on with the mean."""
    in_place: bool = False
    """True if a forward doubles bags in place, and goes on with their halves."""
    leaves_out: bool = False
    """True if each rank's loss leaves out one of the sequences, another one with each batch."""
    evicts: str = ""
    """The policy of its tables' id maps, ``"lfu"``, ``"lru"``, ``"distance"`` or one of
    `HASHED_POLICIES`; empty if ids are rows. The fields below are for maps."""
    interval: int = 1
    """After how many batches a map may evict."""
    drift: int = 0
    """The number of new ids in each batch."""
    id_step: int = 1
    """The distance between two ids, which may wrap around."""
    tables: tuple[TableCase, ...] = (TableCase(),)

    @property
    def trains_positions(self) -> bool:
        """Tell whether it trains position weights."""
        return self.kind == "positions" and not self.frozen_positions

    def is_left_out(self, place: int, number: int) -> bool:
        """Tell whether a loss leaves an output out, by its place and the batch's own number."""
        return self.leaves_out and place == number % self.num_outputs

    @property
    def num_outputs(self) -> int:
        """The number of its outputs."""
        return sum(len(table.features) for table in self.tables)

    @property
    def features(self) -> list[int]:
        """Its feature numbers, in the order in which tables name them."""
        return list(dict.fromkeys(number for table in self.tables for number in table.features))


@dataclass(frozen=True, kw_only=True)
class SyncCase(Strict):
    """The fields for a `GradientSync` or a `WeightSync`; the other kind's fields are ignored."""

    kind: str = "gradient"
    transport: str = "fp32"
    delay: int = 0
    policy: str = "every(1)"
    moments_policy: str = ""
    """Empty for together with the weights."""
    rows: str = "touched"
    dense_above: float | None = None
    drift_every: int = 0

    @property
    def config(self) -> tdsp.GradientSync | tdsp.WeightSync:
        """Return the sync settings that the plan carries."""
        transport, drift_every = tdsp.Transport(self.transport), self.drift_every
        if self.kind == "gradient":
            return tdsp.GradientSync(transport=transport, delay=self.delay, drift_every=drift_every)
        return tdsp.WeightSync(
            policy=parse_policy(self.policy),
            moments_policy=parse_policy(self.moments_policy) if self.moments_policy else None,
            rows=tdsp.SyncedRows(self.rows),
            transport=transport,
            dense_above=self.dense_above,
            drift_every=drift_every,
        )


@dataclass(frozen=True, kw_only=True)
class SearchCase(Strict):
    """Arguments of `parallelize`, for cases whose plan it searches."""

    calibration: str = "emulated_200mbit"
    link_factor: float = 1.0
    """A factor on the measured time of messages."""
    kernel_factor: float = 1.0
    """A factor on the measured time of work on rows."""
    precision: tuple[str, ...] = ("exact",)
    """``"exact"``, ``"any"``, or transports."""
    exchange: tuple[str, ...] = ()
    """The exchanges allowed; empty for all."""
    has_mesh: bool = False
    """True if the case's mesh is demanded."""
    access: str = "none"
    """The counted lookups: ``"none"``, the ``"first"`` module's, or ``"all"``."""
    batch_size: int = 8
    """Samples per rank and step, as the search is told."""
    keeps_weights: bool = False
    """True if tables have their weights before they are sharded, and aren't on the meta device."""
    gives_sharders: bool = True
    """True if sharders are given that know the optimizer; otherwise the optimizer alone is."""


@dataclass(frozen=True, kw_only=True)
class Case(Strict):
    """One run. Each field's default is its plainest value, to which shrinking returns."""

    groups: int = 1
    size: int = 2
    """Ranks of a sharding group."""
    layout: str = "strided"
    local: int = 0
    """Ranks per host; 0 for all on one."""
    modules: tuple[ModuleCase, ...] = (ModuleCase(),)
    joined: bool = False
    """True if modules look up one batch of all features, and not each one its own."""
    optimizer: str = "sgd"
    at_random: bool = False
    """True if updates of fp16 tables are rounded stochastically instead of to the nearest."""
    sync: SyncCase = SyncCase()
    search: SearchCase | None = None
    """The arguments of `parallelize`, if it makes the plan; otherwise the tables say it. Then a
    loop that isn't plain is the plan's pipeline."""
    dense: DenseCase = DenseCase()
    wrapper: str = "2d"
    """`ModelParallel2D`, or ``"stock"`` for TorchRec's `DistributedModelParallel`."""
    has_nan: bool = False
    """True if the last rank's last loss isn't a number: all ranks must raise one error for it."""
    form: str = "plain"
    """The form of the batch's tensors in memory, one of `tests.fuzz.model.FORMS`."""
    built_anew: bool = False
    """True if a batch rebuilds its features at each access."""
    stray_weights: bool = False
    """True if batches carry weights for modules that aren't weighted, which must ignore them."""
    zero_grad: str = "before"
    """The place of a plain loop's `zero_grad`: ``"before"`` the forward, ``"after"`` the step,
    ``"between"`` forward and backward, or before the forward to ``"zeros"`` instead of `None`."""
    loop: str = "plain"
    """``"plain"``, or one of the pipelines ``"sparse_dist"`` and ``"row_prefetch"``; in a searched
    plan also ``"base"``."""
    evaluates_in_pipeline: bool = False
    """True if TorchRec's pipeline for it evaluates, where no train pipeline is attached."""
    evaluates_in_step: bool = False
    """True if a plain loop evaluates a batch between each step's last backward and its update."""
    sync_call: str = "before"
    """The place of a plain loop's ``model.sync()``: ``"before"`` the optimizer's step, ``"after"``
    it, or ``"none"``."""
    accumulated: int = 1
    """The number of a plain loop's batches that make one update."""
    steps: int = 2
    sizes: tuple[int, ...] = (3, 3)
    """Samples of each rank."""
    rotated: bool = False
    """True if sizes move on by a rank with each batch."""
    variable: bool = False
    """True if samples share bags: most batches have a batch size for each feature."""
    max_length: int = 2
    """The most ids of a bag."""
    skew: float = 1.0
    """The exponent of the frequencies of ids; 0 for equal ones."""
    bad_ids: str = "raise"
    has_bad_ids: bool = False
    """True if some batches have ids that no row has."""
    full_duplex: bool = False
    """True for a plan whose all-to-alls are full duplex."""
    qcomms: str = "none"
    """The type of TorchRec's quantised communication."""
    events: tuple[tuple[int, str], ...] = ()
    """Steps, each with an event that follows it, as `tests.fuzz.actions` lists them."""
    seed: int = 0
    """The seed by which weights and batches are drawn."""
    bound: float = 0.0
    """The largest gap to the oracle: of scores relative to 1 plus theirs, of moments to a shard's
    largest one; 0 for as much as rounding explains."""

    @property
    def has_maps(self) -> bool:
        """Tell whether any module maps ids to rows."""
        return any(module.evicts for module in self.modules)

    @property
    def has_positions(self) -> bool:
        """Tell whether some module has position weights."""
        return any(module.kind == "positions" for module in self.modules)

    @property
    def world_size(self) -> int:
        """All ranks."""
        return self.groups * self.size

    @property
    def local_world_size(self) -> int:
        """Ranks per host."""
        return self.local or self.world_size

    @property
    def mesh(self) -> tdsp.Mesh2D:
        """The plan's mesh."""
        return tdsp.Mesh2D(self.groups, self.size, tdsp.RankLayout(self.layout))

    @property
    def tables_by_module(self) -> list[dict[str, TableCase]]:
        """Each module's tables by name."""
        return [
            {table_name(number, index): table for index, table in enumerate(module.tables)}
            for number, module in enumerate(self.modules)
        ]

    @property
    def unfreezable(self) -> list[str]:
        """Names of frozen tables that may be trained later: those without feature processors."""
        return [
            name
            for module, tables in zip(self.modules, self.tables_by_module, strict=True)
            for name, table in tables.items()
            if table.frozen and module.kind != "positions"
        ]

    @property
    def tables(self) -> dict[str, TableCase]:
        """All the model's tables by name."""
        return {name: table for tables in self.tables_by_module for name, table in tables.items()}

    def hot_ids(self, table: str, num_refreshes: int = 0) -> tuple[int, ...]:
        """Return a table's hot rows after ``num_refreshes``; behind an id map, their ids."""
        of_table, module = self.tables[table], self.modules[self.module_of(table)]
        rows = of_table.refreshed_hot_rows if num_refreshes % 2 else of_table.hot_rows
        if not module.evicts or of_table.chosen_hot:
            return rows
        # As 64-bit numbers, which wrap around.
        return tuple(sorted((torch.tensor(rows) * module.id_step).tolist()))

    def module_of(self, table: str) -> int:
        """Return the number of a table's module."""
        return next(n for n, tables in enumerate(self.tables_by_module) if table in tables)

    def to_json(self) -> str:
        """Return the case as one line, without default values."""
        return _JSON.dump_json(self, exclude_defaults=True).decode()

    @classmethod
    def from_json(cls, text: str) -> "Case":
        """Return the case that a line from `to_json` describes."""
        return _JSON.validate_json(text)


_JSON = TypeAdapter(Case)


def table_name(module: int, table: int) -> str:
    return f"m{module}t{table}"


def feature_name(module: int, feature: int) -> str:
    return f"m{module}f{feature}"


DTYPES = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "int8": torch.float32,
}
