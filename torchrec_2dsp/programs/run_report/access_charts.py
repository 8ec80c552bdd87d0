"""How often rows are used, where a run names access statistics, and which of them are hot."""

from torchrec_2dsp.errors import ConfigError
from torchrec_2dsp.programs.run_report.contents import RunContents, RunPart
from torchrec_2dsp.report.page import Page

_MAX_TABLES = 28
"""How many lines a chart has at most: as many as colours and dashes tell apart."""


def add_access(page: Page, contents: RunContents) -> None:
    """Add a chart for each pair of statistics and hot rows that runs have."""
    runs_of: dict[tuple[str, tuple[tuple[str, int], ...]], list[str]] = {}
    for run in contents.runs:
        if path := run.config.get("access"):
            runs_of.setdefault((path, tuple(_hot_rows(run).items())), []).append(run.name)
    for (path, hot_rows), names in runs_of.items():
        _add_chart(page, f"Rows by use, for {', '.join(names)}", path, dict(hot_rows))


def _hot_rows(run: RunPart) -> dict[str, int]:
    """How many rows of each table are hot."""
    lines = () if run.plan is None else run.plan.lines
    return {line.name: line.num_hot for line in lines if line.num_hot}


def _add_chart(page: Page, heading: str, path: str, hot_rows: dict[str, int]) -> None:
    # Reading Parquet takes a while to load, which most runs have no need of.
    from torchrec_2dsp.access.plot import cdf_chart
    from torchrec_2dsp.access.stats import AccessStats

    try:
        stats = AccessStats.load(path)
    except ConfigError as error:
        # A log may have been counted anew or moved since; the rest of the page holds.
        page.add_text(f"{heading}: the statistics can't be shown. {error}")
        return
    most_used = sorted(stats, key=lambda name: -stats[name].num_lookups)[:_MAX_TABLES]
    page.add_lines(heading, cdf_chart({name: stats[name] for name in most_used}, hot_rows))
    left_out = len(stats) - len(most_used)
    page.add_text(
        ("A mark shows how many rows are hot. " if hot_rows else "No row is hot. ")
        + (f"The {left_out} tables with the fewest lookups are left out. " if left_out else "")
        + f"Counted in {path}."
    )
