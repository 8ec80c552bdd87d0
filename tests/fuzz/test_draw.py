"""Cases are drawn by seed alone, cover every option, and survive a JSON round trip."""

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import ValidationError

from tests.fuzz.actions import EVENTS, actions_of
from tests.fuzz.case import Case, DenseCase, ModuleCase, SearchCase, SyncCase, TableCase
from tests.fuzz.draw import (
    CASE_CHOICES,
    DENSE_CHOICES,
    MESHES,
    MODULE_CHOICES,
    SEARCH_CHOICES,
    SYNC_CHOICES,
    TABLE_CHOICES,
    draw_case,
    settled,
)

CASES = [draw_case(seed) for seed in range(3_000)]


def test_a_seed_draws_one_case() -> None:
    assert [draw_case(seed) for seed in range(200)] == CASES[:200]
    assert len(set(CASES)) == len(CASES)


def test_a_case_survives_its_line_of_json() -> None:
    for case in CASES:
        line = case.to_json()
        assert "\n" not in line
        assert Case.from_json(line) == case
    assert Case().to_json() == "{}"


def test_a_line_with_an_unknown_field_is_an_error() -> None:
    with pytest.raises(ValidationError, match=r"colour\n +Unexpected keyword argument"):
        Case.from_json('{"colour":1}')


def parts_of_cases() -> Iterator[tuple[dict[str, tuple[Any, ...]], object]]:
    """Yield each drawn object with its fields' choices."""
    for case in CASES:
        yield CASE_CHOICES, case
        yield SYNC_CHOICES, case.sync
        if case.search is not None:
            yield SEARCH_CHOICES, case.search
        yield DENSE_CHOICES, case.dense
        for module in case.modules:
            yield MODULE_CHOICES, module
            for table in module.tables:
                yield TABLE_CHOICES, table


def test_every_value_of_every_field_is_drawn() -> None:
    drawn: dict[tuple[type, str], set[Any]] = defaultdict(set)
    wanted: dict[tuple[type, str], set[Any]] = {}
    for choices, value in parts_of_cases():
        for name, values in choices.items():
            drawn[type(value), name].add(getattr(value, name))
            wanted[type(value), name] = set(values)
    kinds = {Case, DenseCase, ModuleCase, SearchCase, SyncCase, TableCase}
    assert {kind for kind, _ in wanted} == kinds
    assert drawn == wanted
    assert {(case.groups, case.size) for case in CASES} == set(MESHES)
    assert {name for case in CASES for _, name in case.events} == set(EVENTS)


def test_what_is_settled_stays() -> None:
    for case in CASES[:500]:
        once = settled(case)
        assert settled(once) == once


def test_combinations_that_were_wrong_once_are_drawn() -> None:
    """Ranks without rows, empty mean-pooled batches, and reads that move rows."""
    assert any(
        table.rows < case.size and table.sharding == "row_wise"
        for case in CASES
        for table in case.tables.values()
    )
    assert any(
        table.pooling == "mean" and table.sharding == "row_wise" and 0 in case.sizes
        for case in CASES
        for table in case.tables.values()
    )
    assert any(
        case.loop == "row_prefetch"
        and any(table.owners == "hash" for table in case.tables.values())
        and any(name == "save" for _, name in case.events)
        for case in CASES
    )


def test_batches_of_a_pipeline_keep_the_hot_rows_that_they_were_distributed_with() -> None:
    events = ((0, "refresh_hot"), (3, "refresh_hot"), (3, "detach"))
    by_loop = {
        loop: [
            action.hot
            for action in actions_of(Case(loop=loop, steps=6, events=events))
            if action.kind == "train"
        ]
        for loop in ("plain", "sparse_dist", "row_prefetch")
    }
    assert by_loop == {
        "plain": [0, 1, 1, 1, 2, 2],
        "sparse_dist": [0, 0, 1, 1, 2, 2],
        "row_prefetch": [0, 0, 0, 1, 2, 1],
    }
