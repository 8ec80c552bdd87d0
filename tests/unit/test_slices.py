"""Slices of the slow tests hold each of them once."""

import pytest

from tests.support.commit import seed_of_commit
from tests.support.patience import NUM_LANES, patient
from tests.support.slices import parse_slice, slice_of


@pytest.mark.parametrize("count", [1, 3, 24, 100])
def test_each_test_is_in_one_slice(count: int) -> None:
    names = [f"test_{number}" for number in range(47)]
    slices = [slice_of(names, number, count) for number in range(count)]
    assert sorted(name for part in slices for name in part) == sorted(names)
    assert max(map(len, slices)) - min(map(len, slices)) <= 1


def test_the_commit_chooses_a_slice() -> None:
    assert parse_slice("3/24") == (3, 24)
    assert parse_slice("commit/24") == (seed_of_commit() % 24, 24)


@pytest.mark.parametrize("text", ["3", "24/24", "-1/24", "x/24", "1/0", "1/x"])
def test_what_is_no_slice_is_refused(text: str) -> None:
    with pytest.raises(pytest.UsageError, match=f"--slow-slice={text}"):
        parse_slice(text)


def test_only_long_deadlines_grow_with_the_lanes() -> None:
    assert patient(3) == 3
    assert patient(60) == 60 * NUM_LANES
