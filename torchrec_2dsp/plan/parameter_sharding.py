"""`ParameterSharding2D`: one table's sharding inside a group, and what the plugin adds to it."""

import enum
from dataclasses import dataclass, fields
from typing import Any

from torchrec.distributed.types import ParameterSharding, ShardingType

from torchrec_2dsp.access.hot_set import HotSet
from torchrec_2dsp.errors import PlanError
from torchrec_2dsp.mesh.mesh2d import Mesh2D
from torchrec_2dsp.plan.sync_config import SyncConfig

ROW_EXCHANGE = "row_exchange"
"""What the sharded module sees as the type of a table with `Exchange.ROW`."""

ROW_EXCHANGE_PER_HOST = "row_exchange_per_host"
"""The same with `Exchange.ROW_PER_HOST`."""

_NONEMPTY = "nonempty_"
_AND = ", "
"""Between a proposed type and what else was chosen."""


def nonempty_type(kind: ShardingType) -> str:
    """What the sharded module sees as the type of a table with `Exchange.NONEMPTY`."""
    return _NONEMPTY + kind.value


class ShardingType2D(enum.Enum):
    """The 2D form of each TorchRec sharding type: sharded in a group, replicated over groups.

    TorchRec's planner and plans carry sharding types as strings, so these live beside its own.
    A stock sharder refuses them by name, instead of training one group's plan as if it were
    the world's.
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
        """TorchRec's type inside a sharding group."""
        return ShardingType[self.name]


def type_2d(sharding_type: str) -> str:
    """The 2D form of a sharding type, itself if it is one.

    Example:
        >>> from torchrec_2dsp.plan.parameter_sharding import type_2d
        >>> type_2d("row_wise")
        '2d_row_wise'
    """
    known = {member.base.value: member.value for member in ShardingType2D}
    if sharding_type in known:
        return known[sharding_type]
    if sharding_type in known.values():
        return sharding_type
    raise PlanError(
        f"sharding type {sharding_type!r} has no 2D form; use one of {', '.join(known)}"
    )


def base_type(sharding_type: str) -> str:
    """TorchRec's own name of a sharding type: the inverse of `type_2d`."""
    sharding_type, *_ = sharding_type.split(_AND)
    if sharding_type in (ROW_EXCHANGE, ROW_EXCHANGE_PER_HOST):
        return ShardingType.ROW_WISE.value
    return ShardingType2D(type_2d(sharding_type.removeprefix(_NONEMPTY))).base.value


class Exchange(enum.Enum):
    """How the rows of a table reach the samples that need them."""

    POOLED = "pooled"
    """TorchRec's own output exchange of the sharding type: a vector for each bag, or for each id
    of a sequence."""

    NONEMPTY = "nonempty"
    """The same without bags that have no ids, for bags of tables that are sharded table-wise,
    column-wise or row-wise."""

    ROW = "row"
    """Each distinct row of a rank's batch travels once, for tables that are sharded row-wise."""

    ROW_PER_HOST = "row_per_host"
    """As `ROW`, but ranks of a host ask together, so that a row that several of them need crosses
    from another host once. Inside one host it is `ROW`."""


ROW_EXCHANGES = (Exchange.ROW, Exchange.ROW_PER_HOST)
"""Those of distinct rows."""

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
    """TorchRec's names of the sharding types that an exchange works for.

    Example:
        >>> from torchrec_2dsp import Exchange
        >>> from torchrec_2dsp.plan.parameter_sharding import kinds_of
        >>> kinds_of(Exchange.ROW)
        ('row_wise',)
    """
    return tuple(kind.base.value for kind in _KINDS.get(exchange, ShardingType2D))


class RowOwners(enum.Enum):
    """Which rank of a group has which rows of a table with row exchange."""

    BLOCK = "block"
    """Blocks of consecutive rows, as TorchRec's row-wise sharding deals them."""

    HASH = "hash"
    """Neighbours have different owners, so that the rows that are used most are spread evenly
    wherever in the table they are. Checkpoints don't show it."""


class ProposedType(str):
    """A sharding type with all else that a proposer chose for its table.

    TorchRec's planner carries types from proposals to plans as they are, and nothing else that is
    ours; so this is a string to it, and tells `ParameterSharding2D.of` the rest.

    Example:
        >>> import torchrec_2dsp as tdsp
        >>> from torchrec.distributed.types import ShardingType
        >>> from torchrec_2dsp.plan.parameter_sharding import Exchange, ProposedType, base_type
        >>> kind = ProposedType.of(
        ...     ShardingType.ROW_WISE, tdsp.Mesh2D(2, 4), tdsp.GradientSync(), Exchange.ROW
        ... )
        >>> kind
        '2d_row_wise, row exchange, 2 groups of 4 strided'
        >>> base_type(kind), kind.exchange
        ('row_wise', <Exchange.ROW: 'row'>)
    """

    mesh: Mesh2D
    sync: SyncConfig
    exchange: Exchange
    owners: RowOwners
    hot_set: HotSet | None

    @classmethod
    def of(
        cls,
        kind: ShardingType,
        mesh: Mesh2D,
        sync: SyncConfig,
        exchange: Exchange = Exchange.POOLED,
        owners: RowOwners = RowOwners.BLOCK,
        hot_set: HotSet | None = None,
    ) -> "ProposedType":
        """A type inside the groups of a mesh, and what goes with it."""
        said = [
            type_2d(kind.value),
            f"{exchange.value} exchange",
            "" if owners is RowOwners.BLOCK else f"{owners.value} owners",
            "" if hot_set is None else f"{len(hot_set.row_ids)} hot rows",
            f"{mesh.num_groups} groups of {mesh.group_size} {mesh.layout.value}",
        ]
        # TorchRec accepts a dense kernel for its own name of data parallel alone.
        is_dense = kind is ShardingType.DATA_PARALLEL
        made = cls(kind.value if is_dense else _AND.join(one for one in said if one))
        made.mesh, made.sync = mesh, sync
        made.exchange, made.owners, made.hot_set = exchange, owners, hot_set
        return made


@dataclass
class ParameterSharding2D(ParameterSharding):
    """A `ParameterSharding` whose ranks are positions inside a sharding group."""

    exchange: Exchange = Exchange.POOLED
    """How rows travel inside the group."""

    owners: RowOwners = RowOwners.BLOCK
    """Which of its ranks has which rows."""

    hot_set: HotSet | None = None
    """Rows that every rank of the world keeps a replica of."""

    num_groups: int | None = None
    """How many copies of the table there are: `None` for one in each sharding group, or 1, whose
    shards lie on the ranks of the whole world."""

    def mesh_in(self, mesh: Mesh2D) -> Mesh2D:
        """The mesh that repeats this table, in a plan for ``mesh``.

        Its ranks are positions in a group of that mesh.

        Args:
            mesh: of the tables that every sharding group has.
        """
        if self.num_groups == 1 and mesh.num_groups > 1:
            return Mesh2D(1, mesh.world_size)
        return mesh

    @classmethod
    def of(cls, sharding: ParameterSharding) -> "ParameterSharding2D":
        """The 2D form of a stock sharding; one that is 2D already keeps its additions."""
        known: dict[str, Any] = {
            field.name: getattr(sharding, field.name) for field in fields(sharding)
        }
        kind = sharding.sharding_type
        if isinstance(kind, ProposedType):
            known |= {"exchange": kind.exchange, "owners": kind.owners, "hot_set": kind.hot_set}
            kind = base_type(kind)
        known["sharding_type"] = type_2d(kind)
        return cls(**known)


def num_rows(sharding: ParameterSharding) -> int | None:
    """How many rows the sharded table has, `None` where the plan doesn't say (data parallel)."""
    shards = getattr(sharding.sharding_spec, "shards", None)
    if not shards:
        return None
    return max(shard.shard_offsets[0] + shard.shard_sizes[0] for shard in shards)
