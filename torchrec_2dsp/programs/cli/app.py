"""The `torchrec-2dsp` program, which is also `python -m torchrec_2dsp`."""

from collections.abc import Callable
from importlib import import_module
from typing import Annotated

import typer

from torchrec_2dsp.programs.cli.access import access
from torchrec_2dsp.programs.cli.bench import bench, bench_compare, bench_report
from torchrec_2dsp.programs.cli.calibrate import calibrate
from torchrec_2dsp.programs.cli.cluster import cluster
from torchrec_2dsp.programs.cli.console import with_home
from torchrec_2dsp.programs.cli.doctor import doctor
from torchrec_2dsp.programs.cli.export import export
from torchrec_2dsp.programs.cli.plan import plan, simulate
from torchrec_2dsp.programs.cli.report import report, train_study
from torchrec_2dsp.programs.cli.train import train

# Command modules stay light: they import parts of torch inside their functions, so that
# `--help` is quick and `doctor` runs where torch doesn't.
COMMANDS: tuple[Callable[..., None], ...] = (
    doctor,
    train,
    report,
    access,
    bench,
    bench_report,
    bench_compare,
    calibrate,
    plan,
    simulate,
    train_study,
    export,
    cluster,
)

app = typer.Typer(
    name="torchrec-2dsp",
    help="2D sparse parallelism, hot rows and row exchange for TorchRec.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["--help", "-h"]},
    add_completion=False,
    pretty_exceptions_show_locals=False,
)


def _show_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(f"torchrec-2dsp {import_module('torchrec_2dsp').__version__}")
        raise typer.Exit


@app.callback()
def _program(
    version: Annotated[
        bool,
        typer.Option("--version", is_eager=True, callback=_show_version, help="Print the version."),
    ] = False,
) -> None:
    """Keep the commands named while there is only one."""


for _command in COMMANDS:
    app.command()(with_home(_command))
