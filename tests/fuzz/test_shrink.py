"""A failing case is shrunk as far as it still fails."""

from tests.fuzz.case import Case
from tests.fuzz.draw import draw_case
from tests.fuzz.shrink import shrink, simpler_cases


def late_rows_are_wrong(case: Case) -> bool:
    """Judge as if rows with hashed owners were wrong after a state dict read."""
    return (
        case.loop == "row_prefetch"
        and case.size > 1
        and any(table.owners == "hash" for table in case.tables.values())
        and any(name == "state_dict" for _, name in case.events)
    )


def test_only_what_fails_is_left() -> None:
    failing = [case for case in map(draw_case, range(4_000)) if late_rows_are_wrong(case)]
    assert len(failing) > 10
    for case in failing:
        smallest = shrink(case, late_rows_are_wrong)
        assert smallest.world_size == 2
        assert smallest.steps == 1
        assert smallest.events == ((0, "state_dict"),)
        (table,) = smallest.tables.values()
        assert (table.owners, table.rows, table.dim) == ("hash", 1, 4)
        assert len(smallest.to_json()) < 200, smallest.to_json()


def test_what_does_not_fail_otherwise_is_left_as_it_is() -> None:
    case = draw_case(7)
    assert shrink(case, lambda other: False) == case


def test_simpler_cases_are_other_cases() -> None:
    for seed in range(200):
        case = draw_case(seed)
        simpler = list(simpler_cases(case))
        assert simpler
        assert case not in simpler
        assert all(len(other.sizes) == other.world_size for other in simpler)
        assert all(other.modules and other.steps for other in simpler)
