"""The training loop: schedules, clipping and accumulation as in torch; and how runs end."""

import io
import re
import shutil
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist
from rich.console import Console
from torch.distributed import distributed_c10d
from torch.nn.functional import binary_cross_entropy_with_logits

from tests.support.logs import make_rows, table_config, write_log
from tests.support.ranks import RankPool, error_of
from tests.support.train_runs import (
    TREE,
    PlainRun,
    click_data,
    config_with,
    plain_metrics,
    share_of_rate,
)
from torchrec_2dsp.comms.alarm import agree
from torchrec_2dsp.comms.groups import world_group
from torchrec_2dsp.errors import ConfigError
from torchrec_2dsp.programs.cli.train_display import TrainDisplay
from torchrec_2dsp.programs.config.config_file import make_config
from torchrec_2dsp.programs.data.dataset import Split
from torchrec_2dsp.programs.data.synthetic import SyntheticDataset
from torchrec_2dsp.programs.train import program
from torchrec_2dsp.programs.train.checkpoints import RunSettings
from torchrec_2dsp.programs.train.config import TrainConfig
from torchrec_2dsp.programs.train.metrics import ClickMetrics
from torchrec_2dsp.programs.train.program import train, train_run
from torchrec_2dsp.programs.train.record import Evaluation
from torchrec_2dsp.programs.train.results import Ending, RunResult, TrainWatcher

COSINE = {"kind": "cosine", "warm_up": 3, "final": 0.1}
STEPWISE = {"kind": "step", "warm_up": 2, "step_every": 2, "factor": 0.5}
CLIP = 0.05
OPTIMIZER = {
    "lr": 0.1,
    "dense_optimizer": "adamw",
    "dense_lr": 0.02,
    "schedule": COSINE,
    "dense_schedule": STEPWISE,
    "dense_clip_norm": CLIP,
}
RUNS = {
    "one_group": {},
    "exact": {"num_groups": 2},
    "sharded": {"dense": {"kind": "fully_sharded"}},
    "copies": {"dense": {"kind": "fully_sharded", "num_copies": 2}},
}
ROWS = {"sharding_types": ["row_wise"], "exchange": "row", "hot_rows": 4}
PLAIN_ADAMW = partial(torch.optim.AdamW, weight_decay=0.0)


def train_beside(rank: int, world_size: int) -> dict[str, Any]:
    """Return the tiny program in one batch and in four, and the plain model."""
    pipelined = config_with(
        optimizer=OPTIMIZER,
        loop={"eval_every": 4},
        runs=RUNS | {"rows": ROWS, "prefetch": ROWS | {"prefetch_rows": True}},
    )
    accumulated = config_with(optimizer=OPTIMIZER, loop={"accumulate": 4}, runs=RUNS)
    plain = PlainRun(pipelined, PLAIN_ADAMW)
    expected = plain.train(COSINE, STEPWISE, CLIP)
    _, logits, labels = plain.held_out()
    return {
        "pipelined": train(pipelined).runs,
        "accumulated": train(accumulated).runs,
        "expected": expected,
        "metrics": plain_metrics(logits, labels),
        "clipped": plain.clipped_steps,
        "without clipping": PlainRun(pipelined, PLAIN_ADAMW).train(COSINE, STEPWISE),
        "without schedules": PlainRun(pipelined, PLAIN_ADAMW).train(clip_norm=CLIP),
    }


@pytest.fixture(scope="module")
def trained(ranks2: RankPool) -> list[dict[str, Any]]:
    return ranks2.run(train_beside, timeout_s=280)


@pytest.mark.dealt_suite
def test_schedules_clipping_and_accumulation_train_as_the_plain_loop(
    trained: list[dict[str, Any]],
) -> None:
    seen = trained[0]
    runs: list[RunResult] = [*seen["pipelined"], *seen["accumulated"]]
    assert len(runs) == len(RUNS) * 2 + 2
    for run in runs:
        # Sums of 32 losses are added in another order; AdamW divides rounding by its own size.
        assert run.losses == pytest.approx(seen["expected"], abs=2e-5), run.name
    # Clipping and schedules matter, so that the comparison can fail.
    assert seen["clipped"] > 2
    for other in ("without clipping", "without schedules"):
        gaps = zip(seen["expected"], seen[other], strict=True)
        assert max(abs(left - right) for left, right in gaps) > 1e-3, other


def test_evaluations_are_those_of_all_samples(trained: list[dict[str, Any]]) -> None:
    seen = trained[0]
    for run in seen["pipelined"]:
        assert [evaluation.step for evaluation in run.evaluations] == [4, 8]
        # Scores differ by rounding, which moves no pair of this many samples.
        assert run.evaluated.metrics == pytest.approx(seen["metrics"], abs=3e-5), run.name
        assert run.evaluations[0].metrics != run.evaluated.metrics
        assert len(run.evaluated.losses) == 3
    for others in trained[1:]:
        for run, first in zip(others["pipelined"], seen["pipelined"], strict=True):
            assert run.evaluations == first.evaluations


def test_progress_tells_rates_speed_and_memory(trained: list[dict[str, Any]]) -> None:
    (run, *_) = trained[0]["pipelined"]
    assert [progress.step for progress in run.curve] == [3, 4, 6, 8]
    last = run.curve[-1]
    # The cosine's end belongs to a step after the last one.
    assert 0.1 * 0.1 < last.table_lr < 0.02
    assert last.dense_lr == pytest.approx(0.02 * 0.25)
    assert last.samples_per_s == pytest.approx(2 * 32 / last.seconds)
    assert len(last.memory_bytes) == 2
    assert all(size > 50e6 for size in last.memory_bytes)


def gathered(rank: int, world_size: int) -> tuple[int, dict[str, float], dict[str, float]]:
    """Return this rank's received bytes, the gathered metrics, and the expected ones."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(world_size, 500, generator=generator)
    labels = (torch.rand(world_size, 500, generator=generator) < 0.3).float()
    metrics = ClickMetrics(world_group())
    loss = binary_cross_entropy_with_logits(logits[rank].double(), labels[rank].double())
    metrics.add(loss, logits[rank], labels[rank])
    unpickle = distributed_c10d._tensor_to_object
    with patch.object(distributed_c10d, "_tensor_to_object", wraps=unpickle) as objects:
        evaluation = metrics.gather(3)
    received = sum(int(call.args[1]) for call in objects.call_args_list)
    return received, evaluation.metrics, plain_metrics(logits.flatten(), labels.flatten())


def test_rank_0_alone_receives_the_scores_of_all_samples(ranks2: RankPool) -> None:
    first, second = ranks2.run(gathered)
    num_bytes = 2 * 2 * 500 * 4
    assert num_bytes < first[0] < num_bytes + 4000
    assert 0 < second[0] < 1000
    assert first[1] == second[1]
    # Sums of 1,000 losses are added in another order.
    assert first[1] == pytest.approx(first[2], rel=1e-12)


def differing(rank: int, world_size: int) -> str:
    with pytest.raises(ConfigError) as raised:
        agree(world_group(), facts={"the size": f"Settings(\n  size={15 + rank},\n)"})
    return str(raised.value)


def test_a_difference_between_ranks_is_named_without_the_commas_around_it(
    ranks2: RankPool,
) -> None:
    message = (
        "the size differs between ranks: rank 0 has size=15, rank 1 has size=16; give all ranks"
    )
    assert ranks2.run(differing) == [f"{message} the same"] * 2


class Short(SyntheticDataset):
    """Data with only a few training batches and a few held-out ones."""

    def num_train_batches(self, global_batch_size: int) -> Any:
        return 160 // global_batch_size

    def batches(self, split: Split, **options: Any) -> Any:
        num_left = 2
        if split is Split.TRAIN:
            num_left = self.num_train_batches(options["global_batch_size"]) - options["start"]
        for _, batch in zip(range(num_left), super().batches(split, **options), strict=False):
            yield batch


def ends(rank: int, world_size: int) -> dict[str, Any]:
    """Train runs that end before their last step."""
    # A rate of 0 learns nothing, so no evaluation is better than the first.
    idle = {"lr": 0.0, "dense_lr": 0.0}
    loop = {"steps": 40, "eval_every": 2, "patience": 3, "report_every": 5, "metric": "auc"}
    watcher = Mock(TrainWatcher)
    (impatient,) = train(config_with(optimizer=idle, loop=loop), [watcher]).runs
    config = config_with(loop={"eval_steps": 9})
    by_data = train_run(config, "one_group", Short(click_data(config)))
    cut = config_with(loop={"accumulate": 2, "global_batch_size": 64, "eval_steps": 9})
    by_step = train_run(cut, "one_group", Short(click_data(cut)))
    empty = config_with(loop={"accumulate": 8, "global_batch_size": 256})
    with pytest.raises(ConfigError) as raised:
        train_run(empty, "one_group", Short(click_data(empty)))
    meeting = config_with(runs={"local": {"dense": {"kind": "local", "local_steps": 4}}})
    return {
        "impatient": impatient,
        "is best": [call.kwargs["is_best"] for call in watcher.evaluated.call_args_list],
        "steps": [call.args[1].step for call in watcher.steps_trained.call_args_list],
        "data": by_data,
        "cut": by_step,
        "empty": str(raised.value),
        "apart": error_of(lambda: train_run(meeting, "local", Short(click_data(meeting)))),
    }


def test_runs_end_by_patience_or_with_their_data(ranks2: RankPool) -> None:
    seen = ranks2.run(ends, timeout_s=120)[0]

    assert (seen["impatient"].ending, len(seen["impatient"].losses)) == (Ending.PATIENCE, 8)
    assert seen["is best"] == [True, False, False, False]
    assert seen["steps"] == [2, 4, 5, 6, 8]
    assert (seen["data"].ending, len(seen["data"].losses)) == (Ending.DATA, 5)
    assert len(seen["data"].evaluated.losses) == 2
    # Five batches with 32 samples make two steps with two batches; the rest makes none.
    assert (seen["cut"].ending, len(seen["cut"].losses)) == (Ending.DATA, 2)
    assert seen["empty"] == "the data has too few samples for a single step"
    assert "ends after 5 steps, and its ranks meet after every 4; set loop.steps=4" in seen["apart"]


def late_and_impatient(rank: int, world_size: int) -> tuple[RunResult, list[Evaluation]]:
    """Train until no evaluation is better, with gradients one step late."""
    delayed = {"dense": {"kind": "delayed", "warm_up": 2}}
    config = config_with(loop={"eval_every": 2, "patience": 1}, runs={"main": delayed})
    watcher = Mock(TrainWatcher)
    with patch.object(program, "num_since_best", lambda evaluations, _: len(evaluations) - 1):
        (run,) = train(config, [watcher]).runs
    return run, [call.args[1] for call in watcher.evaluated.call_args_list]


def test_patience_ends_with_an_evaluation_of_the_last_gradients(ranks2: RankPool) -> None:
    run, (first, early, last) = ranks2.run(late_and_impatient)[0]
    assert (run.ending, len(run.losses)) == (Ending.PATIENCE, 4)
    assert (early.step, last.step) == (4, 4)
    assert early.metrics != last.metrics
    assert run.evaluations == (first, last)


def test_a_batch_is_cut_over_ranks_and_parts() -> None:
    config: TrainConfig = config_with(loop={"accumulate": 4})
    config.check_world(8)
    with pytest.raises(ConfigError, match="multiple of the 3 ranks and accumulate=4; use 36"):
        config.check_world(3)
    assert TREE["loop"]["global_batch_size"] == 32


def shown(rank: int, world_size: int, config: TrainConfig) -> tuple[str, RunResult]:
    """Return a display's output, and the run's result."""
    console = Console(file=io.StringIO(), width=200)
    (run,) = train(config, [TrainDisplay(console)]).runs
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue(), run


LINEAR = {"kind": "linear", "warm_up": 1, "final": 0.5}


def on_a_log(folder: Path, *, epochs: int, loop: dict[str, Any], **sections: Any) -> TrainConfig:
    """Return a config that trains on 29 rows with a schedule, and evaluates on 11."""
    log = write_log(folder / "log.csv", make_rows(40))
    data = table_config(log, epochs=epochs, held_out={"share": 11 / 40})
    loop = {"global_batch_size": 8, "eval_steps": 1, "report_every": 1} | loop
    tree = {"data": data.model_dump(mode="json"), "optimizer": {"schedule": LINEAR}, "loop": loop}
    return make_config(TrainConfig, TREE | tree | {"runs": {"main": {}}} | sections)


@pytest.mark.parametrize(
    ("epochs", "accumulate", "steps", "expected"),
    [(2, 1, 50, 6), (2, 2, 50, 6), (0, 1, 7, 7), (3, 1, 4, 4)],
    ids=["data ends", "accumulated", "endless", "data for more"],
)
def test_progress_counts_the_steps_that_there_are_data_for(
    epochs: int, accumulate: int, steps: int, expected: int, ranks2: RankPool, tmp_path: Path
) -> None:
    """An epoch with 29 training rows counts as three steps with 8 rows."""
    loop = {"steps": steps, "accumulate": accumulate}
    text, run = ranks2.run(shown, on_a_log(tmp_path, epochs=epochs, loop=loop))[0]
    assert len(run.losses) == expected
    reports = re.findall(r"^main: step (\d+)/(\d+) .* (\d+:\d\d) left", text, re.MULTILINE)
    assert [(int(step), int(total)) for step, total, _ in reports] == [
        (step, expected) for step in range(1, expected + 1)
    ]
    assert reports[-1][2] == "0:00"
    # Fewer steps than requested are reported.
    assert (f"ended after step {expected}: {run.ending}" in text) == (expected < steps)
    # The schedule spans these steps.
    rates = [0.02 * share_of_rate(LINEAR, step, expected) for step in range(expected)]
    assert [point.table_lr for point in run.curve] == pytest.approx(rates)


def on_logs(rank: int, world_size: int, configs: list[TrainConfig]) -> list[RunResult]:
    return [train(config).runs[0] for config in configs]


@pytest.mark.parametrize("eval_steps", [0, 1])
def test_a_cut_batch_trains_and_evaluates_as_the_whole_one_beyond_an_epoch(
    eval_steps: int, ranks2: RankPool, tmp_path: Path
) -> None:
    loop = {"steps": 9, "eval_steps": eval_steps}
    configs = [
        on_a_log(tmp_path, epochs=3, loop=loop | {"accumulate": accumulate})
        for accumulate in (1, 4)
    ]
    whole, cut = ranks2.run(on_logs, configs)[0]
    # Sums of 8 losses are added in another order.
    assert cut.losses == pytest.approx(whole.losses, abs=2e-6)
    assert cut.evaluated.metrics == pytest.approx(whole.evaluated.metrics, abs=3e-5)


def resumed_schedules(rank: int, world_size: int, config: TrainConfig, version: str) -> Any:
    """Return the losses and rates of a run that ends with its data, and after a resume."""
    folder, runs = Path(config.checkpoint.folder) / "main" / "last", []
    with patch.object(program, "RunSettings", wraps=RunSettings) as settings:
        if version == "older":
            settings.side_effect = lambda config, run, log, _: RunSettings(config, run, log)
        runs += train(config).runs
    if rank == 0:
        shutil.rmtree(folder / "6")
    dist.barrier()
    runs += train(config, resume="auto").runs
    assert runs[1].resumed_from == str(folder / "4")
    return [(run.losses, [point.table_lr for point in run.curve]) for run in runs]


@pytest.mark.parametrize(("version", "last"), [("this", 0.01 + 0.01 / 5), ("older", 0.01992)])
def test_a_resumed_run_goes_on_with_its_schedule(
    version: str, last: float, ranks2: RankPool, tmp_path: Path
) -> None:
    checkpoint = {"folder": str(tmp_path / "saved"), "every": 2}
    loop = {"steps": 501}
    config = on_a_log(tmp_path, epochs=2, loop=loop, checkpoint=checkpoint)
    for through, resumed in ranks2.run(resumed_schedules, config, version):
        assert resumed == through
        assert through[1][-1] == pytest.approx(last, rel=1e-5)


def beyond(rank: int, world_size: int, config: TrainConfig) -> str:
    """Return the error for a run whose checkpoint is beyond its last step."""
    train(config)
    loop = config.loop.model_copy(update={"steps": 3})
    shorter = config.model_copy(update={"loop": loop})
    return error_of(lambda: train(shorter, resume="auto"))


def test_a_checkpoint_beyond_the_last_step_is_refused(ranks2: RankPool, tmp_path: Path) -> None:
    config = config_with(loop={"steps": 4}, checkpoint={"folder": str(tmp_path), "every": 4})
    checkpoint = tmp_path / "one_group" / "last" / "4"
    for error in ranks2.run(beyond, config):
        assert f"{checkpoint} is at step 4, beyond loop.steps=3; raise loop.steps, or" in error
