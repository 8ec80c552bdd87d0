"""The machine finds planted faults, whatever they do, and shrinks their cases."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import pytest

from tests.fuzz import plants
from tests.fuzz.case import Case, DenseCase, ModuleCase, SearchCase, SyncCase, TableCase
from tests.fuzz.judge import Counts
from tests.fuzz.machine import ENOUGH_CASES, Machine, Summary
from tests.fuzz.worker import Worker

REPLICAS = Case(
    groups=2,
    size=1,
    optimizer="rowwise_adagrad",
    modules=(ModuleCase(tables=(TableCase(hot="some"),)),),
    events=((0, "sync_now"),),
)
"""Rows with copies on both ranks, and a call in which a rank may fail."""
WRONG = "wrong numbers"
Plant = Callable[[], AbstractContextManager[None]]


@pytest.mark.dealt_suite
def test_an_update_applied_twice_is_found_in_a_drawn_case_and_made_smaller(
    healthy: Worker,
) -> None:
    with Worker(plants.updates_applied_twice) as worker:
        summary = Machine([worker], shrink_s=60).run(1, 1_000, max_findings=1, is_wanted=is_plain)
    assert summary.findings, str(summary)
    finding = summary.findings[0]
    assert finding.verdict.kind in ("wrong numbers", "copies differ"), str(finding)
    assert len(finding.case.to_json()) < 0.6 * len(finding.drawn.to_json()), str(finding)
    assert f"python -m tests.fuzz --case '{finding.case.to_json()}'" in str(summary)
    assert healthy.judged(finding.case, 60).outcome == "ok", str(finding)


@pytest.fixture(scope="module")
def healthy() -> Iterator[Worker]:
    with Worker() as worker:
        yield worker


def check_found(
    plant: Plant, healthy: Worker, case: Case, kind: str = WRONG, text: str = ""
) -> Counts:
    """Check that a case fails with the plant only; return its counts without the plant."""
    with Worker(plant) as faulty:
        for worker in (faulty, healthy):
            worker.ask(case, 60)
        verdict, right = faulty.answer(), healthy.answer()
    assert (verdict.outcome, verdict.kind) == ("finding", kind), verdict.text
    assert text in verdict.text
    assert right.outcome == "ok", right.text
    return right.counts


def is_plain(case: Case) -> bool:
    """Tell whether a case is quick to run."""
    is_small = case.world_size == 2 and len(case.modules) == 1
    return is_small and case.loop == "plain" and case.dense.kind == DenseCase().kind


def test_a_rank_that_draws_otherwise_is_found(healthy: Worker) -> None:
    (module,) = REPLICAS.modules
    tables = tuple(replace(table, dtype="fp16") for table in module.tables)
    case = replace(REPLICAS, modules=(replace(module, tables=tables),), at_random=True)
    check_found(plants.a_rank_that_draws_otherwise, healthy, case, "copies differ")


@pytest.mark.parametrize(
    ("plant", "kind", "text"),
    [
        (plants.a_rank_that_skips_updates, "wrong numbers", "off by"),
        (plants.a_rank_that_rounds_otherwise, "copies differ", "moments of m0t0 at row 0"),
        (plants.a_rank_that_hangs, "a rank hung", "in _hang"),
        (plants.a_rank_that_dies, "a rank died", "rank 1 died:  exit code -6"),
        (plants.a_rank_that_refuses_alone, "PlanError: rank _ doesn't", "rank 1 raised: PlanError"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_one_rank_does_is_found(plant: Plant, kind: str, text: str) -> None:
    with Worker(plant) as worker:
        verdict = worker.judged(REPLICAS, 8)
    assert verdict.outcome == "finding", verdict.text
    assert kind in verdict.kind, verdict.text
    assert text in verdict.text


@pytest.mark.parametrize(
    ("plant", "case", "kind"),
    [
        (
            plants.a_rank_that_keeps_its_own_numbers,
            replace(REPLICAS, sync=SyncCase(transport="int8")),
            "wrong numbers",
        ),
        (
            plants.a_rank_that_keeps_its_own_numbers,
            # The numbers' own rounding isn't known beside gradients in fp16.
            replace(REPLICAS, sync=SyncCase(transport="int8"), dense=DenseCase(kind="fp16")),
            "copies differ",
        ),
        (
            plants.a_rank_with_coarser_scales,
            Case(modules=(ModuleCase(tables=(TableCase(transport="int8"),)),)),
            "wrong numbers",
        ),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_one_rank_rounds_otherwise_is_found(
    plant: Plant, case: Case, kind: str, healthy: Worker
) -> None:
    assert check_found(plant, healthy, case, kind).rounded > 0


@pytest.mark.parametrize("plant", [plants.evicted_rows_with_moments, plants.maps_of_groups])
def test_wrong_id_maps_are_found(plant: Plant, healthy: Worker) -> None:
    module = ModuleCase(evicts="lru", drift=5, tables=(TableCase(rows=8, exchange="row"),))
    case = Case(groups=2, size=1, modules=(module,), optimizer="adam", steps=3)
    assert check_found(plant, healthy, case).evicted > 8


@pytest.mark.parametrize(
    "plant", [plants.slots_off_by_one, plants.a_rank_that_counts_position_weights_twice]
)
def test_wrong_position_weights_are_found(plant: Plant, healthy: Worker) -> None:
    module = ModuleCase(kind="positions", tables=(TableCase(exchange="row"),))
    assert check_found(plant, healthy, Case(modules=(module,))).moved_positions > 0


def test_a_wrong_number_in_a_searched_plan_is_found(healthy: Worker) -> None:
    case = replace(REPLICAS, search=SearchCase(has_mesh=True))
    counts = check_found(plants.a_rank_that_skips_updates, healthy, case, text="\n  plan {")
    assert counts.searched == 1


def dense_case(**fields: Any) -> Case:
    return Case(dense=DenseCase(**fields), steps=3)


THRESHOLDED = dense_case(kind="thresholded", density=0.3, route="gather")


@pytest.mark.parametrize(
    ("plant", "case", "kind", "text"),
    [
        (
            plants.late_gradients_that_are_lost,
            dense_case(kind="delayed"),
            WRONG,
            "dense part on rank",
        ),
        (
            plants.a_rank_that_forgets_what_it_left_out,
            THRESHOLDED,
            WRONG,
            "dense gradients that weren't sent",
        ),
        (plants.ranks_that_send_twice_as_much, THRESHOLDED, "more than the density", "5 of 5"),
        (
            plants.unused_parameters_without_gradients,
            replace(THRESHOLDED, dense=replace(THRESHOLDED.dense, shortcut=True), steps=4),
            WRONG,
            "dense gradients that weren't sent",
        ),
        (
            plants.a_rank_that_forgets_what_it_left_out,
            dense_case(kind="local", hidden=(4,), density=0.3),
            WRONG,
            "dense gradients that weren't sent",
        ),
        (plants.ranks_that_meet_without_rank_1, dense_case(kind="local"), WRONG, "scores of rank"),
        (
            plants.stages_that_forget_a_micro_batch,
            dense_case(kind="pipelined", hidden=(4,), num_micro_batches=2),
            WRONG,
            "losses of rank",
        ),
        (
            plants.ranks_of_a_layer_that_add_their_losses,
            dense_case(kind="tensor_parallel", hidden=(4,), tp=2),
            WRONG,
            "scores of rank",
        ),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_a_dense_wrapper_does_wrong_is_found(
    plant: Plant, case: Case, kind: str, text: str, healthy: Worker
) -> None:
    check_found(plant, healthy, case, kind, text)


def test_a_machine_that_compares_nothing_complains() -> None:
    summary = Summary(num_ok=ENOUGH_CASES)
    assert "no moved_weights in any case" in summary.complaints
    summary.counts = Counts(**dict.fromkeys(vars(Counts()), 1))
    assert summary.complaints == []
    summary.refusals["PlanError"] = ENOUGH_CASES
    assert summary.complaints == ["50% of the cases were refused"]
    summary.counts.blurred = ENOUGH_CASES
    assert len(summary.complaints) == 2
    assert "THE MACHINE" in str(summary)


def test_cases_that_ranks_survive_are_counted() -> None:
    refused = Case(modules=(ModuleCase(tables=(TableCase(owners="hash"),)),))
    averaged = Case(groups=2, size=1, sync=SyncCase(kind="weight"))
    with Worker() as first, Worker() as second:
        both = Machine([first, second])
        summary = both.run_cases(iter([REPLICAS, refused, averaged, REPLICAS]))
    assert (summary.num_ok, summary.refusals.total(), summary.findings) == (3, 1, [])
    assert summary.counts.copies > 0
    assert summary.counts.synced_rows > 0
