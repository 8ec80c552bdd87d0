"""Sequence, two-tower and user-defined models train the same in every way as in one process."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.exporting import OWN
from tests.support.ranks import RankPool
from tests.support.train_runs import PlainRun
from torchrec_2dsp.access.stats import AccessStats
from torchrec_2dsp.access.table_access import TableAccess
from torchrec_2dsp.parallel.checkpoint.load import load_weights
from torchrec_2dsp.parallel.checkpoint.save import latest_checkpoint
from torchrec_2dsp.programs.config.config_file import make_config
from torchrec_2dsp.programs.models.kinds import build_any_model
from torchrec_2dsp.programs.train.config import TrainConfig
from torchrec_2dsp.programs.train.program import train

pytestmark = pytest.mark.dealt_file

ROUNDING = 2e-6
"""Ranks add float32 numbers in another order; four steps carry it on."""
LOOP = {"steps": 4, "global_batch_size": 16, "eval_steps": 4, "eval_every": 2}
ROWS = {"sharding_types": ["row_wise"], "exchange": "row"}
THRESHOLDED = {"kind": "thresholded", "density": 1.0, "values": "fp32", "warm_up": 2}
MEETINGS = {"kind": "local", "local_steps": 1, "outer_lr": 1.0, "outer_momentum": 0.0}
RUNS: dict[str, dict[str, Any]] = {
    "ddp": {},
    "two_groups": {"num_groups": 2, "sharding_types": ["table_wise"]},
    "column_wise": {"num_groups": 2, "sharding_types": ["column_wise"]},
    "rows": ROWS | {"prefetch_rows": True},
    "hot_rows": ROWS | {"num_groups": 2, "hot_rows": 4},
    "sharded": {"dense": {"kind": "fully_sharded"}},
    "sharded_copies": ROWS | {"dense": {"kind": "fully_sharded", "num_copies": 2}},
    "thresholds_of_1": {"dense": THRESHOLDED},
    "meetings": {"dense": MEETINGS},
}
SPLIT: dict[str, dict[str, Any]] = {
    "split": {"dense": {"kind": "tensor_parallel", "tp": 2}},
    "split_groups": {"num_groups": 2, "dense": {"kind": "tensor_parallel", "tp": 2}},
    "split_copies": {"dense": {"kind": "tensor_parallel", "tp": 2, "num_copies": 2}},
}
"""Ways for layers that ranks can compute together."""

# Some sequences are longer than the model's limit, and some have nothing to predict.
SEQUENCES = {
    "kind": "synthetic_sequences",
    "num_items": 50,
    "min_length": 1,
    "max_length": 9,
    "length_skew": 0.3,
    "num_clusters": 5,
}
SEQUENCE = {"kind": "sequence", "dim": 8, "max_length": 6, "num_negatives": 5, "hidden_factor": 2}
CLICKS = {
    "num_dense": 2,
    "base_rate": 0.5,
    "features": [
        {"name": "user", "num_rows": 40, "min_ids": 0, "max_ids": 3},
        {"name": "item", "num_rows": 15},
        {"name": "unused", "num_rows": 7},
    ],
}
TOWERS = {"kind": "two_tower", "user_features": ["user"], "item_features": ["item"], "dim": 8}
SAMPLED = {"among": "sampled", "k": [3]}
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "sequence": (SEQUENCES, SEQUENCE | {"ranking": {"chunk_size": 17}}),
    "two towers": (CLICKS, TOWERS | {"layers": [8], "ranking": {"among": "all", "chunk_size": 6}}),
    "two towers in a batch": (CLICKS, TOWERS | {"loss": "in_batch", "ranking": SAMPLED}),
    "own": (CLICKS, OWN),
}


TABLES = {"t_item": 50, "t_user": 40, "t_unused": 7}


def config_of(kind: str, runs: dict[str, Any], folder: Path, **model: Any) -> TrainConfig:
    data, tree = KINDS[kind]
    counts = {name: np.arange(rows, 0, -1) for name, rows in TABLES.items()}
    tables = {name: TableAccess.of_counts(count, 100) for name, count in counts.items()}
    AccessStats(tables).save(folder / "access")
    known = {"access": str(folder / "access")}
    sections = {
        "data": data,
        "model": tree | model,
        "optimizer": {"lr": 0.05, "dense_lr": 0.1, "dense_optimizer": "sgd"},
        "loop": LOOP,
        "checkpoint": {"folder": str(folder)},
        "runs": {name: run | known if "hot_rows" in run else run for name, run in runs.items()},
    }
    return make_config(TrainConfig, sections)


def train_all(rank: int, world_size: int, config: TrainConfig) -> list[tuple[Any, ...]]:
    return [(run.losses, run.evaluated.metrics) for run in train(config).runs]


def check_runs(pool: RankPool, config: TrainConfig, num_parts: int) -> dict[str, float]:
    """Compare all runs with one process; return its metrics."""
    plain = PlainRun(config, torch.optim.SGD, num_parts=num_parts)
    start = {name: value.clone() for name, value in plain.model.state_dict().items()}
    losses, metrics, weights = plain.train(), plain.metrics(), plain.model.state_dict()
    assert largest_gap(weights, start) > 1e-2
    model = build_any_model(config.data.dataset(), config.model)
    runs = pool.run(train_all, config, timeout_s=300)[0]
    for name, (own_losses, own_metrics) in zip(config.runs, runs, strict=True):
        assert own_losses == pytest.approx(losses, abs=1e-5), name
        # No two items are so near to each other that rounding changes their order.
        assert own_metrics == pytest.approx(metrics, abs=1e-5), name
        saved = latest_checkpoint(Path(config.checkpoint.folder) / name / "last")
        assert saved is not None
        load_weights(saved, model)
        assert largest_gap(model.state_dict(), weights) < ROUNDING, name
    return metrics


def largest_gap(weights: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """Return the largest difference between two models' weights."""
    assert weights.keys() == expected.keys()
    return max((weights[name] - expected[name]).abs().max().item() for name in weights)


@pytest.mark.parametrize("kind", KINDS)
def test_a_few_ways_train_as_one_process(kind: str, ranks4: RankPool, tmp_path: Path) -> None:
    runs = {name: RUNS[name] for name in ("ddp", "hot_rows", "sharded")}
    metrics = check_runs(ranks4, config_of(kind, runs, tmp_path), 4)
    if kind == "sequence":
        assert 0 < metrics["recall@10"] < 1


@pytest.mark.slow
def test_every_way_trains_as_one_process(ranks4: RankPool, tmp_path: Path) -> None:
    check_runs(ranks4, config_of("sequence", RUNS | SPLIT, tmp_path), 4)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_the_mean_over_samples_is_the_same_for_every_number_of_ranks(
    request: pytest.FixtureRequest, num_ranks: int, tmp_path: Path
) -> None:
    changed = {"loss_mean": "samples", "negatives": "log_uniform"}
    config = config_of("sequence", {"rows": RUNS["rows"]}, tmp_path, **changed)
    check_runs(request.getfixturevalue(f"ranks{num_ranks}"), config, 1)
    by_token = config_of("sequence", {"rows": {}}, tmp_path, negatives="log_uniform")
    first, second = (PlainRun(other, torch.optim.SGD) for other in (config, by_token))
    assert first.train() != pytest.approx(second.train(), abs=1e-3)
