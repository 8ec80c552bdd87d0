"""Runs by TorchRec alone train the same as this package's runs, step by step."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torchrec.distributed.embedding import ShardedEmbeddingCollection
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
from torchrec.distributed.model_parallel import DistributedModelParallel

from tests.support.ranks import RankPool
from tests.support.train_runs import PlainRun, config_with
from torchrec_2dsp.programs.train import program as trainer
from torchrec_2dsp.programs.train.config import TrainConfig
from torchrec_2dsp.programs.train.program import train
from torchrec_2dsp.programs.train.results import RunFolder

pytestmark = pytest.mark.dealt_file

RUNS: dict[str, Any] = {"stock": {"stock": True}, "exact": {"num_groups": 2}}
SEQUENCES = {"kind": "synthetic_sequences", "num_items": 60, "max_length": 8, "num_clusters": 5}
SEQUENCE_MODEL = {"kind": "sequence", "dim": 8, "max_length": 8, "num_negatives": 4}
OPTIMIZER = {
    "lr": 0.1,
    "dense_optimizer": "adagrad",
    "dense_lr": 0.02,
    "dense_clip_norm": 0.5,
    "schedule": {"kind": "linear", "warm_up": 2, "final": 0.1},
}


def clicks_in(folder: Path) -> TrainConfig:
    return config_with(
        loop={"eval_every": 4},
        optimizer=OPTIMIZER,
        checkpoint={"folder": str(folder / "checkpoints"), "every": 3, "keep_last": 3},
        output={"folder": str(folder / "out")},
        runs=RUNS,
    )


def sequences() -> TrainConfig:
    loop = {"steps": 5, "global_batch_size": 16, "eval_steps": 2, "eval_every": 3}
    return config_with({"data": SEQUENCES, "model": SEQUENCE_MODEL, "loop": loop, "runs": RUNS})


Figures = tuple[list[float], dict[str, float], str]


def train_all(rank: int, world_size: int, folder: Path) -> tuple[list[Figures], list[set[type]]]:
    """Return all runs' figures, and the module types in each sharded model."""
    figures: list[Figures] = []
    types: list[set[type]] = []
    evaluate = trainer.evaluated

    def evaluate_and_look(config: TrainConfig, model: Any, *rest: Any) -> Any:
        types.append({type(model), *map(type, model.module.modules())})
        return evaluate(config, model, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer, "evaluated", evaluate_and_look)
        for config in (clicks_in(folder), sequences()):
            watchers = [RunFolder(folder / "out", config)] if rank == 0 else []
            for run in train(config, watchers).runs:
                figures.append(
                    ([*run.losses, *run.evaluated.losses], run.evaluated.metrics, run.name)
                )
    return figures, types


def resume_stock(rank: int, world_size: int, folder: Path) -> list[float]:
    """Return the losses of a run that resumes midway, by TorchRec alone."""
    config = clicks_in(folder).only(["stock"])
    resume = folder / "checkpoints" / "stock" / "last" / "3"
    checkpoint = config.checkpoint.model_copy(update={"folder": ""})
    (run,) = train(config.model_copy(update={"checkpoint": checkpoint}), resume=resume).runs
    return list(run.losses)


def test_a_stock_run_trains_what_the_others_do(ranks4: RankPool, tmp_path: Path) -> None:
    figures, types = ranks4.run(train_all, tmp_path)[0]
    assert [name for *_, name in figures] == [*RUNS] * 2
    for first in (0, 2):
        stock, *others = figures[first : first + 2]
        assert len(stock[0]) in (8 + 3, 5 + 2)
        assert len(set(stock[0])) > 5
        for losses, metrics, name in others:
            # Float32 rounding: sums are added in another order.
            assert losses == pytest.approx(stock[0], abs=1e-5), name
            assert metrics == pytest.approx(stock[1], abs=1e-5, nan_ok=True), name
    config = clicks_in(tmp_path)
    plain = PlainRun(config, torch.optim.Adagrad).train(
        OPTIMIZER["schedule"], OPTIMIZER["schedule"], OPTIMIZER["dense_clip_norm"]
    )
    assert figures[0][0][:8] == pytest.approx(plain, abs=1e-5)
    # The model contains none of this package's classes: neither wrapper nor sharded modules.
    of_stock = [kinds for kinds in types if DistributedModelParallel in kinds]
    assert len(of_stock) == 2 + 2
    for kinds in of_stock:
        assert kinds & {ShardedEmbeddingBagCollection, ShardedEmbeddingCollection}
        sharding = [kind for kind in kinds if "parallel" in kind.__module__]
        assert not [kind for kind in sharding if kind.__module__.startswith("torchrec_2dsp")]
    assert ranks4.run(resume_stock, tmp_path)[0] == figures[0][0][:8]
