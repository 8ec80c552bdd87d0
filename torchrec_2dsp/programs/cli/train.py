"""`train`: shows a training program as it runs, and what its runs came to."""

from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from torchrec_2dsp.programs.cli.errors import shown_errors
from torchrec_2dsp.programs.cli.outputs import check_writable

if TYPE_CHECKING:
    from torchrec_2dsp.mesh.mesh2d import Mesh2D
    from torchrec_2dsp.plan.parameter_sharding import ParameterSharding2D
    from torchrec_2dsp.plan.plan2d import Plan2D
    from torchrec_2dsp.programs.train.config import TrainConfig
    from torchrec_2dsp.programs.train.meter import Measured
    from torchrec_2dsp.programs.train.results import (
        DenseProgress,
        RunResult,
        TrainResult,
        TrainWatcher,
    )


def train(
    config: Annotated[
        str,
        typer.Option(
            metavar="NAME|FILE",
            help="What to train: demo or another config that ships, or a TOML file.",
        ),
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY.SUB=VALUE",
            help="Change a value of the file, such as loop.steps=50 or "
            "runs.exact.num_groups=4. Can be repeated.",
        ),
    ] = None,
    # Not "--run": torchrun would read that as its own --run-path.
    only: Annotated[
        list[str] | None,
        typer.Option(metavar="RUN", help="Train only this run. Can be repeated."),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(help="Write the results of the runs here, as JSON for train-study."),
    ] = None,
) -> None:
    """Train a DLRM on synthetic clicks, once per run of a config, and compare the runs.

    Start it with torchrun, which starts the ranks:

    torchrun --standalone --nproc-per-node 4 -m torchrec_2dsp train --config demo
    """
    with shown_errors():
        _train(config, overrides or [], only or [], output)


def _train(name: str, overrides: list[str], only: list[str], output: Path | None) -> None:
    from torchrec_2dsp.programs.config.config_file import load_config
    from torchrec_2dsp.programs.launch.world import launched_world, quiet_upstream
    from torchrec_2dsp.programs.train.config import TrainConfig
    from torchrec_2dsp.programs.train.program import train as train_runs
    from torchrec_2dsp.programs.train.record import Recorder

    quiet_upstream()
    config = load_config(TrainConfig, name, overrides).only(only)
    with launched_world(config.loop.device, "train") as rank:
        if rank != 0:
            train_runs(config)
            return
        console = Console()
        check_writable(output)
        recorder = Recorder()
        with closing(Display(console)) as display:
            result = train_runs(config, [display, recorder, *_writers(config)])
        show_result(result, console)
        if output is not None:
            recorder.record(config, result).save(output)
            console.print(f"wrote {output}", soft_wrap=True)


def _writers(config: "TrainConfig") -> "list[TrainWatcher]":
    if not config.loop.tensorboard_dir:
        return []
    from torchrec_2dsp.errors import ConfigError

    try:
        from torchrec_2dsp.programs.train.tensorboard import TensorBoardWatcher
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"loop.tensorboard_dir={config.loop.tensorboard_dir!r} needs tensorboard, which is not "
            "installed; pip install 'torchrec-2dsp[tensorboard]', or leave it empty"
        ) from error

    return [TensorBoardWatcher(config.loop.tensorboard_dir)]


class Display:
    """Shows each run's plan and progress: a bar on a terminal, lines elsewhere."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._steps = 0
        self._bar: Progress | None = None

    def run_planned(self, name: str, plan: "Plan2D", config: "TrainConfig") -> None:
        """Print the plan and start the bar."""
        self._steps = config.loop.steps
        self._console.print()
        self._console.print(plan_to_show(name, plan, config))
        if self._console.is_terminal:
            self._bar = Progress(
                TextColumn("{task.description}", markup=False),
                BarColumn(bar_width=30),
                MofNCompleteColumn(),
                TextColumn("{task.fields[figures]}", markup=False),
                TimeElapsedColumn(),
                console=self._console,
            )
            self._bar.add_task(name, total=self._steps, figures="")
            self._bar.start()

    def steps_trained(
        self, name: str, last_step: int, measured: "Measured", dense: "DenseProgress | None"
    ) -> None:
        """Move the bar, or print a line."""
        figures = f"loss {measured.losses[-1]:.4f}  NE {measured.ne:.4f}"
        if dense is not None:
            figures += f"  dense {dense.density:.2%}"
        if self._bar is None:
            line = f"{name}: step {last_step}/{self._steps}  {figures}"
            self._console.print(line, markup=False, highlight=False)
        else:
            self._bar.update(self._bar.task_ids[0], completed=last_step, figures=figures)

    def run_finished(self, result: "RunResult") -> None:
        """Stop the bar, which stays visible."""
        self.close()

    def close(self) -> None:
        """Give the terminal back, also after an error."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def plan_to_show(name: str, plan: "Plan2D", config: "TrainConfig") -> Table:
    """One row per table; ranks that hold the same shard are joined by a plus."""
    from torchrec_2dsp.programs.models.model import table_name

    how = f", kept equal by {type(plan.sync).__name__}" if plan.mesh.num_groups > 1 else ""
    table = Table(
        "table",
        title=Text(f"{name}: {plan.mesh}{how}", style="bold"),
        title_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
    )
    table.add_column("rows", justify="right")
    table.add_column("dim", justify="right")
    table.add_column("2D type")
    table.add_column("ranks" if plan.mesh.num_groups == 1 else "ranks (a+b: replica peers)")
    rows = {table_name(feature.name): feature.num_rows for feature in config.data.features}
    tables = [table for _, module in plan.modules() for table in module.tables()]
    exchanges = [_exchange(sharding) for _, sharding in tables]
    if any(exchanges):
        table.add_column("exchange")
    for (key, sharding), exchange in zip(tables, exchanges, strict=True):
        table.add_row(
            Text(key),
            f"{rows[key]:,}",
            str(config.model.dim),
            sharding.sharding_type,
            _ranks(plan.mesh, sharding.ranks),
            *([exchange] if any(exchanges) else []),
        )
    return table


def _exchange(sharding: "ParameterSharding2D") -> str:
    """How rows travel, who owns them, and how many are hot, where that isn't as in TorchRec."""
    from torchrec_2dsp.codecs.transport import Transport
    from torchrec_2dsp.plan.parameter_sharding import Exchange
    from torchrec_2dsp.plan.row_owners import RowOwners

    parts = []
    if sharding.exchange is not Exchange.POOLED:
        parts.append(sharding.exchange.value)
    if sharding.owners is not RowOwners.BLOCK:
        parts.append(sharding.owners.value)
    if sharding.transport is not Transport.FP32:
        parts.append(sharding.transport.value)
    if sharding.hot_set is not None:
        parts.append(f"{len(sharding.hot_set):,} hot")
    return ", ".join(parts)


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
            f"{run.evaluated.loss:.5f}",
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
    return (
        "NE: loss relative to always predicting the click rate; lower is better, and the "
        f"model behind the labels has {result.planted.ne:.4f}. Sync: what a rank sends to its "
        "replica peers."
    )


def _ranks(mesh: "Mesh2D", shard_indices: list[int] | None) -> str:
    peers = [mesh.replica_peers(mesh.rank_at(0, index)) for index in shard_indices or []]
    return "  ".join("+".join(str(rank) for rank in group) for group in peers)
