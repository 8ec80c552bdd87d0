"""`bench-report` and `bench-compare`: what is made of the JSON files of benchmarks."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.text import Text

from torchrec_2dsp.programs.cli.errors import shown_errors

if TYPE_CHECKING:
    from torchrec_2dsp.programs.bench.results import BenchResult


def bench_report(
    results: Annotated[
        list[Path], typer.Argument(metavar="RESULT.json...", help="Results of benchmarks.")
    ],
    output: Annotated[
        Path, typer.Option(help="The page to write, such as docs/benchmarks/demo.md.")
    ],
    plots: Annotated[bool, typer.Option(help="Also draw plots, which needs matplotlib.")] = True,
) -> None:
    """Write a Markdown page on benchmark results, with its plots and data beside it.

    The data is copied as NAME_1.json and so on, so that the page can be made again from the
    repository alone.
    """
    with shown_errors():
        for path in _write_report(results, output, plots):
            Console().print(Text(f"wrote {path}"), soft_wrap=True)


def bench_compare(
    results: Annotated[
        list[Path], typer.Argument(metavar="RESULT.json...", help="Runs of the same command.")
    ],
    tolerance: Annotated[
        float, typer.Option(help="How far a contestant's medians may differ, as a share.")
    ] = 0.1,
) -> None:
    """Check that several runs of a benchmark agree; exit code 1 if they don't."""
    with shown_errors():
        from torchrec_2dsp.programs.bench.compare import compare_runs
        from torchrec_2dsp.programs.bench.results import BenchResult
        from torchrec_2dsp.programs.cli.bench_tables import show_agreement

        agreement = compare_runs([BenchResult.load(path) for path in results], tolerance=tolerance)
    show_agreement(agreement, Console())
    if not agreement.passed:
        raise typer.Exit(code=1)


def _write_report(sources: list[Path], output: Path, with_plots: bool) -> list[Path]:
    """All files that were written, the page last."""
    from torchrec_2dsp.errors import ConfigError
    from torchrec_2dsp.programs.bench.markdown import markdown_report
    from torchrec_2dsp.programs.bench.results import BenchResult

    if output.suffix != ".md":
        raise ConfigError(f"--output {output} is no Markdown page; use a name that ends in .md")
    results = [BenchResult.load(source) for source in sources]
    # Read before anything is written: a report may be made again from its own copies.
    copies = [source.read_bytes() for source in sources]
    data = [output.with_name(f"{output.stem}_{n}.json") for n in range(1, len(results) + 1)]
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        plots = _draw_plots(results, output) if with_plots else {}
        page = markdown_report(
            results,
            plots={name: path.name for name, path in plots.items()},
            data=[path.name for path in data],
        )
        for path, copy in zip(data, copies, strict=True):
            path.write_bytes(copy)
        output.write_text(page)
    except OSError as error:
        raise ConfigError(f"{error.filename} can't be written: {error.strerror}") from error
    return [*data, *plots.values(), output]


def _draw_plots(results: "list[BenchResult]", output: Path) -> dict[str, Path]:
    """The plots that the results have something for, by what the report calls them."""
    from torchrec_2dsp.programs.bench.markdown_predicted import predicted_in
    from torchrec_2dsp.programs.bench.plot import phase_plot, scaling_plot
    from torchrec_2dsp.programs.bench.plot_predicted import predicted_plot

    drawn = {}
    if len(results) > 1 and any(result.measured() for result in results):
        drawn["scaling"] = output.with_name(f"{output.stem}_scaling.svg")
        scaling_plot(results, drawn["scaling"])
    if sum(bool(predicted_in(result)) for result in results) > 1:
        drawn["predicted"] = output.with_name(f"{output.stem}_predicted.svg")
        predicted_plot(results, drawn["predicted"])
    for number, result in enumerate(results, 1):
        if any(contestant.phases for contestant in result.measured()):
            path = output.with_name(f"{output.stem}_phases_{number}.svg")
            drawn[f"phases_{number}"] = path
            phase_plot(result, path)
    return drawn
