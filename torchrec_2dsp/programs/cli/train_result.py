"""`show_result`: the table with which a training program closes."""

from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from torchrec_2dsp.programs.train.results import TrainResult


def show_result(result: "TrainResult", console: Console) -> None:
    """Print the closing table and what its numbers mean."""
    from torchrec_2dsp.programs.train.results import largest_loss_gap

    reference = result.reference if len(result.runs) > 1 else None
    # Narrow enough for 80 columns, which is what a log file gets.
    table = Table("run", "mesh", "sync", box=box.SIMPLE_HEAD, padding=0, show_edge=False)
    headings = ["train\nloss", "eval\nloss", "eval\nNE", "samples\nper s", "sync MB\nper step"]
    if reference is not None:
        headings.insert(3, f"gap to\n{reference.name}")
    for heading in headings:
        table.add_column(Text(heading), justify="right")
    for run in result.runs:
        mesh = run.plan.mesh
        figures = [
            f"{run.train_loss:.5f}",
            f"{run.evaluated.metrics['loss']:.5f}",
            f"{run.evaluated.ne:.4f}",
            f"{run.samples_per_s:,.0f}",
            f"{run.sync_bytes_per_step / 1e6:.3f}",
        ]
        if reference is not None:
            gap = largest_loss_gap(run, reference)
            figures.insert(3, "-" if run is reference else f"{gap:.1e}")
        sync = "none" if mesh.num_groups == 1 else type(run.plan.sync).__name__
        table.add_row(Text(run.name), f"{mesh.num_groups}x{mesh.group_size}", sync, *figures)
    console.print()
    console.print(table)
    console.print()
    gap = "Gap: the largest difference of a step's train loss; with GradientSync, float rounding. "
    console.print(Text((gap if reference is not None else "") + _meaning(result)))


def _meaning(result: "TrainResult") -> str:
    planted = result.planted
    best = "" if planted is None else f", and the model behind the labels has {planted.ne:.4f}"
    return (
        f"NE: loss relative to always predicting the click rate; lower is better{best}. Sync: what "
        "a rank sends to its replica peers."
    )
