"""Calibrations that ranks measure at start and cache."""

import contextlib
import io
import logging
from dataclasses import replace
from logging.handlers import BufferingHandler
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

import torchrec_2dsp as tdsp
from tests.dist.test_calibrate import TINY
from tests.support.planning import with_part
from tests.support.ranks import RankPool
from torchrec_2dsp.comms.counting import count_collectives
from torchrec_2dsp.cost.collectives import Span, all_to_all
from torchrec_2dsp.cost.measuring import cache, kernels
from torchrec_2dsp.cost.measuring.cache import calibration_of_world
from torchrec_2dsp.cost.measuring.calibrate import calibrate
from torchrec_2dsp.cost.measuring.clock import Clock
from torchrec_2dsp.cost.measuring.collectives import measure_collectives, subgroup
from torchrec_2dsp.errors import CalibrationError, ConfigError, TwoDError

CPU = torch.device("cpu")


class Start(NamedTuple):
    """A rank's results from one request for the calibration."""

    calibration: tdsp.Calibration
    counts: dict[str, int]
    stderr: str
    warnings: list[str]


def start(folder: Path) -> Start:
    """Ask for the calibration, with little to measure."""
    assert dist.group.WORLD is not None
    warnings, stderr = BufferingHandler(capacity=1_000), io.StringIO()
    warnings.setLevel(logging.WARNING)
    cache.logger.addHandler(warnings)
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stderr(stderr):
        patch.setenv("XDG_CACHE_HOME", str(folder))
        patch.setattr(cache, "QUICK", TINY)
        with count_collectives() as seen:
            calibration = calibration_of_world(dist.group.WORLD, local_world_size=2, device=CPU)
    cache.logger.removeHandler(warnings)
    texts = [record.getMessage() for record in warnings.buffer]
    return Start(calibration, seen.counts(), stderr.getvalue(), texts)


def start_twice(rank: int, world_size: int, folder: Path) -> tuple[Start, Start, bool]:
    """Start twice; return both results, and whether the random state is unchanged."""
    before = torch.get_rng_state()
    first = start(folder)
    is_same = torch.equal(torch.get_rng_state(), before)
    return first, start(folder), is_same


@pytest.mark.dealt_suite
def test_the_second_start_measures_nothing(ranks4: RankPool, tmp_path: Path) -> None:
    results = ranks4.run(start_twice, tmp_path)
    (path,) = (tmp_path / "torchrec_2dsp" / "calibrations").iterdir()
    kept = tdsp.Calibration.load(path)
    assert kept.hardware.name == path.stem
    for rank, (first, second, is_same) in enumerate(results):
        assert first.calibration == second.calibration == kept
        assert first.counts["all_to_all_single"] > 50
        assert "all_to_all_single" not in second.counts
        assert second.counts.get("all_reduce", 0) == 0
        assert is_same
        line = f"measuring this cluster for the planner, 20 s at most; kept in {path}\n"
        assert first.stderr == ("" if rank else line)
        assert second.stderr == ""
        assert first.warnings == second.warnings == []


def start_without_measuring(
    rank: int,
    world_size: int,
    folder: Path,
    threads: int = 1,
    error: float = 0.0,
    num_bytes: int = 2**33,
) -> Start:
    """Use a shipped calibration in place of measuring."""

    def shipped(world: dist.ProcessGroup, **options: Any) -> tdsp.Calibration:
        dist.all_to_all_single(torch.zeros(4), torch.zeros(4), group=world)
        # Other processors' fits differ in their last digits.
        measured = tdsp.Calibration.load("emulated_1gbit")
        find = measured.kernels.find.model_copy(update={"median_error": error})
        measured = with_part(measured, "kernels", find=find)
        return measured.model_copy(update={"turn_s": rank / 100})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cache, "calibrate", shipped)
        patch.setattr(cache, "memory_bytes", lambda device: num_bytes)
        if rank == 3:
            patch.setattr(
                cache, "processor_name", lambda device: f"processor with {threads} threads"
            )
        return start(folder)


def has_measured(starts: list[Start]) -> bool:
    """Tell whether ranks measured, after checking that their calibrations are equal."""
    assert all(other.calibration == starts[0].calibration for other in starts)
    (has,) = {"all_to_all_single" in each.counts for each in starts}
    return has


def test_another_processor_on_one_rank_is_another_cluster(ranks4: RankPool, tmp_path: Path) -> None:
    measured = [
        has_measured(ranks4.run(start_without_measuring, tmp_path, threads))
        for threads in (1, 2, 2, 1)
    ]
    assert measured == [True, True, False, False]


def test_a_container_with_less_memory_is_another_cluster(ranks4: RankPool, tmp_path: Path) -> None:
    measured = [
        has_measured(ranks4.run(start_without_measuring, tmp_path, 1, 0.0, num_bytes))
        for num_bytes in (2**33, 2**33 - 2**22, 2**32, 2**33)
    ]
    assert measured == [True, False, True, False]


def test_a_damaged_file_is_measured_again(ranks4: RankPool, tmp_path: Path) -> None:
    assert has_measured(ranks4.run(start_without_measuring, tmp_path))
    (path,) = (tmp_path / "torchrec_2dsp" / "calibrations").iterdir()
    path.write_text("format = ")
    starts = ranks4.run(start_without_measuring, tmp_path)
    assert has_measured(starts)
    (warning,) = starts[0].warnings
    assert warning.startswith(f"measuring again what was kept: {path} is not TOML")
    assert not has_measured(ranks4.run(start_without_measuring, tmp_path))


def test_a_folder_that_cannot_be_written_is_a_warning(ranks4: RankPool, tmp_path: Path) -> None:
    no_folder = tmp_path / "file"
    no_folder.write_text("")
    for _ in range(2):
        starts = ranks4.run(start_without_measuring, no_folder)
        assert has_measured(starts)
        (warning,) = starts[0].warnings
        assert warning.startswith("this calibration isn't kept, the next start measures again:")
        assert all(not other.warnings for other in starts[1:])


def test_rough_times_are_used_once(ranks4: RankPool, tmp_path: Path) -> None:
    starts = ranks4.run(start_without_measuring, tmp_path, 1, 5.0)
    assert has_measured(starts)
    (warning,) = starts[0].warnings
    assert warning.startswith("the planner goes by rough times, which aren't kept: find: the cost")
    assert has_measured(ranks4.run(start_without_measuring, tmp_path))


def fail(rank: int, world_size: int, folder: Path, where: str) -> TwoDError:
    """Let a rank fail while it measures; return its error."""

    def broken(*arguments: object, **options: object) -> Any:
        raise MemoryError("no room")

    room, name = {
        "facts": (cache, "facts_of_rank"),
        "input": (kernels, "_tables"),
        "work": (kernels, "RowSum"),
    }[where]
    with pytest.MonkeyPatch.context() as patch:
        if rank == 2:
            patch.setattr(room, name, broken)
        with pytest.raises(TwoDError) as caught:
            start(folder)
    return caught.value


@pytest.mark.parametrize("where", ["facts", "input", "work"])
def test_a_failure_on_one_rank_ends_on_all_alike(
    ranks4: RankPool, tmp_path: Path, where: str
) -> None:
    kind = ConfigError if where == "facts" else CalibrationError
    for error in ranks4.run(fail, tmp_path, where):
        assert isinstance(error, kind)
        assert str(error) == "MemoryError: no room (found on rank 2)"
    assert not any(tmp_path.rglob("*.toml"))


def late(rank: int, world_size: int) -> tuple[set[int], set[int], list[float]]:
    """Return the numbers of samples past the deadline, and a clock's times."""
    assert dist.group.WORLD is not None
    clock = Clock(dist.group.WORLD, replace(TINY, deadline_s=0.0))
    times = clock.seconds(lambda: None, 2)
    of_network = measure_collectives(clock, local_world_size=2, share=1.0, progress=print)
    of_kernels = kernels.measure_kernels(clock, share=1.0, progress=print)
    return (
        {len(samples) for samples in of_network.values()},
        {len(samples) for samples in of_kernels.values()},
        times,
    )


def test_after_the_deadline_only_what_a_fit_needs_is_timed(ranks4: RankPool) -> None:
    (of_network, of_kernels, times), *others = ranks4.run(late)
    # Two messages in hosts, across them and over all ranks.
    assert of_network == {6}
    assert of_kernels <= {1, 2}
    assert [other for *_, other in others] == [times] * 3


def calibrate_alone(rank: int, world_size: int) -> tdsp.Calibration:
    with subgroup([[0], [1]], is_full_duplex=False) as alone:
        return calibrate(alone, local_world_size=1, name="x", sampling=TINY)


@pytest.mark.dealt_suite
def test_one_rank_alone_has_no_network(ranks2: RankPool) -> None:
    calibration = ranks2.run(calibrate_alone)[0]
    calibration.check_covers(world_size=1, local_world_size=1)
    cost, alone = calibration.all_to_all(full_duplex=True), Span.of_world(1, 1)
    assert cost.seconds(alone, all_to_all(alone, 1e6)) == 0.0
    assert calibration.turn_s == 0.0
    assert calibration.kernels.row_update.seconds(1e4, 1e6) > 0
    with pytest.raises(CalibrationError, match="nothing travels in a host"):
        calibration.check_covers(world_size=2, local_world_size=2)
