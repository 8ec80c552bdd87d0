"""`RunContents`: the files in a training program's folder, run by run."""

import json
import math
import re
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from torchrec_2dsp.errors import ConfigError, MeshError
from torchrec_2dsp.mesh import Mesh2D, RankLayout
from torchrec_2dsp.programs.bench.results import BenchResult
from torchrec_2dsp.programs.traces import RankSplit
from torchrec_2dsp.programs.train.record import (
    TRAIN_RECORD_FORMAT,
    Evaluation,
    RunRecord,
    StepsTrained,
    TrainRecord,
    read_progress,
)
from torchrec_2dsp.report.table import Table

_RECORD, _CONFIG = "record.json", "config.toml"
_REMEDY = "give the folder that train wrote to, which its config names as output.folder"
_MAX_RANKS_SHOWN = 8


class _Read(BaseModel):
    """A part of a plan file, with the keys that a page shows."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class _Mesh(_Read):
    num_groups: int
    group_size: int
    layout: RankLayout


class _Shard(_Read):
    shard_offsets: tuple[int, int]
    shard_sizes: tuple[int, int]


class _PlannedTable(_Read):
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
    pipeline: str = "sparse_dist"
    full_duplex: bool = False
    modules: dict[str, dict[str, _PlannedTable]]


@dataclass(frozen=True, kw_only=True)
class PlanLine:
    """One table in a plan."""

    name: str
    """The table's name."""

    num_rows: int | None
    """The table's rows, if the plan has them."""

    dim: int | None
    """The embedding dimension, if the plan has it."""

    sharding_type: str
    """The sharding type."""

    ranks: str
    """The ranks that hold it; a plus joins replica peers."""

    exchange: str
    """The way rows travel, with their owners, wire format and hot rows, where that differs from
    TorchRec."""

    num_hot: int
    """Rows that every rank has a copy of."""


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """A run's plan, read without TorchRec."""

    mesh: Mesh2D
    """The groups and their ranks."""

    sync: str
    """The replica sync; empty without replicas."""

    lines: tuple[PlanLine, ...]
    """The tables, by name within each module."""

    pipeline: str = "sparse_dist"
    """The train pipeline that the plan wants."""

    full_duplex: bool = False
    """Whether all-to-alls send and receive at the same time."""

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a plan file.

        Raises:
            ConfigError: it can't be read, or has another format.
        """
        try:
            return cls.of_json(path.read_text())
        except OSError as error:
            raise ConfigError(f"{path} can't be read: {error.strerror}") from error
        except (ValidationError, MeshError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path} is not a plan file: {error}") from error

    @classmethod
    def of_json(cls, text: str) -> Self:
        """Read a plan file's text."""
        plan = _Plan.model_validate_json(text)
        mesh = Mesh2D(plan.mesh.num_groups, plan.mesh.group_size, plan.mesh.layout)
        lines = tuple(
            _line(name, table, mesh)
            for tables in plan.modules.values()
            for name, table in tables.items()
        )
        return cls(
            mesh=mesh,
            sync=plan.sync.kind if mesh.num_groups > 1 else "",
            lines=lines,
            pipeline=plan.pipeline,
            full_duplex=plan.full_duplex,
        )

    @property
    def mesh_text(self) -> str:
        """The mesh and its replica sync, in words."""
        mesh = self.mesh
        groups = "1 group" if mesh.num_groups == 1 else f"{mesh.num_groups} groups"
        ranks = "1 rank" if mesh.group_size == 1 else f"{mesh.group_size} ranks"
        return f"{groups} of {ranks}" + (f", {self.sync}" if self.sync else "")

    @property
    def words(self) -> str:
        """The whole plan in two or three sentences."""
        kinds = Counter(
            f"{line.sharding_type} ({re.sub(', [0-9,]+ hot$', '', line.exchange)})"
            for line in self.lines
        )
        tables = "; ".join(
            f"{count} {'table' if count == 1 else 'tables'} {kind}"
            for kind, count in kinds.most_common()
        )
        num_hot = sum(line.num_hot for line in self.lines)
        hot = f" Every rank has a copy of {num_hot:,} hot rows." if num_hot else ""
        pipeline = f" Pipeline: {self.pipeline}" + (
            ", with full-duplex all-to-alls." if self.full_duplex else "."
        )
        return f"{self.mesh_text}. {tables}.{hot}{pipeline}"

    def table(self, sizes: Mapping[str, tuple[int, int]] = {}) -> Table:
        """Return the lines as a table, with ``sizes`` (rows, dim) for tables without shards."""
        rows = []
        for line in self.lines:
            num_rows, dim = sizes.get(line.name, (line.num_rows, line.dim))
            size = ("" if num_rows is None else f"{num_rows:,}", "" if dim is None else str(dim))
            rows.append((line.name, *size, line.sharding_type, line.ranks, line.exchange))
        has_peers = any("+" in line.ranks for line in self.lines)
        ranks = "ranks (+: replica peers)" if has_peers else "ranks"
        headings = ("table", "rows", "dim", "type", ranks, "exchange")
        return Table(headings, rows, words=("table", "type", ranks, "exchange"))


def _line(name: str, table: _PlannedTable, mesh: Mesh2D) -> PlanLine:
    shards = table.shards or ()
    if table.num_groups == 1 and mesh.num_groups > 1:
        # The table has one copy in the world, whatever mesh the others have.
        mesh = Mesh2D(1, mesh.world_size, mesh.layout)
    num_hot = len(table.hot_rows or ())
    parts = [
        table.exchange,
        *([f"{table.owners} owners"] if table.owners != "block" else []),
        *([f"in {table.transport}"] if table.transport != "fp32" else []),
        *([f"{num_hot:,} hot"] if num_hot else []),
    ]
    num_rows, dim = (
        max((shard.shard_offsets[way] + shard.shard_sizes[way] for shard in shards), default=None)
        for way in (0, 1)
    )
    return PlanLine(
        name=name,
        num_rows=num_rows,
        dim=dim,
        sharding_type=table.sharding_type,
        ranks=_ranks(mesh, table.ranks or ()),
        exchange=", ".join(parts),
        num_hot=num_hot,
    )


def _ranks(mesh: Mesh2D, shard_indices: Sequence[int]) -> str:
    shown = [
        "+".join(map(str, mesh.replica_peers(mesh.rank_at(0, index))))
        for index in shard_indices[:_MAX_RANKS_SHOWN]
    ]
    rest = len(shard_indices) - len(shown)
    return "  ".join([*shown, *([f"and {rest} more"] if rest else [])])


@dataclass(frozen=True, kw_only=True)
class RunPart:
    """One run's files."""

    name: str
    """The run's name in the config."""

    config: Mapping[str, Any]
    """The run's config section."""

    record: RunRecord | None
    """The run's figures; `None` before it ends."""

    curve: tuple[StepsTrained, ...]
    """The steps trained so far, a few at a time."""

    evaluations: tuple[Evaluation, ...]
    """The evaluations so far."""

    plan: RunPlan | None
    """The plan; `None` before the run begins."""

    explanation: str
    """The reason for the plan, in words; empty without a search by cost."""

    splits: tuple[RankSplit, ...]
    """Each rank's mean step by phase, over the steps that were traced last."""

    @property
    def reason(self) -> str:
        """Where the plan comes from, in a sentence."""
        if self.explanation:
            return self.explanation.split("\n\n")[0]
        if self.config.get("stock"):
            return "TorchRec's own planner chose it, and TorchRec alone trains."
        if path := self.config.get("plan"):
            return f"It was read from {path}."
        return (
            "The config gives the mesh and the exchange, and the planner placed the tables without "
            "predicting steps: for that, give the run a calibration."
        )

    @property
    def state(self) -> str:
        """The run's progress, in words."""
        if self.record is not None:
            return self.record.ending or "finished"
        return "not finished" if self.plan is not None else "not begun"


@dataclass(frozen=True, kw_only=True)
class RunContents:
    """A training program's files."""

    folder: Path
    """The files' folder."""

    config: Mapping[str, Any]
    """The config."""

    config_text: str
    """The config as TOML."""

    record: TrainRecord | None
    """The record with finished runs; `None` before the first ends."""

    runs: tuple[RunPart, ...]
    """The runs, in config order."""

    benches: tuple[BenchResult, ...]
    """The benchmarks whose results ``bench --output`` wrote into the folder."""

    @classmethod
    def read(cls, folder: str | Path) -> Self:
        """Read a training program's files, also while it trains.

        Raises:
            ConfigError: there is no such folder, it has no config or neither a record nor a run's
                progress, or a file has another format; the error names it.
        """
        folder = Path(folder)
        if not folder.is_dir():
            raise ConfigError(f"there is no folder {folder}; {_REMEDY}")
        text, config = _read_config(folder / _CONFIG)
        record = _read_record(folder / _RECORD)
        parts = tuple(
            _read_run(folder / name, section, None if record is None else record.find(name))
            for name, section in config["runs"].items()
        )
        if record is None and not any(part.curve or part.evaluations for part in parts):
            raise ConfigError(
                f"{folder} has no {_RECORD}, and no run has reported yet; {_REMEDY}, once it has "
                "trained loop.report_every steps"
            )
        benches = tuple(_read_benches(folder))
        return cls(
            folder=folder,
            config=config,
            config_text=text,
            record=record,
            runs=parts,
            benches=benches,
        )

    @property
    def num_ranks(self) -> int | None:
        """The number of ranks that trained; `None` before that is known."""
        if self.record is not None:
            return self.record.world_size
        return next((run.plan.mesh.world_size for run in self.runs if run.plan is not None), None)

    @property
    def finite_metrics(self) -> tuple[str, ...]:
        """Every metric that an evaluation has a finite value for, once."""
        metrics = [part.metrics for run in self.runs for part in run.evaluations]
        names = (name for part in metrics for name, value in part.items() if math.isfinite(value))
        return tuple(dict.fromkeys(names))

    @property
    def metric(self) -> str:
        """The metric that compares evaluations: the config's, or else the model's."""
        if named := self.config["loop"].get("metric"):
            return named
        metrics = [
            metric for run in self.runs for part in run.evaluations[:1] for metric in part.metrics
        ]
        return "ne" if "auc" in metrics else next(reversed(metrics), "loss")


def _read_config(path: Path) -> tuple[str, dict[str, Any]]:
    try:
        text = path.read_text()
        config = tomllib.loads(text)
    except OSError as error:
        raise ConfigError(f"{path} can't be read: {error.strerror}; {_REMEDY}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not TOML: {error}") from error
    for name in ("data", "model", "loop", "runs"):
        if not isinstance(config.get(name), dict):
            raise ConfigError(f"{path} isn't a train config: it has no section {name}; {_REMEDY}")
    return text, config


def _read_record(path: Path) -> TrainRecord | None:
    if not path.exists():
        return None
    try:
        content = json.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"{path} can't be read: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from error
    written = content.get("format") if isinstance(content, dict) else None
    if written not in range(1, TRAIN_RECORD_FORMAT + 1):
        raise ConfigError(
            f"{path} has format={written!r}, and this version reads 1 to {TRAIN_RECORD_FORMAT}; "
            "use the version of torchrec-2dsp that wrote it"
        )
    return TrainRecord.load(path)


def _read_benches(folder: Path) -> Iterator[BenchResult]:
    """Yield the benchmark results among a folder's files, by name."""
    for path in sorted(folder.glob("*.json")):
        try:
            content = json.loads(path.read_text())
        except (OSError, ValueError):
            continue  # Whatever it is, neither train nor bench wrote it there.
        if isinstance(content, dict) and {"setting", "contestants"} <= content.keys():
            yield BenchResult.load(path)


def _read_run(folder: Path, section: Mapping[str, Any], record: RunRecord | None) -> RunPart:
    """Read a run's own folder; its record counts unless the run is being trained again."""
    progress = read_progress(folder)
    if progress and not progress[-1].is_over:
        record = None
    explanation, plan = folder / "explanation.txt", folder / "plan.json"
    points = tuple(line.point for line in progress if line.point is not None)
    evaluations = tuple(line.evaluation for line in progress if line.evaluation is not None)
    return RunPart(
        name=folder.name,
        config=section,
        record=record,
        curve=points if record is None else record.curve,
        evaluations=evaluations if record is None else record.evaluations,
        plan=RunPlan.read(plan) if plan.exists() else None,
        explanation=explanation.read_text().strip() if explanation.exists() else "",
        splits=next((line.traced for line in reversed(progress) if line.traced), ()),
    )
