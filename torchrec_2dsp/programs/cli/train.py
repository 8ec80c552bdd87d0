"""`train`: shows a training program as it runs, and what its runs came to."""

import math
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from torchrec_2dsp.programs.cli.errors import check_writable, shown_errors

if TYPE_CHECKING:
    from torchrec_2dsp.mesh import Mesh2D
    from torchrec_2dsp.plan.parameter_sharding import ParameterSharding2D
    from torchrec_2dsp.programs.train.config import TrainConfig
    from torchrec_2dsp.programs.train.metrics import Evaluation
    from torchrec_2dsp.programs.train.results import (
        RunResult,
        StepsTrained,
        TrainResult,
        TrainWatcher,
    )
    from torchrec_2dsp.programs.train.sharded import PlannedRun
    from torchrec_2dsp.samples.dealer import BalanceReport


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
    resume: Annotated[
        str,
        typer.Option(
            metavar="auto|never|PATH",
            help="Go on from the newest checkpoint of each run, if there is one; begin anew; or "
            "go on from this checkpoint.",
        ),
    ] = "never",
    profile: Annotated[
        str,
        typer.Option(
            metavar="FIRST:LAST",
            help="Write a trace of these steps of each rank, for Perfetto, to output.folder.",
        ),
    ] = "",
) -> None:
    """Train a model once per run of a config, and compare the runs.

    Start it with torchrun, which starts the ranks:

    torchrun --standalone --nproc-per-node 4 -m torchrec_2dsp train --config demo
    """
    with shown_errors():
        _train(config, overrides or [], only or [], output, resume, profile)


def _train(
    name: str,
    overrides: list[str],
    only: list[str],
    output: Path | None,
    resumed: str,
    profile: str,
) -> None:
    from torchrec_2dsp.comms.alarm import agreeing
    from torchrec_2dsp.comms.groups import world_group
    from torchrec_2dsp.programs.config.config_file import load_config
    from torchrec_2dsp.programs.launch import launched_world, quiet_upstream
    from torchrec_2dsp.programs.train.checkpoints import Resume
    from torchrec_2dsp.programs.train.config import TrainConfig
    from torchrec_2dsp.programs.train.program import train as train_runs
    from torchrec_2dsp.programs.train.results import train_record
    from torchrec_2dsp.programs.train.steps import ProfiledSteps

    quiet_upstream()
    config = load_config(TrainConfig, name, overrides).only(only)
    resume, profiled = Resume.of(resumed), ProfiledSteps.of(profile) if profile else None
    loop = config.loop
    with launched_world(loop.device, "train", loop.timeout_s) as rank:
        console, is_first = Console(), rank == 0
        # What rank 0 can't write is an error of all ranks.
        with agreeing(world_group()):
            writers = _writers(config, output) if is_first else []
        with closing(Display(console)) as display:
            watchers = [display, *writers] if is_first else []
            if is_first:
                display.opening(config)
            result = train_runs(config, watchers, resume=resume, profiled=profiled)
        if is_first:
            show_result(result, console)
        with agreeing(world_group()):
            if is_first and output is not None:
                train_record(config, result).save(output)
        for written in filter(None, (output, config.output.folder)) if is_first else ():
            console.print(f"wrote {written}", soft_wrap=True)


def _writers(config: "TrainConfig", output: Path | None) -> "list[TrainWatcher]":
    from torchrec_2dsp.errors import ConfigError
    from torchrec_2dsp.programs.train.results import RunFolder, TensorBoardWatcher

    check_writable(output)
    writers: list[TrainWatcher] = []
    if config.output.folder:
        writers.append(RunFolder(config.output.folder, config))
    if config.loop.tensorboard_dir:
        try:
            writers.append(TensorBoardWatcher(config.loop.tensorboard_dir))
        except ModuleNotFoundError as error:
            raise ConfigError(
                f"loop.tensorboard_dir={config.loop.tensorboard_dir!r} needs tensorboard, which is "
                "not installed; pip install 'torchrec-2dsp[tensorboard]', or leave it empty"
            ) from error
    return writers


class Display:
    """Shows each run's plan and progress: a bar on a terminal, lines elsewhere."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._steps = self._asked_steps = 0
        self._bar: Progress | None = None

    def opening(self, config: "TrainConfig") -> None:
        """Say which files are opened, before their rows are counted."""
        if files := getattr(config.data, "files", ()):
            self._say(f"opening {', '.join(files)}")

    def data_opened(self, text: str) -> None:
        """Say what of the files is trained on, and what is held out."""
        self._say(text)

    def run_planned(self, name: str, planned: "PlannedRun", config: "TrainConfig") -> None:
        """Print the plan and start the bar."""
        self._steps, self._asked_steps = planned.num_steps, config.loop.steps
        self._console.print()
        self._console.print(plan_to_show(name, planned))
        if self._console.is_terminal:
            self._bar = Progress(
                TextColumn("{task.description}", markup=False),
                BarColumn(bar_width=20),
                MofNCompleteColumn(),
                TextColumn("{task.fields[figures]}", markup=False),
                console=self._console,
            )
            self._bar.add_task(name, total=self._steps, figures="")
            self._bar.start()

    def run_resumed(self, name: str, path: Path, step: int) -> None:
        """Say where the run goes on."""
        self._say(f"{name}: going on at step {step}, from {path}")
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=step)

    def steps_trained(self, name: str, progress: "StepsTrained") -> None:
        """Move the bar, or print a line."""
        figures = progress_text(progress, self._steps)
        if self._bar is None:
            self._say(f"{name}: step {progress.step}/{self._steps}  {figures}")
        else:
            self._bar.update(self._bar.task_ids[0], completed=progress.step, figures=figures)

    def layers_moved(self, name: str, step: int, cuts: Mapping[str, tuple[int, ...]]) -> None:
        """Print where layers are cut now."""
        for stack, firsts in cuts.items():
            at = ", ".join(map(str, firsts))
            self._say(f"{name}: layers of {stack!r} are cut at {at}, after step {step}")

    def evaluated(self, name: str, evaluation: "Evaluation", *, is_best: bool) -> None:
        """Print the metrics of an evaluation."""
        metrics = "  ".join(f"{key} {value:.5f}" for key, value in evaluation.metrics.items())
        best = "  best so far" if is_best else ""
        self._say(f"{name}: held out, after step {evaluation.step}:  {metrics}{best}")

    def run_finished(self, result: "RunResult") -> None:
        """Stop the bar, which stays visible; say so if the run ended before its last step."""
        self.close()
        if result.balance is not None:
            self._say(f"{result.name}: {balance_text(result.balance)}")
        if len(result.losses) < self._asked_steps:
            self._say(f"{result.name}: ended after step {len(result.losses)}: {result.ending}")

    def all_finished(self, result: "TrainResult") -> None:
        """Show nothing: the closing table follows."""

    def close(self) -> None:
        """Give the terminal back, also after an error."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _say(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)


def progress_text(progress: "StepsTrained", num_steps: int) -> str:
    """The figures of some steps, in one line."""
    measured, window = progress.measured, progress.window
    per_step = window.seconds / len(measured.losses)
    minutes, seconds = divmod(round(per_step * (num_steps - progress.step)), 60)
    parts = [
        f"loss {measured.losses[-1]:.4f}",
        # Where all labels are equal, there is no entropy to compare with.
        *([] if math.isnan(measured.ne) else [f"NE {measured.ne:.4f}"]),
        f"lr {progress.table_lr:.3g}",
        f"{progress.samples_per_s:,.0f}/s",
        f"{minutes}:{seconds:02d} left",
        f"{max(window.memory_bytes) / 1e9:.2f} GB",
    ]
    if progress.dense is not None:
        parts.append(f"dense {progress.dense.density:.2%}")
    return "  ".join(parts)


def balance_text(report: "BalanceReport") -> str:
    """How even a run's samples were dealt, in one line."""
    before, after = report.imbalance_before, report.imbalance_after
    moved = report.num_moved / max(1, report.num_samples)
    return (
        f"slowest rank by the mean, by the samples' costs:  {before:.3f} as read, {after:.3f} as "
        f"dealt  {moved:.0%} of the samples moved"
    )


def plan_to_show(name: str, planned: "PlannedRun") -> Table:
    """One row per table; ranks that hold the same shard are joined by a plus."""
    plan = planned.plan
    how = f", kept equal by {type(plan.sync).__name__}" if plan.mesh.num_groups > 1 else ""
    how += f"; dense part: {planned.dense}" if planned.dense else ""
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
    tables = [table for _, module in plan.modules() for table in module.tables()]
    exchanges = [_exchange(sharding) for _, sharding in tables]
    if any(exchanges):
        table.add_column("exchange")
    for (key, sharding), exchange in zip(tables, exchanges, strict=True):
        num_rows, dim = planned.tables[key]
        table.add_row(
            Text(key),
            f"{num_rows:,}",
            str(dim),
            sharding.sharding_type,
            _ranks(plan.mesh, sharding.ranks),
            *([exchange] if any(exchanges) else []),
        )
    return table


def _exchange(sharding: "ParameterSharding2D") -> str:
    """How rows travel, who owns them, and how many are hot, where that isn't as in TorchRec."""
    from torchrec_2dsp.codecs.rows import Transport
    from torchrec_2dsp.plan.parameter_sharding import Exchange, RowOwners

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


def _ranks(mesh: "Mesh2D", shard_indices: list[int] | None) -> str:
    peers = [mesh.replica_peers(mesh.rank_at(0, index)) for index in shard_indices or []]
    return "  ".join("+".join(str(rank) for rank in group) for group in peers)


_HEADINGS = {"ne": "NE", "auc": "AUC"}


def show_result(result: "TrainResult", console: Console) -> None:
    """Print the closing table and what its numbers mean."""
    from torchrec_2dsp.programs.train.results import largest_loss_gap

    reference = result.reference if len(result.runs) > 1 else None
    # Narrow enough for 80 columns, which is what a log file gets.
    table = Table("run", "mesh", "sync", box=box.SIMPLE_HEAD, padding=0, show_edge=False)
    name = result.metric
    evaluated = f"eval\n{_HEADINGS.get(name, name)}"
    headings = ["train\nloss", "eval\nloss", evaluated, "samples\nper s", "sync MB\nper step"]
    if reference is not None:
        headings.insert(3, f"gap to\n{reference.name}")
    for heading in headings:
        table.add_column(Text(heading), justify="right")
    for run in result.runs:
        mesh = run.plan.mesh
        figures = [
            f"{run.train_loss:.5f}",
            f"{run.evaluated.metrics['loss']:.5f}",
            f"{run.evaluated.metrics[name]:.4f}",
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
        f"NE: loss relative to always predicting the click rate; lower is better{best}. "
        if result.metric == "ne"
        else ""
    ) + "Sync: what a rank sends to its replica peers."
