"""A training program on a terminal or in a log: plans, progress, and the closing table."""

import math
from collections.abc import Mapping
from dataclasses import replace

from rich.console import Console
from rich.text import Text

from torchrec_2dsp.parallel.checkpoint.address import Place
from torchrec_2dsp.plan import serialize
from torchrec_2dsp.plan.parameter_sharding import Exchange
from torchrec_2dsp.plan.sync import GradientSync
from torchrec_2dsp.programs.cli.console import ProgressBars
from torchrec_2dsp.programs.run_report.contents import RunPlan
from torchrec_2dsp.programs.train.config import TrainConfig
from torchrec_2dsp.programs.train.record import Evaluation, StepsTrained, best_of, heading_of
from torchrec_2dsp.programs.train.results import (
    RunResult,
    TrainResult,
    TrainWatcher,
    largest_loss_gap,
)
from torchrec_2dsp.programs.train.sharded import PlannedRun
from torchrec_2dsp.report.table import MISSING, Table


class TrainDisplay(TrainWatcher):
    """Shows each run's plan and progress: a bar on a terminal, lines elsewhere."""

    def __init__(self, console: Console) -> None:
        self._console, self._bars = console, ProgressBars(console)
        self._steps = self._asked_steps = 0

    def opening(self, config: TrainConfig) -> None:
        """Print which files are opened, before their rows are counted."""
        if files := getattr(config.data, "files", ()):
            self._say(f"opening {', '.join(files)}")

    def data_opened(self, text: str) -> None:
        """Print which rows are for training, and which are held out."""
        self._say(text)

    def run_planned(self, name: str, planned: PlannedRun, config: TrainConfig) -> None:
        """Print the plan and start the bar."""
        self._steps, self._asked_steps = planned.num_steps, config.loop.steps
        self._console.print()
        self._console.print(plan_table(name, planned))
        self._bars = ProgressBars(self._console)
        self._bars.show(name, 0, self._steps)

    def run_resumed(self, name: str, path: Place, step: int) -> None:
        """Print where the run continues."""
        self._say(f"{name}: going on at step {step}, from {path}")
        self._bars.show(name, step, self._steps)

    def steps_trained(self, name: str, progress: StepsTrained) -> None:
        """Move the bar, or print a line."""
        figures = progress_text(progress, self._steps)
        if self._bars.are_shown:
            self._bars.show(name, progress.step, self._steps, figures)
        else:
            self._say(f"{name}: step {progress.step}/{self._steps}  {figures}")

    def layers_moved(self, name: str, step: int, cuts: Mapping[str, tuple[int, ...]]) -> None:
        """Print the layers' new cuts."""
        for stack, firsts in cuts.items():
            at = ", ".join(map(str, firsts))
            self._say(f"{name}: layers of {stack!r} are cut at {at}, after step {step}")

    def evaluated(self, name: str, evaluation: Evaluation, *, is_best: bool) -> None:
        """Print an evaluation's metrics."""
        metrics = "  ".join(f"{key} {value:.5f}" for key, value in evaluation.metrics.items())
        best = "  best so far" if is_best else ""
        self._say(f"{name}: held out, after step {evaluation.step}:  {metrics}{best}")

    def run_finished(self, result: RunResult) -> None:
        """Stop the bar; say so if the run ended before its last step."""
        self.close()
        if len(result.losses) < self._asked_steps:
            self._say(f"{result.name}: ended after step {len(result.losses)}: {result.ending}")

    def close(self) -> None:
        """Release the terminal, also after an error."""
        self._bars.close()

    def _say(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)


def progress_text(progress: StepsTrained, num_steps: int) -> str:
    """Format steps' figures in one line."""
    per_step_s = (progress.seconds or 0.0) / len(progress.losses)
    minutes, seconds = divmod(round(per_step_s * (num_steps - progress.step)), 60)
    parts = [
        f"loss {progress.loss:.4f}",
        # If all labels are equal, there is no entropy to compare with.
        *([] if math.isnan(progress.ne) else [f"NE {progress.ne:.4f}"]),
        f"lr {progress.table_lr:.3g}",
        f"{progress.samples_per_s:,.0f}/s",
        f"{minutes}:{seconds:02d} left",
        f"{max(progress.memory_bytes) / 1e9:.2f} GB",
    ]
    if progress.dense_density is not None:
        parts.append(f"dense {progress.dense_density:.2%}")
    return "  ".join(parts)


def plan_table(name: str, planned: PlannedRun) -> Table:
    """Return a table with one row per embedding table; replica peers are joined by a plus."""
    plan = planned.plan
    verb = "kept equal" if isinstance(plan.sync, GradientSync) else "averaged"
    how = f", {verb} by {type(plan.sync).__name__}" if plan.mesh.num_groups > 1 else ""
    how += f"; dense part: {planned.dense}" if planned.dense else ""
    table = RunPlan.model_validate_json(serialize.to_json(plan)).table(planned.tables)
    if all(row[-1] == Exchange.POOLED.value for row in table.rows):
        # All rows travel as in TorchRec.
        rows = [row[:-1] for row in table.rows]
        table = replace(table, headings=table.headings[:-1], rows=rows)
    return replace(table, title=f"{name}: {plan.mesh}{how}")


def show_result(result: TrainResult, console: Console) -> None:
    """Print the closing tables, narrow enough for 80 columns, and their numbers' meaning."""
    reference = result.reference if len(result.runs) > 1 else None
    for table in (_losses_table(result, reference), _speeds_table(result)):
        console.print()
        console.print(table)
    console.print()
    console.print(Text(_meaning(result, has_gap=reference is not None)))


def _losses_table(result: TrainResult, reference: RunResult | None) -> Table:
    """Return each run's losses, its last evaluation, and its best one."""
    name = result.metric
    others = ["auc"] if name == "ne" else []
    rows = []
    for run in result.runs:
        metrics, best = run.evaluated.metrics, best_of(run.evaluations, name)
        row = [
            run.name,
            f"{run.train_loss:.5f}",
            f"{metrics['loss']:.5f}",
            *(f"{metrics[metric]:.4f}" for metric in (name, *others)),
            MISSING if best is None else f"{best.metrics[name]:.4f}",
            MISSING if best is None else f"{best.step:,}",
        ]
        if reference is not None:
            row.append(MISSING if run is reference else f"{largest_loss_gap(run, reference):.1e}")
        rows.append(row)
    headings = ["run", "train\nloss", "eval\nloss"]
    headings += [f"eval\n{heading_of(metric)}" for metric in (name, *others)]
    headings += [f"best\n{heading_of(name)}", "at\nstep"]
    headings += [] if reference is None else [f"gap to\n{reference.name}"]
    return Table(headings, rows, {"run"})


def _speeds_table(result: TrainResult) -> Table:
    """Return each run's mesh, sync, speed and bytes."""
    rows = []
    for run in result.runs:
        mesh, sync = run.plan2d.mesh, type(run.plan2d.sync).__name__
        rows.append(
            [
                run.name,
                f"{mesh.num_groups}x{mesh.group_size}",
                "none" if mesh.num_groups == 1 else sync,
                f"{run.samples_per_s:,.0f}",
                f"{run.sync_bytes_per_step / 1e6:.3f}",
            ]
        )
    headings = ["run", "mesh", "sync", "samples\nper s", "sync MB\nper step"]
    return Table(headings, rows, {"run", "mesh", "sync"})


def _meaning(result: TrainResult, *, has_gap: bool) -> str:
    texts = []
    if has_gap:
        texts.append(
            "Gap: the largest difference of a step's train loss; with GradientSync, float rounding "
            "that has grown with the steps."
        )
    if result.metric == "ne":
        planted = result.planted_ne
        best = "" if planted is None else f", and the model behind the labels has {planted:.4f}"
        texts.append(
            f"NE: loss relative to always predicting the click rate; lower is better{best}."
        )
    texts.append("Sync: what a rank sends to its replica peers.")
    return " ".join(texts)
