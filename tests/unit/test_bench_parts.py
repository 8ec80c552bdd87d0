"""The small parts of a benchmark: phases and weights."""

from functools import cache

import pytest
import torch
from hypothesis import given, strategies as st

import torchrec_2dsp as tdsp
from tests.support.planning import SHARDERS, planner
from tests.support.traces import COMPUTING_US, WAITING_US, step_events
from tests.support.train_runs import click_data, click_model
from tests.unit.test_bench_config import CONFIGS, config_of
from torchrec_2dsp.cost.step_cost import StepCost
from torchrec_2dsp.cost.workload import DenseWork
from torchrec_2dsp.programs.bench.config import StockContestant
from torchrec_2dsp.programs.bench.contestants import initial_rows, tables_work, workload_of
from torchrec_2dsp.programs.bench.process import Place
from torchrec_2dsp.programs.bench.program import predicted_steps
from torchrec_2dsp.programs.bench.results import Phase
from torchrec_2dsp.programs.bench.tracing import mean_phases, phases_of, profiled
from torchrec_2dsp.programs.calibrate.collectives import (
    SECONDS_PER_REPEAT,
    LinkSpeeds,
    bytes_per_s,
    payload_bytes,
)
from torchrec_2dsp.programs.config.config_file import make_config
from torchrec_2dsp.programs.models.model import build_model
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


seconds = st.floats(1e-6, 1e3)
sizes = st.integers(1, 2**40)


@pytest.mark.parametrize(
    ("num_ranks", "num_passes", "expected"),
    # Each rank keeps its own part of an all-to-all, and passes each part but one on, twice over.
    [(2, 1, 500.0), (4, 1, 750.0), (2, 2, 1000.0), (4, 2, 1500.0)],
)
def test_the_bytes_are_those_on_the_wire(num_ranks: int, num_passes: int, expected: float) -> None:
    actual = bytes_per_s(
        [1.0, 2.0, 0.0], num_bytes=1000, num_ranks=num_ranks, num_passes=num_passes
    )
    assert actual == expected


@given(st.lists(seconds, min_size=1), sizes)
def test_twice_the_time_is_half_the_speed(times: list[float], num_bytes: int) -> None:
    speed = bytes_per_s(times, num_bytes=num_bytes, num_ranks=2, num_passes=1)
    doubled = [2 * time for time in times]
    slower = bytes_per_s(doubled, num_bytes=num_bytes, num_ranks=2, num_passes=1)
    assert slower == pytest.approx(speed / 2)


@given(sizes, seconds, sizes)
def test_a_payload_takes_its_time_or_is_the_largest(
    probe_bytes: int, probe_seconds: float, max_bytes: int
) -> None:
    actual = payload_bytes(probe_bytes, probe_seconds, max_bytes)
    assert 1 <= actual <= max_bytes
    if actual < max_bytes:
        wanted = probe_bytes / probe_seconds * SECONDS_PER_REPEAT
        assert wanted <= actual * (1 + 1e-9) <= (wanted + 1) * (1 + 2e-9)


def test_a_host_sends_what_its_ranks_send() -> None:
    speeds = LinkSpeeds(
        local_world_size=4,
        intra_host_all_to_all_bytes_per_s=1.0,
        intra_host_all_reduce_bytes_per_s=2.0,
        cross_host_all_to_all_bytes_per_s=3.0,
        cross_host_all_reduce_bytes_per_s=None,
    )
    assert speeds.host_all_to_all_bytes_per_s == 12.0
    assert speeds.host_all_reduce_bytes_per_s is None


CONFIG = config_of(
    {
        "plain": {"kind": "stock"},
        "copies": {"kind": "two_d", "num_groups": 2},
        "ceiling": {"kind": "ceiling", "of": "plain"},
        "ceiling_2d": {"kind": "ceiling", "of": "copies"},
    },
    calibration=str(CONFIGS / "hardware/emulated_1gbit.toml"),
)
DENSE = DenseWork(forward_s=0.01, backward_s=0.03)
PLACE = Place(0, 4, 2)


@cache
def plans() -> dict[str, tdsp.Plan2D]:
    model = build_model(click_data(CONFIG), click_model(CONFIG), tables_device="meta")
    one_group, two_groups = (
        planner(mesh=tdsp.Mesh2D(num_groups, 4 // num_groups)).plan(model, SHARDERS)
        for num_groups in (1, 2)
    )
    return {
        "plain": one_group,
        "copies": two_groups,
        "ceiling": one_group,
        "ceiling_2d": two_groups,
    }


def test_a_ceiling_says_what_a_step_takes_beside_its_tables() -> None:
    actual = predicted_steps(CONFIG, plans(), DENSE, PLACE, {"ceiling": 0.1, "ceiling_2d": 0.5})
    assert set(actual.steps) == {"plain", "copies"}
    assert actual.dense_from == ("ceiling",)
    of_tables = StepCost(**actual.steps["plain"])
    computed_s = of_tables.lookup_s + of_tables.rows_s + of_tables.update_s
    assert 0 < computed_s < 0.1
    assert of_tables.dense_s + computed_s == pytest.approx(0.1)
    assert actual.steps["copies"]["dense_s"] == of_tables.dense_s


@pytest.mark.parametrize("ceilings", [{}, {"ceiling_2d": 0.5}, {"ceiling": 1e-9}])
def test_without_a_ceiling_that_can_tell_the_timed_model_counts(ceilings: dict[str, float]) -> None:
    actual = predicted_steps(CONFIG, plans(), DENSE, PLACE, ceilings)
    assert actual.dense_from == ()
    assert actual.steps["plain"]["dense_s"] == pytest.approx(0.04)


def test_without_a_calibration_nothing_is_predicted() -> None:
    assert predicted_steps(CONFIG, plans(), None, PLACE, {"ceiling": 0.1}) == ({}, ())


def test_numbers_in_bf16_travel_as_those_in_fp16() -> None:
    tables = tables_work(CONFIG)
    in_fp16, in_bf16 = (
        workload_of(make_config(StockContestant, {"qcomms": qcomms}), tables, 8, DENSE)
        for qcomms in ("fp16", "bf16")
    )
    assert in_bf16 == in_fp16
    assert in_bf16.forward_wire_bytes == 2
