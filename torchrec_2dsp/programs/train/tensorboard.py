"""`TensorBoardWatcher`: the scalars of each run, in a folder of its own."""

from collections.abc import Mapping
from pathlib import Path

from torch.utils.tensorboard import SummaryWriter

from torchrec_2dsp.programs.config.output_file import writing
from torchrec_2dsp.programs.train.config import TrainConfig
from torchrec_2dsp.programs.train.evaluation import Evaluation
from torchrec_2dsp.programs.train.parts import PlannedRun
from torchrec_2dsp.programs.train.results import QuietWatcher, RunResult, StepsTrained


class TensorBoardWatcher(QuietWatcher):
    """Writes losses by step, evaluations, and a run's other figures at its end.

    TensorBoard writes in a thread of its own, so a disk that is full is noticed some calls later,
    at the latest when the run is over.
    """

    def __init__(self, folder: str | Path) -> None:
        """Each run writes to ``folder/<name of the run>``."""
        self._folder = Path(folder)
        self._writers: dict[str, SummaryWriter] = {}

    def run_planned(self, name: str, planned: PlannedRun, config: TrainConfig) -> None:
        """Start the run's folder with its plan and config as texts."""
        with writing(self._folder / name):
            writer = self._writers[name] = SummaryWriter(str(self._folder / name))
            writer.add_text("plan", f"```\n{planned.plan}\n```")
            writer.add_text("config", f"```\n{config.model_dump_json(indent=1)}\n```")

    def run_resumed(self, name: str, path: Path, step: int) -> None:
        """Let the curves of the new life cover what an earlier one wrote after ``step``."""
        with writing(self._folder / name):
            self._writers[name].close()
            self._writers[name] = SummaryWriter(str(self._folder / name), purge_step=step + 1)

    def steps_trained(self, name: str, progress: StepsTrained) -> None:
        """The loss of every step; and of them all the entropy, the rates, the speed, the memory,
        and what thresholds did."""
        step, losses = progress.step, progress.measured.losses
        figures = {
            "train/ne": progress.measured.ne,
            "lr/tables": progress.table_lr,
            "lr/dense": progress.dense_lr,
            "speed/samples_per_s_now": progress.samples_per_s,
            "memory/largest_gb": max(progress.window.memory_bytes) / 1e9,
        }
        if (dense := progress.dense) is not None:
            figures |= {
                "dense/density": dense.density,
                "dense/residual_norm": dense.residual_norm,
                "bytes/dense_fp32": dense.fp32_bytes_per_step,
                "bytes/dense_sent": dense.bytes_per_step,
            }
        with writing(self._folder / name):
            writer = self._writers[name]
            for number, loss in enumerate(losses, step - len(losses) + 1):
                writer.add_scalar("train/loss", loss, number)
            for tag, value in figures.items():
                writer.add_scalar(tag, value, step)

    def layers_moved(self, name: str, step: int, cuts: Mapping[str, tuple[int, ...]]) -> None:
        """The first layer of each stage but the first, in words."""
        with writing(self._folder / name):
            for stack, firsts in cuts.items():
                self._writers[name].add_text(f"dense/cuts of {stack}", str(firsts), step)

    def evaluated(self, name: str, evaluation: Evaluation, *, is_best: bool) -> None:
        """The metrics of an evaluation."""
        with writing(self._folder / name):
            for metric, value in evaluation.metrics.items():
                self._writers[name].add_scalar(f"eval/{metric}", value, evaluation.step)

    def run_finished(self, result: RunResult) -> None:
        """Write the figures of the whole run, at its last step."""
        figures = {
            "speed/samples_per_s": result.samples_per_s,
            "sync/bytes_per_step": result.sync_bytes_per_step,
        }
        # Where nothing is encoded, nothing is counted.
        if result.rows_bytes_per_step:
            figures["bytes/rows_fp32"] = result.rows_fp32_bytes_per_step
            figures["bytes/rows_sent"] = result.rows_bytes_per_step
        if result.sync_fp32_bytes_per_step != result.sync_bytes_per_step:
            figures["bytes/replicas_fp32"] = result.sync_fp32_bytes_per_step
            figures["bytes/replicas_sent"] = result.sync_bytes_per_step
        with writing(self._folder / result.name):
            writer = self._writers.pop(result.name)
            for tag, value in figures.items():
                writer.add_scalar(tag, value, len(result.losses))
            writer.close()
