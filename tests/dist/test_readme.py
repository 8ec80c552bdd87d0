"""The swap that the README prints runs, line by line, between what a user has before and after."""

import re
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist

import torchrec_2dsp as tdsp
from tests.support.loops import LossModel
from tests.support.models import ModelSpec, make_batch
from tests.support.parity import make_optimizer
from tests.support.ranks import RankPool

README = Path(__file__).parents[2] / "README.md"


def swapped() -> str:
    """The lines of the README's diff that are there afterwards."""
    (block,) = re.findall(r"^```diff\n(.*?)^```", README.read_text(), re.MULTILINE | re.DOTALL)
    lines = [line for line in block.splitlines() if not line.startswith("- ")]
    return "\n".join(line[2:] for line in lines)


def run_swap(rank: int, world_size: int, source: str) -> list[float]:
    """Losses of a few steps after the swap."""
    calibration = tdsp.Calibration.load("configs/hardware/emulated_1gbit.toml")
    spec = ModelSpec()
    script: dict[str, Any] = {
        "dist": dist,
        "model": LossModel(spec),
        "device": torch.device("cpu"),
        "topology": calibration.topology(world_size, local_world_size=2),
        "constraints": {},
        "TrainPipelineSparseDist": TrainPipelineSparseDist,
    }
    before, last = source.rstrip().rsplit("\n", 1)
    exec(before, script)
    # A user makes the optimizer of the sharded model's parameters.
    script["optimizer"] = make_optimizer(script["model"])
    exec(last, script)
    batches = iter([make_batch(spec, seed=10 * step + rank) for step in range(3)])
    return [script["pipeline"].progress(batches)[0].item() for _ in range(3)]


def test_the_swap_of_the_readme_runs(ranks2: RankPool) -> None:
    source = swapped()
    assert "Planner2D" in source
    assert source.rstrip().rpartition("\n")[2].startswith("pipeline = ")
    for losses in ranks2.run(run_swap, source):
        assert len(set(losses)) == 3
