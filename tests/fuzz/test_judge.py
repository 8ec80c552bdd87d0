"""Findings are distinguished from refusals, without any ranks."""

from dataclasses import replace

import pytest
import torch

from tests.fuzz.case import Case, ModuleCase, SearchCase, TableCase
from tests.fuzz.judge import judge
from tests.fuzz.oracle import expect
from tests.fuzz.search import contradiction
from tests.fuzz.seen import Piece, RankReport, Seen, StateSeen

CASE = Case(optimizer="adagrad")
"""One table of 16 rows on two ranks."""
FINAL = 2
"""Its last action."""


def right_reports() -> list[RankReport]:
    """Return the reports of `CASE`'s ranks when all is well."""
    expected = expect(CASE)
    reports = []
    for rank in range(2):
        rows = slice(8 * rank, 8 * rank + 8)
        weights, moments = (
            [Piece("m0t0", 8 * rank, 0, of_kind[FINAL, "m0t0"][rows].float())]
            for of_kind in (expected.weights, expected.moments)
        )
        seen = Seen(
            scores={index: expected.scores[index, rank].float() for index in range(FINAL)},
            states={FINAL: StateSeen(weights, moments, {}, expected.dense[FINAL, rank].float())},
        )
        reports.append(RankReport("returned", seen))
    return reports


def test_right_numbers_are_ok_and_are_counted() -> None:
    verdict = judge(CASE, right_reports())
    assert (verdict.outcome, verdict.text) == ("ok", "")
    assert (verdict.counts.weights, verdict.counts.moments, verdict.counts.scores) == (64, 64, 12)
    assert verdict.counts.moved_weights > 0
    assert verdict.counts.copies == 5


@pytest.mark.parametrize("kind", ["weights", "moments"])
def test_a_wrong_number_is_found(kind: str) -> None:
    reports = right_reports()
    assert reports[1].seen is not None
    (piece,) = getattr(reports[1].seen.states[FINAL], kind)
    piece.values[5, 1] += 1e-4
    verdict = judge(CASE, reports)
    assert (verdict.outcome, verdict.kind) == ("finding", "wrong numbers")
    assert "m0t0 at row 8, column 0 on rank 1 in action 2 (final)" in verdict.text


@pytest.mark.parametrize("kind", ["weights", "moments", "scores"])
def test_a_bound_holds_whatever_rounding_explains(kind: str) -> None:
    """Moments are compared relative to their shard's largest, scores and weights relative to 1."""
    reports, bounded = right_reports(), replace(CASE, bound=1e-6)
    assert judge(bounded, reports).outcome == "ok"
    assert reports[1].seen is not None
    final, scores = reports[1].seen.states[FINAL], reports[1].seen.scores[1]
    (values,) = [scores] if kind == "scores" else [piece.values for piece in getattr(final, kind)]
    values[(0,) * values.dim()] += 2e-6 * (values.max() if kind == "moments" else 1)
    assert judge(CASE, reports).outcome == "ok"
    assert judge(bounded, reports).kind == "wrong numbers"


def test_a_wrong_score_is_found() -> None:
    reports = right_reports()
    assert reports[0].seen is not None
    reports[0].seen.scores[1][2] += 1e-4
    assert "scores of rank 0 in action 1 (train)" in judge(CASE, reports).text


def test_copies_that_differ_in_a_bit_are_found() -> None:
    reports = right_reports()
    assert reports[1].seen is not None
    dense = reports[1].seen.states[FINAL].dense
    dense[0] = torch.nextafter(dense[0], torch.tensor(9.0))
    verdict = judge(CASE, reports)
    assert (verdict.outcome, verdict.kind) == ("finding", "copies differ")


def test_a_missing_shard_is_found() -> None:
    reports = right_reports()
    assert reports[1].seen is not None
    reports[1].seen.states[FINAL].weights.clear()
    assert judge(CASE, reports).kind == "incomplete table"


@pytest.mark.parametrize(
    ("demand", "chosen", "text"),
    [
        ("sharding", TableCase(sharding="table_wise"), "another sharding"),
        ("exchange", TableCase(exchange="row"), "another exchange"),
        ("transport", TableCase(transport="int8"), "another transport"),
        ("hot", TableCase(hot="some"), "another hot"),
        ("once", TableCase(once=True), "another once"),
        ("none", TableCase(exchange="nonempty"), "has exchange nonempty"),
        ("none", TableCase(transport="int8"), "travels in int8"),
        ("none", TableCase(chosen_blocks=2), "has column shards"),
    ],
)
def test_a_plan_against_demands_is_found(demand: str, chosen: TableCase, text: str) -> None:
    search = SearchCase(exchange=("pooled", "row"))
    case = Case(modules=(ModuleCase(tables=(TableCase(demand=demand),)),), search=search)
    assert not contradiction(case, case)
    other = replace(case, modules=(ModuleCase(tables=(chosen,)),))
    assert text in contradiction(case, other)


REFUSED = RankReport("raised", None, "PlanError", True, "table 'm0t0' is row_wise")


def test_the_same_error_of_ours_on_all_ranks_is_a_refusal() -> None:
    verdict = judge(CASE, [REFUSED, REFUSED])
    assert (verdict.outcome, verdict.kind) == ("refused", "PlanError: table _ is row_wise")


@pytest.mark.parametrize(
    ("second", "kind"),
    [
        (replace(REFUSED, message="another"), "PlanError: table _ is row_wise, not alike on all"),
        (RankReport("returned", Seen()), "PlanError: table _ is row_wise, not alike on all ranks"),
        (RankReport("hung"), "PlanError: table _ is row_wise, a rank hung"),
        (RankReport("died", message="exit code -6"), "PlanError: table _ is row_wise, a rank died"),
    ],
)
def test_what_only_some_ranks_refuse_is_found(second: RankReport, kind: str) -> None:
    verdict = judge(CASE, [REFUSED, second])
    assert verdict.outcome == "finding"
    assert verdict.kind.startswith(kind)


@pytest.mark.parametrize(("error", "is_ours"), [("SyncError", True), ("IndexError", False)])
def test_other_errors_are_findings_though_alike(error: str, is_ours: bool) -> None:
    report = replace(REFUSED, error=error, is_ours=is_ours)
    assert judge(CASE, [report, report]).outcome == "finding"
