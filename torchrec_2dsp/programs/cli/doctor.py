"""`doctor`: shows whether the installation works, and how to repair it."""

from collections.abc import Sequence
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from torchrec_2dsp._compat.versions import CheckResult, Status
from torchrec_2dsp.programs.doctor import run_health_checks

_STYLES = {
    Status.OK: "green",
    Status.WARNING: "yellow",
    Status.FAILED: "bold red",
    Status.SKIPPED: "dim",
}


def doctor(
    run: Annotated[
        bool, typer.Option("--run", help="Also load the libraries, compute, and use gloo.")
    ] = False,
) -> None:
    """Check this installation, and say how to repair it."""
    checks = run_health_checks(run=run)
    console = Console()
    show_checks(checks, console)
    if not run:
        hint = "Only versions and environment were read. doctor --run also loads and computes."
        console.print(Text(hint), soft_wrap=True)
    if any(check.status is Status.FAILED for check in checks):
        raise typer.Exit(code=1)


def show_checks(checks: Sequence[CheckResult], console: Console) -> None:
    """Print the checks as a table, then the remedies."""
    table = Table("check", "found", "expected", "status")
    for check in checks:
        # `Text`, because brackets in a message are not markup.
        status = Text(check.status, style=_STYLES[check.status])
        table.add_row(Text(check.name), Text(check.found), Text(check.expected), status)
    console.print(table)
    for check in checks:
        if check.remedy:
            console.print(Text(f"\nTo fix {check.name}:", style=_STYLES[check.status]))
        for line in check.remedy:
            # Not wrapped: commands are there to be copied.
            console.print(Text(f"  {line}"), soft_wrap=True)
