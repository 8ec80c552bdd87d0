"""The page on a training run: speed gains, and the parts of a step."""

import re
from pathlib import Path

import pytest

from tests.support.run_folders import (
    everything,
    figure,
    gain_of,
    headings_of,
    page_of,
    run_record,
    words_of,
    write_progress,
    write_run,
    write_splits,
)
from tests.support.traces import COMPUTING_US, WAITING_US, step_events
from torchrec_2dsp.programs.run_report.contents import RunContents
from torchrec_2dsp.programs.run_report.steps import common_steps, rank_shares, slowest_counts
from torchrec_2dsp.programs.traces import RankShares, RankSplit, StepPhase, StepTimes


def test_the_gain_is_that_over_the_fastest_of_torchrec_and_int8_is_among_them(
    tmp_path: Path,
) -> None:
    page = page_of(everything(tmp_path / "run"))
    tiles = re.findall("<div><b>(.*?)</b>(.*?)</div>", page.html())
    assert [number for number, _ in tiles] == ["2.00 x", "2.50 x", "4.00 x"]
    int8, int4, exact = (text for _, text in tiles)
    assert int8 == "as fast as int8, TorchRec&#x27;s fastest: by one_call, exactly"
    assert int4.endswith("by rows_int4, rounded or late")
    assert exact == "as fast as planner, its fastest that trains exactly: by one_call, exactly"
    words = " ".join(words_of(page).split())
    assert "demo, on 2 x 2 ranks (hosts x ranks per host), 1 Gbit/s; medians of 5 rounds" in words
    assert (
        "one_call exactly 100.0 4.00 [4.00, 4.02] 2.00 [2.00, 2.01] +0.003% parallelize(" in words
    )
    times = figure(page, "Time of a step")
    assert dict(zip(times["TorchRec"].y, times["TorchRec"].x, strict=True)) == {
        "planner": 400,
        "int8": 200,
    }
    # A ceiling trains nothing.
    assert list(times["torchrec_2dsp"].y) == ["one_call", "rows_int4"]


def test_a_benchmark_without_rounded_contestants_has_one_gain(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", [run_record("main")])
    gain_of(folder, is_rounded=False)
    (folder / "notes.json").write_text("[1]")
    html = page_of(folder).html()
    assert re.findall("<div><b>(.*?)</b>", html) == ["4.00 x"]
    assert "as fast as planner" in html


def test_without_a_benchmark_a_page_says_how_to_measure_the_gain(tmp_path: Path) -> None:
    records = [run_record("alone", samples_per_s=1600.0), run_record("ours")]
    folder = write_run(tmp_path / "run", records, sections={"alone": {"stock": True}, "ours": {}})
    words = " ".join(words_of(page_of(folder)).split())
    assert f"bench --config bench --output {folder / 'gain.md'}" in words
    assert "in units of alone&#x27;s, which is TorchRec alone: ours 4.00." in words


def test_a_benchmark_s_steps_stand_span_by_span_beside_torchrec_s(tmp_path: Path) -> None:
    page = page_of(everything(tmp_path / "run"))
    bars = figure(page, "A step of the benchmark demo, beside TorchRec&#x27;s")
    assert list(bars["lookup"].y) == ["planner", "int8", "one_call", "rows_int4"]
    assert list(bars["rows: waiting"].x) == [170, 170, 50, 50]
    words = " ".join(words_of(page).split())
    assert "phase planner int8 one_call rows_int4 saved" in words
    assert "lookup 30.00 30.00 30.00 30.00 +0.00" in words
    assert (
        "rows 170.00 (170.00) 170.00 (170.00) 50.00 (50.00) 50.00 (50.00) +120.00 "
        "the step 200.00 (170.00) 200.00 (170.00) 80.00 (50.00) 80.00 (50.00) +120.00"
    ) in words


def test_traced_steps_are_shown_by_rank_and_span_by_span(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", [run_record("traced"), run_record("plain")])
    # Rank 2's next batch takes 30 us more.
    write_splits(
        folder / "traced", {rank: step_events(late=30 * (rank == 2)) for rank in (0, 2, 10)}
    )
    traced, plain = RunContents.read(folder).runs
    assert [split.rank for split in traced.splits] == [0, 2, 10]
    assert not plain.splits
    page = page_of(folder)
    places = ["traced, rank 0", "traced, rank 2 (slowest)", "traced, rank 10"]
    bars = figure(page, "A step of this training, by rank")
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
    assert "traced: steps 7 to 7, in which rank 2 computes longest, 0.10 ms." in words
    # 10, 40 and 10 us.
    assert "phase traced next batch 0.02" in words
    assert "rows 0.01 (0.01)" in words
    assert "the step 0.11 (0.03)" in words
    # In 110 us steps ranks compute for 83 on average, and the slowest for 103.
    assert "traced 75.5% 18.2% 1.24" in words
    assert "2 0.10 0.03 79.2% 1 of 1" in words


def test_a_page_says_what_the_slowest_rank_costs(tmp_path: Path) -> None:
    records = [run_record(name) for name in ("uneven", "even", "untraced")]
    folder = write_run(tmp_path / "run", records)
    # A rank computes for 73 of 100 us, and 50 us more in one of the uneven run's two steps.
    steps = {
        rank: [event for n in range(2) for event in step_events(n, 200 * n, late=50 * (n == rank))]
        for rank in range(2)
    }
    write_splits(folder / "uneven", steps)
    write_splits(folder / "even", {rank: step_events() for rank in range(2)})
    page = page_of(folder)
    words = " ".join(words_of(page).split())
    assert "uneven 78.4% 20.0% 1.26 even 73.0% 0.0% 1.00" in words
    assert "rank computing ms waiting ms busy slowest in steps" in words
    assert "0 0.10 0.03 78.4% 1 of 2 1 0.10 0.03 78.4% 1 of 2" in words
    assert "Ranks in a step of untraced" not in headings_of(page)


def split_of(rank: int, *computing_us: float, first: int = 5) -> RankSplit:
    """Return the split of steps that take 100 us each."""
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


def test_a_page_says_how_steps_are_traced_if_none_was(tmp_path: Path) -> None:
    def text() -> str:
        words = words_of(page_of(folder)).replace("&#x27;", "'")
        (sentence,) = re.findall(r"Where a step of this training goes (.*)\.", words)
        return sentence

    folder = write_run(tmp_path / "run", [run_record("main")])
    how = "train traces some in the middle of a run (output.traced_steps)"
    assert text() == f"isn't known, because none was traced: {how}"
    assert "Span by span" not in headings_of(page_of(folder))
    config = folder / "config.toml"
    config.write_text(config.read_text() + "\n[output]\ntraced_steps = 0\n")
    assert text() == "isn't known: output.traced_steps=0 traces none"
    config.write_text(config.read_text().replace("traced_steps = 0", ""))
    (folder / "record.json").unlink()
    write_progress(folder / "main")
    assert text() == f"isn't known yet: {how}"


def test_of_many_ranks_the_fastest_and_the_slowest_have_bars(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", [run_record("main")])
    write_splits(folder / "main", {rank: step_events(late=rank * 7 % 20) for rank in range(20)})
    page = page_of(folder)
    # Those with 8 to 11 us more than the fastest have none.
    shown = [rank for rank in range(20) if not 8 <= rank * 7 % 20 < 12]
    slowest = next(rank for rank in range(20) if rank * 7 % 20 == 19)
    assert list(figure(page, "A step of this training, by rank")["ids"].y) == [
        f"main, rank {rank}{' (slowest)' * (rank == slowest)}" for rank in shown
    ]
    assert "half of those shown compute most" in words_of(page)
