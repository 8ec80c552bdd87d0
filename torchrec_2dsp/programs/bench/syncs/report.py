"""`sync_report`: a result of `bench-sync` as a page, and its plot."""

import statistics
from collections.abc import Sequence
from itertools import cycle
from pathlib import Path

from torchrec_2dsp.programs.bench.syncs.results import SyncBenchResult, SyncTimes
from torchrec_2dsp.report.charts import MARKERS, Axis, Line, LineChart, draw_lines
from torchrec_2dsp.report.table import Table

_HEADINGS = (
    *("changed rows", "sync", "min ms", "median ms", "max ms"),
    *("x reference", "MB", "x bytes", "noting ms"),
)


def sync_report(result: SyncBenchResult, *, plot: str = "", data: str = "") -> str:
    """A page on one result.

    Args:
        result: the numbers.
        plot: where the page finds its plot, if there is one.
        data: where it finds the JSON.
    """
    setting = result.setting
    speeds = [
        f"{rate * 8e-9:.2f} Gbit/s {where}" for where, rate in setting.link_speeds.items() if rate
    ]
    facts = {
        "When": f"{setting.when} UTC",
        "Ranks": f"{setting.hosts} hosts x {setting.ranks_per_host}",
        "Network": setting.network,
        "A rank sends": ", ".join(speeds),
        "Cluster": setting.cluster,
        "Machine": ", ".join(setting.machine.values()),
        "Versions": ", ".join(f"{name} {version}" for name, version in setting.versions.items()),
        "Repeat it": f"`{setting.command}`",
        "Numbers": f"[{data}]({data})" if data else "",
    }
    parts = [f"# {setting.title}", "\n".join(f"- {k}: {v}" for k, v in facts.items() if v)]
    if plot:
        parts.append(f"![Time by share of changed rows]({plot})")
    parts.append(_HOW_TO_READ.format(reference=result.reference))
    for num_groups, shard_mib in shards_of(result):
        parts.append(f"## {num_groups} copies of {shard_mib:g} MiB")
        parts.append(table_of_shard(result, num_groups, shard_mib).markdown())
    return "\n\n".join(parts) + "\n"


_HOW_TO_READ = (
    "Each copy changes its own random rows of one shard with row-wise AdaGrad; then all copies are "
    "made equal, and compared. A time is that of the slowest rank. MB are what a rank sends to "
    "others. *x reference* and *x bytes* are how many times less time and bytes than *{reference}* "
    "it takes. *Noting* is what a backward takes before, to keep the rows that it changes. A "
    "gradient sync's time includes adding up gradients, and the update, which a weight sync "
    "follows."
)


def shards_of(result: SyncBenchResult) -> list[tuple[int, float]]:
    """Numbers of copies and sizes, in order."""
    return list(dict.fromkeys(times.case[:2] for times in result.times))


def table_of_shard(result: SyncBenchResult, num_groups: int, shard_mib: float) -> Table:
    """What each sync of one shard took, by how many of its rows had changed."""
    rows = []
    for times in result.times:
        if times.case[:2] != (num_groups, shard_mib):
            continue
        reference = result.find(times.case, result.reference)
        rows.append(
            (
                f"{times.touched_share:.4g}",
                times.sync,
                *(f"{1e3 * value:.1f}" for value in (min(times.seconds), times.median_s)),
                f"{1e3 * max(times.seconds):.1f}",
                f"{reference.median_s / times.median_s:.2f}",
                f"{times.sent_bytes / 1e6:.3f}",
                f"{reference.sent_bytes / times.sent_bytes:.1f}" if times.sent_bytes else "-",
                f"{1e3 * statistics.median(times.tracking_s):.1f}"
                if any(times.tracking_s)
                else "-",
            )
        )
    return Table(_HEADINGS, rows, words={"sync"})


def sync_plot(result: SyncBenchResult, path: str | Path) -> None:
    """Write an SVG of times by share of changed rows, with a panel for each shard.

    Raises:
        ConfigError: matplotlib is missing.
    """
    names = list(dict.fromkeys(times.sync for times in result.times))
    charts = [
        LineChart(
            [
                _line(name, marker, [times for times in result.times if times.case[:2] == shard])
                for name, marker in zip(names, cycle(MARKERS), strict=False)
            ],
            x=Axis(title="changed rows per copy, %", is_log=True),
            y=Axis(title="time of a sync, ms", is_log=True),
            title=f"{shard[0]} copies of {shard[1]:g} MiB",
            width_inches=3.2,
        )
        for shard in shards_of(result)
    ]
    draw_lines(charts, path)


def _line(name: str, marker: str, times_of_shard: Sequence[SyncTimes]) -> Line:
    """The line of one sync, from the fastest to the slowest time of each share."""
    times_of_sync = [times for times in times_of_shard if times.sync == name]
    return Line(
        name=name,
        x=[100 * times.touched_share for times in times_of_sync],
        y=[1e3 * times.median_s for times in times_of_sync],
        low=[1e3 * min(times.seconds) for times in times_of_sync],
        high=[1e3 * max(times.seconds) for times in times_of_sync],
        marker=marker,
    )
