"""Each model and dense optimizer of the training program trains as the unsharded model does."""

from typing import Any, cast

import pytest
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper

from tests.support.ranks import RankPool
from tests.support.train_runs import click_data, click_model
from torchrec_2dsp.optim import MomentScaledRowWiseAdaGradOptimizer
from torchrec_2dsp.programs.config.config_file import make_config
from torchrec_2dsp.programs.data.dataset import Split
from torchrec_2dsp.programs.data.synthetic import make_batch
from torchrec_2dsp.programs.models.model import build_model, split_
from torchrec_2dsp.programs.models.optimizer import dense_optimizer
from torchrec_2dsp.programs.train.config import TrainConfig
from torchrec_2dsp.programs.train.program import train

pytestmark = pytest.mark.dealt_file

TINY: dict[str, Any] = {
    "data": {
        "num_dense": 3,
        "interaction_share": 0.5,
        "features": [
            {"name": "user", "num_rows": 100},
            {"name": "page", "num_rows": 33, "min_ids": 0, "max_ids": 3},
        ],
    },
    "model": {"dim": 8, "dense_layers": [4], "over_layers": [4]},
    "loop": {"steps": 7, "global_batch_size": 32, "eval_steps": 2, "report_every": 3},
    "runs": {
        "one_group": {},
        "exact": {"num_groups": 2},
        "rows": {"sharding_types": ["row_wise"], "exchange": "row", "hot_rows": 4},
    },
}
DCN = {"kind": "dcn", "dcn_layers": 2, "dcn_low_rank": 3}
SGD, ADAGRAD, ADAM = (
    {"dense_optimizer": "sgd"},
    {"dense_optimizer": "adagrad", "dense_lr": 0.02},
    {"dense_optimizer": "adam", "dense_lr": 0.01},
)


def config_of(model: dict[str, Any], optimizer: dict[str, Any]) -> TrainConfig:
    tree = TINY | {"model": TINY["model"] | model, "optimizer": optimizer}
    return make_config(TrainConfig, tree)


def unsharded_losses(
    config: TrainConfig, *, is_trained: bool = True, is_split: bool = True
) -> list[float]:
    """Return losses of the plain model on the global batches, and of those that are held out."""
    model = build_model(click_data(config), click_model(config))
    run = config.runs["rows"]
    split_(model, run.splits if is_split else {}, run.split_threshold)
    named = dict(model.named_parameters())
    tables = {name: weight for name, weight in named.items() if "embedding_bags" in name}
    others = {name: weight for name, weight in named.items() if name not in tables}
    rule = config.optimizer
    optimizer = CombinedOptimizer(
        [
            KeyedOptimizerWrapper(
                tables,
                lambda params: MomentScaledRowWiseAdaGradOptimizer(
                    cast(Any, params), lr=rule.lr, eps=rule.eps, moment_scale=1.0
                ),
            ),
            dense_optimizer(rule, others),
        ]
    )
    losses, size = [], config.loop.global_batch_size
    for step in range(config.loop.steps):
        loss, _ = model(make_batch(click_data(config), step=step, global_batch_size=size))
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        if is_trained:
            optimizer.step()
    model.eval()
    for step in range(config.loop.eval_steps):
        batch = make_batch(click_data(config), step=step, global_batch_size=size, split=Split.EVAL)
        losses.append(model(batch)[0].item())
    return losses


def train_beside(
    rank: int, world_size: int, model: dict[str, Any], optimizer: dict[str, Any]
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    config = config_of(model, optimizer)
    sharded = {run.name: [*run.losses, *run.evaluated.losses] for run in train(config).runs}
    expected = {
        "trained": unsharded_losses(config),
        "untrained": unsharded_losses(config, is_trained=False),
    }
    return sharded, expected


@pytest.mark.parametrize(
    ("model", "optimizer"),
    [({}, ADAGRAD), (DCN, SGD), (DCN, ADAGRAD), (DCN, ADAM)],
    ids=["dlrm-adagrad", "dcn-sgd", "dcn-adagrad", "dcn-adam"],
)
def test_every_run_trains_as_the_unsharded_model(
    ranks4: RankPool, model: dict[str, Any], optimizer: dict[str, Any]
) -> None:
    sharded, expected = ranks4.run(train_beside, model, optimizer)[0]

    assert list(sharded) == ["one_group", "exact", "rows"]
    for losses in sharded.values():
        # Sums of 32 losses are added in another order. Adam divides rounding by its own size.
        assert losses == pytest.approx(expected["trained"], abs=1e-5)
    # The updates matter, so that the comparison can fail.
    gaps = zip(expected["trained"], expected["untrained"], strict=True)
    assert max(abs(left - right) for left, right in gaps) > 1e-3


SPLITS = {"embeddings": 0.25, "dense": 0.5, "over": 0.5}


def train_split(
    rank: int, world_size: int, model: dict[str, Any]
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    runs = {name: run | {"splits": SPLITS} for name, run in TINY["runs"].items()}
    config = make_config(TrainConfig, TINY | {"model": TINY["model"] | model, "runs": runs})
    sharded = {run.name: [*run.losses, *run.evaluated.losses] for run in train(config).runs}
    expected = {
        "split": unsharded_losses(config),
        "whole": unsharded_losses(config, is_split=False),
    }
    return sharded, expected


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
    (result,) = train(make_config(TrainConfig, TINY | {"runs": {"laplace": run}})).runs
    return [*result.losses, *result.evaluated.losses]


def test_thresholds_that_ranks_fit_train_nearly_alike(ranks4: RankPool) -> None:
    losses = ranks4.run(train_laplace)
    assert losses == [losses[0]] * 4
    config = config_of({}, {})
    expected = unsharded_losses(config)
    assert losses[0] != pytest.approx(expected, abs=1e-5)
    assert losses[0] == pytest.approx(expected, abs=0.1)
