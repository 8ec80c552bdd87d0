"""`export`: turns a checkpoint into a serving model, and shows the loss of quality."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.text import Text

from torchrec_2dsp.programs.cli.console import show_written, shown_errors
from torchrec_2dsp.report.table import Table

if TYPE_CHECKING:
    from torchrec_2dsp.programs.export.export import ExportRecord


@shown_errors()
def export(
    source: Annotated[
        str,
        typer.Argument(
            metavar="FOLDER|CHECKPOINT",
            help="The folder that train wrote to (its output.folder), or a checkpoint.",
        ),
    ],
    output: Annotated[
        Path, typer.Option(metavar="FOLDER", help="Write the model to this new folder.")
    ],
    config: Annotated[
        str,
        typer.Option(
            metavar="NAME|FILE", help="The config that trained a CHECKPOINT; a FOLDER has its own."
        ),
    ] = "",
    only: Annotated[
        str, typer.Option(metavar="RUN", help="The run to export, if the config has several.")
    ] = "",
    max_loss: Annotated[
        float,
        typer.Option(
            min=0.0,
            metavar="NUMBER",
            help="How much worse the served model may be, by the config's metric (usually NE).",
        ),
    ] = 0.001,
) -> None:
    """Export a trained model for serving without this package, with int8 tables.

    It is compared with the trained model on the config's held-out batches.
    """
    from torchrec_2dsp.parallel.checkpoint.address import place_of
    from torchrec_2dsp.programs.export.export import check_output, export_model
    from torchrec_2dsp.programs.export.source import ExportSource
    from torchrec_2dsp.programs.launch import only_rank, quiet_upstream

    quiet_upstream()
    check_output(output)
    trained = ExportSource.find(place_of(os.path.expanduser(source)), config=config, run=only)
    with only_rank("export"):
        record = export_model(trained, output, max_loss=max_loss)
    show_export(record, Console())
    show_written(Console(), output)


def show_export(record: "ExportRecord", console: Console) -> None:
    """Print both models' metrics, and the largest difference of their scores."""
    rows = [
        [name, f"{value:.6f}", f"{record.served[name]:.6f}"]
        for name, value in record.trained.items()
    ]
    console.print(Table(("metric", "as trained", "as served"), rows, words={"metric"}))
    change = f"{'better' if record.worse_by < 0 else 'worse'} by {abs(record.worse_by):.2e}"
    megabytes = record.table_bytes / 1e6, record.served_table_bytes / 1e6
    console.print(
        Text(
            f"{record.num_samples:,} held-out samples; the largest difference between scores is "
            f"{record.largest_difference:.2e}. {record.metric} is {change}; "
            f"up to {record.max_loss:g} is allowed. Tables: {megabytes[0]:,.2f} MB trained, "
            f"{megabytes[1]:,.2f} MB served."
        )
    )
