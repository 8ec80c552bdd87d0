"""Random cases, different for each commit, and cases that failed before."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fuzz.case import Case
from tests.fuzz.machine import DEADLINE_S, ENOUGH_CASES, Machine, Summary
from tests.fuzz.worker import Worker
from tests.support.slices import patient, seed_of_commit

NUM_CASES = 20
"""About a quarter of a minute for two workers; other ones for each commit."""
FAILED_ONCE = Path(__file__).with_name("failed_once.jsonl")
"""A line for each case that showed a defect, as small as it was made."""


@pytest.fixture(scope="module")
def workers() -> Iterator[list[Worker]]:
    """Yield two workers side by side, as there are at least two cores."""
    with Worker() as first, Worker() as second:
        yield [first, second]


def test_cases_that_failed_once_are_right(workers: list[Worker]) -> None:
    machine = Machine(workers, deadline_s=patient(DEADLINE_S), shrink_s=0)
    lines = FAILED_ONCE.read_text().splitlines()
    summary = machine.run_cases(Case.from_json(line) for line in lines)
    assert not summary.findings, str(summary)
    assert summary.num_ok == len(lines), str(summary)


def run_drawn(workers: list[Worker], seed: int, num_cases: int) -> Summary:
    """Run cases from consecutive seeds; none may fail."""
    machine = Machine(workers, deadline_s=patient(DEADLINE_S), shrink_s=40)
    summary = machine.run(seed, num_cases, max_findings=3)
    assert not summary.findings, f"--seed {seed} --cases {num_cases}: {summary}"
    return summary


def test_drawn_cases_are_right(workers: list[Worker]) -> None:
    summary = run_drawn(workers, seed_of_commit(), NUM_CASES)
    assert summary.num_ok > 0, str(summary)


@pytest.mark.slow
def test_enough_cases_to_judge_the_machine_are_right(workers: list[Worker]) -> None:
    summary = run_drawn(workers, seed_of_commit() + NUM_CASES, ENOUGH_CASES)
    assert summary.num_cases == ENOUGH_CASES
    assert not summary.complaints, str(summary)
