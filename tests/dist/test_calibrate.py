"""Calibration, equal on all ranks, and by the command."""

import math
import sys
from dataclasses import asdict
from pathlib import Path
from subprocess import Popen
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _world
from typer.testing import CliRunner

import torchrec_2dsp as tdsp
from tests.support.programs import forked, torchrun
from tests.support.ranks import RankPool
from torchrec_2dsp.comms.counting import count_collectives
from torchrec_2dsp.comms.groups import world_group
from torchrec_2dsp.cost.measuring.calibrate import calibrate
from torchrec_2dsp.cost.measuring.clock import Clock, Sampling
from torchrec_2dsp.errors import ConfigError
from torchrec_2dsp.programs.bench.machine import foreign_load_now
from torchrec_2dsp.programs.cli.app import app
from torchrec_2dsp.programs.link_speeds import LinkSpeeds, measure_link_speeds

# What the times are isn't tested, and other tests may run meanwhile.
TINY = Sampling(
    tolerance=4.0,
    min_repeats=3,
    max_repeats=3,
    largest_bytes=2**21,
    beside_repeats=3,
    most_elements=2**18,
    rows=((16, 2**11), (64, 2**11), (128, 2**11)),
    table_bytes=(2**18, 2**19, 2**20),
)


def measured(
    rank: int, world_size: int, local_world_size: int
) -> tuple[tdsp.Calibration, list[str], int]:
    """Calibrate; return the result, the progress messages, and the number of groups left."""
    world = dist.group.WORLD
    assert world is not None
    torch.manual_seed(rank)
    before = set(_world.pg_names.values())
    lines: list[str] = []
    calibration = calibrate(
        world, local_world_size=local_world_size, name="x", sampling=TINY, progress=lines.append
    )
    return calibration, lines, len(set(_world.pg_names.values()) - before)


@pytest.mark.dealt_suite
def test_every_rank_finds_the_same(ranks4: RankPool) -> None:
    (calibration, lines, left), *others = ranks4.run(measured, 2)
    assert [other for other, _, _ in others] == [calibration] * 3
    assert left == 0
    assert (calibration.hardware.num_hosts, calibration.hardware.ranks_per_host) == (2, 2)
    for name, cost in calibration.collectives:
        assert cost.local_s_per_byte is not None, name
        assert cost.link_s_per_byte is not None, name
        assert 1e-12 < max(cost.local_s_per_byte, cost.link_s_per_byte) < 1e-5, name
    assert calibration.kernels.host_memory is None, "there is one memory"
    for name, cost in calibration.kernels:
        if name == "host_memory":
            continue
        # Noise decides to which unit of work the time is attributed.
        units = [getattr(cost, unit) for unit in type(cost).model_fields if unit.endswith("_s")]
        assert 0 < sum(units) < 1, name
    assert 0 <= calibration.turn_s < 1
    assert "all_to_all, across hosts" in lines
    assert "full_duplex_all_to_all, all ranks" in lines


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


def test_the_command_keeps_a_file_that_is_no_calibration(tmp_path: Path) -> None:
    config = tmp_path / "mine.toml"
    config.write_text("[data]\n")
    done = forked(*COMMAND, "--output", str(config), ranks=2)
    assert done.returncode != 0
    assert f"{config} is no calibration, and would be overwritten" in done.stderr
    assert config.read_text() == "[data]\n"


def foreign(rank: int, world_size: int) -> float:
    return foreign_load_now(world_group())


def test_a_busy_machine_is_noticed_before_measuring(ranks2: RankPool) -> None:
    with Popen([sys.executable, "-c", "while True: pass"]) as other:
        try:
            assert min(ranks2.run(foreign)) > 0.4
        finally:
            other.kill()


def test_an_unknown_device(tmp_path: Path) -> None:
    arguments = ["--out", str(tmp_path / "c.toml"), "--device", "tpu"]
    done = CliRunner().invoke(app, ["calibrate", *arguments])
    assert done.exit_code != 0
    assert "error: device='tpu' is unknown; use cpu or cuda" in done.output


@pytest.mark.slow
def test_the_command_writes_a_calibration(tmp_path: Path) -> None:
    out = tmp_path / "mine.toml"
    done = torchrun(*COMMAND, "--output", str(out), timeout_s=240, columns=100)
    assert done.returncode == 0, done.stdout + done.stderr
    assert tdsp.Calibration.load(out).hardware.name == "mine"
    for text in ("measuring all_reduce, in hosts", "host's link", "ns per row", f"wrote {out}"):
        assert text in done.stdout, text


def measure(rank: int, world_size: int, local_world_size: int) -> tuple[LinkSpeeds, int]:
    """Return the speeds, and the number of groups left."""
    before = set(_world.pg_names.values())
    speeds = measure_link_speeds(local_world_size=local_world_size, num_bytes=2**18, repeats=3)
    return speeds, len(set(_world.pg_names.values()) - before)


@pytest.mark.parametrize("local_world_size", [1, 2, 4])
def test_every_rank_gets_the_speeds_of_the_links_there_are(
    ranks4: RankPool, local_world_size: int
) -> None:
    (speeds, left), *others = ranks4.run(measure, local_world_size)
    assert others == [(speeds, left)] * 3
    assert left == 0
    are_there = {"in_host": local_world_size > 1, "across_hosts": local_world_size < 4}
    for link, by_collective in asdict(speeds).items():
        assert list(by_collective) == ["all-to-all", "all-reduce"]
        for speed in by_collective.values():
            assert 1e4 < speed < math.inf if are_there[link] else speed is None


def measure_by_set_times(rank: int, world_size: int, local_world_size: int) -> LinkSpeeds:
    with patch.object(Clock, "seconds", lambda clock, run, repeats: [1.0, 2.0, 0.0][:repeats]):
        return measure_link_speeds(local_world_size=local_world_size, num_bytes=4000, repeats=3)


def test_the_bytes_are_those_on_the_wire(ranks4: RankPool) -> None:
    # 4,000 bytes took two seconds, so 400 are to take 0.2. Each rank keeps its own part of an
    # all-to-all, and an all-reduce passes each part but one on, twice over.
    in_pairs = {"all-to-all": 200.0, "all-reduce": 400.0}
    speeds = ranks4.run(measure_by_set_times, 2)[0]
    assert speeds == LinkSpeeds(in_host=in_pairs, across_hosts=in_pairs)
    together = ranks4.run(measure_by_set_times, 4)[0]
    assert together.in_host == {"all-to-all": 300.0, "all-reduce": 600.0}


def count(rank: int, world_size: int) -> dict[str, int]:
    with count_collectives() as seen:
        measure_link_speeds(local_world_size=2, num_bytes=400, repeats=2)
    assert all(record.num_bytes == 400 for record in seen.records if len(record.ranks) == 2)
    return seen.counts()


def test_the_collectives_are_those_of_the_docstring(ranks4: RankPool) -> None:
    # Two links, two collectives each, with two warm-up runs and two that count.
    each, times = 2 * (2 + 2), 2 * 2 * 2
    for counts in ranks4.run(count):
        assert counts["all_to_all_single"] == each
        assert counts["all_reduce"] == each + 2 * each + times


def refuse(rank: int, world_size: int, local_world_size: int, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        measure_link_speeds(local_world_size=local_world_size)


@pytest.mark.parametrize("local_world_size", [0, 3])
def test_hosts_that_do_not_fit_have_no_speeds(ranks4: RankPool, local_world_size: int) -> None:
    text = f"local_world_size={local_world_size} does not divide world_size=4; pass the number"
    ranks4.run(refuse, local_world_size, text)


def disagree(rank: int, world_size: int) -> None:
    with pytest.raises(ConfigError, match="local_world_size differs between ranks"):
        measure_link_speeds(local_world_size=2 if rank else 4)


def test_ranks_that_disagree_all_hear_of_it(ranks4: RankPool) -> None:
    ranks4.run(disagree)
