"""The plan command: machines unlike the calibrated ones, and configs for other commands."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

import torchrec_2dsp as tdsp
from torchrec_2dsp.errors import ConfigError
from torchrec_2dsp.programs.bench.config import BenchConfig
from torchrec_2dsp.programs.config.config_file import load_config
from torchrec_2dsp.programs.plan import PlanConfig, Slower, planning
from torchrec_2dsp.programs.train.config import TrainConfig

COLLECTIVES = ("all_to_all", "all_reduce", "all_gather", "reduce_scatter")
OF_FACTOR = {
    "link": {f"collectives.{name}.link_s_per_byte" for name in COLLECTIVES},
    "host": {f"collectives.{name}.local_s_per_byte" for name in COLLECTIVES},
    "kernels": {"per_item_s", "per_byte_s", "per_vector_byte_s", "per_row_byte_s"},
    "latency": {"base_s", "per_peer_s", "turn_s"},
}
"""The coefficients that each factor changes, by the end of their names."""
REPORTED = {512: 1.01, 1_024: 0.96, 2_048: 0.95, 4_096: 0.90}
"""Samples per second and GPU in 2D, compared with 256 GPUs (arXiv 2508.03854)."""


def numbers(part: dict[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in part.items():
        if isinstance(value, dict):
            yield from numbers(value, f"{path}{name}.")
        else:
            yield path + name, value


@pytest.mark.parametrize("factor", OF_FACTOR)
def test_a_factor_changes_what_it_says(factor: str) -> None:
    calibration = tdsp.Calibration.load("configs/hardware/h100_8_datasheet.toml")
    before = dict(numbers(calibration.model_dump()))
    after = dict(numbers(Slower(**{factor: 3.0}).than(calibration).model_dump()))
    assert after["hardware.name"] == f"{before['hardware.name']} with {factor} x 3"
    for name, value in before.items():
        if name == "hardware.name":
            continue
        is_meant = any(name.endswith(suffix) for suffix in OF_FACTOR[factor])
        assert after[name] == (pytest.approx(3 * value) if is_meant else value), name


def test_unknown_stays_unknown_and_nothing_stays_as_it_is() -> None:
    calibration = tdsp.Calibration.load("configs/hardware/h100_8_datasheet.toml")
    assert Slower().than(calibration) is calibration
    other = Slower(link=2.0).than(calibration).collectives
    assert other.full_duplex_all_to_all is calibration.collectives.full_duplex_all_to_all is None


@pytest.mark.parametrize(
    ("kind", "name", "message"),
    [
        (PlanConfig, "demo", "demo is a config for train, with [runs]; give one for plan"),
        (PlanConfig, "bench_criteo", "is a config for bench, with [contestants]; give one for"),
        (TrainConfig, "plan", "is a config for plan, with [machines]; give one for train, with"),
        (BenchConfig, "bench_sync", "is a config for bench-sync, with [syncs]; give one for bench"),
    ],
)
def test_a_config_of_another_command_is_named_in_one_sentence(
    kind: type[BaseModel], name: str, message: str
) -> None:
    with pytest.raises(ConfigError) as refusal:
        # An override doesn't make it one of the wanted kind.
        load_config(kind, name, ["machines.num_ranks=4"])
    assert message in str(refusal.value)
    assert "\n" not in str(refusal.value)


def samples_per_rank(num_ranks: int, *overrides: str) -> float:
    config = load_config(
        PlanConfig, Path("configs/runs/scale.toml"), [f"machines.num_ranks={num_ranks}", *overrides]
    )
    work = planning(config)
    best = work.planner.search(work.model, work.sharders).placements[0]
    return config.batch_size / best.cost.total_s


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_efficiencies_in_2d_are_those_that_are_reported() -> None:
    """A model as large, on machines of which only data sheets are known."""
    start = samples_per_rank(256)
    # Fitted, by the length of the dense part.
    assert 256 * start == pytest.approx(176_000, rel=0.03)
    for num_ranks, reported in REPORTED.items():
        assert samples_per_rank(num_ranks) / start == pytest.approx(reported, abs=0.05)
    exact = samples_per_rank(4_096, "replicas.sync=GradientSync", "replicas.synced_rows=touched")
    assert exact / start > 0.95
