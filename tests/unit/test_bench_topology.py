"""What a benchmark tells the planners of the network."""

import pytest
import torch.distributed as dist

from tests.unit.test_bench_config import config_of
from torchrec_2dsp.programs.bench import contestants
from torchrec_2dsp.programs.bench.contestants import planner_topology
from torchrec_2dsp.programs.bench.program import calibration_warning
from torchrec_2dsp.programs.calibrate.collectives import LinkSpeeds

SPEEDS = LinkSpeeds(
    local_world_size=2,
    intra_host_all_to_all_bytes_per_s=3e9,
    intra_host_all_reduce_bytes_per_s=2e9,
    cross_host_all_to_all_bytes_per_s=60e6,
    cross_host_all_reduce_bytes_per_s=55e6,
)


def test_a_calibration_of_other_machines_is_named() -> None:
    path = "configs/hardware/emulated_1gbit.toml"
    config = config_of({"plain": {"kind": "stock"}}, calibration=path)
    assert calibration_warning(config, local_world_size=2) == ""
    assert calibration_warning(config, local_world_size=4) == (
        f"{path} is of other machines: hosts have 4 ranks, and had 2"
    )
    assert calibration_warning(config_of({"plain": {"kind": "stock"}}), 4) == ""


def test_planners_know_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_world_size", lambda: 4)
    monkeypatch.setattr(contestants, "get_local_size", lambda world_size: 2)
    config = config_of({"plain": {"kind": "stock"}})
    measured = planner_topology(config, "measured", SPEEDS)
    # TorchRec counts bytes per millisecond.
    assert (measured.intra_host_bw, measured.inter_host_bw) == (3e6, 60e3)
    default = planner_topology(config, "default", SPEEDS)
    assert default.intra_host_bw > default.inter_host_bw > 1e6
