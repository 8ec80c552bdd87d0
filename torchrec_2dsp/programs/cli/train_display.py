"""`Display`: a training program as it runs, on a terminal or in a log."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from torchrec_2dsp.mesh.mesh2d import Mesh2D
    from torchrec_2dsp.plan.parameter_sharding import ParameterSharding2D
    from torchrec_2dsp.programs.train.config import TrainConfig
    from torchrec_2dsp.programs.train.evaluation import Evaluation
    from torchrec_2dsp.programs.train.parts import PlannedRun
    from torchrec_2dsp.programs.train.results import RunResult, StepsTrained, TrainResult
    from torchrec_2dsp.samples.report import BalanceReport


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


def _ranks(mesh: "Mesh2D", shard_indices: list[int] | None) -> str:
    peers = [mesh.replica_peers(mesh.rank_at(0, index)) for index in shard_indices or []]
    return "  ".join("+".join(str(rank) for rank in group) for group in peers)
