"""Each model and dense optimizer of the training program trains as the unsharded model does."""

from typing import Any

import pytest
import torch

from tests.support.ranks import RankPool
from tests.support.train_runs import TREE, PlainRun, config_with
from torchrec_2dsp.programs.config.sections import SplitPlace
from torchrec_2dsp.programs.train.config import TrainConfig
from torchrec_2dsp.programs.train.program import train

pytestmark = pytest.mark.dealt_file

TINY: dict[str, Any] = TREE | {
    "data": TREE["data"] | {"interaction_share": 0.5},
    "loop": TREE["loop"] | {"steps": 7, "eval_steps": 2},
    "runs": {
        "one_group": {},
        "exact": {"num_groups": 2},
        "rows": {"sharding_types": ["row_wise"], "exchange": "row", "hot_rows": 4},
    },
}
DCN = {"kind": "dcn", "dcn_layers": 2, "dcn_low_rank": 3}
RATES = {"sgd": 0.1, "adagrad": 0.02, "adam": 0.01}
Splits = dict[SplitPlace, float]
SPLITS: Splits = {"embeddings": 0.25, "dense": 0.5, "over": 0.5}
PLAIN = {"sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad, "adam": torch.optim.Adam}


def losses_of(config: TrainConfig) -> dict[str, list[float]]:
    """Train all runs; return their losses, and those on the held-out batches."""
    return {run.name: [*run.losses, *run.evaluated.losses] for run in train(config).runs}


def unsharded_losses(config: TrainConfig, splits: Splits | None = None) -> list[float]:
    """Return the plain model's losses on the global batches and on the held-out ones."""
    plain = PlainRun(config, PLAIN[config.optimizer.dense_optimizer], splits)
    return [*plain.train(), *plain.held_out()[0]]


def train_beside(
    rank: int, world_size: int, model: dict[str, Any], optimizer: str, splits: Splits
) -> tuple[dict[str, list[float]], list[float], list[float]]:
    """Return all runs' losses, the plain model's, and those without its splits or updates."""
    rule = {"dense_optimizer": optimizer, "dense_lr": RATES[optimizer]}
    runs = {name: run | {"splits": splits} for name, run in TINY["runs"].items()}
    config = config_with(TINY, model=model, optimizer=rule, runs=runs)
    idle = config_with(TINY, model=model, optimizer=rule | {"lr": 0.0, "dense_lr": 0.0})
    without = unsharded_losses(config if splits else idle)
    return losses_of(config), unsharded_losses(config, splits), without


@pytest.mark.parametrize(
    ("model", "optimizer", "splits", "least_gap"),
    [
        ({}, "adagrad", {}, 1e-3),
        (DCN, "sgd", {}, 1e-3),
        (DCN, "adagrad", {}, 1e-3),
        (DCN, "adam", {}, 1e-3),
        ({}, "sgd", SPLITS, 3e-4),
        (DCN, "sgd", SPLITS, 3e-4),
    ],
    ids=["dlrm-adagrad", "dcn-sgd", "dcn-adagrad", "dcn-adam", "dlrm-split", "dcn-split"],
)
def test_every_run_trains_as_the_unsharded_model(
    ranks4: RankPool, model: dict[str, Any], optimizer: str, splits: Splits, least_gap: float
) -> None:
    sharded, expected, without = ranks4.run(train_beside, model, optimizer, splits)[0]

    assert list(sharded) == ["one_group", "exact", "rows"]
    for losses in sharded.values():
        # Sums of 32 losses are added in another order. Adam divides rounding by its own size.
        # No number is so near to another that they change places by that in a split.
        assert losses == pytest.approx(expected, abs=1e-5)
    # The updates or the splits matter, so that the comparison can fail.
    gaps = zip(expected, without, strict=True)
    assert max(abs(left - right) for left, right in gaps) > least_gap


def train_laplace(rank: int, world_size: int) -> list[float]:
    run = {"splits": {"dense": 0.5, "over": 0.5}, "split_threshold": "laplace", "num_groups": 2}
    return losses_of(config_with(TINY, runs={"laplace": run}))["laplace"]


def test_thresholds_that_ranks_fit_train_nearly_alike(ranks4: RankPool) -> None:
    losses = ranks4.run(train_laplace)
    assert losses == [losses[0]] * 4
    expected = unsharded_losses(config_with(TINY))
    assert losses[0] != pytest.approx(expected, abs=1e-5)
    assert losses[0] == pytest.approx(expected, abs=0.1)
