"""Orders of work: each rank does what it has to, once, and none waits for another one forever."""

from contextlib import suppress

import pytest

from torchrec_2dsp.dense.pipelined.schedule import SCHEDULES, Schedule, Work, WorkKind
from torchrec_2dsp.errors import ConfigError

KINDS = [
    (name, count) for name, kind in SCHEDULES.items() for count in kind.stages_per_rank or (1, 2, 3)
]


def schedules_of(name: str, stages_per_rank: int) -> list[Schedule]:
    """All schedules of small numbers that there are."""
    schedules = []
    for num_ranks in (1, 2, 3, 4):
        for num_micro_batches in (1, 2, 3, 4, 6, 8, 12):
            with suppress(ConfigError):
                schedules.append(
                    Schedule(name, num_ranks * stages_per_rank, num_micro_batches, stages_per_rank)
                )
    return schedules


def needs(work: Work, num_stages: int) -> set[tuple[str, int, int]]:
    """What has to be there before a piece of work can be done."""
    stage, number = work.stage, work.micro_batch
    if work.kind is WorkKind.FORWARD:
        return {("activation", stage, number)} if stage else set()
    if work.kind is WorkKind.WEIGHT_GRADIENT:
        return {("weights due", stage, number)}
    gradient = {("gradient", stage, number)} if stage < num_stages - 1 else set()
    return {("graph", stage, number)} | gradient


def gives(work: Work) -> set[tuple[str, int, int]]:
    """What is there after a piece of work."""
    stage, number = work.stage, work.micro_batch
    if work.kind is WorkKind.FORWARD:
        return {("graph", stage, number), ("activation", stage + 1, number)}
    if work.kind is WorkKind.WEIGHT_GRADIENT:
        return set()
    due = {("weights due", stage, number)} if work.kind is WorkKind.INPUT_GRADIENT else set()
    return {("gradient", stage - 1, number)} | due


@pytest.mark.parametrize(("name", "stages_per_rank"), KINDS)
def test_no_rank_waits_forever(name: str, stages_per_rank: int) -> None:
    schedules = schedules_of(name, stages_per_rank)
    assert len(schedules) > 5
    for schedule in schedules:
        there: set[tuple[str, int, int]] = set()
        places = [0] * schedule.num_ranks
        has_moved = True
        while has_moved:
            has_moved = False
            for rank, order in enumerate(schedule.work):
                while places[rank] < len(order):
                    if not needs(order[places[rank]], schedule.num_stages) <= there:
                        break
                    there |= gives(order[places[rank]])
                    places[rank] += 1
                    has_moved = True
        assert places == [len(order) for order in schedule.work], schedule


@pytest.mark.parametrize(("name", "stages_per_rank"), KINDS)
def test_each_piece_of_work_is_done_once(name: str, stages_per_rank: int) -> None:
    for schedule in schedules_of(name, stages_per_rank):
        for rank, order in enumerate(schedule.work):
            assert len(set(order)) == len(order)
            for stage in schedule.stages_of(rank):
                for number in range(schedule.num_micro_batches):
                    kinds = {
                        work.kind.value
                        for work in order
                        if (work.stage, work.micro_batch) == (stage, number)
                    }
                    assert kinds in ({"F", "B"}, {"F", "I", "W"}), (schedule, stage, number)
            assert {work.stage for work in order} == set(schedule.stages_of(rank))


def test_1f1b_keeps_as_many_micro_batches_as_stages_follow() -> None:
    schedule = Schedule("1F1B", num_stages=4, num_micro_batches=8)
    for rank, order in enumerate(schedule.work):
        alive = most = 0
        for work in order:
            alive += 1 if work.kind is WorkKind.FORWARD else -1
            most = max(most, alive)
        assert most == 4 - rank


def test_what_cannot_be_is_said() -> None:
    for arguments, text in (
        (
            ("Rail", 2, 2),
            "schedule='Rail' is unknown; use one of 'GPipe', '1F1B', 'Interleaved1F1B'",
        ),
        (("1F1B", 0, 2), "num_stages=0 is no count; use 1 or more"),
        (("1F1B", 4, 2, 2), "1F1B doesn't run 2 stages on a rank; use stages_per_rank=1"),
        (("Interleaved1F1B", 5, 2, 2), "num_stages=5 isn't a multiple of stages_per_rank=2"),
        (
            ("DualPipeV", 4, 2, 2),
            "DualPipeV can't run 4 stages, 2 on each rank, with num_micro_batches=2; use one of 4",
        ),
    ):
        with pytest.raises(ConfigError) as raised:
            Schedule(*arguments)  # type: ignore[arg-type]
        assert str(raised.value).startswith(text)
