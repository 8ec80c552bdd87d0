"""`report` and `train-study`: pages on one training run, and on runs with several seeds."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from torchrec_2dsp.errors import ConfigError
from torchrec_2dsp.programs.cli.console import (
    check_output,
    show_written,
    shown_errors,
)


@shown_errors()
def report(
    run: Annotated[
        Path,
        typer.Argument(metavar="FOLDER", help="The folder that train wrote to: its output.folder."),
    ],
    output: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.html", help="The page to write.", show_default="FOLDER/report.html"
        ),
    ] = None,
) -> None:
    """Write a self-contained HTML page on a training run, finished or still running."""
    from torchrec_2dsp.programs.run_report.contents import RunContents
    from torchrec_2dsp.programs.run_report.page import run_page

    contents = RunContents.read(run)
    path = run / "report.html" if output is None else output
    check_output(path, ".html")
    run_page(contents).write(path)
    show_written(Console(), path)


@shown_errors()
def train_study(
    records: Annotated[
        list[Path],
        typer.Argument(metavar="RECORD.json...", help="Records written by train --output."),
    ],
    reference: Annotated[str, typer.Option(help="The run to compare the others with.")],
    output: Annotated[Path, typer.Option(help="The page to write, such as results/quality.md.")],
    baseline: Annotated[
        str, typer.Option(help="Say how much of this run's gap to the reference the others close.")
    ] = "",
    only: Annotated[
        list[str] | None,
        typer.Option(metavar="RUN", help="Compare only this run. Can be repeated."),
    ] = None,
    title: Annotated[str, typer.Option(help="Title of the page.")] = "Quality",
) -> None:
    """Write a Markdown page that compares runs over several seeds, with plot and data beside it."""
    from torchrec_2dsp.programs.study import study_plot, study_report
    from torchrec_2dsp.programs.train.record import TrainRecord, joined

    check_output(output, ".md")
    names = [name for name in (reference, baseline, *only) if name] if only else []
    compared = [record.only(names) for record in joined(list(map(TrainRecord.load, records)))]
    data = [output.with_name(f"{output.stem}_{n}.json") for n in range(1, len(compared) + 1)]
    plot = output.with_suffix(".svg")
    sources = {path.resolve() for path in records}
    for path in (output, plot, *data):
        if path.resolve() in sources:
            raise ConfigError(
                f"--output {output} would write over the record {path}; use another name"
            )
    page = study_report(
        compared,
        reference=reference,
        baseline=baseline,
        title=title,
        plot=plot.name,
        data=[path.name for path in data],
    )
    study_plot(compared, plot, reference=reference)
    for record, path in zip(compared, data, strict=True):
        record.save(path)
    output.write_text(page)
    show_written(Console(), *data, plot, output)
