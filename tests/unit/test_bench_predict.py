"""Steps that are predicted from plans, and what a ceiling says of the rest of a step."""

from functools import cache

import pytest

import torchrec_2dsp as tdsp
from tests.support.click_configs import click_data, click_model
from tests.support.planning import SHARDERS, planner
from tests.unit.test_bench_config import CONFIGS, config_of
from torchrec_2dsp.cost.step_cost import StepCost
from torchrec_2dsp.cost.workload import DenseWork
from torchrec_2dsp.programs.bench.process import Place
from torchrec_2dsp.programs.bench.program import predicted_steps
from torchrec_2dsp.programs.models.model import build_model

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
    one, two = (
        planner(mesh=tdsp.Mesh2D(num_groups, 4 // num_groups)).plan(model, SHARDERS)
        for num_groups in (1, 2)
    )
    return {"plain": one, "copies": two, "ceiling": one, "ceiling_2d": two}


def test_a_ceiling_says_what_a_step_takes_beside_its_tables() -> None:
    found = predicted_steps(CONFIG, plans(), DENSE, PLACE, {"ceiling": 0.1, "ceiling_2d": 0.5})
    assert set(found.steps) == {"plain", "copies"}
    assert found.dense_from == ("ceiling",)
    of_tables = StepCost(**found.steps["plain"])
    computed_s = of_tables.lookup_s + of_tables.rows_s + of_tables.update_s
    assert 0 < computed_s < 0.1
    assert of_tables.dense_s + computed_s == pytest.approx(0.1)
    assert found.steps["copies"]["dense_s"] == of_tables.dense_s


@pytest.mark.parametrize("ceilings", [{}, {"ceiling_2d": 0.5}, {"ceiling": 1e-9}])
def test_without_a_ceiling_that_can_tell_the_timed_model_counts(ceilings: dict[str, float]) -> None:
    found = predicted_steps(CONFIG, plans(), DENSE, PLACE, ceilings)
    assert found.dense_from == ()
    assert found.steps["plain"]["dense_s"] == pytest.approx(0.04)


def test_without_a_calibration_nothing_is_predicted() -> None:
    assert predicted_steps(CONFIG, plans(), None, PLACE, {"ceiling": 0.1}) == ({}, ())
