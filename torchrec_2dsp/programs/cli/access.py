"""`access`: counts how often a log uses each row, and shows the resulting statistics."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from torchrec_2dsp.programs.cli.console import (
    ReadingProgress,
    check_writable,
    set_option,
    show_written,
    shown_errors,
)
from torchrec_2dsp.report.table import MISSING, Table

if TYPE_CHECKING:
    from torchrec_2dsp.programs.access import AccessResult

_FILE = "access.parquet"


@shown_errors()
def access(
    config: Annotated[
        str,
        typer.Option(
            metavar="NAME|FILE", help=r"A config with a section \[data], such as one for train."
        ),
    ],
    output: Annotated[
        Path, typer.Option(metavar="FOLDER", help="Write the statistics here, as access.parquet.")
    ],
    overrides: Annotated[list[str] | None, set_option("data.malformed_limit=10")] = None,
) -> None:
    """Count how often a log's training samples use each row of the tables, in one pass.

    Start it alone, or with torchrun to divide the log among ranks:

    torchrun --standalone --nproc-per-node 4 -m torchrec_2dsp access --config FILE --output stats/
    """
    from torchrec_2dsp.comms.groups import world_group
    from torchrec_2dsp.programs.access import AccessConfig, count_access
    from torchrec_2dsp.programs.config.config_file import load_config
    from torchrec_2dsp.programs.launch import launched_world_or_one, quiet_upstream

    quiet_upstream()
    log = load_config(AccessConfig, config, overrides or [])
    with launched_world_or_one() as rank:
        if rank:
            count_access(log, world_group())
            return
        path = output / _FILE
        check_writable(path)
        console = Console()
        with ReadingProgress(console) as progress:
            result = count_access(log, world_group(), progress.show)
        result.stats.save(path)
        show_access(result, console)
        show_written(console, path)


def show_access(result: "AccessResult", console: Console) -> None:
    """Print a line for each table, and the meaning of its numbers."""
    headings = ("rows", "used", "lookups\nper sample", "top 1 %\ntake", "colliding\nvalues")
    rows = []
    for table, collision_rate in result.collision_rates.items():
        lookups = result.stats[table]
        num_top = max(1, round(lookups.num_used_rows / 100))
        top_share = lookups.share_of(num_top) if lookups.num_lookups else 0.0
        rows.append(
            [
                table,
                f"{lookups.num_rows:,}",
                f"{lookups.num_used_rows:,}",
                f"{lookups.num_lookups / max(result.num_samples, 1):.2f}",
                f"{top_share:.0%}",
                MISSING if collision_rate is None else f"{collision_rate:.2%}",
            ]
        )
    console.print(Table(["table", *headings], rows, words={"table"}))
    samples, lines = ("users", "rows were") if result.are_users else ("rows", "were")
    console.print(
        f"Read {result.num_samples:,} {samples} of the log; {result.num_malformed:,} {lines} "
        "malformed and replaced by neighbouring rows. Top 1 %: the share of lookups that goes to "
        "the most used 1 % of the used rows. Colliding values: the expected share of values that "
        "are hashed to the row of another value; give the table more rows for fewer collisions.",
        highlight=False,
    )
