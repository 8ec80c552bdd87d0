"""A full disk ends a training program with an error that names the file, and costs no checkpoint.

Files are links to ``/dev/full``, which the kernel answers as a full disk, or meet a limit of their
size, where they may only fill up later.
"""

import os
import resource
from pathlib import Path

import pytest

from tests.support.ranks import RankPool, RanksFailed
from tests.support.train_runs import config_with
from torchrec_2dsp.errors import OutputError, TwoDError
from torchrec_2dsp.parallel.checkpoint.save import latest_checkpoint
from torchrec_2dsp.programs.train.checkpoints import Resume
from torchrec_2dsp.programs.train.config import TrainConfig
from torchrec_2dsp.programs.train.program import train
from torchrec_2dsp.programs.train.record import read_progress
from torchrec_2dsp.programs.train.results import (
    RunFolder,
    StepsTrained,
    TensorBoardWatcher,
    TrainWatcher,
)

pytestmark = pytest.mark.dealt_file

FULL = Path("/dev/full")
LOOP = {"steps": 6, "report_every": 1, "eval_every": 0, "eval_steps": 1}
CHECKPOINTS = {
    "a rank's share": (False, "__1_0.distcp"),
    "a rank's share, beside training": (True, "__1_0.distcp"),
    "the last file": (False, ".metadata.tmp"),
}
"""Whether a save is asynchronous, and the file that doesn't fit."""


def saving(folder: Path, *, asynchronous: bool) -> TrainConfig:
    checkpoint = {"folder": str(folder), "every": 2, "keep_best": 0, "asynchronous": asynchronous}
    return config_with(loop=LOOP, checkpoint=checkpoint, runs={"main": {}})


def fill(file: Path) -> None:
    """Let a file that isn't there yet be on a full disk."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.symlink_to(FULL)


def saved(
    rank: int, world_size: int, config: TrainConfig
) -> tuple[str, tuple[float, ...], Path | None]:
    """Return error of a run that goes on if it can, its losses, and what there is to go on from."""
    text, losses = "", ()
    try:
        losses = train(config, resume=Resume.of("auto")).runs[0].losses
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
    said = (
        f"{last / '4'} couldn't be written and holds no checkpoint (rank {rank}: OSError(28, 'No "
        "space left on device')); make room there, and resume from an earlier checkpoint"
    )
    earlier = "an earlier asynchronous save has failed: " if asynchronous else ""
    assert ranks2.run(saved, config) == [(f"CheckpointError: {earlier}{said}", (), last / "2")] * 2
    assert not (last / "4" / ".metadata").exists()

    (last / "4" / name).unlink()
    for (text, losses, newest), (_, whole, _) in zip(
        ranks2.run(saved, config), expected, strict=True
    ):
        assert (text, newest) == ("", last / "6")
        assert losses == whole
        assert len(losses) == LOOP["steps"]


def writing_out(folder: Path) -> TrainConfig:
    output = {"folder": str(folder / "out")}
    return config_with(loop=LOOP, output=output, runs={"main": {}})


class FillsUp(TrainWatcher):
    """Lets no file of this process grow after a step."""

    def __init__(self, step: int) -> None:
        self._step = step

    def steps_trained(self, name: str, progress: StepsTrained) -> None:
        if progress.step == self._step:
            _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (0, most))


def watched(rank: int, world_size: int, folder: Path) -> None:
    config = writing_out(folder)
    train(config, [RunFolder(folder / "out", config)] if rank == 0 else [])


@pytest.mark.parametrize("file", ["main/plan.json", "record.json.draft"])
def test_a_file_of_the_output_that_does_not_fit_is_named_on_all_ranks(
    file: str, ranks2: RankPool, tmp_path: Path
) -> None:
    fill(tmp_path / "out" / file)
    with pytest.raises(RanksFailed) as failed:
        ranks2.run(watched, tmp_path)
    path = tmp_path / "out" / file.removesuffix(".draft")
    for report in failed.value.reports.values():
        said = report.strip().splitlines()[-1]
        assert f"OutputError: {path} can't be written: No space left on device; make room" in said
        assert said.endswith("(found on rank 0)")
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
    said = (tmp_path / "said").read_text()
    assert said.startswith(f"{path} can't be written: File too large; make room there")
    assert f"OutputError: {said[:-30]}" in failed.value.reports[1]
    if writer == "progress":
        # TensorBoard's own thread meets the limit some time later.
        where = "RankError: rank 0 failed at step 3, after the report: OutputError"
        assert where in failed.value.reports[1]
        steps = [line.point.step for line in read_progress(out) if line.point is not None]
        assert steps == [1, 2]
