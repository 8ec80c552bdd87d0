"""`Explanation`: the reasons for a plan, by table and by rank; printed, it is a report."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from textwrap import fill

import numpy as np

from torchrec_2dsp.codecs.rows import Transport
from torchrec_2dsp.cost.loads import Ranks, load_weights
from torchrec_2dsp.cost.model import CostSetting, MemoryCost
from torchrec_2dsp.cost.step_cost import NamedParts, StepCost
from torchrec_2dsp.cost.workload import ASSUMED_SKEW
from torchrec_2dsp.planner.search.choices import Choice
from torchrec_2dsp.planner.search.placement import Descent, MeshPlacement, SearchResult, Tried
from torchrec_2dsp.planner.search.space import Room, Space
from torchrec_2dsp.report.charts import PALETTE, Axis, BarChart, Bars, Line, LineChart
from torchrec_2dsp.report.page import Page
from torchrec_2dsp.report.table import Table

_HEADINGS = (
    *("table", "rows", "dim", "sharded", "exchange"),
    *("hot rows", "MB", "ms", "instead", "+ ms"),
)
_WORDS = (
    *("table", "sharded", "exchange", "instead"),
    *("part of a step", "kept by the fullest rank", "alternatives", ""),
)
"""Headings of columns without numbers."""
_WIDTH = 100
_BAR = 30
_MAX_TABLES = 60
_MAX_BARS = 50
_MAX_RANKS = 16
_MAX_COMPARED = 500
"""The number of tables, longest first, that are compared with their other choices."""
_WORTH_SAYING = 1.1
"""The smallest gain from rounding that is worth a sentence."""


@dataclass(frozen=True)
class TableLine:
    """One table of a plan."""

    name: str
    num_rows: int
    dim: int
    choice: Choice

    hot_share: float
    """The share of lookups that hit hot rows."""

    sent_bytes: float
    """Bytes that a rank sends in a step."""

    seconds: float
    """Seconds that the table alone adds to a step, without shared and hidden ones."""

    runner_up: Choice | None = None
    """The second best choice; `None` if there is no other, or none was rated."""

    lost_by_s: float = 0.0
    """Seconds that the second best choice would add to the step, as the search rates steps."""

    is_once: bool = False
    """True if it has one copy in the world, besides tables with one in each group."""

    @property
    def way(self) -> str:
        """The sharding type and exchange, in words."""
        kind = self._kind
        return f"{kind}, {_exchange(self.choice)} exchange" if self.choice.message_type else kind

    @property
    def _kind(self) -> str:
        return _kind(self.choice) + (", one copy" if self.is_once else "")

    def cells(self) -> Sequence[str]:
        """Return the line's cells, in words."""
        choice, other = self.choice, self.runner_up
        return (
            self.name,
            f"{self.num_rows:,}",
            str(self.dim),
            self._kind,
            _exchange(choice) if choice.message_type else "-",
            f"{choice.num_hot:,} ({self.hot_share:.0%})" if choice.num_hot else "-",
            f"{self.sent_bytes / 1e6:.3f}",
            milliseconds(self.seconds),
            "-" if other is None else _difference(choice, other),
            "-" if other is None else milliseconds(self.lost_by_s),
        )


def milliseconds(seconds: float) -> str:
    """Format seconds in milliseconds, as reports show them."""
    return f"{1e3 * seconds:,.2f}"


def _exchange(choice: Choice) -> str:
    is_exact = choice.transport is Transport.FP32
    return choice.exchange.value + ("" if is_exact else f" {choice.transport.value}")


def _kind(choice: Choice) -> str:
    parts = f" / {choice.column_shards}" if choice.column_shards > 1 else ""
    memory = ", uvm" if choice.in_host_memory else ""
    return choice.kind.value.replace("_", "-") + parts + memory


def _difference(chosen: Choice, other: Choice) -> str:
    exchange = _exchange(other)
    if other.kind is chosen.kind and other.kernel == chosen.kernel:
        return exchange
    return _kind(other) + ("" if exchange == "pooled" else f", {exchange}")


@dataclass(frozen=True)
class Explanation:
    """The reasons for a plan; see `Planner2D.explain`."""

    setting: CostSetting
    """The mesh, and everything else that its cost depends on."""

    where: str
    """The mesh, and the number of tables with one copy besides it."""

    cost: StepCost
    """The step's cost, part by part."""

    memory: MemoryCost
    """The fullest rank's memory."""

    gain_by_int4: float
    """The factor by which rows in 4 bits would speed up a step; 1 if they are allowed."""

    tables: Sequence[TableLine]
    """A line for each table, longest first."""

    busy_by_rank: Ranks
    """Seconds for which tables keep each rank of a group busy in a step."""

    ids_by_rank: Ranks
    """Rows that each rank of a group looks up in a step, counted per id."""

    bytes_by_rank: Ranks
    """Bytes on each rank."""

    room: Room
    """The memory that each rank has for tables and buffers."""

    meshes: Sequence[tuple[str, float, float]]
    """The meshes on which tables were placed, with their steps and the fullest rank's bytes; the
    first is the plan's."""

    front: Sequence[Tried]
    """The attempts that no other attempt beats in both time and memory."""

    torchrec_s: float | None = None
    """The predicted step of the plan by TorchRec's planner; `None` if it wasn't requested."""

    def __str__(self) -> str:
        """Return the report, which fits 100 columns."""
        return "\n\n".join(
            part.text(_WIDTH) if isinstance(part, Table) else fill(part, _WIDTH)
            for part in self._parts()
        )

    @property
    def headline(self) -> str:
        """The plan in a sentence."""
        setting = self.setting
        return (
            f"{self.where} on {setting.calibration.hardware.name}, {setting.sync}, batch "
            f"{setting.workload.batch_size} per rank: {milliseconds(self.cost.total_s)} ms per step"
        )

    @property
    def verdict(self) -> str:
        """The comparison with TorchRec's plan; empty if it wasn't requested."""
        if self.torchrec_s is None:
            return ""
        sentence = (
            "TorchRec's planner, given the same bandwidths, makes a plan for one group that is "
            f"predicted to take {milliseconds(self.torchrec_s)} ms per step"
        )
        if not self.cost.total_s:
            return f"{sentence}."
        return f"{sentence}: this plan is {self.torchrec_s / self.cost.total_s:.2f} times as fast."

    @property
    def caveat(self) -> str:
        """The gaps in the numbers, as a sentence; empty if there are none."""
        unknown = self.setting.workload.num_without_access
        if not unknown:
            return ""
        skews = {work.skew for work in self.setting.workload.tables.values() if not work.access}
        if skews == {0.0}:
            assumed = "equally used rows, which makes row exchange look slower than it is"
        elif len(skews) == 1:
            assumed = f"a Zipf exponent of {min(skews):.3g} and no hot rows"
        else:
            assumed = f"Zipf exponents of {min(skews):.2f} to {max(skews):.2f} and no hot rows"
        remedy = "; parallelize(sample=...) measures it" if skews == {ASSUMED_SKEW} else ""
        tables = f"{unknown:,} of {len(self.tables):,} tables"
        return f"No access statistics for {tables}: assuming {assumed}{remedy}."

    @property
    def advice(self) -> str:
        """The largest gain that isn't allowed, as a sentence; empty if there is none."""
        if self.gain_by_int4 < _WORTH_SAYING:
            return ""
        return (
            f"Rows in int4 would make a step {self.gain_by_int4:.1f} times as fast, with rounding: "
            "precision='any' of parallelize and Planner2D allows it."
        )

    def summary(self) -> Iterator[str]:
        """Yield what was chosen, the predicted step, and what else would help, a line each."""
        ways = Counter(line.way for line in self.tables)
        chosen = "; ".join(f"{count:,} {way}" for way, count in ways.most_common())
        yield f"torchrec_2dsp: {chosen or 'no tables'}; {self.where}"
        longest = sorted(self.cost.parts(), key=lambda part: -part[1])[:3]
        parts = ", ".join(
            f"{milliseconds(part)} {name.replace('_', ' ')}" for name, part in longest
        )
        yield f"  a step should take {milliseconds(self.cost.total_s)} ms, with {parts}"
        for where, seconds, _ in self.meshes[1:2]:
            yield f"  next best: {milliseconds(seconds)} ms with {where}"
        yield from (f"  {sentence}" for sentence in (self.advice, self.caveat) if sentence)

    def table_rows(self) -> Table:
        """Return a row for each table: its choice, its time, and the second best choice."""
        return Table(_HEADINGS, [line.cells() for line in self.tables], _WORDS)

    def phase_rows(self) -> Table:
        """Return a row for each part of a step."""
        return _parts_table(("part of a step", "ms"), self.cost, self.cost.total_s, milliseconds)

    def memory_rows(self) -> Table:
        """Return a row for each part of the fullest rank's memory."""
        headings = ("kept by the fullest rank", "GB")
        whole = "all on its GPU" if self.memory.host_memory_bytes else "all"
        return _parts_table(headings, self.memory, self.memory.total_bytes, _gigabytes, whole)

    def rank_rows(self) -> Table:
        """Return a row with the time and memory of each of a group's ranks."""
        longest = float(self.busy_by_rank.max(initial=0.0)) or 1.0
        is_alone = self.setting.mesh.group_size == 1
        rows = [
            (
                "each rank" if is_alone else str(rank),
                milliseconds(busy),
                "#" * round(_BAR * busy / longest),
                _gigabytes(num_bytes),
                f"{num_bytes / self.room.device:.0%}",
            )
            for rank, (busy, num_bytes) in enumerate(
                zip(self.busy_by_rank.tolist(), self.bytes_by_rank.tolist(), strict=True)
            )
        ]
        return Table(("rank of a group", "busy ms", "", "GB", "of capacity"), rows, _WORDS)

    def other_rows(self) -> Table:
        """Return a row for each placement and each attempt on the front, except the plan."""
        others, plan = self.meshes[1:], (str(self.setting), milliseconds(self.cost.total_s))
        placed = [
            (f"{mesh}, placed", milliseconds(seconds), _gigabytes(num_bytes))
            for mesh, seconds, num_bytes in others
        ]
        front = [
            (
                # Its shards haven't been placed; with few tables that may be impossible.
                f"{', '.join(filter(None, (str(point.setting), point.ways)))}, if dealt evenly",
                milliseconds(point.seconds),
                _gigabytes(point.bytes_of_rank),
            )
            for point in self.front
            if (str(point.setting), milliseconds(point.seconds)) != plan
        ]
        return Table(("alternatives", "ms", "GB per rank"), [*placed, *front], _WORDS)

    def write_html(self, path: str | Path, title: str = "Why this plan") -> None:
        """Write the report as one self-contained page with plots.

        Raises:
            ConfigError: plotly is missing.
        """
        self.page(title).write(path)

    def page(self, title: str) -> Page:
        """Lay the report out as a page, without writing it."""
        page = Page(title)
        page.add_text(self.headline)
        for sentence in filter(None, (self.verdict, self.caveat, self.advice)):
            page.add_text(sentence)
        page.add_bars("Parts of a step", parts_chart(self.cost))
        longest = self.tables[:_MAX_BARS]
        page.add_bars(f"The {len(longest)} tables that take longest", _tables_chart(longest))
        page.add_table("All tables", self.table_rows())
        busy = _ranks_chart(1e3 * self.busy_by_rank, "ms")
        page.add_bars("How busy the ranks of a group are", busy, upright=True)
        full = _ranks_chart(self.bytes_by_rank / 1e9, "GB")
        page.add_bars("How full the ranks of a group are", full, upright=True)
        plan = self.cost.total_s, float(self.bytes_by_rank.max(initial=0.0))
        page.add_lines("Time and memory of the alternatives", _front_chart(self.front, plan))
        page.add_table("Memory of the fullest rank", self.memory_rows())
        if (others := self.other_rows()).rows:
            page.add_table("Alternatives", others)
        return page

    def _parts(self) -> Iterator[Table | str]:
        yield self.headline
        tables, ranks = self.table_rows(), self.rank_rows()
        yield replace(tables, rows=tables.rows[:_MAX_TABLES])
        hidden = len(self.tables) - _MAX_TABLES
        if hidden > 0:
            rest = sum(line.seconds for line in self.tables[_MAX_TABLES:])
            yield f"and {hidden:,} more tables, which add {milliseconds(rest)} ms"
        yield from filter(None, (self.verdict, self.caveat, self.advice))
        yield self.phase_rows()
        yield self.memory_rows()
        # The busiest ones, if there are many.
        order = sorted(range(len(ranks.rows)), key=lambda rank: -self.busy_by_rank[rank])
        yield replace(ranks, rows=[ranks.rows[rank] for rank in sorted(order[:_MAX_RANKS])])
        if (others := self.other_rows()).rows:
            yield others


def _gigabytes(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.3f}"


def _parts_table(
    headings: tuple[str, str],
    parts: NamedParts,
    total: float,
    shown: Callable[[float], str],
    whole: str = "all",
) -> Table:
    rows = [(name.replace("_", " "), shown(part)) for name, part in parts.parts() if part]
    return Table(headings, [*rows, (whole, shown(total))], _WORDS)


def parts_chart(cost: StepCost) -> BarChart:
    """Draw bars that each begin where the previous one ends; hidden parts go back."""
    parts = {name.replace("_", " "): 1e3 * seconds for name, seconds in cost.parts() if seconds}
    starts = dict(zip(parts, accumulate(parts.values(), initial=0.0), strict=False))
    total = {"all": 1e3 * cost.total_s}
    added = {name: part_ms for name, part_ms in parts.items() if part_ms > 0}
    hidden = {name: part_ms for name, part_ms in parts.items() if part_ms < 0}
    kinds = (
        ("adds time", added, PALETTE[0]),
        ("is hidden behind other parts", hidden, PALETTE[2]),
        ("the step", total, PALETTE[3]),
    )
    bars = [
        Bars(
            name=name,
            values=values,
            starts={place: starts.get(place, 0.0) for place in values},
            colour=colour,
            hover={place: f"{place}: {value:.2f} ms" for place, value in values.items()},
        )
        for name, values, colour in kinds
        if values
    ]
    return BarChart(bars, places=[*parts, *total], title="ms")


def _tables_chart(tables: Sequence[TableLine]) -> BarChart:
    """Draw a bar for each table, in a colour for each way of sharding."""
    bars = []
    for way in dict.fromkeys(line.way for line in tables):
        lines = [line for line in tables if line.way == way]
        hover = {
            line.name: f"{line.name}, {line.num_rows:,} rows of {line.dim}: "
            f"{1e3 * line.seconds:.3f} ms, {line.sent_bytes / 1e6:.3f} MB sent"
            for line in lines
        }
        lengths = {line.name: 1e3 * line.seconds for line in lines}
        bars.append(Bars(name=way, values=lengths, hover=hover))
    places = [line.name for line in tables]
    return BarChart(bars, places=places, title="ms that a table adds to a step")


def _ranks_chart(numbers: Ranks, unit: str) -> BarChart:
    values = {str(rank): float(number) for rank, number in enumerate(numbers)}
    hover = {rank: f"rank {rank}: {number:.3f} {unit}" for rank, number in values.items()}
    return BarChart([Bars(name=unit, values=values, hover=hover)], places=[*values], title=unit)


def _front_chart(front: Sequence[Tried], plan: tuple[float, float]) -> LineChart:
    """Draw the front; a star marks the plan's seconds and the bytes on its fullest rank."""
    attempts = Line(
        name="dealt evenly",
        x=[point.bytes_of_rank / 1e9 for point in front],
        y=[1e3 * point.seconds for point in front],
        way="steps",
        marker="o",
        hover=[
            f"{point.setting}: {1e3 * point.seconds:.2f} ms, {point.bytes_of_rank / 1e9:.3f} GB"
            for point in front
        ],
    )
    star = Line(name="the plan", x=[plan[1] / 1e9], y=[1e3 * plan[0]], way="points", marker="*")
    return LineChart([attempts, star], x=Axis(title="GB per rank"), y=Axis(title="ms per step"))


def explain(result: SearchResult) -> Explanation:
    """Explain why the search's best placement is best."""
    best = result.placements[0]
    tables, busy, ids = _explained(best, result.room)
    if best.once is not None:
        in_world, busy_in_world, ids_in_world = _explained(best.once, result.room)
        tables += [replace(line, is_once=True) for line in in_world]
        # A position in a group stands for a rank in each group.
        busy, ids = busy + busy_in_world.mean(), ids + ids_in_world.mean()
    return Explanation(
        setting=best.setting,
        where=best.where,
        cost=best.cost,
        memory=best.memory,
        gain_by_int4=result.gain_by_int4,
        tables=sorted(tables, key=lambda line: -line.seconds),
        busy_by_rank=busy,
        ids_by_rank=ids,
        bytes_by_rank=best.bytes_by_rank,
        room=result.room,
        meshes=[
            (placed.where, placed.cost.total_s, float(placed.bytes_by_rank.max(initial=0.0)))
            for placed in result.placements
        ],
        front=pareto_front(result.tried),
    )


def _explained(best: MeshPlacement, room: Room) -> tuple[list[TableLine], Ranks, Ranks]:
    """Return a line for each table, and each rank's busy seconds and ids."""
    space = Space.of(best.candidates, best.setting)
    rough = Descent(space, np.zeros(0), room).sums(best.placement)
    prices = space.prices(rough.loads.mean(axis=1))
    descent = Descent(space, prices, room)
    rated_s = descent.rated_s(best.placement)
    lines = sorted(enumerate(_lines(best, descent)), key=lambda numbered: -numbered[1].seconds)
    compared: list[TableLine] = []
    for place, (table, line) in enumerate(lines):
        others = descent.alternatives(best.placement, table) if place < _MAX_COMPARED else []
        if others:
            choice, seconds = min(others, key=lambda other: other[1])
            line = replace(line, runner_up=choice, lost_by_s=seconds - rated_s)
        compared.append(line)
    ids = load_weights(lookup_ids=1.0, owned_ids=1.0) @ rough.loads
    return compared, np.asarray(prices @ rough.loads, np.float64), ids


def pareto_front(tried: Sequence[Tried]) -> list[Tried]:
    """Return the attempts that none beats in both time and memory, shortest step first."""
    front: list[Tried] = []
    for point in sorted(tried, key=lambda point: (point.seconds, point.bytes_of_rank)):
        if not front or point.bytes_of_rank < front[-1].bytes_of_rank:
            front.append(point)
    return front


def _lines(best: MeshPlacement, descent: Descent) -> Iterator[TableLine]:
    sent = best.setting.sent_bytes()
    for table, (candidate, choice) in enumerate(
        zip(best.candidates, best.placement.choices, strict=True)
    ):
        loads = descent.sums_of(best.placement, table).loads.mean(axis=1)
        yield TableLine(
            name=candidate.name,
            num_rows=candidate.work.num_rows,
            dim=candidate.work.dim,
            choice=choice,
            hot_share=candidate.work.hot_share(choice.num_hot),
            sent_bytes=float(sent @ loads),
            seconds=float(descent.prices @ loads),
        )
