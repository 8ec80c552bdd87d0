"""Each model and dense optimizer of the training program trains as the unsharded model does."""

from collections.abc import Mapping
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
PLAIN = {"sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad, "adam": torch.optim.Adam}


def losses_of(config: TrainConfig) -> dict[str, list[float]]:
    """Train all runs; return their losses, and those on the held-out batches."""
    return {run.name: [*run.losses, *run.evaluated.losses] for run in train(config).runs}


def unsharded_losses(
    config: TrainConfig, splits: Mapping[SplitPlace, float] | None = None
) -> list[float]:
    """Return the plain model's losses on the global batches and on the held-out ones."""
    plain = PlainRun(config, PLAIN[config.optimizer.dense_optimizer], splits)
    return [*plain.train(), *plain.held_out()[0]]


def train_beside(
    rank: int, world_size: int, model: dict[str, Any], optimizer: str
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    rule = {"dense_optimizer": optimizer, "dense_lr": RATES[optimizer]}
    config = config_with(TINY, model=model, optimizer=rule)
    idle = config_with(TINY, model=model, optimizer=rule | {"lr": 0.0, "dense_lr": 0.0})
    expected = {"trained": unsharded_losses(config), "untrained": unsharded_losses(idle)}
    return losses_of(config), expected


@pytest.mark.parametrize(
    ("model", "optimizer"),
    [({}, "adagrad"), (DCN, "sgd"), (DCN, "adagrad"), (DCN, "adam")],
    ids=["dlrm-adagrad", "dcn-sgd", "dcn-adagrad", "dcn-adam"],
)
def test_every_run_trains_as_the_unsharded_model(
    ranks4: RankPool, model: dict[str, Any], optimizer: str
) -> None:
    sharded, expected = ranks4.run(train_beside, model, optimizer)[0]

    assert list(sharded) == ["one_group", "exact", "rows"]
    for losses in sharded.values():
        # Sums of 32 losses are added in another order. Adam divides rounding by its own size.
        assert losses == pytest.approx(expected["trained"], abs=1e-5)
    # The updates matter, so that the comparison can fail.
    gaps = zip(expected["trained"], expected["untrained"], strict=True)
    assert max(abs(left - right) for left, right in gaps) > 1e-3


SPLITS: dict[SplitPlace, float] = {"embeddings": 0.25, "dense": 0.5, "over": 0.5}


def train_split(
    rank: int, world_size: int, model: dict[str, Any]
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    runs = {name: run | {"splits": SPLITS} for name, run in TINY["runs"].items()}
    config = config_with(TINY, model=model, runs=runs)
    expected = {"split": unsharded_losses(config, SPLITS), "whole": unsharded_losses(config)}
    return losses_of(config), expected


@pytest.mark.parametrize("model", [{}, DCN], ids=["dlrm", "dcn"])
def test_every_split_run_trains_as_the_unsharded_split_model(
    ranks4: RankPool, model: dict[str, Any]
) -> None:
    sharded, expected = ranks4.run(train_split, model)[0]

    assert list(sharded) == ["one_group", "exact", "rows"]
    for losses in sharded.values():
        # Sums are added in another order. No number is so near to another that they change places.
        assert losses == pytest.approx(expected["split"], abs=1e-5)
    # The splits matter, so that the comparison can fail.
    gaps = zip(expected["split"], expected["whole"], strict=True)
    assert max(abs(left - right) for left, right in gaps) > 3e-4


def train_laplace(rank: int, world_size: int) -> list[float]:
    run = {"splits": {"dense": 0.5, "over": 0.5}, "split_threshold": "laplace", "num_groups": 2}
    return losses_of(config_with(TINY, runs={"laplace": run}))["laplace"]


def test_thresholds_that_ranks_fit_train_nearly_alike(ranks4: RankPool) -> None:
    losses = ranks4.run(train_laplace)
    assert losses == [losses[0]] * 4
    expected = unsharded_losses(config_with(TINY))
    assert losses[0] != pytest.approx(expected, abs=1e-5)
    assert losses[0] == pytest.approx(expected, abs=0.1)
