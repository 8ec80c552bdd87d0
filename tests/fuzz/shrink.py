"""Find the smallest case that still fails in the same way."""

from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from typing import Any

from tests.fuzz.case import Case, ModuleCase, TableCase


def shrink(case: Case, still_fails: Callable[[Case], bool]) -> Case:
    """Simplify the case step by step, as long as a simpler one fails in the same way."""
    while True:
        simpler = next((other for other in simpler_cases(case) if still_fails(other)), None)
        if simpler is None:
            return case
        case = simpler


def simpler_cases(case: Case) -> Iterator[Case]:
    """Yield all cases with one simplification, the largest ones first."""
    if case.events:
        yield replace(case, events=())
    yield from (
        replace(case, modules=modules)
        for modules in _shorter(case.modules, simpler_items=lambda module: ())
    )
    yield from (replace(case, events=events) for events in _shorter(case.events, _earlier_events))
    yield from _smaller_worlds(case)
    if case.steps > 1:
        yield _with_steps(case, 1)
        yield _with_steps(case, case.steps - 1)
    for modules in _shorter(case.modules, _simpler_modules):
        if len(modules) == len(case.modules):
            yield replace(case, modules=modules)
    yield from (replace(case, sync=sync) for sync in _with_defaults(case.sync))
    if case.search is not None:
        yield from (replace(case, search=search) for search in _with_defaults(case.search))
    yield from (replace(case, dense=dense) for dense in _with_defaults(case.dense))
    yield from _with_defaults(
        case, "groups", "size", "modules", "sync", "dense", "steps", "sizes", "events", "seed"
    )
    for index, size in enumerate(case.sizes):
        for smaller in {1, size - 1} if size > 1 else ():
            yield replace(case, sizes=(*case.sizes[:index], smaller, *case.sizes[index + 1 :]))
    for index, size in enumerate(case.sizes):
        # An empty batch is a special one.
        if size == 0:
            yield replace(case, sizes=(*case.sizes[:index], 1, *case.sizes[index + 1 :]))
    if case.seed:
        yield replace(case, seed=0)


def _smaller_worlds(case: Case) -> Iterator[Case]:
    for groups, size in ((1, 1), (1, 2), (2, 1), (1, 4), (2, 2)):
        world = groups * size
        is_smaller = (world, groups) < (case.world_size, case.groups)
        if is_smaller and (case.local == 0 or world % case.local == 0):
            yield replace(case, groups=groups, size=size, sizes=case.sizes[:world])


def _with_steps(case: Case, steps: int) -> Case:
    events = tuple((min(step, steps - 1), name) for step, name in case.events)
    return replace(case, steps=steps, events=events)


def _earlier_events(event: tuple[int, str]) -> Iterator[tuple[int, str]]:
    step, name = event
    if step:
        yield step - 1, name
    if name not in ("state_dict", "evaluate"):
        yield step, "state_dict"


def _simpler_modules(module: ModuleCase) -> Iterator[ModuleCase]:
    for tables in _shorter(module.tables, _simpler_tables):
        yield replace(module, tables=tables)
    yield from _with_defaults(module, "tables")


def _simpler_tables(table: TableCase) -> Iterator[TableCase]:
    for index in range(len(table.features)) if len(table.features) > 1 else ():
        kept = table.features[:index] + table.features[index + 1 :]
        yield replace(table, features=kept)
    yield from _with_defaults(table, "features", "rows", "dim")
    for rows in (1, 2, 4, 8, 16, 40):
        if rows < table.rows:
            yield replace(table, rows=rows)
    for dim in (4, 8, 12):
        if dim < table.dim:
            yield replace(table, dim=dim)


def _shorter(
    items: tuple[Any, ...], simpler_items: Callable[[Any], Any]
) -> Iterator[tuple[Any, ...]]:
    """Yield the items with one dropped or simplified; at least one module or table stays."""
    least = 0 if items and isinstance(items[0], tuple) else 1
    for index, item in enumerate(items):
        if len(items) > least:
            yield items[:index] + items[index + 1 :]
        for simpler in simpler_items(item):
            yield (*items[:index], simpler, *items[index + 1 :])


def _with_defaults(value: Any, *kept: str) -> Iterator[Any]:
    """Yield the value with one field set to its default, for each field that isn't kept."""
    for field in fields(value):
        if field.name not in kept and getattr(value, field.name) != field.default:
            yield replace(value, **{field.name: field.default})
