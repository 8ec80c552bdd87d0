"""Random cases, other ones for each commit, and those that failed once."""

import hashlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fuzz.case import Case
from tests.fuzz.machine import ENOUGH_CASES, Machine, Summary
from tests.fuzz.worker import Worker

NUM_SLICES = 3
"""Each has the time of a test for itself."""
FAILED_ONCE = Path(__file__).with_name("failed_once.jsonl")
"""A line for each case that showed a defect, as small as it was made."""


def seed_of_commit() -> int:
    """Another one for each commit; 0 where there is no repository."""
    answer = subprocess.run(
        ["git", "rev-parse", "HEAD"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    )
    if answer.returncode:
        return 0
    return int(hashlib.sha256(answer.stdout.strip().encode()).hexdigest()[:7], 16)


@pytest.fixture(scope="module")
def workers() -> Iterator[list[Worker]]:
    """Two side by side, for the two cores that there are at least."""
    both = [Worker(), Worker()]
    yield both
    for worker in both:
        worker.close()


@pytest.fixture(scope="module")
def total() -> Summary:
    """What all slices came to."""
    return Summary()


def test_cases_that_failed_once_are_right(workers: list[Worker]) -> None:
    machine = Machine(workers, shrink_s=0)
    lines = FAILED_ONCE.read_text().splitlines()
    summary = machine.run_cases(Case.from_json(line) for line in lines)
    assert not summary.findings, str(summary)
    assert summary.num_ok == len(lines), str(summary)


@pytest.mark.parametrize("number", range(NUM_SLICES))
def test_drawn_cases_are_right(workers: list[Worker], total: Summary, number: int) -> None:
    machine = Machine(workers, shrink_s=40)
    num_cases = ENOUGH_CASES // NUM_SLICES
    seed = seed_of_commit() + number * num_cases
    summary = machine.run(seed, num_cases, max_findings=3)
    assert not summary.findings, f"--seed {seed} --cases {num_cases}: {summary}"
    total += summary
    assert not total.complaints, str(total)


def test_the_seed_is_that_of_the_commit() -> None:
    assert seed_of_commit() == seed_of_commit() >= 0
