"""`RunPlan`: what a plan file says of each table, read without TorchRec."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from torchrec_2dsp.errors import ConfigError, MeshError
from torchrec_2dsp.mesh.mesh2d import Mesh2D, RankLayout
from torchrec_2dsp.report.table import Table

_MAX_RANKS_SHOWN = 8
_WORDS = ("table", "type", "ranks", "exchange")


class _Read(BaseModel):
    """A part of a plan file, of which a page shows some keys."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class _Mesh(_Read):
    num_groups: int
    group_size: int
    layout: RankLayout


class _Shard(_Read):
    shard_offsets: tuple[int, int]
    shard_sizes: tuple[int, int]


class _Table(_Read):
    sharding_type: str
    ranks: tuple[int, ...] | None = None
    shards: tuple[_Shard, ...] | None = None
    exchange: str = "pooled"
    owners: str = "block"
    transport: str = "fp32"
    hot_rows: tuple[int, ...] | None = None
    num_groups: int | None = None


class _Sync(_Read):
    kind: str


class _Plan(_Read):
    mesh: _Mesh
    sync: _Sync
    modules: dict[str, dict[str, _Table]]


@dataclass(frozen=True, kw_only=True)
class PlanLine:
    """One table of a plan."""

    name: str
    """The table's name."""

    num_rows: int | None
    """How many rows it has, if the plan says so."""

    dim: int | None
    """The embedding dimension, if the plan says so."""

    sharding_type: str
    """The sharding type."""

    ranks: str
    """The ranks that hold it; replica peers are joined by a plus."""

    exchange: str
    """How rows travel, and where that isn't as in TorchRec, who owns them, in which form they
    travel, and how many are hot."""

    num_hot: int
    """How many rows every rank has."""


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """The plan of a run."""

    mesh: Mesh2D
    """The groups and the ranks of each."""

    sync: str
    """How replicas are kept equal; empty where there are none."""

    lines: tuple[PlanLine, ...]
    """The tables, by name within each module."""

    @property
    def mesh_text(self) -> str:
        """The mesh and how its replicas are kept equal, in words."""
        mesh = self.mesh
        groups = "1 group" if mesh.num_groups == 1 else f"{mesh.num_groups} groups"
        ranks = "1 rank" if mesh.group_size == 1 else f"{mesh.group_size} ranks"
        return f"{groups} of {ranks}" + (f", {self.sync}" if self.sync else "")

    def table(self) -> Table:
        """The lines as a table."""
        rows = [
            (
                line.name,
                "" if line.num_rows is None else f"{line.num_rows:,}",
                "" if line.dim is None else str(line.dim),
                line.sharding_type,
                line.ranks,
                line.exchange,
            )
            for line in self.lines
        ]
        headings = ("table", "rows", "dim", "type", "ranks", "exchange")
        return Table(headings, rows, words=_WORDS)


def read_plan(path: Path) -> RunPlan:
    """The plan in a file.

    Raises:
        ConfigError: it can't be read, or is something else.
    """
    try:
        plan = _Plan.model_validate_json(path.read_text())
        mesh = Mesh2D(plan.mesh.num_groups, plan.mesh.group_size, plan.mesh.layout)
        lines = [
            _line(name, table, mesh)
            for tables in plan.modules.values()
            for name, table in tables.items()
        ]
    except OSError as error:
        raise ConfigError(f"{path} can't be read: {error.strerror}") from error
    except (ValidationError, MeshError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not a plan file: {error}") from error
    sync = plan.sync.kind if mesh.num_groups > 1 else ""
    return RunPlan(mesh=mesh, sync=sync, lines=tuple(lines))


def _line(name: str, table: _Table, mesh: Mesh2D) -> PlanLine:
    shards = table.shards or ()
    if table.num_groups == 1 and mesh.num_groups > 1:
        # The table has one copy in the world, whatever the mesh of the others.
        mesh = Mesh2D(1, mesh.world_size, mesh.layout)
    num_hot = len(table.hot_rows or ())
    parts = [
        table.exchange,
        *([f"{table.owners} owners"] if table.owners != "block" else []),
        *([f"in {table.transport}"] if table.transport != "fp32" else []),
        *([f"{num_hot:,} hot"] if num_hot else []),
    ]
    return PlanLine(
        name=name,
        num_rows=_end(shards, 0),
        dim=_end(shards, 1),
        sharding_type=table.sharding_type,
        ranks=_ranks(mesh, table.ranks),
        exchange=", ".join(parts),
        num_hot=num_hot,
    )


def _end(shards: Sequence[_Shard], way: int) -> int | None:
    """Where a table's shards end: how many rows there are, or how many columns."""
    ends = [shard.shard_offsets[way] + shard.shard_sizes[way] for shard in shards]
    return max(ends, default=None)


def _ranks(mesh: Mesh2D, shard_indices: Sequence[int] | None) -> str:
    """The ranks of each shard, of which there may be many."""
    indices = shard_indices or ()
    shown = [
        "+".join(map(str, mesh.replica_peers(mesh.rank_at(0, index))))
        for index in indices[:_MAX_RANKS_SHOWN]
    ]
    rest = len(indices) - len(shown)
    return "  ".join([*shown, *([f"and {rest} more"] if rest else [])])
