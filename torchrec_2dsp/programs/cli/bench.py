"""`bench`: measures ways to train a model side by side, and shows who is how fast."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from torchrec_2dsp.programs.cli.errors import check_writable, shown_errors

if TYPE_CHECKING:
    from torchrec_2dsp.programs.bench.config import BenchConfig
    from torchrec_2dsp.programs.bench.results import BenchResult, ContestantBlock, Outcome
    from torchrec_2dsp.programs.calibrate.link_speed import LinkSpeeds


def bench(
    config: Annotated[
        str,
        typer.Option(
            metavar="NAME|FILE",
            help="What to compare: bench or another config that ships, or a TOML file.",
        ),
    ],
    workload: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|FILE",
            help="The data and the model, instead of those that the config includes: "
            "criteo_one_hot or another workload that ships, or a TOML file.",
        ),
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY.SUB=VALUE",
            help="Change a value, such as schedule.rounds=9. Can be repeated.",
        ),
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(
            metavar="CONTESTANT", help="Run only this contestant, and the reference. Repeatable."
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(help="Write a report here, such as out.md, and its numbers to out.json."),
    ] = None,
) -> None:
    """Train one model in several ways, in turns, and compare their speed.

    Start it with torchrun, which starts the ranks:

    torchrun --standalone --nproc-per-node 4 -m torchrec_2dsp bench --config bench

    The exit code is 1 if a contestant crashed, hung, or trained something else.
    """
    with shown_errors():
        result = _bench(config, workload, overrides or [], only or [], output)
    if len(result.measured()) < len(result.contestants):
        raise typer.Exit(code=1)


def _bench(
    name: str, workload: str | None, overrides: list[str], only: list[str], output: Path | None
) -> "BenchResult":
    import os

    from torchrec_2dsp.programs.bench.config import BenchConfig
    from torchrec_2dsp.programs.bench.predict import calibration_warning
    from torchrec_2dsp.programs.bench.program import run_bench
    from torchrec_2dsp.programs.cli.bench_tables import show_bench
    from torchrec_2dsp.programs.config.config_file import load_config
    from torchrec_2dsp.programs.launch import check_launched, quiet_upstream

    quiet_upstream()
    check_launched("bench")
    config = load_config(BenchConfig, name, overrides, include=workload).only(only)
    if os.environ["RANK"] != "0":
        return run_bench(config)
    console = Console()
    check_writable(output)
    local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"]))
    if warning := calibration_warning(config, local_world_size):
        console.print(f"warning: {warning}", style="yellow", markup=False, soft_wrap=True)
    with BenchDisplay(console, config) as display:
        result = run_bench(config, [display])
    show_bench(result, console)
    if output is not None:
        from torchrec_2dsp.programs.bench.markdown import markdown_report

        result.save(output.with_suffix(".json"))
        output.write_text(markdown_report([result]))
        console.print(f"wrote {output} and {output.with_suffix('.json')}", soft_wrap=True)
    return result


class BenchDisplay:
    """A bar on a terminal, lines elsewhere."""

    def __init__(self, console: Console, config: "BenchConfig") -> None:
        self._console = console
        num_contestants = len(config.contestants)
        self._rounds = config.schedule.rounds
        self._bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[last]}", markup=False),
            console=console,
            disable=not console.is_terminal,
        )
        self._built = self._bar.add_task("built", total=num_contestants, last="")
        self._blocks = self._bar.add_task("blocks", total=num_contestants * self._rounds, last="")
        self._in_round = (-1, 0)

    def __enter__(self) -> "BenchDisplay":
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def speeds_measured(self, speeds: "LinkSpeeds") -> None:
        """Show the bandwidths that the planner will be told."""
        rates = {
            "inside its host": speeds.intra_host_all_to_all_bytes_per_s,
            "to other hosts": speeds.cross_host_all_to_all_bytes_per_s,
        }
        parts = [f"{rate * 8e-9:.2f} Gbit/s {to}" for to, rate in rates.items() if rate]
        self._say(f"a rank sends {', '.join(parts)}")

    def contestant_built(self, name: str, sharding: dict[str, int], dense_plan: str) -> None:
        """Show that a contestant is ready."""
        parts = [f"{count} {kind}" for kind, count in sharding.items()]
        if dense_plan:
            parts.append(f"dense part {dense_plan}")
        self._bar.advance(self._built)
        self._say(f"{name}: {', '.join(parts)}")

    def block_measured(self, name: str, block: "ContestantBlock") -> None:
        """Move the bar; without one, say when a round begins."""
        last = f"{name} {block.step_s * 1e3:.0f} ms"
        self._bar.update(self._blocks, advance=1, last=last)
        if not self._console.is_terminal and block.round != self._in_round[0]:
            self._in_round = (block.round, 0)
            self._say(f"round {block.round + 1} of {self._rounds}")

    def contestant_out(self, name: str, outcome: "Outcome", reason: str) -> None:
        """Say why, in full: the closing table has less room."""
        self._bar.advance(self._built)
        self._console.print(Text(f"{name} {outcome}, {reason}", style="red"), soft_wrap=True)

    def _say(self, line: str) -> None:
        self._console.print(Text(line), soft_wrap=True)
