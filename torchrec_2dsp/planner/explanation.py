"""`Explanation`: why a plan is as it is, as numbers; printed, it is a report."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from io import StringIO

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from torchrec_2dsp.cost.loads import Ranks
from torchrec_2dsp.cost.model import Setting
from torchrec_2dsp.cost.step_cost import StepCost
from torchrec_2dsp.planner.search.choices import Choice
from torchrec_2dsp.planner.search.meshes import Tried

_WIDTH = 100
_BAR = 30
_MAX_TABLES = 60
_MAX_RANKS = 16


@dataclass(frozen=True)
class TableLine:
    """One table of a plan."""

    name: str
    num_rows: int
    dim: int

    choice: Choice
    """How it is sharded, and how its rows travel."""

    hot_share: float
    """Of its lookups, those of hot rows."""

    sent_bytes: float
    """By a rank in a step."""

    seconds: float
    """That it adds to a step. What tables share, and what is hidden, is in none of them."""

    runner_up: Choice | None = None
    """What would be best in its place; `None` without anything else, or where nobody looked."""

    lost_by_s: float = 0.0
    """By how much the step would be longer with it."""


@dataclass(frozen=True)
class Explanation:
    """Of a plan; see `Planner2D.explain`."""

    setting: Setting
    """The mesh, and all else that its cost depends on."""

    cost: StepCost
    """Of a step, part by part."""

    tables: Sequence[TableLine]
    """The longest first."""

    busy_by_rank: Ranks
    """Seconds for which each rank of a group is busy with tables in a step."""

    bytes_by_rank: Ranks
    """That it keeps."""

    room: float
    """Bytes that it has for them."""

    meshes: Sequence[tuple[str, float]]
    """What was placed, and its step; the first is the plan."""

    front: Sequence[Tried]
    """Of all that was tried, what nothing else beats both in time and in memory."""

    def __str__(self) -> str:
        """The report, which fits 100 columns."""
        file = StringIO()
        console = Console(file=file, width=_WIDTH, highlight=False)
        for part in self._parts():
            console.print(part)
        return "\n".join(line.rstrip() for line in file.getvalue().splitlines())

    def _parts(self) -> Iterator[Table | Text | str]:
        setting = self.setting
        yield Text(
            f"{setting.mesh} on {setting.calibration.hardware.name}, {setting.sync}, batch "
            f"{setting.workload.batch_size} per rank: {_ms(self.cost.total_s)} ms per step"
        )
        yield self._tables()
        hidden = len(self.tables) - _MAX_TABLES
        if hidden > 0:
            rest = sum(one.seconds for one in self.tables[_MAX_TABLES:])
            yield f"and {hidden:,} more tables, which add {_ms(rest)} ms"
        unknown = setting.workload.num_without_access
        if unknown:
            yield (
                f"Nothing was counted for {unknown:,} of {len(self.tables):,} tables: all their "
                "rows count as used alike, which makes row exchange dearer than it is."
            )
        yield self._phases()
        yield self._ranks()
        yield self._others()

    def _tables(self) -> Table:
        found = _table(
            "table", "rows", "dim", "sharded", "exchange", "hot rows", "MB", "ms", "instead", "+ ms"
        )
        for one in self.tables[:_MAX_TABLES]:
            hot = f"{one.choice.num_hot:,} ({one.hot_share:.0%})" if one.choice.num_hot else "-"
            other = one.runner_up
            found.add_row(
                Text(one.name),
                f"{one.num_rows:,}",
                str(one.dim),
                _kind(one.choice),
                one.choice.exchange.value if one.choice.message_type else "-",
                hot,
                f"{one.sent_bytes / 1e6:.3f}",
                _ms(one.seconds),
                "-" if other is None else _in_place(one.choice, other),
                "-" if other is None else _ms(one.lost_by_s),
            )
        return found

    def _phases(self) -> Table:
        found = _table("part of a step", "ms")
        for name, seconds in self.cost.parts():
            if seconds:
                found.add_row(name.replace("_", " "), _ms(seconds))
        found.add_row("all", _ms(self.cost.total_s))
        return found

    def _ranks(self) -> Table:
        found = _table("rank of a group", "busy ms", "", "GB", "of the room")
        longest = float(self.busy_by_rank.max(initial=0.0)) or 1.0
        order = sorted(range(len(self.busy_by_rank)), key=lambda rank: -self.busy_by_rank[rank])
        # The busiest ones, where there are many.
        for rank in sorted(order[:_MAX_RANKS]):
            busy, kept = float(self.busy_by_rank[rank]), float(self.bytes_by_rank[rank])
            found.add_row(
                str(rank),
                _ms(busy),
                "#" * round(_BAR * busy / longest),
                f"{kept / 1e9:.3f}",
                f"{kept / self.room:.0%}",
            )
        return found

    def _others(self) -> Table:
        found = _table("what else was found", "ms", "GB per rank")
        for mesh, seconds in self.meshes:
            found.add_row(f"{mesh}, placed", _ms(seconds), "")
        for one in self.front:
            found.add_row(
                f"{one.mesh}, dealt evenly", _ms(one.seconds), f"{one.bytes_of_rank / 1e9:.3f}"
            )
        return found


def _table(*headings: str) -> Table:
    found = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    words = ("table", "sharded", "exchange", "instead", "part of a step", "what else was found", "")
    for heading in headings:
        found.add_column(heading, justify="left" if heading in words else "right", overflow="fold")
    return found


def _kind(choice: Choice) -> str:
    parts = f" / {choice.column_shards}" if choice.column_shards > 1 else ""
    return choice.kind.value.replace("_", " ") + parts


def _in_place(chosen: Choice, other: Choice) -> str:
    """What is other in it."""
    if other.kind is chosen.kind:
        return other.exchange.value
    exchange = other.exchange.value
    return _kind(other) + ("" if exchange == "pooled" else f", {exchange}")


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:,.2f}"
