"""The small parts of a benchmark: phases and weights."""

import pytest
import torch

from torchrec_2dsp.programs.bench.results import Phase
from torchrec_2dsp.programs.bench.trace import (
    Trace,
    TracedSpan,
    mean_phases,
    split_by_phase,
    traced,
)
from torchrec_2dsp.programs.bench.weights import initial_rows

STEP = TracedSpan("## bench step ##", 0, 100)


def phases_of(*spans: TracedSpan) -> dict[tuple[str, bool], float]:
    """Phases of a step of 100 us, in us."""
    labels = tuple(span for span in spans if span.name.startswith("##"))
    collectives = tuple(span for span in spans if span.name.startswith("gloo:"))
    operators = tuple(span for span in spans if "::" in span.name)
    found = split_by_phase(Trace((STEP, *labels), operators, collectives))
    return {(one.name, one.waiting): round(one.seconds * 1e6, 6) for one in found}


def test_a_step_is_split_without_gaps_or_overlaps() -> None:
    found = phases_of(
        TracedSpan("## forward 7 ##", 10, 50),
        TracedSpan("aten::mm", 12, 20),
        TracedSpan("fbgemm::split_embedding_codegen_lookup_rowwise_adagrad_function", 20, 25),
        TracedSpan("gloo:all_to_all", 24, 40),
        TracedSpan("## backward 7 ##", 50, 90),
        TracedSpan("aten::mm", 50, 60),
        TracedSpan("gloo:all_reduce", 55, 80),
        TracedSpan("gloo:all_to_all", 58, 65),
    )

    assert found == {
        ("pooled rows", True): 15.0,  # 25 to 40: the lookup still ran until 25
        ("row gradients", True): 5.0,  # 60 to 65: both were in flight
        ("dense gradients", True): 15.0,  # 65 to 80: the all-reduce alone
        ("lookup", False): 5.0,
        ("forward", False): 20.0,
        ("backward", False): 20.0,
        ("other", False): 20.0,
    }
    assert sum(found.values()) == 100.0


def test_a_collective_behind_an_operator_costs_nothing() -> None:
    found = phases_of(
        TracedSpan("## forward 0 ##", 0, 100),
        TracedSpan("aten::mm", 0, 100),
        TracedSpan("gloo:all_to_all", 10, 90),
    )

    assert found == {("forward", False): 100.0}


def test_work_on_rows_is_not_the_part_of_the_step_that_it_lies_in() -> None:
    found = phases_of(
        TracedSpan("## forward 0 ##", 0, 50),
        TracedSpan("## replica sync ##", 0, 20),
        TracedSpan("## apply rows ##", 5, 15),
        TracedSpan("## capture rows ##", 30, 35),
        TracedSpan("## backward 0 ##", 50, 100),
        TracedSpan("## note rows ##", 60, 70),
    )

    assert found == {
        ("sync", False): 10.0,
        ("apply rows", False): 10.0,
        ("capture rows", False): 5.0,
        ("note rows", False): 10.0,
        ("forward", False): 25.0,
        ("backward", False): 40.0,
    }


def test_several_steps_are_averaged() -> None:
    steps = (STEP, TracedSpan("## bench step ##", 200, 400))

    (phase,) = split_by_phase(Trace(steps, (), ()))

    assert phase.seconds == pytest.approx(150e-6)


def test_ranks_may_lack_a_phase() -> None:
    one = [Phase(name="sync", seconds=2.0, waiting=True)]

    (mean,) = mean_phases([one, []])

    assert mean.seconds == 1.0


def test_a_profile_has_the_steps_and_their_operators() -> None:
    def step() -> None:
        torch.ones(64, 64).mm(torch.ones(64, 64)).sum()

    trace = traced(step, num_steps=3)

    assert sum(span.name == STEP.name for span in trace.labels) == 3
    assert sum(span.name == "aten::mm" for span in trace.operators) == 3


def test_what_steps_left_under_way_ends_inside_the_profile() -> None:
    def settle() -> None:
        torch.ones(4, 4).mm(torch.ones(4, 4))

    trace = traced(lambda: None, num_steps=2, settle=settle)

    (settled,) = [span for span in trace.operators if span.name == "aten::mm"]
    assert all(span.end_us <= settled.start_us for span in trace.labels)


def test_rows_do_not_depend_on_where_they_are_made() -> None:
    whole = initial_rows(0, 10_000, 8, 10_000, (3, 1))

    assert torch.equal(initial_rows(4_000, 4_200, 8, 10_000, (3, 1)), whole[4_000:4_200])
    assert torch.equal(initial_rows(9_999, 10_000, 8, 10_000, (3, 1)), whole[9_999:])
    assert whole.abs().max() <= 0.01
    assert whole.std() == pytest.approx(0.01 / 3**0.5, rel=0.02)
    assert not torch.equal(initial_rows(0, 10, 8, 10_000, (3, 2)), whole[:10])
