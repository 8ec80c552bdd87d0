"""Training programs plan their dense part, and move the layers of a pipeline while they train."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from tests.support.ranks import RankPool
from tests.support.train_runs import SEQUENCES
from torchrec_2dsp.dense.pipelined import cut_stack
from torchrec_2dsp.errors import ConfigError
from torchrec_2dsp.programs.config.config_file import make_config
from torchrec_2dsp.programs.train.checkpoints import Resume
from torchrec_2dsp.programs.train.config import TrainConfig
from torchrec_2dsp.programs.train.program import train
from torchrec_2dsp.programs.train.results import RunResult, TrainWatcher
from torchrec_2dsp.programs.train.sharded import PlannedRun

pytestmark = pytest.mark.dealt_file

PIPELINED = {"kind": "pipelined", "num_stages": 2, "num_micro_batches": 2}
TREE: dict[str, Any] = {
    "data": SEQUENCES["data"],
    "model": SEQUENCES["model"] | {"num_blocks": 4},
    "optimizer": {"dense_clip_norm": 1.0, "dense_lr": 0.01},
    "loop": {"steps": 7, "global_batch_size": 16, "eval_steps": 1, "report_every": 3},
}


def config_with(runs: dict[str, Any], **sections: Any) -> TrainConfig:
    return make_config(TrainConfig, TREE | sections | {"runs": runs})


@contextmanager
def layers_that_move() -> Iterator[None]:
    """Yield a context in which other cuts seem better each time that they are looked for."""
    numbers = count(1)

    def others(seconds: Sequence[float], cuts: Sequence[int], least_gain: float) -> tuple[int, ...]:
        (first,) = cuts
        return (first % (len(seconds) - 1) + next(numbers) % 2 + 1,)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cut_stack, "better_cuts", others)
        yield


class Watcher(TrainWatcher):
    """Notes what runs dense parts, and which layers move, and when."""

    def __init__(self) -> None:
        self.dense: dict[str, str] = {}
        self.moves: list[tuple[str, int, tuple[int, ...]]] = []

    def run_planned(self, name: str, planned: PlannedRun, config: TrainConfig) -> None:
        self.dense[name] = planned.dense

    def layers_moved(self, name: str, step: int, cuts: Mapping[str, tuple[int, ...]]) -> None:
        (firsts,) = cuts.values()
        self.moves.append((name, step, firsts))


def results_of(run: RunResult) -> tuple[Any, ...]:
    return run.losses, run.evaluations, (run.curve[-1].losses, run.curve[-1].click_rate)


def fixed_and_moving(rank: int, world_size: int, folder: str) -> tuple[list[Any], list[Any]]:
    """Train with layers that stay, and with layers that move, resume and move again."""
    moving = PIPELINED | {"recut_every": 2}
    config = config_with({"fixed": {"dense": PIPELINED}, "moving": {"dense": moving}})
    watcher = Watcher()
    with layers_that_move():
        results = [results_of(run) for run in train(config, [watcher]).runs]
        checkpoint = {"folder": folder, "every": 3}
        stops = TREE["loop"] | {"steps": 3}
        train(config_with({"moving": {"dense": moving}}, checkpoint=checkpoint, loop=stops))
        whole = config_with({"moving": {"dense": moving}}, checkpoint=checkpoint)
        (resumed,) = train(whole, resume=Resume.of("auto")).runs
    return [*results, results_of(resumed)], watcher.moves


def test_layers_that_move_train_the_same(ranks2: RankPool, tmp_path: Path) -> None:
    for (fixed, moving, resumed), moves in ranks2.run(fixed_and_moving, str(tmp_path)):
        assert [(name, step) for name, step, _ in moves] == [("moving", step) for step in (2, 4, 6)]
        assert len({cuts for *_, cuts in moves}) > 1
        assert len(fixed[0]) == 7
        assert moving == fixed
        assert resumed[0] == fixed[0]
        assert resumed[1] == fixed[1]


def planned_and_not(rank: int, world_size: int) -> tuple[list[Any], str, dict[str, str]]:
    planned = {"calibration": "emulated_1gbit", "dense": {"kind": "planned"}}
    watcher = Watcher()
    first, second = train(config_with({"plain": {}, "planned": planned}), [watcher]).runs
    return [first.losses, second.losses], second.explanation, watcher.dense


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


@pytest.mark.parametrize(
    ("dense", "text"),
    [
        ({"recut_every": 5}, "recut_every=5 is for kind='pipelined', and kind is 'ddp'"),
        (PIPELINED | {"recut_every": 5, "fully_shard": True}, "ranks have parts of them"),
        (PIPELINED | {"recut_every": 5, "tp": 2}, "ranks have parts of them"),
        ({"kind": "planned"}, "needs to know the machines"),
    ],
)
def test_dense_parts_that_cannot_be_are_refused(dense: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        config_with({"one": {"dense": dense}})
