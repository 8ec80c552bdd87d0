"""Stopped training programs resume with bitwise equal results, even after a kill during a save."""

import os
import resource
import shutil
import signal
import time
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from tests.support.buckets import bucket
from tests.support.logs import make_rows, table_config, write_log
from tests.support.ranks import RankPool, RanksFailed
from tests.support.train_runs import TREE, config_with, refusal, train_in_folder
from torchrec_2dsp.errors import InputError, OutputError, TwoDError
from torchrec_2dsp.parallel.checkpoint.save import latest_checkpoint
from torchrec_2dsp.parallel.checkpoint.writer import ChecksumWriter
from torchrec_2dsp.programs.train import program
from torchrec_2dsp.programs.train.checkpoints import Resume, RunSettings
from torchrec_2dsp.programs.train.config import TrainConfig
from torchrec_2dsp.programs.train.program import train
from torchrec_2dsp.programs.train.record import read_progress
from torchrec_2dsp.programs.train.results import (
    RunFolder,
    RunResult,
    StepsTrained,
    TensorBoardWatcher,
    TrainResult,
    TrainWatcher,
)

pytestmark = pytest.mark.dealt_file

ROWS = {"sharding_types": ["row_wise"], "exchange": "row", "hot_rows": 4}
RUNS: dict[str, Any] = {
    "plain": {},
    "prefetch": ROWS | {"prefetch_rows": True},
    "averaged": {"num_groups": 2, "sync": "WeightSync", "sync_policy": "every(3)"},
    "late": {"num_groups": 2, "delay": 1},
    "thresholded": {"dense": {"kind": "thresholded", "density": 0.2, "warm_up": 2}},
    "powersgd": {"dense": {"kind": "powersgd", "rank": 1, "warm_up": 2}},
    "sharded": {"dense": {"kind": "fully_sharded"}},
    "local": {"dense": {"kind": "local", "local_steps": 2, "meeting_density": 0.5}},
}
SCHEDULED = {
    "dense_optimizer": "adam",
    "dense_lr": 0.01,
    "dense_clip_norm": 0.1,
    "schedule": {"kind": "cosine", "warm_up": 2},
}
LOOP = TREE["loop"] | {"steps": 10, "eval_every": 2, "report_every": 3, "eval_steps": 2}
WITHOUT_FOLDER = TREE | {"optimizer": SCHEDULED, "loop": LOOP, "runs": RUNS}
SAVING = WITHOUT_FOLDER | {"checkpoint": {"every": 4, "keep_last": 3, "keep_best": 2}}


def config_in(folder: Path, **sections: Any) -> TrainConfig:
    """Return a config whose runs leave checkpoints in a folder."""
    checkpoint = {"folder": str(folder)} | sections.pop("checkpoint", {})
    return config_with(SAVING, checkpoint=checkpoint, **sections)


def through(rank: int, world_size: int, config: TrainConfig) -> TrainResult:
    return train(config)


def through_without_fingerprint(rank: int, world_size: int, config: TrainConfig) -> TrainResult:
    """Train as before checkpoints described the log."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(program, "RunSettings", lambda config, run, *_: RunSettings(config, run))
        return train(config)


def refusal_to_go_on(rank: int, world_size: int, config: TrainConfig) -> str:
    return refusal(rank, world_size, config, resume="auto")


def on_from(rank: int, world_size: int, config: TrainConfig) -> tuple[TrainResult, dict[str, int]]:
    """Return a resumed program's result, and the steps from which its runs resumed."""
    watcher = Mock(TrainWatcher)
    result = train(config, [watcher], resume="auto")
    calls = [call.args for call in watcher.run_resumed.call_args_list]
    return result, {name: step for name, _, step in calls}


def forget(folder: Path, *, after: int) -> int:
    """Remove all checkpoints after a step; how many there were."""
    newer = [path for path in folder.glob("*/*/*") if int(path.name) > after]
    for path in newer:
        shutil.rmtree(path)
    return len(newer)


def what_counts(run: RunResult) -> tuple[Any, ...]:
    """Return all of a run's results that a stop must not change."""
    curve = [(point.step, (point.losses, point.click_rate), point.table_lr) for point in run.curve]
    return run.losses, run.evaluations, curve, run.train_loss, run.ending


def check_same(first: TrainResult, other: TrainResult) -> None:
    for run, expected in zip(other.runs, first.runs, strict=True):
        assert what_counts(run) == what_counts(expected), run.name
        # A best checkpoint has the previous save's ones.
        assert bytes_of(run) == pytest.approx(bytes_of(expected), rel=0.01), run.name
        assert len(run.losses) == LOOP["steps"]


@pytest.mark.parametrize("is_cut", [False, True], ids=["pipelined", "accumulated"])
def test_stopped_runs_go_on_with_the_same_bits(
    ranks2: RankPool, tmp_path: Path, is_cut: bool
) -> None:
    """Final evaluations also match the final weights, in float64."""
    whole = config_in(tmp_path)
    if is_cut:
        chosen = {name: RUNS[name] for name in RUNS if name not in ("prefetch", "averaged")}
        # Layers that are large enough to be thresholded.
        model = {"dense_layers": [64], "over_layers": [64]}
        whole = config_in(
            tmp_path,
            runs=chosen,
            model=model,
            loop={"accumulate": 2},
            checkpoint={"asynchronous": True, "folder": str(bucket(tmp_path))},
        )
    expected = ranks2.run(through, whole, timeout_s=280)
    assert forget(tmp_path, after=4) >= 2 * len(whole.runs)

    for (result, resumed), first in zip(
        ranks2.run(on_from, whole, timeout_s=280), expected, strict=True
    ):
        assert resumed == dict.fromkeys(whole.runs, 4)
        check_same(first, result)
    kept = sorted(int(path.name) for path in (tmp_path / "plain" / "last").iterdir())
    assert kept == [4, 8, 10]
    assert len(list((tmp_path / "plain" / "best").iterdir())) <= 2


def bytes_of(run: RunResult) -> list[float | None]:
    return [value for name, value in run if name.endswith("bytes_per_step")]


@pytest.mark.parametrize(
    "eval_every", [0, 2], ids=["evaluated_at_the_end", "evaluated_in_the_loop"]
)
def test_a_finished_run_that_is_started_again_keeps_its_figures(
    ranks2: RankPool, tmp_path: Path, eval_every: int
) -> None:
    rows = {"sharding_types": ["row_wise"], "exchange": "row", "row_transport": "bf16"}
    runs = {"averaged": RUNS["averaged"], "late": RUNS["late"], "rows": rows}
    loop, checkpoint = {"steps": 4, "eval_every": eval_every}, {"keep_best": int(bool(eval_every))}
    config = config_in(tmp_path, runs=runs, loop=loop, checkpoint=checkpoint)
    first = ranks2.run(through, config)[0]
    again, resumed = ranks2.run(on_from, config)[0]
    assert resumed == dict.fromkeys(runs, 4)
    assert [any(bytes_of(run)) for run in first.runs] == [True] * 3
    for run, expected in zip(again.runs, first.runs, strict=True):
        assert bytes_of(run) == bytes_of(expected), run.name


class Killer(TrainWatcher):
    """Kills its rank after a step."""

    def steps_trained(self, name: str, progress: StepsTrained) -> None:
        if progress.step == 6:
            os.kill(os.getpid(), signal.SIGKILL)


def killed(rank: int, world_size: int, config: TrainConfig, victim: int, moment: str) -> None:
    """Train until a rank is killed, between two steps or while it writes its share of step 8."""
    watchers = [Killer()] if rank == victim and moment == "step" else []
    if rank == victim and moment == "save":
        write = ChecksumWriter.write_data

        def write_and_die(self: Any, *args: Any) -> Any:
            written = write(self, *args)
            if self._folder.name == "8":
                os.kill(os.getpid(), signal.SIGKILL)
            return written

        ChecksumWriter.write_data = write_and_die  # type: ignore[method-assign]
    train(config, watchers, resume="auto")


def test_a_killed_run_goes_on_with_the_same_bits(ranks2: RankPool, tmp_path: Path) -> None:
    runs = {"plain": {"num_groups": 2}}
    through_config, config = (
        config_in(tmp_path / name, runs=runs, loop={"eval_every": 5}) for name in ("through", "cut")
    )
    expected = ranks2.run(through, through_config)
    for victim, moment in ((1, "step"), (0, "save")):
        with pytest.raises(RanksFailed, match=r"SIGKILL|killed|-9"):
            ranks2.run(killed, config, victim, moment, grace_s=2)
    folder = tmp_path / "cut" / "plain" / "last"
    assert sorted(path.name for path in folder.iterdir()) == ["4", "8"]
    assert not (folder / "8" / ".metadata").exists()

    for (result, resumed), first in zip(ranks2.run(on_from, config), expected, strict=True):
        # Step 5's evaluation was the best so far, and saved.
        assert resumed == {"plain": 5}
        check_same(first, result)


def test_other_meshes_and_worlds_go_on_within_rounding(
    ranks2: RankPool, ranks4: RankPool, tmp_path: Path
) -> None:
    runs = {"plain": {}, "sharded": RUNS["sharded"]}
    expected = ranks2.run(through, config_in(tmp_path, runs=runs))[0]
    forget(tmp_path, after=4)
    other = {name: run | {"num_groups": 2} | ROWS for name, run in runs.items()}
    result, resumed = ranks4.run(on_from, config_in(tmp_path, runs=other))[0]
    assert resumed == {"plain": 4, "sharded": 4}
    for run, first in zip(result.runs, expected.runs, strict=True):
        assert run.mesh == "Mesh2D(2x2, strided)"
        assert run.losses[:4] == first.losses[:4]
        # Sums of 32 losses are added in another order; Adam divides rounding by its own size.
        assert run.losses == pytest.approx(first.losses, abs=2e-5)
        assert run.losses != first.losses


def refusals(rank: int, world_size: int, folder: Path) -> dict[str, str]:
    """Return the errors for runs that can't resume from a folder."""
    runs, older = {"plain": {}}, folder / "plain/last/4"
    cases: dict[str, tuple[TrainConfig, Resume]] = {
        "never": (config_in(folder, runs=runs), None),
        "older": (config_in(folder, runs=runs), older),
        "batch": (config_in(folder, runs=runs, loop={"global_batch_size": 64}), "auto"),
        "rate": (config_in(folder, runs=runs, optimizer={"lr": 0.5}), "auto"),
        "length": (config_in(folder, runs=runs, loop={"steps": 20}), "auto"),
        "model": (config_in(folder, runs=runs, model={"dim": 4}), "auto"),
        "two runs": (config_in(folder, runs=runs | {"other": {}}), older),
        "no folder": (config_with(WITHOUT_FOLDER, runs=runs), "auto"),
        "no checkpoint": (config_in(folder, runs=runs), folder / "plain/last"),
        "a file": (config_in(older / ".metadata", runs=runs), None),
    }
    return {
        name: refusal(rank, world_size, config, resume=resume)
        for name, (config, resume) in cases.items()
    }


def test_runs_that_cannot_go_on_are_refused_by_name(ranks2: RankPool, tmp_path: Path) -> None:
    ranks2.run(through, config_in(tmp_path, runs={"plain": {}}))
    texts = {
        "never": "is newer than step 0, at which this run would begin, and the run would save over",
        "older": "plain/last/10 is newer than step 4",
        "batch": "loop.global_batch_size was 32 when the checkpoint was saved, and is 64 now",
        "rate": "optimizer.lr was 0.02 when the checkpoint was saved, and is 0.5 now",
        "length": "loop.steps was 10 when the checkpoint was saved, and is 20 now",
        "model": "model.dim was 8 when the checkpoint was saved, and is 4 now",
        "two runs": "is a checkpoint of one run, and the config has plain, other; choose a run",
        "no folder": "--resume auto needs a folder of checkpoints; set checkpoint.folder",
        "no checkpoint": "plain/last is no finished checkpoint; give the folder of one, such as",
        "a file": ".metadata' can't be written to: Not a directory; use another",
    }
    first, *others = ranks2.run(refusals, tmp_path)
    assert [first.keys(), *others] == [texts.keys(), first]
    for name, text in texts.items():
        assert text in first[name], name


class SavesToo(TrainWatcher):
    """Finishes another run's checkpoint of step 4 while this one trains."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "plain/last/4"

    def steps_trained(self, name: str, progress: StepsTrained) -> None:
        if progress.step == 3:
            self._path.mkdir(parents=True)
            (self._path / ".metadata").touch()


def refused_beside_another(rank: int, world_size: int, config: TrainConfig) -> str:
    watchers = [] if rank else [SavesToo(Path(config.checkpoint.folder))]
    return refusal(rank, world_size, config, watchers=watchers)


def test_a_checkpoint_that_another_run_has_saved_is_not_taken_for_this_ones(
    ranks2: RankPool, tmp_path: Path
) -> None:
    config = config_in(tmp_path, runs={"plain": {}})
    for text in ranks2.run(refused_beside_another, config):
        assert (
            "plain/last/4 was saved by another run while this one trained, and one folder" in text
        )


def without_evaluation(
    rank: int, world_size: int, config: TrainConfig, log: TrainConfig
) -> tuple[str, str, Path | None]:
    """Return the errors for runs without a last evaluation, and the first one's checkpoint."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(program, "evaluated", Mock(side_effect=InputError("no such row")))
        failed = refusal(rank, world_size, config)
    newest = latest_checkpoint(Path(config.checkpoint.folder) / "main" / "last")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(program, "train_run", None)
        return failed, refusal(rank, world_size, log), newest


def test_a_last_evaluation_that_fails_loses_no_step(ranks2: RankPool, tmp_path: Path) -> None:
    checkpoint = {"keep_best": 0}
    config = config_in(tmp_path, runs={"main": {}}, loop={"eval_every": 0}, checkpoint=checkpoint)
    data = table_config(write_log(tmp_path / "log.parquet", make_rows(64)))
    log = config.model_copy(update={"data": data})
    refused = "there are no held-out rows; name more files, or hold out another share"
    for failed, text, newest in ranks2.run(without_evaluation, config, log):
        assert (failed, text) == ("no such row", refused)
        assert newest == tmp_path / "main" / "last" / "10"


def test_a_log_that_changed_is_refused_by_name(ranks2: RankPool, tmp_path: Path) -> None:
    log, rows = tmp_path / "logs", make_rows(96)
    log.mkdir()
    write_log(log / "a.parquet", rows[:64])
    section = table_config(log / "*.parquet", prepared=str(tmp_path), held_out={"share": 0.5})
    loop = {"steps": 2, "eval_every": 2, "eval_steps": 1, "global_batch_size": 8}
    config = config_in(tmp_path / "new", runs={"main": {}}, loop=loop)
    config = config.model_copy(update={"data": section})
    older = config_in(tmp_path / "old", runs={"main": {}}, loop=loop)
    older = older.model_copy(update={"data": section})
    ranks2.run(through, config)
    ranks2.run(through_without_fingerprint, older)
    write_log(log / "b.parquet", rows[64:])
    text = "the log's file 2 (b.parquet) was nothing when the checkpoint was saved, and is 32 rows"
    for refused in ranks2.run(refusal_to_go_on, config):
        assert text in refused
        assert "put the files back as they were, or start a new run in another folder" in refused
    for _, resumed in ranks2.run(on_from, older):
        assert resumed == {"main": 2}, "older checkpoints don't say what the log was"
    (log / "b.parquet").unlink()
    log.rename(tmp_path / "moved")
    files = (str(tmp_path / "moved/*.parquet"),)
    moved = section.model_copy(update={"files": files, "malformed_limit": 2, "num_ahead": 1})
    for _, resumed in ranks2.run(on_from, config.model_copy(update={"data": moved})):
        assert resumed == {"main": 2}


def slow_to_save(rank: int, world_size: int, config: TrainConfig) -> tuple[int, int]:
    """Return the steps that were trained, and the saves that began, where a save takes its time."""
    finish, num_saves = ChecksumWriter.finish, 0

    def finish_late(self: Any, **what: Any) -> None:
        nonlocal num_saves
        num_saves += 1
        time.sleep(0.5)
        finish(self, **what)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ChecksumWriter, "finish", finish_late)
        return len(train(config).runs[0].losses), num_saves


def test_a_save_of_the_last_step_that_still_goes_on_is_not_begun_again(
    ranks2: RankPool, tmp_path: Path
) -> None:
    checkpoint = {"every": 2, "keep_best": 0, "asynchronous": True}
    config = config_in(
        tmp_path, runs={"main": {}}, loop={"steps": 2, "eval_every": 0}, checkpoint=checkpoint
    )
    assert ranks2.run(slow_to_save, config) == [(2, 1), (2, 0)]
    assert latest_checkpoint(tmp_path / "main" / "last") == tmp_path / "main" / "last" / "2"


FULL = Path("/dev/full")
FULL_DISK_LOOP = {"steps": 6, "report_every": 1, "eval_every": 0, "eval_steps": 1}
CHECKPOINTS = {
    "a rank's share": (False, "__1_0.distcp"),
    "a rank's share, beside training": (True, "__1_0.distcp"),
    "the last file": (False, ".metadata.tmp"),
}
"""True for an asynchronous save, and the file that doesn't fit."""


def saving(folder: Path, *, asynchronous: bool) -> TrainConfig:
    checkpoint = {"folder": str(folder), "every": 2, "keep_best": 0, "asynchronous": asynchronous}
    return config_with(loop=FULL_DISK_LOOP, checkpoint=checkpoint, runs={"main": {}})


def fill(file: Path) -> None:
    """Let a file that isn't there yet be on a full disk."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.symlink_to(FULL)


def saved(
    rank: int, world_size: int, config: TrainConfig
) -> tuple[str, tuple[float, ...], Path | None]:
    """Return the error and losses of a run that resumes if it can, and its newest checkpoint."""
    text, losses = "", ()
    try:
        losses = train(config, resume="auto").runs[0].losses
    except TwoDError as error:
        text = f"{type(error).__name__}: {error}"
    newest = latest_checkpoint(Path(config.checkpoint.folder) / "main" / "last")
    return text, losses, newest


@pytest.mark.parametrize("cell", CHECKPOINTS)
def test_a_save_on_a_full_disk_ends_the_run_and_leaves_the_last_checkpoint(
    cell: str, ranks2: RankPool, tmp_path: Path
) -> None:
    asynchronous, name = CHECKPOINTS[cell]
    through = saving(tmp_path / "through", asynchronous=asynchronous)
    config = saving(tmp_path / "full", asynchronous=asynchronous)
    expected = ranks2.run(saved, through)
    last = tmp_path / "full" / "main" / "last"
    fill(last / "4" / name)

    rank = 0 if name.startswith(".") else 1
    message = (
        f"{last / '4'} couldn't be written and holds no checkpoint (rank {rank}: OSError(28, 'No "
        "space left on device')); make room there, and resume from an earlier checkpoint"
    )
    earlier = "an earlier asynchronous save has failed: " if asynchronous else ""
    assert (
        ranks2.run(saved, config) == [(f"CheckpointError: {earlier}{message}", (), last / "2")] * 2
    )
    assert not (last / "4" / ".metadata").exists()

    (last / "4" / name).unlink()
    for (text, losses, newest), (_, whole, _) in zip(
        ranks2.run(saved, config), expected, strict=True
    ):
        assert (text, newest) == ("", last / "6")
        assert losses == whole
        assert len(losses) == FULL_DISK_LOOP["steps"]


def writing_out(folder: Path) -> TrainConfig:
    output = {"folder": str(folder / "out")}
    return config_with(loop=FULL_DISK_LOOP, output=output, runs={"main": {}})


class FillsUp(TrainWatcher):
    """Prevents this process's files from growing after a step."""

    def __init__(self, step: int) -> None:
        self._step = step

    def steps_trained(self, name: str, progress: StepsTrained) -> None:
        if progress.step == self._step:
            _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (0, most))


@pytest.mark.parametrize("file", ["main/plan.json", "record.json.draft"])
def test_a_file_of_the_output_that_does_not_fit_is_named_on_all_ranks(
    file: str, ranks2: RankPool, tmp_path: Path
) -> None:
    fill(tmp_path / "out" / file)
    with pytest.raises(RanksFailed) as failed:
        ranks2.run(train_in_folder, writing_out(tmp_path))
    path = tmp_path / "out" / file.removesuffix(".draft")
    for report in failed.value.reports.values():
        message = report.strip().splitlines()[-1]
        assert (
            f"OutputError: {path} can't be written: No space left on device; make room" in message
        )
        assert message.endswith("(found on rank 0)")
    assert not (tmp_path / "out" / "record.json").exists()
    assert not (tmp_path / "out" / "record.json.draft").exists()


def full_after_a_while(rank: int, world_size: int, folder: Path, writer: str) -> None:
    """Train where rank 0 can't write any more after the third step, and ends with its error."""
    config = writing_out(folder)
    if rank != 0:
        train(config)
        return
    kind = TensorBoardWatcher(folder / "scalars") if writer == "scalars" else None
    try:
        train(config, [FillsUp(3), kind or RunFolder(folder / "out", config)])
    except OutputError as error:
        _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
        (folder / "said").write_text(str(error))
        # As a program ends, without which the other ranks would wait for this one.
        os._exit(2)


@pytest.mark.parametrize("writer", ["progress", "scalars"])
def test_a_disk_that_fills_up_while_the_run_trains_ends_it(
    writer: str, ranks2: RankPool, tmp_path: Path
) -> None:
    with pytest.raises(RanksFailed) as failed:
        ranks2.run(full_after_a_while, tmp_path, writer)
    out = tmp_path / "out" / "main"
    path = out / "progress.jsonl" if writer == "progress" else tmp_path / "scalars" / "main"
    message = (tmp_path / "said").read_text()
    assert message.startswith(f"{path} can't be written: File too large; make room there")
    assert f"OutputError: {message[:-30]}" in failed.value.reports[1]
    if writer == "progress":
        # TensorBoard's own thread meets the limit some time later.
        where = "RankError: rank 0 failed at step 3, after the report: OutputError"
        assert where in failed.value.reports[1]
        steps = [line.point.step for line in read_progress(out) if line.point is not None]
        assert steps == [1, 2]
