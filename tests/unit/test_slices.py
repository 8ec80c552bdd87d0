"""Slices of the slow tests, and hands of long matrices, hold each part of them once."""

import sys

import pytest
from hypothesis import given, strategies as st

from tests.support.programs import python
from tests.support.slices import (
    NUM_HANDS,
    NUM_LANES,
    even_hands,
    hand_number,
    hand_of,
    parse_slice,
    patient,
    seed_of_commit,
    slice_of,
)


@pytest.mark.parametrize("count", [1, 3, 24, 100])
def test_each_test_is_in_one_slice(count: int) -> None:
    names = [f"test_{number}" for number in range(47)]
    slices = [slice_of(names, number, count) for number in range(count)]
    assert sorted(name for part in slices for name in part) == sorted(names)
    assert max(map(len, slices)) - min(map(len, slices)) <= 1


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 7, 36])
def test_each_cell_is_in_a_hand(count: int) -> None:
    cells = list(range(count))
    hands = [hand_of(cells, number) for number in range(NUM_HANDS)]
    assert all(hands), "no test runs without a cell"
    assert {cell for hand in hands for cell in hand} == set(cells)
    if count >= NUM_HANDS:
        assert sorted(cell for hand in hands for cell in hand) == cells
        assert hand_of(cells, NUM_HANDS) == hands[0], "the seventh slice has the first hand again"
    hands = [hand_of(cells, number, 12) for number in range(12)]
    assert all(hands)
    assert {cell for hand in hands for cell in hand} == set(cells)


def test_a_hand_has_some_of_every_factor() -> None:
    """Each sixth of the parity matrix has every mesh, kind of bag, and method."""
    cells = [(mesh, bags, method) for mesh in range(4) for bags in range(3) for method in range(3)]
    for number in range(NUM_HANDS):
        assert [len({cell[place] for cell in hand_of(cells, number)}) for place in range(3)] == [
            4,
            3,
            3,
        ]


@given(st.dictionaries(st.text(), st.floats(1, 100)), st.integers(1, 6))
def test_hands_take_about_as_long(seconds: dict[str, float], num_hands: int) -> None:
    hands = even_hands(seconds, num_hands)
    assert sorted(name for hand in hands for name in hand) == sorted(seconds)
    totals = [sum(seconds[name] for name in hand) for hand in hands]
    assert max(totals) - min(totals) <= max(seconds.values(), default=0) + 1e-6


def test_the_commit_chooses_a_slice() -> None:
    assert parse_slice("3/24") == (3, 24)
    assert parse_slice("commit/24") == (seed_of_commit() % 24, 24)
    assert (hand_number("3/24"), hand_number("commit/24")) == (3, seed_of_commit() // 24)


@pytest.mark.parametrize("text", ["3", "24/24", "-1/24", "x/24", "1/0", "1/x"])
def test_what_is_no_slice_is_refused(text: str) -> None:
    with pytest.raises(pytest.UsageError, match=f"--slow-slice={text}"):
        parse_slice(text)


def test_only_long_deadlines_grow_with_the_lanes() -> None:
    assert patient(3) == 3
    assert patient(60) == 60 * NUM_LANES


_STEPS = """
import resource, sys
import torch

def step():
    return [torch.ones(2**21) for _ in range(6)]

if sys.argv[1] == "keep":
    from torchrec_2dsp.programs.launch import keep_freed_memory

    keep_freed_memory()
for _ in range(5):
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    step()
print((resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) // 10)
"""


@pytest.mark.dealt_suite
@pytest.mark.skipif(sys.platform != "linux", reason="glibc")
def test_memory_that_a_step_frees_is_there_for_the_next() -> None:
    # As small as they are before glibc has seen larger ones.
    thresholds = {f"MALLOC_{name}_THRESHOLD_": str(2**17) for name in ("MMAP", "TRIM")}
    faults = {
        what: int(python("-c", _STEPS, what, env=thresholds).stdout) for what in ("leave", "keep")
    }

    # 48 MiB have 12,288 pages.
    assert faults["leave"] > 1_000
    assert faults["keep"] < 100
