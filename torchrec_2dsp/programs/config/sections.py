"""Config sections that several programs share: model, optimizers, and training options."""

import logging
import math
from typing import Annotated, Any, Literal, Self

from pydantic import Field, PositiveInt, field_validator, model_validator
from torchrec.modules.embedding_configs import DataType

from torchrec_2dsp.codecs.rows import Transport
from torchrec_2dsp.dense.thresholded import ThresholdKind
from torchrec_2dsp.plan.parameter_sharding import (
    ROW_EXCHANGES,
    Exchange,
    RowOwners,
    RowStorage,
)
from torchrec_2dsp.plan.sync import (
    GradientSync,
    SyncConfig,
    SyncedRows,
    WeightSync,
    parse_policy,
)
from torchrec_2dsp.programs.config.section import Section, Seed

SplitPlace = Literal["embeddings", "dense", "over"]
"""The places where a model may be split: after the lookup, and after the first layer and ReLU in
the dense arch and in the over arch."""

logger = logging.getLogger(__name__)


class TablesSection(Section):
    """A model, and its tables' type."""

    table_dtype: Literal["fp32", "fp16", "bf16"] = "fp32"
    """The type of the tables' rows; their moments stay in fp32."""

    @property
    def data_type(self) -> DataType:
        """The type as TorchRec's table configs name it."""
        return DataType[self.table_dtype.upper()]


class ModelConfig(TablesSection):
    """TorchRec's DLRM, or its DCN, over one table per sparse feature."""

    kind: Literal["dlrm", "dcn"] = "dlrm"
    """The feature interaction: dot products, or DCN v2's low-rank cross layers."""

    dim: int = Field(default=16, ge=4, multiple_of=4)
    """The embedding dimension of all tables."""

    dense_layers: tuple[PositiveInt, ...] = (64,)
    """Hidden layer sizes below the interaction; a last layer with size `dim` is added."""

    over_layers: tuple[PositiveInt, ...] = (64,)
    """Hidden layer sizes above the interaction; a last layer with size 1 is added."""

    dcn_layers: int = Field(default=3, ge=1)
    """The number of cross layers in a "dcn"."""

    dcn_low_rank: int = Field(default=32, ge=1)
    """The rank of the cross layers in a "dcn"."""

    seed: Seed = 0
    """The seed for the initial weights."""

    @model_validator(mode="after")
    def _check_interaction(self) -> Self:
        if self.kind != "dcn":
            self.refuse_unread(
                ["dcn_layers", "dcn_low_rank"],
                f"is for cross layers, which kind={self.kind!r} has none of; set kind='dcn', or "
                "leave it out",
            )
        return self


class OptimizerConfig(Section):
    """Row-wise AdaGrad for the tables, a torch optimizer for everything else."""

    lr: float = Field(default=0.02, ge=0, allow_inf_nan=False)
    """The tables' learning rate."""

    eps: float = Field(default=1e-8, ge=0, allow_inf_nan=False)
    """Added to the root of the moment."""

    dense_optimizer: Literal["sgd", "adagrad", "adam", "adamw"] = "sgd"
    """The optimizer for the other parameters, with torch's defaults except for learning rate and
    weight decay."""

    dense_lr: float = Field(default=0.1, ge=0, allow_inf_nan=False)
    """The other parameters' learning rate. The default suits "sgd"; "adagrad" needs about 0.02,
    "adam" and "adamw" about 0.001."""

    dense_weight_decay: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """The other parameters' weight decay, as torch's optimizer defines it."""


class RateSchedule(Section):
    """A learning rate that warms up, and then stays or decays.

    Example:
        >>> from torchrec_2dsp.programs.config.sections import RateSchedule
        >>> schedule = RateSchedule(kind="linear", warm_up=2, final=0.5)
        >>> [schedule.multiplier(step, num_steps=6) for step in range(6)]
        [0.5, 1.0, 1.0, 0.875, 0.75, 0.625]
    """

    kind: Literal["constant", "linear", "cosine", "step"] = "constant"
    """The rate after the warm-up: constant, decaying linearly or by half a cosine wave, or
    multiplied by `factor` every few steps."""

    warm_up: int = Field(default=0, ge=0)
    """The number of warm-up steps, over which the rate grows linearly to the optimizer's."""

    decay_steps: int = Field(default=0, ge=0)
    """The number of steps after the warm-up over which "linear" and "cosine" decay; 0 for all
    remaining steps."""

    final: float = Field(default=0.0, ge=0, le=1)
    """The final rate for "linear" and "cosine", as a share of the optimizer's."""

    step_every: int = Field(default=0, ge=0)
    """The number of steps between multiplications by `factor`, for "step"."""

    factor: float = Field(default=0.1, gt=0, le=1)
    """The factor for "step"."""

    @model_validator(mode="after")
    def _check_kind(self) -> Self:
        for kinds, names in (
            (("linear", "cosine"), ["decay_steps", "final"]),
            (("step",), ["step_every", "factor"]),
        ):
            if self.kind not in kinds:
                self.refuse_unread(
                    names,
                    f"is for kind={' or '.join(map(repr, kinds))}, and the schedule is "
                    f"{self.kind!r}; set the kind, or leave it out",
                )
        if self.kind == "step" and not self.step_every:
            raise ValueError("kind='step' needs step_every, the steps between two of its changes")
        return self

    @property
    def is_constant(self) -> bool:
        """True if the rate never changes."""
        return self.kind == "constant" and not self.warm_up

    @property
    def depends_on_length(self) -> bool:
        """True if the rates depend on the run's length."""
        return self.kind in ("linear", "cosine") and not self.decay_steps

    def multiplier(self, step: int, num_steps: int) -> float:
        """Return a step's rate as a share of the optimizer's.

        Args:
            step: the number of steps trained before.
            num_steps: the number of steps in the run.
        """
        if step < self.warm_up:
            return (step + 1) / self.warm_up
        after = step - self.warm_up
        if self.kind == "step":
            return self.factor ** (after // self.step_every)
        if self.kind == "constant":
            return 1.0
        length = self.decay_steps or max(1, num_steps - self.warm_up)
        share = min(1.0, after / length)
        if self.kind == "cosine":
            share = (1 - math.cos(math.pi * share)) / 2
        return 1.0 - (1.0 - self.final) * share


class ScheduledOptimizerConfig(OptimizerConfig):
    """Optimizers with learning rate schedules and gradient clipping."""

    schedule: RateSchedule = RateSchedule()
    """The tables' learning rate schedule."""

    dense_schedule: RateSchedule | None = None
    """The other parameters' learning rate schedule; by default the tables' schedule."""

    dense_clip_norm: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """The largest Euclidean norm for the joint gradient of all other parameters, to which a larger
    one is scaled down; 0 for no bound."""

    stochastic_rounding: bool = False
    """True if updates of tables in 16 bits are rounded at random, alike on all copies; else they
    are rounded to the nearest."""

    rounding_seed: Seed = 0
    """The seed for stochastic rounding."""

    @model_validator(mode="after")
    def _check_rounding(self) -> Self:
        if not self.stochastic_rounding:
            self.refuse_unread(
                ["rounding_seed"], "is for stochastic_rounding=true; set it, or leave it out"
            )
        return self

    @property
    def schedules(self) -> tuple[RateSchedule, RateSchedule]:
        """The schedules for the tables and for the other parameters."""
        return self.schedule, self.dense_schedule or self.schedule


class SplitConfig(Section):
    """Splits in a model's dense part, and the share of numbers that passes each split."""

    splits: dict[SplitPlace, Annotated[float, Field(gt=0, le=1)]] = Field(default_factory=dict)
    """The share of largest numbers that passes, by split: embeddings, dense or over. The others are
    set to zero in the forward and backward passes."""

    split_threshold: ThresholdKind = "exact"
    """The method that finds the smallest number to pass: exact, or laplace."""

    @model_validator(mode="after")
    def _check_splits(self) -> Self:
        if not self.splits:
            self.refuse_unread(["split_threshold"], "is for splits; name some, or leave it out")
        return self


class ExchangeConfig(Section):
    """The exchange that brings table rows to their samples."""

    exchange: Exchange = Exchange.POOLED
    """The exchange, if the sharding type allows it: pooled, nonempty, row or row_per_host."""

    owners: RowOwners = RowOwners.BLOCK
    """The assignment of rows to owners, for an exchange of rows: block or hash."""

    row_transport: Transport = Transport.FP32
    """The wire format for rows, or pooled vectors, and their gradients: fp32, bf16, fp16, int8 or
    int4."""

    stored_as: RowStorage = RowStorage.PLAIN
    """The format of rows in memory: plain, or int8 where the sharding type keeps rows whole."""

    hot_rows: int = Field(default=0, ge=0)
    """The number of each table's most frequent rows to replicate on every rank."""

    prefetch_rows: bool = False
    """Prefetch rows that the running step doesn't change while it computes."""

    @model_validator(mode="after")
    def _check_owners(self) -> Self:
        if self.exchange not in ROW_EXCHANGES:
            self.refuse_unread(["owners"], "is for an exchange of rows; set exchange='row'")
        return self

    @property
    def exchange_text(self) -> str:
        """The differences from TorchRec, in words; empty if there are none."""
        parts = []
        if self.exchange is not Exchange.POOLED:
            parts.append(f"{self.exchange.value.replace('_', ' ')} exchange")
        if self.owners is RowOwners.HASH:
            parts.append("rows spread over owners")
        if self.row_transport is not Transport.FP32:
            parts.append(f"rows in {self.row_transport.value}")
        if self.stored_as is not RowStorage.PLAIN:
            parts.append(f"rows stored as {self.stored_as.value}")
        if self.hot_rows:
            parts.append(f"{self.hot_rows:,} hot rows per table")
        return ", ".join(parts)


class ReplicationConfig(Section):
    """Synchronisation between table replicas."""

    sync: Literal["GradientSync", "WeightSync"] = "GradientSync"
    """The synchronisation: GradientSync (exact) or WeightSync (averages)."""

    sync_policy: str = "every(1)"
    """The steps at which WeightSync averages: every(4), after(1000, every(4)) or never()."""

    synced_rows: SyncedRows = SyncedRows.TOUCHED
    """The rows that WeightSync sends: changed ones, or "all", which is TorchRec's arithmetic."""

    transport: Transport = Transport.FP32
    """The wire format for gradients or changed rows between replicas: fp32, bf16, fp16, int8 or
    int4."""

    delay: int = Field(default=0, ge=0, le=1)
    """The number of steps by which GradientSync's updates may be late."""

    drift_every: int = Field(default=0, ge=0)
    """Compare the replicas after every n-th sync, and stop if they differ; 0 for never."""

    dense_above: float | None = Field(default=None, ge=0, le=1)
    """The share of changed rows above which WeightSync averages a whole shard; the default is low
    enough for a fast link."""

    moment_scale: float | Literal["from_mesh"] = "from_mesh"
    """Row-wise AdaGrad's moment scale; "from_mesh" is the number of groups for WeightSync and 1
    otherwise."""

    @model_validator(mode="before")
    @classmethod
    def _drop_former_key(cls, tree: Any) -> Any:
        """Drop earlier versions' keys, found in run folders and results, that this one lacks."""
        if not isinstance(tree, dict):
            return tree
        former = {"moment_rho"}
        if tree.get("moment_scale") == "expected":
            former.add("moment_scale")
            logger.warning(
                "moment_scale='expected' is gone; 'from_mesh', which did better, takes its place"
            )
        return {key: tree[key] for key in tree if key not in former}

    @field_validator("sync_policy")
    @classmethod
    def _check_policy(cls, text: str) -> str:
        return str(parse_policy(text))

    @model_validator(mode="after")
    def _check_sync_keys(self) -> Self:
        is_exact, all_rows = self.sync == "GradientSync", self.synced_rows is SyncedRows.ALL
        if is_exact:
            self.refuse_unread(
                ["sync_policy", "synced_rows"],
                "is for WeightSync; GradientSync merges the gradients of every step",
            )
        else:
            self.refuse_unread(["delay"], "is for GradientSync; WeightSync has a sync_policy")
        if is_exact or all_rows:
            self.refuse_unread(["dense_above"], "is for a WeightSync of touched rows; leave it out")
        if all_rows:
            self.refuse_unread(["transport"], "is for touched rows; whole shards aren't encoded")
        return self

    @property
    def sync_config(self) -> SyncConfig:
        """The sync config for a plan."""
        if self.sync == "GradientSync":
            return GradientSync(
                transport=self.transport, delay=self.delay, drift_every=self.drift_every
            )
        return WeightSync(
            policy=parse_policy(self.sync_policy),
            rows=self.synced_rows,
            transport=self.transport,
            drift_every=self.drift_every,
            dense_above=self.dense_above,
        )
