"""`access`: counts how often each row of a log is used, and shows what follows from it."""

import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from torchrec_2dsp.programs.cli.console import check_writable, shown_errors

if TYPE_CHECKING:
    from torchrec_2dsp.programs.access import AccessProgress, AccessResult

_FILE = "access.parquet"
_SECONDS_PER_LINE = 10.0
"""How often a line is printed where there is no terminal."""


def access(
    config: Annotated[
        str,
        typer.Option(
            metavar="NAME|FILE", help="A config with a section [data], such as one of train."
        ),
    ],
    output: Annotated[
        Path, typer.Option(metavar="FOLDER", help="Write the statistics here, as access.parquet.")
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY.SUB=VALUE",
            help="Change a value of the file, such as data.num_rows=100000. Can be repeated.",
        ),
    ] = None,
) -> None:
    """Count how often the training rows of a log use each row of a table, in one pass.

    Start it alone, or with torchrun, whose ranks read different parts:

    torchrun --standalone --nproc-per-node 4 -m torchrec_2dsp access --config FILE --output stats/
    """
    with shown_errors():
        _access(config, output, overrides or [])


def _access(name: str, output: Path, overrides: list[str]) -> None:
    from torchrec_2dsp.comms.groups import world_group
    from torchrec_2dsp.programs.access import AccessConfig, count_access
    from torchrec_2dsp.programs.config.config_file import load_config
    from torchrec_2dsp.programs.launch import launched_world_or_one, quiet_upstream

    quiet_upstream()
    config = load_config(AccessConfig, name, overrides)
    with launched_world_or_one() as rank:
        if rank:
            count_access(config, world_group())
            return
        path = output / _FILE
        check_writable(path)
        console = Console()
        with ReadingDisplay(console) as display:
            result = count_access(config, world_group(), display.show)
        result.stats.save(path)
        show_access(result, console)
        console.print(f"wrote {path}", soft_wrap=True, highlight=False)


class ReadingDisplay(ExitStack):
    """Shows how far rank 0 has come: a bar on a terminal, a line now and then elsewhere."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console
        self._next_line = time.monotonic() + _SECONDS_PER_LINE
        self._bar: Progress | None = None

    def show(self, progress: "AccessProgress") -> None:
        """Move the bar, or print a line if it is time."""
        minutes, seconds = divmod(round(progress.seconds_left), 60)
        figures = f"{progress.rows_per_s:,.0f} rows/s, {minutes}:{seconds:02d} left"
        if self._console.is_terminal:
            if self._bar is None:
                columns = (
                    TextColumn("{task.description}"),
                    BarColumn(bar_width=30),
                    TextColumn("{task.fields[figures]}", markup=False),
                )
                self._bar = self.enter_context(Progress(*columns, console=self._console))
                self._bar.add_task("rank 0", total=progress.total_rows, figures="")
            self._bar.update(self._bar.task_ids[0], completed=progress.num_rows, figures=figures)
        elif time.monotonic() >= self._next_line:
            self._next_line = time.monotonic() + _SECONDS_PER_LINE
            line = f"rank 0: {progress.num_rows:,} of about {progress.total_rows:,} rows, {figures}"
            self._console.print(line, highlight=False)


def show_access(result: "AccessResult", console: Console) -> None:
    """Print a line for each table, and what its numbers mean."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False, show_edge=False)
    table.add_column("table", no_wrap=True)
    headings = ("rows", "used", "lookups\nper sample", "top 1 %\ntake", "values\nthat share")
    for heading in headings:
        table.add_column(heading, justify="right")
    for line in result.tables:
        rate = line.collision_rate
        table.add_row(
            Text(line.table),
            f"{line.num_rows:,}",
            f"{line.used_rows:,}",
            f"{line.num_lookups / max(result.num_samples, 1):.2f}",
            f"{line.top_share:.0%}",
            "-" if rate is None else f"{rate:.2%}",
        )
    console.print(table)
    console.print(
        f"{result.num_samples:,} rows of the log were read, {result.num_malformed:,} of which "
        "could not be and were left to their neighbours. Top 1 %: of the rows that are used, by "
        "lookups. Values that share: how many values are expected to share their row with another "
        "one, since ids are hashes; more rows make them fewer.",
        highlight=False,
    )
