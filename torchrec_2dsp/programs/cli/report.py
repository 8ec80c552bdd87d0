"""`report`: one page on a training run."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from torchrec_2dsp.programs.cli.errors import shown_errors


def report(
    run: Annotated[
        Path,
        typer.Argument(metavar="RUN", help="The folder that train wrote to: its output.folder."),
    ],
    output: Annotated[
        Path | None, typer.Option(metavar="FILE.html", help="The page; RUN/report.html by default.")
    ] = None,
) -> None:
    """Write one HTML page on a training run, also while it trains; it needs no network."""
    with shown_errors():
        path = _write(run, output)
        Console().print(Text(f"wrote {path}"), soft_wrap=True)


def _write(run: Path, output: Path | None) -> Path:
    from torchrec_2dsp.programs.cli.outputs import check_writable
    from torchrec_2dsp.programs.run_report.contents import RunContents
    from torchrec_2dsp.programs.run_report.page import run_page

    contents = RunContents.read(run)
    path = run / "report.html" if output is None else output
    check_writable(path)
    run_page(contents).write(path)
    return path
