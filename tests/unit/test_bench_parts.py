"""The small parts of a benchmark: phases and weights."""

import pytest
import torch

from tests.support.traces import COMPUTING_US, WAITING_US, step_events
from torchrec_2dsp.programs.bench.contestants import initial_rows
from torchrec_2dsp.programs.bench.results import Phase
from torchrec_2dsp.programs.bench.tracing import mean_phases, phases_of, profiled
from torchrec_2dsp.programs.traces import RankSplit, RankTrace, StepPhase, step_mark


def test_ranks_may_lack_a_phase() -> None:
    phases = [Phase(name="sync", seconds=2.0, waiting=True)]

    (mean,) = mean_phases([phases, []])

    assert mean.seconds == 1.0


def test_a_ranks_phases_add_up_to_its_step() -> None:
    split = RankSplit.of_trace(0, RankTrace.of_events(step_events()))

    phases = phases_of(split)

    assert sum(phase.seconds for phase in phases) == pytest.approx(split.step_us * 1e-6)
    seconds = {(phase.name, phase.waiting): phase.seconds for phase in phases}
    assert seconds["rows", True] == pytest.approx(WAITING_US[StepPhase.ROWS] * 1e-6)
    assert seconds["rows", False] == pytest.approx(COMPUTING_US[StepPhase.ROWS] * 1e-6)


def test_a_profile_has_the_steps_and_their_operators() -> None:
    def step() -> None:
        torch.ones(64, 64).mm(torch.ones(64, 64)).sum()

    def settle() -> None:
        torch.ones(4, 4).mm(torch.ones(4, 4))

    trace = profiled(step, 3, settle)

    assert [span.name for span in trace.steps] == [step_mark(number) for number in (1, 2, 3)]
    products = [span for span in trace.training if span.name == "aten::mm"]
    assert len(products) == 4
    assert trace.steps[-1].end_us <= products[-1].start_us, "settling ends inside the profile"


def test_rows_do_not_depend_on_where_they_are_made() -> None:
    whole = initial_rows(0, 10_000, 8, 10_000, (3, 1))

    assert torch.equal(initial_rows(4_000, 4_200, 8, 10_000, (3, 1)), whole[4_000:4_200])
    assert torch.equal(initial_rows(9_999, 10_000, 8, 10_000, (3, 1)), whole[9_999:])
    assert whole.abs().max() <= 0.01
    assert whole.std() == pytest.approx(0.01 / 3**0.5, rel=0.02)
    assert not torch.equal(initial_rows(0, 10, 8, 10_000, (3, 2)), whole[:10])
