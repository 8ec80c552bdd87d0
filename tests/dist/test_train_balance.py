"""Training programs whose samples are dealt by cost train as those whose samples stay."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torchrec.datasets.utils import Batch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from tests.support.loops import largest_gap, snapshot
from tests.support.ranks import RankPool
from tests.support.train_runs import SEQUENCES, TREE, config_with, refusal
from torchrec_2dsp.programs.models.balance import WeightedBatch, weigh_losses_, weighted_batch
from torchrec_2dsp.programs.train import program, sharded
from torchrec_2dsp.programs.train.config import TrainConfig
from torchrec_2dsp.programs.train.program import RunTrainer, train
from torchrec_2dsp.programs.train.results import RunResult
from torchrec_2dsp.samples.balanced_batches import BalancedBatches

pytestmark = pytest.mark.dealt_file

STEPS = 10
SPEEDS = [1.0, 2.0, 1.0, 0.5]
LEARNING: dict[str, Any] = {
    "optimizer": {"lr": 0.05, "dense_lr": 0.05},
    "loop": {"steps": STEPS, "global_batch_size": 32, "eval_steps": 2, "report_every": 4},
}
FEATURES = [
    {"name": "user", "num_rows": 100},
    {"name": "page", "num_rows": 33, "min_ids": 0, "max_ids": 9},
]
CLICKS = TREE | LEARNING | {"data": {"num_dense": 3, "features": FEATURES}}
IN_CHUNKS = SEQUENCES | LEARNING | {"model": SEQUENCES["model"] | {"length_chunks": 3}}
ROWS = {"sharding_types": ["row_wise"], "exchange": "row"}


class Trained:
    """A run's result and the weights at its end."""

    def __init__(self, result: RunResult, weights: dict[str, torch.Tensor]) -> None:
        self.result, self.weights = result, weights


def train_all(config: TrainConfig) -> dict[str, Trained]:
    """Train all runs, and look at the weights of each."""
    weights: dict[str, dict[str, torch.Tensor]] = {}
    finish = RunTrainer.run

    def run_and_look(self: RunTrainer, *args: Any) -> RunResult:
        result = finish(self, *args)
        has_whole_layers = config.runs[result.name].dense.kind == "ddp"
        weights[result.name] = snapshot(self._model) if has_whole_layers else {}
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(program.RunTrainer, "run", run_and_look)
        results = train(config).runs
    return {result.name: Trained(result, weights[result.name]) for result in results}


def gaps_of(
    rank: int, world_size: int, tree: dict[str, Any], runs: dict[str, Any], loop: dict[str, Any]
) -> dict[str, tuple[float, float, float, int, float]]:
    """Compare each balanced run with the run that keeps samples in reading order.

    Weights are compared only if both runs have the same mesh.

    Returns:
        For each run, the largest gap in losses, weights and click rates, how many samples moved,
        and the remaining imbalance.
    """
    trained = train_all(config_with(tree, runs=runs, loop=loop))
    gaps = {}
    for name, other in trained.items():
        mesh, _, way = name.partition(":")
        plain = trained.get(mesh) or trained["one_group"]
        if not way:
            assert other.result.balance is None
            continue
        losses, rates = (
            [[*values(run.result)] for run in (other, plain)] for values in (losses_of, rates_of)
        )
        report = other.result.balance
        assert report is not None
        assert len(other.result.losses) == loop.get("steps", STEPS)
        weight_gap = largest_gap(other.weights, plain.weights) if mesh in trained else 0.0
        gaps[name] = (
            max(abs(left - right) for left, right in zip(*losses, strict=True)),
            weight_gap,
            max(abs(left - right) for left, right in zip(*rates, strict=True)),
            report.num_moved,
            report.imbalance_after,
        )
    losses_as_read = trained["one_group"].result.losses
    assert max(losses_as_read) - min(losses_as_read) > 1e-3
    return gaps


def losses_of(result: RunResult) -> list[float]:
    return [*result.losses, *result.evaluated.losses]


def rates_of(result: RunResult) -> list[float]:
    return [point.click_rate for point in result.curve if point.click_rate is not None]


COST = {"balance": {"cost": {"quadratic": 0.1}}}
SPEED = {"balance": {"rank_speeds": SPEEDS, "shared_ids": 0.2}}
CASES: dict[str, dict[str, Any]] = {
    "one_group": {},
    "two_groups": {"num_groups": 2},
    "one_group:cost": COST,
    "two_groups:speed": {"num_groups": 2} | SPEED,
}
SHARED_LAYERS = {
    "sharded:speed": {"dense": {"kind": "fully_sharded"}} | SPEED,
    "split:speed": {"dense": {"kind": "tensor_parallel", "tp": 2}} | SPEED,
}
PREFETCHED = {"prefetched:speed": ROWS | {"prefetch_rows": True} | SPEED}


@pytest.mark.parametrize(
    ("tree", "runs", "loop"),
    [
        (CLICKS, CASES | PREFETCHED, {}),
        (IN_CHUNKS, CASES | SHARED_LAYERS, {}),
        (CLICKS, {"one_group": {}, "one_group:speed": SPEED}, {"accumulate": 2, "steps": 4}),
    ],
    ids=["dlrm", "sequence", "accumulated"],
)
def test_dealt_samples_train_as_those_that_stay(
    ranks4: RankPool, tree: dict[str, Any], runs: dict[str, Any], loop: dict[str, Any]
) -> None:
    for gaps in ranks4.run(gaps_of, tree, runs, loop):
        assert len(gaps) == len([name for name in runs if ":" in name])
        for name, (loss_gap, weight_gap, rate_gap, num_moved, imbalance) in gaps.items():
            # Sums of the same float32 numbers in another order, through ten steps; the moment of
            # a row that was seen once divides by its own rounding.
            assert loss_gap < 2e-6, name
            assert weight_gap < 2e-5, name
            # Counts of clicks and samples, divided once.
            assert rate_gap == 0, name
            assert num_moved > 50
            assert 1 <= imbalance < 1.2


def measure(rank: int, world_size: int) -> tuple[list[float], list[float], int, list[float]]:
    """Return losses as read and with measured speeds, moved samples and noted seconds."""
    noted_s: list[float] = []
    note = BalancedBatches.note_seconds

    def note_slowly(self: BalancedBatches[Batch], seconds: float) -> None:
        noted_s.append(seconds)
        # The last rank seems to need far more time for each sample.
        note(self, 1.0 + 9.0 * (rank == world_size - 1))

    runs = {"as_read": {}, "measured": {"balance": {"rank_speeds": "measured"}}}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BalancedBatches, "note_seconds", note_slowly)
        as_read, measured = train(config_with(CLICKS, runs=runs, loop={"steps": 6})).runs
    assert measured.balance is not None
    return losses_of(as_read), losses_of(measured), measured.balance.num_moved, noted_s


def test_measured_speeds_train_the_same(ranks2: RankPool) -> None:
    for as_read, measured, num_moved, noted_s in ranks2.run(measure):
        # As above.
        assert measured == pytest.approx(as_read, abs=2e-6)
        # So many of 192 that one rank gets far fewer than the other.
        assert num_moved > 60
        assert len(noted_s) == 6
        assert all(0 < seconds < 60 for seconds in noted_s)


def lose_weight(rank: int, world_size: int) -> tuple[list[float], list[float]]:
    """Return the losses as read, and dealt by speed when batches don't carry their weights."""
    runs = {"as_read": {}, "dealt": SPEED}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sharded, "weigh_losses_", lambda model: None)
        as_read, dealt = train(config_with(CLICKS, runs=runs, loop={"steps": 3})).runs
    return list(as_read.losses), list(dealt.losses)


def test_without_weights_it_would_not_be_the_same(ranks4: RankPool) -> None:
    for as_read, dealt in ranks4.run(lose_weight):
        assert max(abs(left - right) for left, right in zip(as_read, dealt, strict=True)) > 1e-3


def go_on(rank: int, world_size: int, config: TrainConfig) -> list[tuple[Any, ...]]:
    results = train(config, resume="auto").runs
    return [(*losses_of(run), *rates_of(run), run.train_loss) for run in results]


def test_stopped_runs_go_on_with_the_same_bits(ranks2: RankPool, tmp_path: Path) -> None:
    speeds = {"rank_speeds": [1.0, 2.0], "shared_ids": 0.2}
    runs: dict[str, Any] = {
        "speed": {"num_groups": 2, "balance": speeds},
        "prefetched": ROWS | {"prefetch_rows": True, "balance": {"lengths": ["page"]}},
    }
    config = config_with(
        CLICKS, runs=runs, checkpoint={"folder": str(tmp_path), "every": 4, "keep_last": 3}
    )
    expected = ranks2.run(go_on, config)
    for path in tmp_path.glob("*/*/*"):
        if int(path.name) > 4:
            shutil.rmtree(path)
    assert len(list(tmp_path.glob("*/last/4"))) == len(runs)
    assert ranks2.run(go_on, config) == expected


def refuse(rank: int, world_size: int) -> list[str]:
    """Return the texts of errors that only the ranks can find."""
    return [
        refusal(rank, world_size, config_with(CLICKS, runs={"dealt": {"balance": section}}))
        for section in ({"lengths": ["pages"]}, {"rank_speeds": [1.0, 2.0, 3.0]})
    ]


def test_what_the_data_and_the_world_lack_is_refused(ranks2: RankPool) -> None:
    for lengths, speeds in ranks2.run(refuse):
        assert lengths == (
            "runs.dealt.balance.lengths names 'pages', and the data has user, page; name some of "
            "these, or leave it out"
        )
        assert speeds == (
            "runs.dealt.balance.rank_speeds has 3 speeds for 2 ranks; give one for each, or "
            "'measured'"
        )


class Mean(nn.Module):
    """A model whose loss is the mean of the labels."""

    def forward(self, batch: Batch) -> Any:
        loss = batch.labels.mean()
        return loss, (loss.detach(), batch.labels, batch.labels)


def test_losses_are_weighted_in_training_alone() -> None:
    model = Mean()
    weigh_losses_(model)
    features = KeyedJaggedTensor.from_lengths_sync(
        keys=["user"], values=torch.tensor([1, 2]), lengths=torch.tensor([1, 1])
    )
    batch = Batch(torch.empty(2, 0), features, torch.tensor([1.0, 0.0]))
    heavy = weighted_batch(batch, 3.0).to(torch.device("cpu"))
    assert isinstance(heavy, WeightedBatch)
    loss, (detached, scores, _) = model(heavy)
    assert (loss, detached) == (1.5, 1.5)
    assert torch.equal(scores, batch.labels)
    assert model(batch)[0] == 0.5
    model.eval()
    assert model(heavy)[0] == 0.5
