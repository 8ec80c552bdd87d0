"""`RunContents`: the files in a training program's folder, run by run."""

import json
import math
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

from pydantic import ConfigDict

from torchrec_2dsp.errors import ConfigError
from torchrec_2dsp.mesh import Mesh2D
from torchrec_2dsp.programs.bench.results import BenchResult
from torchrec_2dsp.programs.config.section import JsonFile, Section
from torchrec_2dsp.programs.traces import RankSplit
from torchrec_2dsp.programs.train.record import (
    PROGRESS_FILE,
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


class _Part(Section):
    """A part of a plan file, with the keys that a page shows."""

    model_config = ConfigDict(extra="ignore")


class _Shard(_Part):
    shard_offsets: tuple[int, int]
    shard_sizes: tuple[int, int]


class _Sync(_Part):
    kind: str


class PlannedTable(_Part):
    """One table in a plan."""

    sharding_type: str
    ranks: tuple[int, ...] | None = None
    shards: tuple[_Shard, ...] | None = None
    exchange: str = "pooled"
    owners: str = "block"
    transport: str = "fp32"
    stored_as: str = "plain"
    hot_rows: tuple[int, ...] | None = None
    num_groups: int | None = None

    @property
    def size(self) -> tuple[int | None, int | None]:
        """The table's rows and its dimension, if the plan has them."""
        num_rows, dim = (
            max(
                (shard.shard_offsets[way] + shard.shard_sizes[way] for shard in self.shards or ()),
                default=None,
            )
            for way in (0, 1)
        )
        return num_rows, dim

    @property
    def type_text(self) -> str:
        """The sharding type, as plan explanations name it: "table-wise" for "2d_table_wise"."""
        return self.sharding_type.removeprefix("2d_").replace("_", "-")

    @property
    def exchange_text(self) -> str:
        """The exchange, with its owners and wire format where these aren't TorchRec's."""
        owners = "" if self.owners == "block" else f", {self.owners} owners"
        transport = "" if self.transport == "fp32" else f", in {self.transport}"
        stored_as = "" if self.stored_as == "plain" else f", stored as {self.stored_as}"
        return f"{self.exchange}{owners}{transport}{stored_as}"

    @property
    def num_hot(self) -> int:
        """The number of rows that every rank has a copy of."""
        return len(self.hot_rows or ())


class RunPlan(JsonFile):
    """A run's plan file, read without TorchRec."""

    model_config = ConfigDict(extra="ignore")
    what_it_is: ClassVar[str] = "a plan file"

    mesh: Mesh2D
    """The groups and their ranks."""

    sync: _Sync

    modules: dict[str, dict[str, PlannedTable]]
    """The tables by name, within each module."""

    pipeline: str = "sparse_dist"
    """The plan's train pipeline."""

    full_duplex: bool = False
    """True if all-to-alls send and receive at the same time."""

    @property
    def tables(self) -> list[tuple[str, PlannedTable]]:
        """All modules' tables, with their names."""
        return [named for tables in self.modules.values() for named in tables.items()]

    @property
    def sync_kind(self) -> str:
        """The replica sync; empty without replicas."""
        return self.sync.kind if self.mesh.num_groups > 1 else ""

    @property
    def words(self) -> str:
        """The whole plan in two or three sentences."""
        mesh = self.mesh
        groups = "1 group" if mesh.num_groups == 1 else f"{mesh.num_groups} groups"
        ranks = "1 rank" if mesh.group_size == 1 else f"{mesh.group_size} ranks"
        sync = f", {self.sync_kind}" if self.sync_kind else ""
        kinds = Counter(f"{table.type_text} ({table.exchange_text})" for _, table in self.tables)
        tables = "; ".join(
            f"{count} {'table' if count == 1 else 'tables'} {kind}"
            for kind, count in kinds.most_common()
        )
        num_hot = sum(table.num_hot for _, table in self.tables)
        hot = f" Every rank has a copy of {num_hot:,} hot rows." if num_hot else ""
        duplex = ", with full-duplex all-to-alls" if self.full_duplex else ""
        pipeline = "none" if self.pipeline == "base" else self.pipeline.replace("_", " ")
        return f"{groups} of {ranks}{sync}. {tables}.{hot} Pipeline: {pipeline}{duplex}."

    def table(self, sizes: Mapping[str, tuple[int, int]] = {}) -> Table:
        """Show the plan table by table, with ``sizes`` (rows, dim) for tables without shards."""
        rows = []
        for name, table in self.tables:
            num_rows, dim = sizes.get(name, table.size)
            size = ("" if num_rows is None else f"{num_rows:,}", "" if dim is None else str(dim))
            hot = f", {table.num_hot:,} hot" if table.num_hot else ""
            exchange = table.exchange_text + hot
            rows.append((name, *size, table.type_text, self._ranks(table), exchange))
        has_peers = any("+" in ranks for *_, ranks, _ in rows)
        ranks = "ranks (+: replica peers)" if has_peers else "ranks"
        headings = ("table", "rows", "dim", "type", ranks, "exchange")
        return Table(headings, rows, words=("table", "type", ranks, "exchange"))

    def _ranks(self, table: PlannedTable) -> str:
        """Name the ranks that hold a table; a plus joins replica peers."""
        mesh = self.mesh
        if table.num_groups == 1:
            # The table has one copy in the world, for any mesh of the others.
            mesh = Mesh2D(1, mesh.world_size, mesh.layout)
        ranks = table.ranks or ()
        shown = [
            "+".join(map(str, mesh.replica_peers(mesh.rank_at(0, index))))
            for index in ranks[:_MAX_RANKS_SHOWN]
        ]
        rest = len(ranks) - len(shown)
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
        """The plan's source, in a sentence."""
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
        record = TrainRecord.load(folder / _RECORD) if (folder / _RECORD).exists() else None
        parts = tuple(
            _read_run(folder / name, section, None if record is None else record.find(name))
            for name, section in config["runs"].items()
        )
        if not any(part.record for part in parts):
            record = None  # All its runs are being trained again.
        if record is None and not any(part.curve or part.evaluations for part in parts):
            raise ConfigError(
                f"{folder} has no finished run, and no run has reported yet; {_REMEDY}, once it "
                "has trained loop.report_every steps"
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


def _read_benches(folder: Path) -> Iterator[BenchResult]:
    """Yield the benchmark results among a folder's files, by name."""
    for path in sorted(folder.glob("*.json")):
        try:
            content = json.loads(path.read_text())
        except (OSError, ValueError):
            continue  # Neither train nor bench wrote it.
        if isinstance(content, dict) and {"setting", "contestants"} <= content.keys():
            yield BenchResult.load(path)


def _read_run(folder: Path, section: Mapping[str, Any], record: RunRecord | None) -> RunPart:
    """Read a run's own folder; its record counts unless the run is being trained again."""
    progress = read_progress(folder)
    is_over = progress[-1].is_over if progress else not (folder / PROGRESS_FILE).exists()
    if not is_over:
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
        plan=RunPlan.load(plan) if plan.exists() else None,
        explanation=explanation.read_text().strip() if explanation.exists() else "",
        splits=next((line.traced for line in reversed(progress) if line.traced), ()),
    )
