"""Decide which long tests a run takes, and how long it waits."""

import hashlib
import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Protocol, TypeVar

import pytest


def seed_of_commit() -> int:
    """Return a number that changes with each commit; 0 outside a repository."""
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


Item = TypeVar("Item")
NUM_HANDS = 6
"""The fewest commits until every cell of a dealt matrix has run."""
NUM_FILE_HANDS = 24
"""The number of commits until every test marked `dealt_file` has run."""
NUM_SUITE_HANDS = 8
"""The fewest commits until every test marked `dealt_suite` has run."""
USUAL_SECONDS = 10
"""The time of a test marked `dealt_suite` whose mark doesn't say ``seconds=``."""

_SHUFFLED = 36
"""The seed of a shuffle that leaves each sixth of a product of 4, 3 and 3 with all its factors."""


class Deal(Protocol):
    """Deals the cells of a matrix, see the fixture `dealt`."""

    def __call__(self, cells: Sequence[Item]) -> list[Item]: ...


def parse_slice(text: str) -> tuple[int, int]:
    """Parse ``"3/24"`` as ``(3, 24)``; for ``"commit/24"``, the commit chooses the slice."""
    number, separator, count = text.partition("/")
    if not separator or not count.isdecimal() or int(count) < 1:
        raise pytest.UsageError(f"--slow-slice={text} has no number of slices; use such as 3/24")
    if number == "commit":
        return seed_of_commit() % int(count), int(count)
    if not number.isdecimal() or int(number) >= int(count):
        raise pytest.UsageError(
            f"--slow-slice={text} is no slice; use 0/{count} to {int(count) - 1}/{count}, or "
            f"commit/{count}"
        )
    return int(number), int(count)


def hand_number(text: str) -> int:
    """Return the number that chooses hands.

    For ``"commit/24"`` it is independent of the slice, or slow tests would always get one hand.
    """
    number, count = parse_slice(text)
    return seed_of_commit() // count if text.startswith("commit/") else number


def slice_of(names: Sequence[str], number: int, count: int) -> set[str]:
    """Return each ``count``-th name, to separate neighbours, which take equally long."""
    return set(sorted(names)[number::count])


def hand_of(cells: Sequence[Item], number: int, num_hands: int = NUM_HANDS) -> list[Item]:
    """Return one hand of the cells, in order and not empty; each cell belongs to one hand.

    Neighbours have most in common, and every sixth cell of a product may lack a factor: cells
    are shuffled, always the same way, before they are dealt.
    """
    places = Random(_SHUFFLED).sample(range(len(cells)), len(cells))
    hand = places[number % min(num_hands, len(cells)) :: num_hands] if cells else []
    return [cells[place] for place in sorted(hand)]


def even_hands(seconds: Mapping[str, float], num_hands: int) -> list[set[str]]:
    """Deal each test to one hand, so that all hands take about equally long."""
    hands: list[set[str]] = [set() for _ in range(num_hands)]
    totals = [0.0] * num_hands
    for name in sorted(seconds, key=lambda name: (-seconds[name], name)):
        shortest = totals.index(min(totals))
        hands[shortest].add(name)
        totals[shortest] += seconds[name]
    return hands


NUM_LANES = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
"""Workers of xdist that run tests side by side."""
_SHORT_S = 20.0


def patient(seconds: float) -> float:
    """Scale a deadline that no test should reach by the number of lanes.

    Short deadlines stay as they are: tests wait for them to expire.
    """
    return seconds if seconds < _SHORT_S else seconds * NUM_LANES
