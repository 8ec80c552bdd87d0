"""`TensorBoardWatcher`: the scalars of each run, in a folder of its own."""

from pathlib import Path

from torch.utils.tensorboard import SummaryWriter

from torchrec_2dsp.plan.plan2d import Plan2D
from torchrec_2dsp.programs.train.config import TrainConfig
from torchrec_2dsp.programs.train.meter import Measured
from torchrec_2dsp.programs.train.results import DenseProgress, RunResult


class TensorBoardWatcher:
    """Writes losses by step, and a run's other figures at its end."""

    def __init__(self, folder: str | Path) -> None:
        """Each run writes to ``folder/<name of the run>``."""
        self._folder = Path(folder)
        self._writers: dict[str, SummaryWriter] = {}

    def run_planned(self, name: str, plan: Plan2D, config: TrainConfig) -> None:
        """Start the run's folder with its plan and config as texts."""
        writer = self._writers[name] = SummaryWriter(str(self._folder / name))
        writer.add_text("plan", f"```\n{plan}\n```")
        writer.add_text("config", f"```\n{config.model_dump_json(indent=1)}\n```")

    def steps_trained(
        self, name: str, last_step: int, measured: Measured, dense: DenseProgress | None
    ) -> None:
        """The loss of every step, the normalized entropy of them all, and what thresholds did."""
        writer = self._writers[name]
        first_step = last_step - len(measured.losses) + 1
        for step, loss in enumerate(measured.losses, first_step):
            writer.add_scalar("train/loss", loss, step)
        writer.add_scalar("train/ne", measured.ne, last_step)
        if dense is not None:
            writer.add_scalar("dense/density", dense.density, last_step)
            writer.add_scalar("dense/residual_norm", dense.residual_norm, last_step)
            writer.add_scalar("bytes/dense_fp32", dense.fp32_bytes_per_step, last_step)
            writer.add_scalar("bytes/dense_sent", dense.bytes_per_step, last_step)

    def run_finished(self, result: RunResult) -> None:
        """Write the figures of the whole run, at its last step."""
        writer = self._writers.pop(result.name)
        figures = {
            "eval/loss": result.evaluated.loss,
            "eval/ne": result.evaluated.ne,
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
        for tag, value in figures.items():
            writer.add_scalar(tag, value, len(result.losses))
        writer.close()
