r"""Log training runs to MLflow or to Weights & Biases.

OMP_NUM_THREADS=1 PYTHONPATH=docs/examples torchrun --standalone --nproc-per-node 4 \
    -m torchrec_2dsp train --config demo \
    --set output.watchers='["experiment_trackers:MLflowWatcher"]'

Rank 0 makes a watcher and tells it each step. Both log to the server that their own environment
variables name; WANDB_MODE=offline writes to a folder instead. mlflow-skinny, which lacks MLflow's
default store, needs MLFLOW_TRACKING_URI.
"""

from typing import Any

import mlflow
import wandb

from torchrec_2dsp.programs.train.config import TrainConfig
from torchrec_2dsp.programs.train.record import Evaluation, StepsTrained
from torchrec_2dsp.programs.train.results import RunResult, TrainWatcher


class MLflowWatcher(TrainWatcher):
    """Logs each run to MLflow."""

    def __init__(self, config: TrainConfig) -> None:
        self._settings = {"lr": config.optimizer.lr, "global_batch": config.loop.global_batch_size}

    def run_planned(self, name: str, planned: Any, config: TrainConfig) -> None:
        mlflow.start_run(run_name=name)
        mlflow.log_params(self._settings)
        mlflow.log_text(str(planned.plan), "plan.txt")

    def steps_trained(self, name: str, progress: StepsTrained) -> None:
        for step, loss in enumerate(progress.losses, progress.step - len(progress.losses) + 1):
            mlflow.log_metric("loss", loss, step)

    def evaluated(self, name: str, evaluation: Evaluation, *, is_best: bool) -> None:
        figures = {f"held out {key}": value for key, value in evaluation.metrics.items()}
        # Their names may have no @.
        mlflow.log_metrics(
            {key.replace("@", " at "): value for key, value in figures.items()}, evaluation.step
        )

    def run_finished(self, result: RunResult) -> None:
        mlflow.end_run()


class WandbWatcher(TrainWatcher):
    """Logs each run to Weights & Biases."""

    def __init__(self, config: TrainConfig) -> None:
        self._settings = config.model_dump(mode="json")

    def run_planned(self, name: str, planned: Any, config: TrainConfig) -> None:
        self._run = wandb.init(name=name, config=self._settings)

    def steps_trained(self, name: str, progress: StepsTrained) -> None:
        for step, loss in enumerate(progress.losses, progress.step - len(progress.losses) + 1):
            self._run.log({"loss": loss}, step)

    def evaluated(self, name: str, evaluation: Evaluation, *, is_best: bool) -> None:
        self._run.log({"held out": evaluation.metrics}, evaluation.step)

    def run_finished(self, result: RunResult) -> None:
        self._run.finish()
