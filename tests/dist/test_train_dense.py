"""Training programs plan their dense part, and move a pipeline's layers while they train."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from tests.support.ranks import RankPool
from tests.support.train_runs import SEQUENCES, config_with
from torchrec_2dsp.dense.pipelined import cut_stack
from torchrec_2dsp.parallel.checkpoint.load import load_weights
from torchrec_2dsp.programs.bench.config import StockContestant, TwoDContestant
from torchrec_2dsp.programs.config.config_file import make_config
from torchrec_2dsp.programs.config.dense import PowerSGDConfig
from torchrec_2dsp.programs.models.kinds import build_any_model
from torchrec_2dsp.programs.train import sharded
from torchrec_2dsp.programs.train.program import train
from torchrec_2dsp.programs.train.results import RunResult, TrainWatcher, largest_loss_gap

pytestmark = pytest.mark.dealt_file

PIPELINED = {"kind": "pipelined", "num_stages": 2, "num_micro_batches": 2}
TREE: dict[str, Any] = {
    "data": SEQUENCES["data"],
    "model": SEQUENCES["model"] | {"num_blocks": 4},
    "optimizer": {"dense_clip_norm": 0.05, "dense_lr": 0.01},
    "loop": {"steps": 7, "global_batch_size": 16, "eval_steps": 1, "report_every": 3},
}


@contextmanager
def layers_that_move() -> Iterator[None]:
    """Yield a context in which each search for cuts finds better ones."""
    numbers = count(1)

    def others(seconds: Sequence[float], cuts: Sequence[int], least_gain: float) -> tuple[int, ...]:
        (first,) = cuts
        return (first % (len(seconds) - 1) + next(numbers) % 2 + 1,)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cut_stack, "better_cuts", others)
        yield


def results_of(run: RunResult) -> tuple[Any, ...]:
    return run.losses, run.evaluations, (run.curve[-1].losses, run.curve[-1].click_rate)


def fixed_and_moving(rank: int, world_size: int, folder: str) -> tuple[list[Any], list[Any]]:
    """Train with DDP, with fixed layers, and with layers that move, resume and move again."""
    moving = PIPELINED | {"recut_every": 2}
    runs = {"plain": {}, "fixed": {"dense": PIPELINED}, "moving": {"dense": moving}}
    watcher = Mock(TrainWatcher)
    with layers_that_move():
        results = [results_of(run) for run in train(config_with(TREE, runs=runs), [watcher]).runs]
        saved = {"runs": {"moving": runs["moving"]}, "checkpoint": {"folder": folder, "every": 3}}
        train(config_with(TREE, **saved, loop={"steps": 3}))
        (resumed,) = train(config_with(TREE, **saved), resume="auto").runs
    moves = [
        (name, step, *cuts.values())
        for name, step, cuts in (call.args for call in watcher.layers_moved.call_args_list)
    ]
    return [*results, results_of(resumed)], moves


def test_layers_that_move_train_the_same(ranks2: RankPool, tmp_path: Path) -> None:
    for (plain, fixed, moving, resumed), moves in ranks2.run(fixed_and_moving, str(tmp_path)):
        assert [(name, step) for name, step, _ in moves] == [("moving", step) for step in (2, 4, 6)]
        assert len({cuts for *_, cuts in moves}) > 1
        assert len(fixed[0]) == 7
        assert fixed[0] == pytest.approx(plain[0], abs=2e-6)
        assert moving == fixed
        assert resumed[0] == fixed[0]
        assert resumed[1] == fixed[1]


def planned_and_not(rank: int, world_size: int) -> tuple[list[Any], str, dict[str, str]]:
    planned = {"calibration": "emulated_1gbit", "dense": {"kind": "planned"}}
    watcher, config = Mock(TrainWatcher), config_with(TREE, runs={"plain": {}, "planned": planned})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sharded, "_COUNTED_IDS", 20_000)
        first, second = train(config, [watcher]).runs
    dense = {call.args[0]: call.args[1].dense for call in watcher.run_planned.call_args_list}
    return [first.losses, second.losses], second.explanation, dense


def test_a_planned_dense_part_trains_the_same(ranks2: RankPool) -> None:
    results = ranks2.run(planned_and_not)
    for (plain, planned), _, dense in results:
        assert planned == pytest.approx(plain, abs=2e-6)
        assert dense["plain"] == ""
        assert dense["planned"]
        assert dense == results[0][2]
    explanation, dense = results[0][1:]
    # The tables' plan by cost, and the dense part's.
    assert "table" in explanation
    assert explanation.count(dense["planned"]) >= 1


NUM_DENSE_STEPS = 3
TINY_RUNS = {
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
    """Return each run's losses, and its largest gap to DDP's."""
    runs = {run.name: run for run in train(config_with(TINY_RUNS)).runs}
    return {name: (run.losses, largest_loss_gap(run, runs["ddp"])) for name, run in runs.items()}


def test_runs_send_dense_gradients_as_they_say(ranks2: RankPool) -> None:
    by_run = ranks2.run(losses)[0]
    assert by_run["whole"][0] == by_run["ddp"][0]
    assert by_run["sharded"][1] < 1e-6
    # Averaging weights after each SGD step equals averaging gradients.
    assert by_run["averaged"][1] < 1e-6
    assert 0 < by_run["meeting"][1] < 0.1
    for name, bound in (
        ("thresholded", 0.1),
        ("delayed", 0.1),
        ("powersgd", 0.1),
        ("fp16", 1e-3),
    ):
        assert 0 < by_run[name][1] < bound
    # A warm-up is DDP's arithmetic. The next step's loss doesn't reflect the delay yet.
    for name in ("thresholded", "delayed", "powersgd"):
        for step, (loss, expected) in enumerate(
            zip(by_run[name][0], by_run["ddp"][0], strict=True)
        ):
            assert (abs(loss - expected) < 1e-7) == (step <= NUM_DENSE_STEPS), (name, step)


def ends_of_delayed_runs(rank: int, world_size: int, folder: Path) -> list[tuple[Any, ...]]:
    """Return final evaluations and saved weights, without and with a stop at the last step."""
    ends = []
    for every in (5, 4):
        saved = folder / str(every)
        config = config_with(
            TINY_RUNS,
            runs={"delayed": TINY_RUNS["runs"]["delayed"]},
            loop={"eval_every": every},
            checkpoint={"folder": str(saved), "every": every},
        )
        (run,) = train(config).runs
        model = build_any_model(config.data.dataset(), config.model)
        load_weights(saved / "delayed" / "last" / "8", model)
        weights = {name: weight.tolist() for name, weight in model.state_dict().items()}
        ends.append((run.evaluated, weights))
    return ends


def test_the_last_delayed_gradients_are_evaluated_and_saved(
    ranks2: RankPool, tmp_path: Path
) -> None:
    for apart, together in ranks2.run(ends_of_delayed_runs, tmp_path):
        assert together == apart


@pytest.mark.parametrize("kind", ["stock", "two_d"])
def test_contestants_say_how_dense_gradients_travel(kind: str) -> None:
    config = StockContestant if kind == "stock" else TwoDContestant
    contestant = make_config(config, {"kind": kind, "dense": {"kind": "thresholded"}})
    assert contestant.describe().endswith(", 0.500% of dense gradients, in bf16")
    assert "dense" not in make_config(config, {"kind": kind}).describe()
    in_bf16 = make_config(config, {"kind": kind, "dense": {"kind": "fp16", "autocast": "bf16"}})
    assert in_bf16.describe().endswith(", dense gradients in fp16, computed in bf16")
    assert PowerSGDConfig().text == "dense gradients by PowerSGD of rank 2"
