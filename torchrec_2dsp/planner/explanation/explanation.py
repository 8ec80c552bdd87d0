"""`Explanation`: why a plan is as it is, as numbers; printed, it is a report."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from textwrap import fill

from torchrec_2dsp.cost.loads import Ranks
from torchrec_2dsp.cost.memory import MemoryCost
from torchrec_2dsp.cost.model import CostSetting
from torchrec_2dsp.cost.step_cost import StepCost
from torchrec_2dsp.planner.explanation.plots import (
    MAX_BARS,
    front_chart,
    parts_chart,
    ranks_chart,
    tables_chart,
)
from torchrec_2dsp.planner.explanation.table_line import (
    HEADINGS,
    TableLine,
    milliseconds,
)
from torchrec_2dsp.planner.search.result import Tried
from torchrec_2dsp.report.page import Page
from torchrec_2dsp.report.table import Table

_WIDTH = 100
_BAR = 30
_MAX_TABLES = 60
_MAX_RANKS = 16
_WORTH_SAYING = 0.9
"""The share of its time that a step must be cut to for advice: sending beside computing takes
processor time, too, which isn't predicted."""


@dataclass(frozen=True)
class Explanation:
    """The reasons for a plan; see `Planner2D.explain`."""

    setting: CostSetting
    """The mesh, and all else that its cost depends on."""

    where: str
    """The mesh, and how many tables have one copy beside it."""

    cost: StepCost
    """The cost of a step, part by part."""

    memory: MemoryCost
    """The memory of the fullest rank."""

    prefetching: StepCost | None
    """A step in which rows travel beside computing; none if they do already or can't."""

    tables: Sequence[TableLine]
    """A line for each table, the longest first."""

    busy_by_rank: Ranks
    """Seconds for which each rank of a group is busy with tables in a step."""

    bytes_by_rank: Ranks
    """The bytes that each rank keeps."""

    room: float
    """Bytes that a rank has for tables and buffers."""

    meshes: Sequence[tuple[str, float]]
    """The meshes on which tables were placed, and their steps; the first is the plan."""

    front: Sequence[Tried]
    """The attempts that no other beats both in time and in memory."""

    torchrec_s: float | None = None
    """A step of the plan that TorchRec's planner makes, predicted alike; none if nobody asked."""

    def __str__(self) -> str:
        """The report, which fits 100 columns."""
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
        """How the plan compares with TorchRec's; empty if nobody asked."""
        if self.torchrec_s is None:
            return ""
        sentence = (
            "TorchRec's planner, told the same bandwidths, makes a plan for one group that is "
            f"predicted to take {milliseconds(self.torchrec_s)} ms per step"
        )
        if not self.cost.total_s:
            return f"{sentence}."
        return f"{sentence}: this plan is {self.torchrec_s / self.cost.total_s:.2f} times as fast."

    @property
    def caveat(self) -> str:
        """What the numbers leave out, as a sentence; empty if they leave nothing out."""
        unknown = self.setting.workload.num_without_access
        if not unknown:
            return ""
        return (
            f"Nothing was counted for {unknown:,} of {len(self.tables):,} tables: all their "
            "rows count as used alike, which makes row exchange dearer than it is."
        )

    @property
    def advice(self) -> str:
        """A way to shorten a step of the same plan, as a sentence; empty if none is known."""
        if self.prefetching is None:
            return ""
        now_s, then_s = self.cost.total_s, self.prefetching.total_s
        if then_s > _WORTH_SAYING * now_s:
            return ""
        return (
            f"Trained by TrainPipelineRowPrefetch (`prefetch_rows = true` of a run), whose rows "
            f"travel beside computing, a step of this plan should take {milliseconds(then_s)} ms "
            f"instead of {milliseconds(now_s)}."
        )

    def table_rows(self) -> Table:
        """A row for each table: how it is sharded, what that takes, and what else it could be."""
        return Table(HEADINGS, [line.cells() for line in self.tables], _WORDS)

    def phase_rows(self) -> Table:
        """The parts of a step."""
        rows = [
            (name.replace("_", " "), milliseconds(seconds))
            for name, seconds in self.cost.parts()
            if seconds
        ]
        rows.append(("all", milliseconds(self.cost.total_s)))
        return Table(("part of a step", "ms"), rows, _WORDS)

    def memory_rows(self) -> Table:
        """The rows of the fullest rank's memory."""
        rows = [
            (name.replace("_", " "), f"{size / 1e9:.3f}")
            for name, size in self.memory.parts()
            if size
        ]
        rows.append(("all", f"{self.memory.total_bytes / 1e9:.3f}"))
        return Table(("kept by the fullest rank", "GB"), rows, _WORDS)

    def rank_rows(self) -> Table:
        """How busy and how full the ranks of a group are."""
        longest = float(self.busy_by_rank.max(initial=0.0)) or 1.0
        rows = [
            (
                str(rank),
                milliseconds(busy),
                "#" * round(_BAR * busy / longest),
                f"{num_bytes / 1e9:.3f}",
                f"{num_bytes / self.room:.0%}",
            )
            for rank, (busy, num_bytes) in enumerate(
                zip(self.busy_by_rank.tolist(), self.bytes_by_rank.tolist(), strict=True)
            )
        ]
        return Table(("rank of a group", "busy ms", "", "GB", "of the room"), rows, _WORDS)

    def other_rows(self) -> Table:
        """A row for each placement, and for each attempt that nothing beats in time and memory."""
        placed = [(f"{mesh}, placed", milliseconds(seconds), "") for mesh, seconds in self.meshes]
        front = [
            (
                f"{point.mesh}, {point.ways or 'dealt evenly'}",
                milliseconds(point.seconds),
                f"{point.bytes_of_rank / 1e9:.3f}",
            )
            for point in self.front
        ]
        return Table(("what else was found", "ms", "GB per rank"), [*placed, *front], _WORDS)

    def write_html(self, path: str | Path, title: str = "Why this plan") -> None:
        """Write the report as one page with plots, which needs nothing else to be read.

        Raises:
            ConfigError: plotly is missing.
        """
        self.page(title).write(path)

    def page(self, title: str) -> Page:
        """The report as a page that isn't written yet."""
        page = Page(title)
        page.add_text(self.headline)
        for sentence in filter(None, (self.verdict, self.caveat, self.advice)):
            page.add_text(sentence)
        page.add_bars("Parts of a step", parts_chart(self.cost))
        longest = self.tables[:MAX_BARS]
        page.add_bars(f"The {len(longest)} tables that take longest", tables_chart(longest))
        page.add_table("All tables", self.table_rows())
        busy = ranks_chart(1e3 * self.busy_by_rank, "ms")
        page.add_bars("How busy the ranks of a group are", busy, upright=True)
        full = ranks_chart(self.bytes_by_rank / 1e9, "GB")
        page.add_bars("How full the ranks of a group are", full, upright=True)
        plan = self.cost.total_s, float(self.bytes_by_rank.max(initial=0.0))
        page.add_lines("Time and memory of what else was found", front_chart(self.front, plan))
        page.add_table("Memory of the fullest rank", self.memory_rows())
        page.add_table("What else was found", self.other_rows())
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
        # The busiest ones, where there are many.
        order = sorted(range(len(ranks.rows)), key=lambda rank: -self.busy_by_rank[rank])
        yield replace(ranks, rows=[ranks.rows[rank] for rank in sorted(order[:_MAX_RANKS])])
        yield self.other_rows()


_WORDS = (
    *("table", "sharded", "exchange", "instead"),
    *("part of a step", "kept by the fullest rank", "what else was found", ""),
)
"""Headings of columns that have no numbers."""
