"""What the training program writes for TensorBoard about transports and thresholds."""

from pathlib import Path

import pytest
import torch.distributed as dist
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.dist.test_train import TINY
from tests.support.ranks import RankPool
from torchrec_2dsp.programs.config.config_file import make_config
from torchrec_2dsp.programs.train.config import TrainConfig
from torchrec_2dsp.programs.train.program import train
from torchrec_2dsp.programs.train.results import RunResult, TensorBoardWatcher


def train_rounded(rank: int, world_size: int, folder: str) -> RunResult:
    """Train with rounded rows and row gradients; return the run with its scalars."""
    rounded = {
        "num_groups": 2,
        "sharding_types": ["row_wise"],
        "exchange": "row",
        "row_transport": "int8",
        "transport": "bf16",
    }
    watchers = [TensorBoardWatcher(folder)] if rank == 0 else []
    config = make_config(TrainConfig, TINY | {"runs": {"rounded": rounded, "plain": {}}})
    result = train(config, watchers)
    dist.barrier()
    return result.runs[0]


@pytest.mark.dealt_suite
def test_scalars_tell_what_transports_save(ranks4: RankPool, tmp_path: Path) -> None:
    run = ranks4.run(train_rounded, str(tmp_path))[0]

    # Rows of 8 numbers become 8 bytes and a scale of two.
    assert run.rows_bytes_per_step == pytest.approx(run.rows_fp32_bytes_per_step * 10 / 32)
    # Of a row gradient the numbers are halved, and not the number of its row.
    assert run.sync_bytes_per_step < run.sync_fp32_bytes_per_step < 2 * run.sync_bytes_per_step
    scalars, of_plain = (
        EventAccumulator(str(tmp_path / name)).Reload() for name in ("rounded", "plain")
    )
    for tag, value in {
        "bytes/rows_fp32": run.rows_fp32_bytes_per_step,
        "bytes/rows_sent": run.rows_bytes_per_step,
        "bytes/replicas_fp32": run.sync_fp32_bytes_per_step,
        "bytes/replicas_sent": run.sync_bytes_per_step,
    }.items():
        (event,) = scalars.Scalars(tag)
        assert (event.step, event.value) == (7, pytest.approx(value))
    assert not [tag for tag in of_plain.Tags()["scalars"] if tag.startswith("bytes/")]


def train_thresholded(rank: int, world_size: int, folder: str) -> None:
    """A run that thresholds its dense gradients after three steps."""
    thresholded = {"dense": {"kind": "thresholded", "density": 0.05, "warm_up": 3}}
    tree = TINY | {
        "model": {"dim": 8, "dense_layers": [64], "over_layers": [64, 64]},
        "loop": TINY["loop"] | {"steps": 6, "report_every": 3},
        "runs": {"thresholded": thresholded},
    }
    train(make_config(TrainConfig, tree), [TensorBoardWatcher(folder)] if rank == 0 else [])


def test_scalars_tell_what_thresholds_leave_out(ranks2: RankPool, tmp_path: Path) -> None:
    ranks2.run(train_thresholded, str(tmp_path))

    scalars = EventAccumulator(str(tmp_path / "thresholded")).Reload()
    by_step = {
        tag: {event.step: event.value for event in scalars.Scalars(tag)}
        for tag in scalars.Tags()["scalars"]
    }
    assert by_step["dense/density"] == {3: 0, 6: pytest.approx(0.05, rel=0.2)}
    assert by_step["dense/residual_norm"][3] == 0 < by_step["dense/residual_norm"][6]
    sent, fp32 = by_step["bytes/dense_sent"], by_step["bytes/dense_fp32"]
    assert sent[3] == fp32[3] == fp32[6] > 3 * sent[6]
