"""Other machines than the calibrated ones: each factor changes what it says, and nothing else."""

from collections.abc import Iterator
from typing import Any

import pytest

import torchrec_2dsp as tdsp
from torchrec_2dsp.programs.plan import Slower

COLLECTIVES = ("all_to_all", "all_reduce", "all_gather", "reduce_scatter")
OF_FACTOR = {
    "link": {f"collectives.{one}.link_s_per_byte" for one in COLLECTIVES},
    "host": {f"collectives.{one}.local_s_per_byte" for one in COLLECTIVES},
    "kernels": {"per_item_s", "per_byte_s", "per_vector_byte_s", "per_row_byte_s"},
    "latency": {"base_s", "per_peer_s", "turn_s"},
}
"""Coefficients, by the end of their names."""


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
        is_meant = any(name.endswith(one) for one in OF_FACTOR[factor])
        assert after[name] == (pytest.approx(3 * value) if is_meant else value), name


def test_unknown_stays_unknown_and_nothing_stays_as_it_is() -> None:
    calibration = tdsp.Calibration.load("configs/hardware/h100_8_datasheet.toml")
    assert Slower().than(calibration) is calibration
    other = Slower(link=2.0).than(calibration).collectives
    assert other.full_duplex_all_to_all is calibration.collectives.full_duplex_all_to_all is None
