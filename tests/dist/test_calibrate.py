"""Calibration: on all ranks alike, and by the command."""

import math
from pathlib import Path

import pytest
import torch.distributed as dist
from torch.distributed.distributed_c10d import _world
from typer.testing import CliRunner

import torchrec_2dsp as tdsp
from tests.support.programs import forked, torchrun
from tests.support.ranks import RankPool
from torchrec_2dsp.programs.calibrate import calibrate as program, collectives, fit, kernels
from torchrec_2dsp.programs.calibrate.calibrate import calibrate
from torchrec_2dsp.programs.cli.app import app


def measured(
    rank: int, world_size: int, local_world_size: int
) -> tuple[tdsp.Calibration, list[str], int]:
    """With what progress told, and the groups that are left."""
    world = dist.group.WORLD
    assert world is not None
    # What the times are isn't tested, and other tests may run meanwhile.
    kernels._NUM_IDS, kernels._TABLE_BYTES = (2**11,), (2**18, 2**19, 2**20)
    collectives._MIN_REPEATS = collectives._MAX_REPEATS = program._REPEATS = 3
    collectives._LARGEST, program._LARGEST = 2**21, 2**18
    fit.MAX_MEDIAN_ERROR = fit.MAX_KERNEL_ERROR = math.inf
    before = set(_world.pg_names.values())
    told: list[str] = []
    made = calibrate(world, local_world_size=local_world_size, name="x", progress=told.append)
    return made, told, len(set(_world.pg_names.values()) - before)


@pytest.mark.dealt_suite
def test_every_rank_finds_the_same(ranks4: RankPool) -> None:
    (made, told, left), *others = ranks4.run(measured, 2)
    assert [other for other, _, _ in others] == [made] * 3
    assert left == 0
    assert (made.hardware.num_hosts, made.hardware.ranks_per_host) == (2, 2)
    for name, cost in made.collectives:
        assert cost.local_s_per_byte is not None, name
        assert cost.link_s_per_byte is not None, name
        assert 1e-12 < max(cost.local_s_per_byte, cost.link_s_per_byte) < 1e-5, name
    for name, cost in made.kernels:
        # Noise decides which unit of work the time is put down to.
        units = [getattr(cost, unit) for unit in type(cost).model_fields if unit.endswith("_s")]
        assert 0 < sum(units) < 1, name
    assert 0 <= made.turn_s < 1
    assert "all_to_all, across hosts" in told
    assert "full_duplex_all_to_all, all ranks" in told


def refused(rank: int, world_size: int) -> str:
    assert dist.group.WORLD is not None
    with pytest.raises(tdsp.errors.CalibrationError) as caught:
        calibrate(dist.group.WORLD, local_world_size=3, name="x")
    return str(caught.value)


def test_hosts_of_different_sizes_are_refused(ranks4: RankPool) -> None:
    assert set(ranks4.run(refused)) == {
        "local_world_size=3 does not divide world_size=4; start as many ranks on every host"
    }


COMMAND = ("torchrec_2dsp", "calibrate")


def test_the_command_says_what_is_wrong(tmp_path: Path) -> None:
    out = tmp_path / "c.toml"
    done = forked(*COMMAND, "--out", str(out), ranks=1)
    assert done.returncode != 0
    assert "error: one rank has no network to measure; start at least two" in done.stderr
    assert not out.exists()


def test_an_unknown_device(tmp_path: Path) -> None:
    arguments = ["--out", str(tmp_path / "c.toml"), "--device", "tpu"]
    done = CliRunner().invoke(app, ["calibrate", *arguments])
    assert done.exit_code != 0
    assert "error: device='tpu' is unknown; use cpu or cuda" in done.output


@pytest.mark.slow
def test_the_command_writes_a_calibration(tmp_path: Path) -> None:
    out = tmp_path / "mine.toml"
    done = torchrun(*COMMAND, "--out", str(out), timeout_s=240, columns=100)
    assert done.returncode == 0, done.stdout + done.stderr
    assert tdsp.Calibration.load(out).hardware.name == "mine"
    for text in ("measuring all_reduce, in hosts", "host's link", "ns per row", f"wrote {out}"):
        assert text in done.stdout, text
