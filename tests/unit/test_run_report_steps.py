"""Where a step goes, on the page on a training run: which ranks, phases and means it shows."""

import re
from pathlib import Path

import pytest

from tests.support.run_folders import figure, headings_of, page_of, run_record, words_of, write_run
from tests.support.traces import COMPUTING_US, WAITING_US, step_events, write_trace
from torchrec_2dsp.programs.run_report.contents import RunContents
from torchrec_2dsp.programs.run_report.steps import (
    common_steps,
    rank_shares,
    slowest_counts,
)
from torchrec_2dsp.programs.traces import RankShares, RankSplit, StepPhase, StepTimes


def test_profiled_steps_are_split_by_phase_and_the_slowest_rank_is_marked(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", [run_record("traced"), run_record("plain")])
    # The next batch of rank 2 takes 30 us more.
    for rank in (0, 2, 10):
        events = step_events(late=30 * (rank == 2))
        write_trace(folder / "traced" / f"trace_rank{rank}.json", events)
    traced, plain = RunContents.read(folder).runs
    assert [path.stem for path in traced.traces] == ["trace_rank0", "trace_rank2", "trace_rank10"]
    assert not plain.traces
    page = page_of(folder)
    places = ["traced, rank 0", "traced, rank 2 (slowest)", "traced, rank 10"]
    bars = figure(page, "Where a step goes")
    assert {*bars} == {
        *(phase.value for phase in COMPUTING_US),
        *(f"{phase.value}: waiting" for phase in WAITING_US),
    }
    assert list(bars["next batch"].y) == places
    assert list(bars["next batch"].x) == [0.01, 0.04, 0.01]
    assert list(bars["rows: waiting"].x) == [0.011] * 3
    assert bars["rows: waiting"].marker.pattern.shape == "/"
    ends = [sum(trace.x[place] for trace in bars.values()) for place in range(3)]
    assert ends == pytest.approx([0.1, 0.13, 0.1])
    words = " ".join(words_of(page).split())
    assert "The mean of 1 step of 3 ranks. Rank 2 computes longest, 0.10 ms." in words
    assert f"Traces, for Perfetto or Chrome: {folder / 'traced'}." in words
    # 10, 40 and 10 us of 100, 130 and 100 us.
    assert "next batch 0.02 18.2% 0.02 0.00 0.01 (rank 0) 0.04 (rank 2)" in words
    assert "rows 0.01 13.6% 0.00 0.01 0.00 (rank 0) 0.00 (rank 10)" in words
    assert "the step 0.11 100.0% 0.08 0.03 0.07 (rank 0) 0.10 (rank 2)" in words
    assert "Phases of a step of plain" not in words
    # Of steps of 110 us ranks compute 83 in the mean, and the slowest 103.
    assert "traced as read 75.5% 18.2% 1.24" in words
    assert "2 0.10 0.03 79.2% 1 of 1" in words


def test_a_page_says_what_the_slowest_rank_costs_with_and_without_dealt_samples(
    tmp_path: Path,
) -> None:
    records = [
        run_record("plain"),
        run_record("dealt", imbalance_before=1.36, imbalance_after=1.02),
        run_record("unprofiled"),
    ]
    sections = {"plain": {}, "dealt": {"balance": {}}, "unprofiled": {}}
    folder = write_run(tmp_path / "run", records, sections=sections)
    # A rank computes 73 us of 100, and in one of two steps of the plain run 50 us more.
    for rank in range(2):
        first, second = (step_events(n, 200 * n, late=50 * (n == rank)) for n in range(2))
        write_trace(folder / "plain" / f"trace_rank{rank}.json", [*first, *second])
        write_trace(folder / "dealt" / f"trace_rank{rank}.json", step_events())
    page = page_of(folder)
    words = " ".join(words_of(page).split())
    assert "plain as read 78.4% 20.0% 1.26 dealt dealt by cost 73.0% 0.0% 1.00 1.36 1.02" in words
    assert "rank computing ms waiting ms busy slowest in steps" in words
    assert "0 0.10 0.03 78.4% 1 of 2 1 0.10 0.03 78.4% 1 of 2" in words
    assert "Ranks in a step of unprofiled" not in headings_of(page)


def split_of(rank: int, *computing_us: float, first: int = 5) -> RankSplit:
    """Return the split of steps of 100 us each."""
    steps = {first + place: StepTimes(time, 100.0) for place, time in enumerate(computing_us)}
    return RankSplit(
        rank=rank,
        num_steps=len(steps),
        step_us=100.0,
        computing_us={StepPhase.OTHER: sum(computing_us) / len(steps)},
        waiting_us={},
        steps=steps,
    )


def test_what_is_lost_to_the_slowest_rank_is_found_step_by_step() -> None:
    splits = [split_of(0, 80, 40), split_of(3, 40, 80)]
    assert rank_shares(splits) == RankShares(busy=0.6, lost=0.2)
    assert slowest_counts(splits) == {0: 1, 3: 1}
    # Steps that a trace lacks are left out.
    later = split_of(9, 20, 10, first=6)
    assert common_steps([*splits, later]) == [6]
    shares = rank_shares([*splits, later])
    assert shares is not None
    assert shares.imbalance == pytest.approx(80 / (140 / 3))
    assert shares.lost == pytest.approx(0.8 - 1.4 / 3)
    assert rank_shares([splits[0], split_of(1, 5, first=9)]) is None
    assert rank_shares([]) is None
    assert rank_shares(splits[:1]) == RankShares(busy=0.6, lost=0.0)


def test_a_page_says_how_to_profile_if_no_step_was_profiled(tmp_path: Path) -> None:
    page = page_of(write_run(tmp_path / "run", [run_record("main")]))
    assert "train --profile 20:30 records steps 20 to 30" in words_of(page)
    assert "Where a step goes" not in headings_of(page)


def test_a_trace_that_marks_no_steps_leaves_the_rest_of_the_page(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", [run_record("older"), run_record("newer")])
    write_trace(folder / "older" / "trace_rank0.json", step_events()[1:])
    write_trace(folder / "newer" / "trace_rank0.json", step_events())
    page = page_of(folder)
    assert re.search(
        "Where a step of older goes can.*t be shown.*trace_rank0.json doesn.*t mark", words_of(page)
    )
    assert list(figure(page, "Where a step goes")["ids"].y) == ["newer, rank 0"]
    assert "The mean of 1 step of 1 rank. Traces" in words_of(page)


def test_of_many_ranks_the_fastest_and_the_slowest_have_bars(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", [run_record("main")])
    for rank in range(20):
        write_trace(folder / "main" / f"trace_rank{rank}.json", step_events(late=rank * 7 % 20))
    page = page_of(folder)
    # Those with 8 to 11 us more than the fastest have none.
    shown = [rank for rank in range(20) if not 8 <= rank * 7 % 20 < 12]
    slowest = next(rank for rank in range(20) if rank * 7 % 20 == 19)
    assert list(figure(page, "Where a step goes")["ids"].y) == [
        f"main, rank {rank}{' (slowest)' * (rank == slowest)}" for rank in shown
    ]
    assert "half of those shown compute most" in words_of(page)
    assert "of 20 ranks" in words_of(page)
