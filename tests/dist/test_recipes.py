"""Examples with third-party tools read and log the right data."""

import json
import runpy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.loops import drain
from tests.support.ranks import RankPool
from tests.support.train_runs import config_with
from torchrec_2dsp.errors import ConfigError
from torchrec_2dsp.programs.cli.train import _writers
from torchrec_2dsp.programs.train.program import train
from torchrec_2dsp.programs.train.results import TrainResult

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"


def train_in_lightning(rank: int, world_size: int) -> list[list[float]]:
    """Return the losses in Lightning's loop, and in the same pipeline without it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Lightning's own.
        example = runpy.run_path(str(EXAMPLES / "lightning_loop.py"))
        trained = example["fit"](example["shard"]())
    model = example["shard"]()
    pipeline = model.pipeline(torch.optim.Adagrad(model.dense_parameters(), lr=0.02))
    losses = [loss.item() for _ in range(2) for loss, *_ in drain(pipeline, example["Log"]())]
    return [trained.losses, losses]


@pytest.mark.dealt_suite(seconds=10)
def test_lightnings_loop_trains_as_the_pipeline_does(ranks2: RankPool) -> None:
    for in_lightning, alone in ranks2.run(train_in_lightning):
        assert in_lightning == alone
        assert len(set(alone)) == 40


Sample = tuple[float, int, tuple[int, ...], int]
"""A sample's age, user, tags, and label."""


def read_by_datasets(rank: int, world_size: int) -> tuple[list[list[Sample]], list[Sample]]:
    """Return this rank's samples in two epochs, and the whole log's samples."""
    example = runpy.run_path(str(EXAMPLES / "hugging_face.py"))
    log: Any = example["clicks"]()
    every = [(round(row["age"], 6), row["user"], tuple(row["tags"]), row["clicked"]) for row in log]
    epochs: list[list[Sample]] = []
    for epoch in range(2):
        epochs.append([])
        for batch in example["batches"](log, epoch):
            users, tags = batch.sparse_features["user"], batch.sparse_features["tags"]
            assert users.lengths().tolist() == [1] * example["BATCH_SIZE"]
            epochs[-1] += zip(
                [round(age, 6) for age in batch.dense_features.squeeze(1).tolist()],
                users.values().tolist(),
                [tuple(ids.tolist()) for ids in tags.to_dense()],
                batch.labels.tolist(),
                strict=True,
            )
    return epochs, every


def test_each_epoch_has_every_sample_of_a_hugging_face_dataset_once(ranks2: RankPool) -> None:
    by_rank = ranks2.run(read_by_datasets)
    _, every = by_rank[0]
    first, second = zip(*(epochs for epochs, _ in by_rank), strict=True)
    for of_ranks in (first, second):
        assert sorted(of_ranks[0] + of_ranks[1]) == sorted(every)
    assert first[0] != second[0]


def logged_by_trackers(rank: int, world_size: int, folder: Path) -> TrainResult:
    """Train two runs with both watchers, which log into a folder."""
    config = config_with(
        runs={"one_group": {}, "rows": {"sharding_types": ["row_wise"], "exchange": "row"}},
        output={"watchers": [f"experiment_trackers:{name}Watcher" for name in ("MLflow", "Wandb")]},
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(EXAMPLES)
        patch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
        patch.setenv("MLFLOW_TRACKING_URI", str(folder / "mlflow"))
        patch.setenv("WANDB_MODE", "offline")
        patch.setenv("WANDB_DIR", str(folder))
        patch.setenv("WANDB_SILENT", "true")
        result = train(config, _writers(config, None) if rank == 0 else [])
    dist.barrier()
    return result


@pytest.mark.dealt_suite(seconds=15)
def test_trackers_have_each_steps_loss(ranks2: RankPool, tmp_path: Path) -> None:
    result, _ = ranks2.run(logged_by_trackers, tmp_path)
    for run in result.runs:
        texts = [text.read_text() for text in (tmp_path / "mlflow").rglob("metrics/loss")]
        lines = [[line.split()[1:] for line in text.splitlines()] for text in texts]
        expected = [[str(loss), str(step)] for step, loss in enumerate(run.losses, 1)]
        assert expected in lines
        in_wandb = b"".join(log.read_bytes() for log in tmp_path.rglob("*.wandb"))
        assert all(json.dumps(loss).encode() in in_wandb for loss in run.losses)
        assert json.dumps(run.evaluated.metrics["ne"]).encode() in in_wandb
    assert len(result.runs[0].losses) == len(set(result.runs[0].losses)) > 3


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("experiment_trackers", "output.watchers='experiment_trackers' is not of the form"),
        (
            "builtins:repr",
            "makes a str; it has to be a torchrec_2dsp.programs.train.results.TrainWatc",
        ),
    ],
)
def test_what_is_no_watcher_is_refused(name: str, message: str) -> None:
    config = config_with(output={"watchers": [name]})
    with pytest.raises(ConfigError, match=message):
        _writers(config, None)
