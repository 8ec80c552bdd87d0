"""Runs of the training program whose dense gradients travel in other ways than DDP's."""

import pytest

from tests.support.ranks import RankPool
from torchrec_2dsp.programs.bench.config import StockContestant, TwoDContestant
from torchrec_2dsp.programs.config.config_file import make_config
from torchrec_2dsp.programs.config.dense import PowerSGDConfig
from torchrec_2dsp.programs.train.config import TrainConfig
from torchrec_2dsp.programs.train.program import train
from torchrec_2dsp.programs.train.results import largest_loss_gap

pytestmark = pytest.mark.dealt_file

NUM_DENSE_STEPS = 3
TREE = {
    "data": {"num_dense": 3, "features": [{"name": "user", "num_rows": 100}]},
    "model": {"dim": 8, "dense_layers": [64], "over_layers": [64, 64]},
    "loop": {"steps": 8, "global_batch_size": 32, "eval_steps": 2, "report_every": 4},
    "runs": {
        "ddp": {},
        "whole": {"dense": {"kind": "thresholded", "density": 1.0}},
        "thresholded": {
            "dense": {"kind": "thresholded", "density": 0.05, "warm_up": NUM_DENSE_STEPS}
        },
        "sharded": {"dense": {"kind": "fully_sharded", "num_copies": 1}},
        "averaged": {
            "dense": {"kind": "local", "local_steps": 1, "outer_lr": 1.0, "outer_momentum": 0.0}
        },
        "meeting": {"dense": {"kind": "local", "local_steps": 4}},
        "delayed": {"dense": {"kind": "delayed", "warm_up": NUM_DENSE_STEPS}},
        "fp16": {"num_groups": 2, "dense": {"kind": "fp16"}},
        "powersgd": {"dense": {"kind": "powersgd", "rank": 1, "warm_up": NUM_DENSE_STEPS}},
    },
}


def losses(rank: int, world_size: int) -> dict[str, tuple[tuple[float, ...], float]]:
    """Return the losses of each run, and its largest distance from DDP's."""
    runs = {run.name: run for run in train(make_config(TrainConfig, TREE)).runs}
    return {name: (run.losses, largest_loss_gap(run, runs["ddp"])) for name, run in runs.items()}


def test_runs_send_dense_gradients_as_they_say(ranks2: RankPool) -> None:
    by_run = ranks2.run(losses)[0]
    assert by_run["whole"][0] == by_run["ddp"][0]
    assert by_run["sharded"][1] < 1e-6
    # Weights that are averaged after each step of SGD are those of averaged gradients.
    assert by_run["averaged"][1] < 1e-6
    assert 0 < by_run["meeting"][1] < 0.1
    for name, bound in (
        ("thresholded", 0.1),
        ("delayed", 0.1),
        ("powersgd", 0.1),
        ("fp16", 1e-3),
    ):
        assert 0 < by_run[name][1] < bound
    # A warm-up is DDP's arithmetic. The loss of the step after it doesn't know of it yet.
    for name in ("thresholded", "delayed", "powersgd"):
        for step, (loss, expected) in enumerate(
            zip(by_run[name][0], by_run["ddp"][0], strict=True)
        ):
            assert (abs(loss - expected) < 1e-7) == (step <= NUM_DENSE_STEPS), (name, step)


@pytest.mark.parametrize("kind", ["stock", "two_d"])
def test_contestants_say_how_dense_gradients_travel(kind: str) -> None:
    config = StockContestant if kind == "stock" else TwoDContestant
    contestant = make_config(config, {"kind": kind, "dense": {"kind": "thresholded"}})
    assert contestant.describe().endswith(", 0.500% of dense gradients, in bf16")
    assert "dense" not in make_config(config, {"kind": kind}).describe()
    assert PowerSGDConfig().text == "dense gradients by PowerSGD of rank 2"
