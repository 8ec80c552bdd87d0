"""`ParameterSharding2D`: how one table is sharded, its exchange, owners and hot rows."""

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import torch
from torch.optim import Optimizer
from torchrec.distributed.types import ParameterSharding, ShardingType
from torchrec.distributed.utils import optimizer_type_to_emb_opt_type

from torchrec_2dsp._compat.fbgemm import EmbOptimType
from torchrec_2dsp.access.table_access import HotSet
from torchrec_2dsp.codecs.rows import Transport
from torchrec_2dsp.errors import PlanError, UnsupportedError
from torchrec_2dsp.mesh import Mesh2D
from torchrec_2dsp.optim import MomentScaledRowWiseAdaGradOptimizer
from torchrec_2dsp.plan.sync import SyncConfig, SyncedRows, WeightSync
from torchrec_2dsp.rows.eight_bits import NUM_EXTRA_BYTES

MAX_ROWS = math.isqrt(2**63 - 1)
"""The largest row count whose 64-bit products don't overflow."""


class RowOwners(enum.Enum):
    """Ways to assign a table's rows to the ranks of a group, for row exchange."""

    BLOCK = "block"
    """Blocks of consecutive rows, as in TorchRec's row-wise sharding."""

    HASH = "hash"
    """Neighbours have different owners, so that the most used rows are spread evenly
    wherever they are in the table. Checkpoints don't depend on it."""


class RowStorage(enum.Enum):
    """Formats of a table's rows in memory."""

    PLAIN = "plain"
    """The table's own data type."""

    INT8 = "int8"
    """Eight bits per number and eight bytes per row: a third of float32's memory. Hot
    rows stay in float32. Training rounds every row that it changes."""

    def bytes_per_number(self, dim: int, of_type: float) -> float:
        """Return the bytes per number in a row of ``dim``; ``of_type`` is the table type's."""
        return of_type if self is RowStorage.PLAIN else 1 + NUM_EXTRA_BYTES / dim


def golden_step(num_rows: int) -> int:
    """Return a step near the table's golden section that visits every row once.

    Any run of consecutive steps visits every part of the table in proportion, up to a few rows.

    Example:
        >>> from torchrec_2dsp.plan.parameter_sharding import golden_step
        >>> step = golden_step(10)
        >>> [row * step % 10 for row in range(10)]
        [0, 7, 4, 1, 8, 5, 2, 9, 6, 3]
    """
    step = max(1, round(num_rows * 0.6180339887))
    while math.gcd(step, num_rows) != 1:
        step += 1
    return step


@dataclass(frozen=True)
class RowSpread:
    """A bijection between a table's rows and their positions.

    Example:
        >>> import torch
        >>> from torchrec_2dsp.plan.parameter_sharding import RowSpread
        >>> spread = RowSpread(num_rows=10)
        >>> spread.positions(torch.arange(4))
        tensor([0, 7, 4, 1])
        >>> spread.rows(torch.tensor([0, 7, 4, 1]))
        tensor([0, 1, 2, 3])
    """

    num_rows: int
    """The table's row count."""

    def __post_init__(self) -> None:
        if self.num_rows > MAX_ROWS:
            raise UnsupportedError(
                f"rows of a table with {self.num_rows:,} rows can't be spread, of {MAX_ROWS:,} at "
                "most; use owners='block'"
            )

    @cached_property
    def step(self) -> int:
        """The distance between the positions of neighbouring rows."""
        return golden_step(self.num_rows)

    def positions(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the rows' positions as int64."""
        return rows.long() * self.step % self.num_rows

    def rows(self, positions: torch.Tensor) -> torch.Tensor:
        """Return the rows at these positions as int64."""
        return positions.long() * pow(self.step, -1, self.num_rows) % self.num_rows


_AND = ", "
"""The separator between a sharding type and each other choice."""


class ShardingType2D(enum.Enum):
    """The 2D form of each TorchRec sharding type: sharded in a group, replicated over groups.

    TorchRec's planner and plans carry sharding types as strings, so these exist alongside its own.
    A stock sharder refuses them by name, instead of training one group's plan as if it were
    the world's.

    To add a type, name it here. `shard.shardings` then runs it, `plan.fits_mesh` checks its
    shards, `cost.table_loads` prices it, and `planner.search.candidates` offers it.
    """

    DATA_PARALLEL = "2d_data_parallel"
    TABLE_WISE = "2d_table_wise"
    COLUMN_WISE = "2d_column_wise"
    ROW_WISE = "2d_row_wise"
    TABLE_ROW_WISE = "2d_table_row_wise"
    TABLE_COLUMN_WISE = "2d_table_column_wise"
    GRID_SHARD = "2d_grid_shard"

    @property
    def base(self) -> ShardingType:
        """TorchRec's sharding type inside a group."""
        return ShardingType[self.name]


def type_2d(sharding_type: str) -> str:
    """Return a sharding type's 2D form; a 2D type is returned as it is."""
    type_2d_of = {member.base.value: member.value for member in ShardingType2D}
    if sharding_type in type_2d_of:
        return type_2d_of[sharding_type]
    if sharding_type in type_2d_of.values():
        return sharding_type
    raise PlanError(
        f"sharding type {sharding_type!r} has no 2D form; use one of {', '.join(type_2d_of)}"
    )


def base_type(sharding_type: str) -> str:
    """Return TorchRec's name for a sharding type: the inverse to `type_2d`."""
    sharding_type, *_ = sharding_type.split(_AND)
    return ShardingType2D(type_2d(sharding_type)).base.value


class Exchange(enum.Enum):
    """The way that a table's rows reach the samples that need them."""

    POOLED = "pooled"
    """TorchRec's own output exchange for the sharding type: a vector per bag, or per id
    of a sequence."""

    NONEMPTY = "nonempty"
    """TorchRec's exchange without empty bags, for pooled tables that are sharded
    table-wise, column-wise or row-wise."""

    ROW = "row"
    """Each distinct row of a rank's batch travels once, for row-wise sharded tables."""

    ROW_PER_HOST = "row_per_host"
    """Row exchange in which a host's ranks ask together, so that a row that several of them need
    comes from another host only once. Inside one host it is `ROW`."""


class Pipeline(enum.Enum):
    """The train pipeline, which decides what travels while a step computes."""

    BASE = "base"
    """None: each step waits for its own ids, as in a hand-written loop or `TrainPipelineBase`."""

    SPARSE_DIST = "sparse_dist"
    """TorchRec's `TrainPipelineSparseDist`: the next batch's ids travel during a step."""

    ROW_PREFETCH = "row_prefetch"
    """`TrainPipelineRowPrefetch`: the next batch's rows travel as well."""

    def __str__(self) -> str:
        return "no train pipeline" if self is Pipeline.BASE else self.value.replace("_", " ")


IN_8_BITS = (ShardingType.TABLE_WISE, ShardingType.ROW_WISE, ShardingType.TABLE_ROW_WISE)
"""The sharding types for tables in 8 bits: a part of a row would need a scale of its own."""

ROW_EXCHANGES = (Exchange.ROW, Exchange.ROW_PER_HOST)
"""The exchanges that send each distinct row once."""

_KINDS = {
    Exchange.ROW: (ShardingType2D.ROW_WISE,),
    Exchange.ROW_PER_HOST: (ShardingType2D.ROW_WISE,),
    Exchange.NONEMPTY: (
        ShardingType2D.TABLE_WISE,
        ShardingType2D.COLUMN_WISE,
        ShardingType2D.TABLE_COLUMN_WISE,
        ShardingType2D.ROW_WISE,
    ),
}


def kinds_of(exchange: Exchange) -> tuple[str, ...]:
    """Return TorchRec's names for the sharding types that support an exchange.

    Example:
        >>> from torchrec_2dsp import Exchange
        >>> from torchrec_2dsp.plan.parameter_sharding import kinds_of
        >>> kinds_of(Exchange.ROW)
        ('row_wise',)
    """
    return tuple(kind.base.value for kind in _KINDS.get(exchange, ShardingType2D))


@dataclass(frozen=True)
class TableType:
    """A table's sharding and exchange, the key by which a sharded module sorts its tables.

    TorchRec has one string for both, which only `name` makes and only `of_name` reads.

    Example:
        >>> from torchrec.distributed.types import ShardingType
        >>> from torchrec_2dsp.plan.parameter_sharding import Exchange, TableType
        >>> TableType(ShardingType.ROW_WISE, Exchange.ROW).name
        'row_wise, row exchange, fp32'
        >>> TableType.of_name("column_wise").exchange
        <Exchange.POOLED: 'pooled'>
    """

    base: ShardingType
    """TorchRec's sharding type inside a group."""
    exchange: Exchange = Exchange.POOLED
    """The exchange inside the group."""
    transport: Transport = Transport.FP32
    """The rows' format on the wire."""

    @property
    def name(self) -> str:
        """The string given to TorchRec: its own name if the exchange and transport are its own."""
        if self == TableType(self.base):
            return self.base.value
        return f"{self.base.value}{_AND}{self.exchange.value} exchange{_AND}{self.transport.value}"

    @classmethod
    def of_name(cls, name: str) -> "TableType":
        """Parse a type's name."""
        base, *rest = name.split(_AND)
        if not rest:
            return cls(ShardingType(base))
        exchange, transport = rest
        return cls(
            ShardingType(base), Exchange(exchange.removesuffix(" exchange")), Transport(transport)
        )


class ProposedType(str):
    """A sharding type with everything else that a proposer chose for its table.

    TorchRec's planner carries types from proposals to plans unchanged, and nothing else of ours.
    So this is a string to TorchRec, and tells `ParameterSharding2D.of` the rest.
    """

    mesh: Mesh2D
    sync: SyncConfig
    additions: Mapping[str, Any]
    """The chosen values for the fields that `ParameterSharding2D` adds to TorchRec's."""

    @classmethod
    def of(
        cls, kind: ShardingType, mesh: Mesh2D, sync: SyncConfig, **additions: Any
    ) -> "ProposedType":
        """Choose a type inside a mesh's groups, together with its other settings."""
        table = ParameterSharding2D(kind.value, "", **additions)
        choices = [
            type_2d(kind.value),
            f"{table.exchange.value} exchange",
            "" if table.owners is RowOwners.BLOCK else f"{table.owners.value} owners",
            "" if table.hot_set is None else f"{len(table.hot_set.row_ids)} hot rows",
            "" if table.transport is Transport.FP32 else table.transport.value,
            "" if table.stored_as is RowStorage.PLAIN else f"stored as {table.stored_as.value}",
            f"{mesh.num_groups} groups of {mesh.group_size} {mesh.layout.value}",
        ]
        # TorchRec accepts a dense kernel only for its own data-parallel name.
        is_dense = kind is ShardingType.DATA_PARALLEL
        proposed = cls(
            kind.value if is_dense else _AND.join(choice for choice in choices if choice)
        )
        proposed.mesh, proposed.sync, proposed.additions = mesh, sync, additions
        return proposed


@dataclass
class ParameterSharding2D(ParameterSharding):
    """A `ParameterSharding` whose ranks are positions inside a sharding group."""

    exchange: Exchange = Exchange.POOLED
    """The exchange inside the group."""

    owners: RowOwners = RowOwners.BLOCK
    """The assignment of rows to the group's ranks."""

    hot_set: HotSet | None = None
    """Rows that every rank of the world replicates."""

    transport: Transport = Transport.FP32
    """The wire format of rows or pooled vectors, and of their gradients."""

    stored_as: RowStorage = RowStorage.PLAIN
    """The rows' format in memory."""

    num_groups: int | None = None
    """The number of copies: `None` for one in each sharding group, or 1, whose
    shards lie on all ranks of the world."""

    def mesh_in(self, mesh: Mesh2D) -> Mesh2D:
        """Return the mesh that repeats this table, in a plan for ``mesh``.

        Ranks are positions in a group of the returned mesh.

        Args:
            mesh: the mesh of the tables that every sharding group has.
        """
        if self.num_groups == 1 and mesh.num_groups > 1:
            return Mesh2D(1, mesh.world_size)
        return mesh

    @classmethod
    def of(cls, sharding: ParameterSharding) -> "ParameterSharding2D":
        """Convert a stock sharding into its 2D form; a 2D one keeps its additions."""
        values: dict[str, Any] = {
            field.name: getattr(sharding, field.name) for field in fields(sharding)
        }
        kind = sharding.sharding_type
        if isinstance(kind, ProposedType):
            values |= kind.additions
            kind = base_type(kind)
        values["sharding_type"] = type_2d(kind)
        return cls(**values)


def num_rows(sharding: ParameterSharding) -> int | None:
    """Return the table's row count, `None` for data-parallel tables."""
    shards = getattr(sharding.sharding_spec, "shards", None)
    if not shards:
        return None
    return max(shard.shard_offsets[0] + shard.shard_sizes[0] for shard in shards)


FROM_ROW_GRADIENTS = frozenset(
    {
        EmbOptimType.EXACT_SGD,
        EmbOptimType.EXACT_ADAGRAD,
        EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        EmbOptimType.ADAM,
        EmbOptimType.PARTIAL_ROWWISE_ADAM,
        EmbOptimType.LAMB,
        EmbOptimType.PARTIAL_ROWWISE_LAMB,
    }
)
"""Optimizers whose updates depend only on a row's summed gradient and the schedule."""

WITH_ROW_WISE_MOMENT = (EmbOptimType.PARTIAL_ROWWISE_ADAM, EmbOptimType.PARTIAL_ROWWISE_LAMB)
"""Optimizers with a second moment per row, which TorchRec can't save in shards of one row."""

CHANGES_ALL_ROWS = (
    EmbOptimType.EMAINPLACE_ROWWISE_ADAGRAD,
    EmbOptimType.ENSEMBLE_ROWWISE_ADAGRAD,
)
"""Optimizers that also update rows no batch touched."""


def can_have_copies(
    optimizer: EmbOptimType | type[Optimizer], sync: SyncConfig, is_in_8_bits: bool
) -> bool:
    """Return whether a sync can keep a trained table's copies in several groups equal."""
    kind = fused_kind(optimizer)
    if not isinstance(sync, WeightSync):
        return kind in FROM_ROW_GRADIENTS
    changes_all = kind in CHANGES_ALL_ROWS
    sends_changed = sync.rows is not SyncedRows.TOUCHED or not changes_all
    return sends_changed and not is_in_8_bits


def fused_kind(optimizer: EmbOptimType | type[Optimizer]) -> EmbOptimType | None:
    """Return the fused kernel's name for an optimizer; `None` if TorchRec has no such kernel."""
    try:
        return fused_type_of(optimizer) if isinstance(optimizer, type) else optimizer
    except ValueError:
        return None


def fused_type_of(optimizer: type[Optimizer]) -> EmbOptimType | None:
    """Return the fused kernel's name for an optimizer class."""
    if issubclass(optimizer, MomentScaledRowWiseAdaGradOptimizer):
        return EmbOptimType.EXACT_ROWWISE_ADAGRAD
    return optimizer_type_to_emb_opt_type(optimizer)
