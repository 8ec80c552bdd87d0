"""Rank pools that distributed tests share, and the selection and order of tests.

A pool starts at its first use. Each lane, an xdist worker, has its own.
"""

import gc
from collections import defaultdict
from collections.abc import Iterator

import pytest
from hypothesis import settings

from tests.support.ranks import RankPool
from tests.support.slices import (
    NUM_FILE_HANDS,
    NUM_SUITE_HANDS,
    USUAL_SECONDS,
    Deal,
    even_hands,
    hand_number,
    hand_of,
    parse_slice,
    slice_of,
)

# The same examples in every run, however slow the machine is.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")

LONGEST_FILES = (
    "tests/fuzz/test_fuzz.py",
    "tests/fuzz/test_pinned.py",
    "tests/dist/test_parity.py",
    "tests/dist/test_bench.py",
    "tests/cluster/test_cluster.py",
    "tests/dist/test_checkpoint.py",
    "tests/dist/test_planned_parity.py",
    "tests/dist/test_train_state.py",
    "tests/dist/test_faults.py",
    "tests/dist/test_row_routes.py",
    "tests/dist/test_exchanges.py",
    "tests/dist/test_row_prefetch.py",
    "tests/dist/test_documents.py",
    "tests/cluster/test_programs_on_cluster.py",
    "tests/fuzz/test_machine.py",
    "tests/dist/test_train.py",
    "tests/dist/test_train_resume.py",
    "tests/dist/test_checkpoint_async.py",
    "tests/dist/test_loops.py",
)
"""They begin first, so that no lane has a long one left when the others are done."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--slow-slice",
        metavar="K/N",
        help="of the tests marked `slow` run one slice only, of long matrices a sixth of the "
        "cells, of long tests a 24th in each file, and an eighth of those that are dealt over "
        "all files; `commit/N`: those of the commit",
    )


def pytest_configure() -> None:
    """Disable garbage collection, as the imports leave little garbage and much to scan."""
    gc.disable()


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    ranks = {name: rank for rank, name in enumerate(LONGEST_FILES)}
    items.sort(key=lambda item: ranks.get(item.nodeid.partition("::")[0], len(ranks)))
    if text := config.getoption("--slow-slice"):
        slow = [item.nodeid for item in items if item.get_closest_marker("slow")]
        number, count = parse_slice(text)
        left_out = set(slow) - slice_of(slow, number, count)
        files: dict[str, list[str]] = defaultdict(list)
        matrices: dict[str, list[str]] = defaultdict(list)
        suite: dict[str, list[str]] = defaultdict(list)
        suite_seconds: dict[str, float] = {}
        for item in items:
            if item.get_closest_marker("slow"):
                continue  # Slices choose among them already.
            if mark := item.get_closest_marker("dealt_suite"):
                group = mark.args[0] if mark.args else item.nodeid
                suite[group].append(item.nodeid)
                suite_seconds[group] = mark.kwargs.get("seconds", USUAL_SECONDS)
            elif item.get_closest_marker("alone"):
                continue  # They are few.
            elif item.get_closest_marker("dealt_file"):
                files[item.nodeid.partition("::")[0]].append(item.nodeid)
            elif item.get_closest_marker("dealt"):
                matrices[item.nodeid.partition("[")[0]].append(item.nodeid)
        chosen_hand = hand_number(text)
        for tests in files.values():
            left_out |= set(tests) - set(hand_of(tests, chosen_hand, NUM_FILE_HANDS))
        suite_hands = even_hands(suite_seconds, NUM_SUITE_HANDS)
        for group in set(suite) - suite_hands[chosen_hand % NUM_SUITE_HANDS]:
            left_out |= set(suite[group])
        for cells in matrices.values():
            left_out |= set(cells) - set(hand_of(cells, chosen_hand))
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid in left_out])
        items[:] = [item for item in items if item.nodeid not in left_out]


@pytest.fixture(scope="session")
def dealt(pytestconfig: pytest.Config) -> Deal:
    """Return a function that deals a long matrix's cells: a sixth if slow tests are sliced."""
    text = pytestconfig.getoption("--slow-slice")
    if not text:
        return lambda cells: [*cells]
    number = hand_number(text)
    return lambda cells: hand_of(cells, number)


@pytest.fixture(scope="session")
def ranks2() -> Iterator[RankPool]:
    with RankPool(2) as pool:
        yield pool


@pytest.fixture(scope="session")
def ranks4() -> Iterator[RankPool]:
    with RankPool(4) as pool:
        yield pool


@pytest.fixture(scope="session")
def two_hosts() -> Iterator[RankPool]:
    with RankPool(4, local_world_size=2) as pool:
        yield pool


@pytest.fixture(scope="session")
def ranks8() -> Iterator[RankPool]:
    """Yield eight ranks on four hosts, two each."""
    with RankPool(8, local_world_size=2) as pool:
        yield pool
