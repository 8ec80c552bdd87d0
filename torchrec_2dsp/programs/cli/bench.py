"""`bench`, `bench-report` and `bench-compare`: compare ways to train, and show it."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import TimeElapsedColumn
from rich.text import Text

from torchrec_2dsp.programs.cli.console import (
    ProgressBars,
    check_output,
    set_option,
    show_written,
    shown_errors,
)

if TYPE_CHECKING:
    from torchrec_2dsp.programs.bench.config import BenchConfig
    from torchrec_2dsp.programs.bench.results import BenchResult, ContestantBlock, Outcome
    from torchrec_2dsp.programs.bench.statistics import Summary
    from torchrec_2dsp.programs.link_speeds import LinkSpeeds

_Results = Annotated[list[Path], typer.Argument(metavar="RESULT.json...")]


@shown_errors()
def bench(
    config: Annotated[
        str,
        typer.Option(
            metavar="NAME|FILE",
            help="What to compare: a TOML file, or a config that ships, such as bench.",
        ),
    ],
    workload: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|FILE",
            help="The data and the model, instead of the config's own: a TOML file, or a workload "
            "that ships, such as criteo_one_hot.",
        ),
    ] = None,
    overrides: Annotated[list[str] | None, set_option("schedule.rounds=9")] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(
            metavar="CONTESTANT", help="Run only this one and the reference. Can be repeated."
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(help="Write a report here, such as out.md, and its numbers to out.json."),
    ] = None,
) -> None:
    """Train one model in several ways, interleaved, and compare their speed.

    Start it with torchrun, which starts the ranks:

    torchrun --standalone --nproc-per-node 4 -m torchrec_2dsp bench --config bench

    The exit code is 1 if a contestant crashed, hung, or trained differently.
    """
    from torchrec_2dsp.programs.bench.config import BenchConfig
    from torchrec_2dsp.programs.bench.program import run_bench
    from torchrec_2dsp.programs.config.config_file import load_config
    from torchrec_2dsp.programs.launch import check_launched, quiet_upstream

    quiet_upstream()
    check_launched("bench")
    comparison = load_config(BenchConfig, config, overrides or [], include=workload)
    comparison = comparison.only(only or [])
    is_first = os.environ["RANK"] == "0"
    result = _shown_bench(comparison, output) if is_first else run_bench(comparison)
    if len(result.measured()) < len(result.contestants):
        raise typer.Exit(code=1)


def _shown_bench(config: "BenchConfig", output: Path | None) -> "BenchResult":
    """Run a benchmark on rank 0, show it, and write the report."""
    from torchrec_2dsp.programs.bench.page import markdown_report
    from torchrec_2dsp.programs.bench.program import calibration_warning, run_bench

    console = Console()
    check_output(output, ".md")
    local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"]))
    if warning := calibration_warning(config, local_world_size):
        console.print(f"warning: {warning}", style="yellow", markup=False, soft_wrap=True)
    with ProgressBars(console, TimeElapsedColumn()) as bars:
        result = run_bench(config, BenchDisplay(console, bars, config))
    show_bench(result, console)
    if output is not None:
        result.save(output.with_suffix(".json"))
        output.write_text(markdown_report([result]))
        show_written(console, output, output.with_suffix(".json"))
    return result


class BenchDisplay:
    """A progress bar on a terminal, lines elsewhere."""

    def __init__(self, console: Console, bars: ProgressBars, config: "BenchConfig") -> None:
        self._console, self._bars = console, bars
        self._num_contestants, self._rounds = len(config.contestants), config.schedule.rounds
        self._num_built = self._num_blocks = 0
        self._last_round = -1
        bars.show("built", 0, self._num_contestants)

    def speeds_measured(self, speeds: "LinkSpeeds") -> None:
        """Show the planner's bandwidths."""
        rates = {
            "inside its host": speeds.in_host["all-to-all"],
            "to other hosts": speeds.across_hosts["all-to-all"],
        }
        parts = [f"{rate * 8e-9:.2f} Gbit/s {to}" for to, rate in rates.items() if rate]
        self._say(f"a rank sends {', '.join(parts)}")

    def contestant_built(self, name: str, sharding: dict[str, int], dense_plan: str) -> None:
        """Show that a contestant is ready."""
        parts = [f"{count} {kind}" for kind, count in sharding.items()]
        if dense_plan:
            parts.append(f"dense part {dense_plan}")
        self._built()
        self._say(f"{name}: {', '.join(parts)}")

    def block_measured(self, name: str, block: "ContestantBlock") -> None:
        """Advance the bar; without one, report when a round begins."""
        self._num_blocks += 1
        num_blocks = self._num_contestants * self._rounds
        last = f"{name} {block.step_s * 1e3:.0f} ms"
        self._bars.show("blocks", self._num_blocks, num_blocks, last)
        if not self._bars.are_shown and block.round != self._last_round:
            self._last_round = block.round
            self._say(f"round {block.round + 1} of {self._rounds}")

    def contestant_out(self, name: str, outcome: "Outcome", reason: str) -> None:
        """Give the reason in full: the closing table has less room."""
        self._built()
        self._console.print(Text(f"{name} {outcome}, {reason}", style="red"), soft_wrap=True)

    def _built(self) -> None:
        self._num_built += 1
        self._bars.show("built", self._num_built, self._num_contestants)

    def _say(self, line: str) -> None:
        self._console.print(Text(line), soft_wrap=True)


def show_bench(result: "BenchResult", console: Console) -> None:
    """Print the closing table, its columns' meaning, and the failures."""
    from torchrec_2dsp.programs.bench.results import Outcome
    from torchrec_2dsp.programs.bench.statistics import summarize
    from torchrec_2dsp.programs.bench.tables import closing_table, counts_link

    summary = summarize(result)
    console.print()
    console.print(closing_table(result, summary))
    console.print()
    console.print(Text(_meaning(summary, result.reference, counts_link(summary))))
    for contestant in result.contestants:
        if contestant.outcome is not Outcome.MEASURED:
            text = f"\n{contestant.name} {contestant.outcome}: {contestant.reason}"
            console.print(Text(text, style="bold red"))


def _meaning(summary: "Summary", reference: str, is_counted: bool) -> str:
    """Explain the closing table's columns."""
    from torchrec_2dsp.programs.bench.statistics import CONFIDENCE

    parts = ["Ms: step time over the blocks, on the slowest rank."]
    if summary.best_stock is not None:
        plain = "" if summary.best_stock == summary.best_plain_stock else ", in full duplex"
        parts.append(
            f"Best stock: {summary.best_stock}{plain}; how many times as fast, compared round by "
            f"round, with its {CONFIDENCE:.0%} interval."
        )
    if summary.ceiling is not None:
        parts.append(f"Of ceiling: {summary.ceiling} without communication is 100%.")
    how = "sent on the counted interface" if is_counted else "that the traced collectives send"
    parts.append(f"MB: {how}, per rank.")
    parts.append(
        "NE gap: how much higher its normalized entropy over all trained steps is than that of "
        f"{reference}."
    )
    return " ".join(parts)


@shown_errors()
def bench_report(
    results: _Results,
    output: Annotated[
        Path, typer.Option(help="The page to write, such as docs/benchmarks/demo.md.")
    ],
    plots: Annotated[
        bool, typer.Option(help="Also draw plots that compare the results; needs matplotlib.")
    ] = True,
) -> None:
    """Write a Markdown page on benchmark results, with plots and data beside it.

    The results are copied to NAME_1.json and so on, so that the page can be written again from
    its folder alone.
    """
    from torchrec_2dsp.programs.bench.page import markdown_report
    from torchrec_2dsp.programs.bench.plots import draw_plots
    from torchrec_2dsp.programs.bench.results import BenchResult

    check_output(output, ".md")
    benches = [BenchResult.load(path) for path in results]
    # Read before anything is written: a report may be made again from its own copies.
    copies = [path.read_bytes() for path in results]
    data = [output.with_name(f"{output.stem}_{n}.json") for n in range(1, len(results) + 1)]
    drawn = draw_plots(benches, output) if plots else {}
    page = markdown_report(
        benches,
        plots={name: path.name for name, path in drawn.items()},
        data=[path.name for path in data],
    )
    for path, copy in zip(data, copies, strict=True):
        path.write_bytes(copy)
    output.write_text(page)
    show_written(Console(), *data, *drawn.values(), output)


@shown_errors()
def bench_compare(
    results: _Results,
    tolerance: Annotated[
        float, typer.Option(help="Largest relative difference of a contestant's medians.")
    ] = 0.1,
) -> None:
    """Check that several runs of a benchmark agree; exit code 1 if they don't."""
    from torchrec_2dsp.programs.bench.results import BenchResult
    from torchrec_2dsp.programs.bench.statistics import compare_runs
    from torchrec_2dsp.programs.bench.tables import agreement_table

    agreement = compare_runs([BenchResult.load(path) for path in results], tolerance=tolerance)
    console = Console()
    console.print(agreement_table(agreement))
    if agreement.probes_s:
        console.print(
            "\n(machine): processor time of a fixed piece of work, in ms; where it differs, so did "
            "the machine's speed."
        )
    console.print()
    for pair in agreement.swapped:
        text = (
            f"{pair.first} is faster than {pair.second} in run {pair.run + 1} and slower in run "
            f"{pair.other_run + 1}; in neither do their intervals overlap."
        )
        console.print(Text(text, style="bold red"))
    limit = f"{agreement.tolerance:.0%}"
    if agreement.passed:
        text = f"The runs agree: medians within {limit}, and no clear order reversed."
        console.print(Text(text, style="green"))
    else:
        text = f"The runs don't agree: medians over {limit} apart, failures, or reversed orders."
        console.print(Text(text, style="bold red"))
        raise typer.Exit(code=1)
