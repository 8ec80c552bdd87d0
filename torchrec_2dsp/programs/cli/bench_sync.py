"""`bench-sync`: measures what keeping copies of a table shard equal costs."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from torchrec_2dsp.programs.cli.errors import check_writable, shown_errors

if TYPE_CHECKING:
    from torchrec_2dsp.programs.bench.syncs.results import SyncBenchResult


def bench_sync(
    config: Annotated[
        str,
        typer.Option(
            metavar="NAME|FILE",
            help="What to compare: bench_sync, which ships, or a TOML file.",
        ),
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Change a value, such as repeats=9. Can be repeated.",
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            help="Write a report here, such as out.md, its plot to out.svg and its numbers to "
            "out.json."
        ),
    ] = None,
) -> None:
    """Time ways to keep copies of a table shard equal, by how many of its rows have changed.

    Start it with torchrun, which starts the ranks:

    torchrun --standalone --nproc-per-node 4 -m torchrec_2dsp bench-sync --config bench_sync
    """
    with shown_errors():
        _bench_sync(config, overrides or [], output)


def _bench_sync(name: str, overrides: list[str], output: Path | None) -> None:
    from torchrec_2dsp.programs.bench.syncs.config import SyncBenchConfig
    from torchrec_2dsp.programs.bench.syncs.program import run_sync_bench
    from torchrec_2dsp.programs.bench.syncs.report import sync_plot, sync_report
    from torchrec_2dsp.programs.config.config_file import load_config
    from torchrec_2dsp.programs.launch import launched_world, quiet_upstream

    quiet_upstream()
    config = load_config(SyncBenchConfig, name, overrides)
    with launched_world("cpu", "bench-sync") as rank:
        if rank:
            run_sync_bench(config)
            return
        console = Console()
        check_writable(output)
        result = run_sync_bench(config, [_Progress(console)])
        show_syncs(result, console)
        if output is not None:
            plot, data = output.with_suffix(".svg"), output.with_suffix(".json")
            result.save(data)
            sync_plot(result, plot)
            output.write_text(sync_report(result, plot=plot.name, data=data.name))
            console.print(f"wrote {output}, {plot} and {data}", soft_wrap=True)


def show_syncs(result: "SyncBenchResult", console: Console) -> None:
    """Print a table for each shard."""
    from torchrec_2dsp.programs.bench.syncs.report import shards_of, table_of_shard

    for num_groups, shard_mib in shards_of(result):
        table = Table(title=f"{num_groups} copies of {shard_mib:g} MiB", box=box.SIMPLE_HEAD)
        content = table_of_shard(result, num_groups, shard_mib)
        for heading in content.headings:
            table.add_column(heading, justify="left" if heading in content.words else "right")
        for row in content.rows:
            table.add_row(*row)
        console.print(table)


class _Progress:
    """A line for each case."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def case_started(self, case: tuple[int, float, float], num_done: int, num_cases: int) -> None:
        num_groups, shard_mib, share = case
        self._console.print(
            f"{num_done + 1} of {num_cases}: {num_groups} copies of {shard_mib:g} MiB, "
            f"{100 * share:g} % changed",
            soft_wrap=True,
        )
