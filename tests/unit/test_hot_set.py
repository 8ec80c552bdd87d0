"""`HotSet`: sorted, distinct, in range."""

import pytest
import torch
from hypothesis import given, strategies as st

from torchrec_2dsp import HotSet
from torchrec_2dsp.errors import PlanError

ids = st.integers(0, 2**40)


@given(st.lists(ids, min_size=1))
def test_ids_come_in_any_order(values: list[int]) -> None:
    hot_set = HotSet.of(values)
    assert hot_set.row_ids == tuple(sorted(set(values)))
    assert len(hot_set) == len(set(values))
    assert hot_set == HotSet.of(torch.tensor(values)) == HotSet.of(reversed(values))
    assert hash(hot_set) == hash(HotSet.of(values))


@given(st.lists(ids, min_size=1))
def test_tensor_round_trip(values: list[int]) -> None:
    tensor = HotSet.of(values).tensor()
    assert tensor.dtype == torch.int64
    assert HotSet.of(tensor) == HotSet.of(values)


@pytest.mark.parametrize(
    ("row_ids", "message"),
    [
        ((), "needs at least one row id; leave the hot set out instead"),
        ((3, 1), r"must be ascending and distinct; use HotSet\.of\(ids\)"),
        ((1, 1), r"must be ascending and distinct; use HotSet\.of\(ids\)"),
        ((-2, 1), "row id -2 is negative"),
    ],
)
def test_bad_ids_are_refused(row_ids: tuple[int, ...], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        HotSet(row_ids)


def test_of_refuses_what_has_no_ids() -> None:
    with pytest.raises(PlanError, match="at least one row id"):
        HotSet.of(torch.empty(0, dtype=torch.int64))


def test_ids_have_to_fit_the_table() -> None:
    hot_set = HotSet.of([0, 9])
    hot_set.check_fits("t_user", 10)
    with pytest.raises(
        PlanError,
        match=r"^hot row 9 of table 't_user' is out of range: the table has 9 rows \(0\.\.8\)$",
    ):
        hot_set.check_fits("t_user", 9)


def test_a_hot_set_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        HotSet.of([1]).row_ids = (2,)  # type: ignore[misc]
