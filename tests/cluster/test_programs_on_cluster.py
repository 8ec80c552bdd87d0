"""Programs on a cluster: `bench` counts and reports traffic, and all run in slower time."""

import json
import statistics
from pathlib import Path

import pytest

from torchrec_2dsp.cost.calibration import Calibration
from torchrec_2dsp.programs.bench.results import BenchResult, ContestantResult
from torchrec_2dsp.programs.cluster.emulated_cluster import EmulatedCluster
from torchrec_2dsp.programs.dilation import dilation_for
from torchrec_2dsp.programs.train.record import TrainRecord

pytestmark = pytest.mark.usefixtures("needs_cluster")

COMMAND = (
    *("-m", "torchrec_2dsp", "bench", "--config", "configs/runs/bench.toml"),
    *("--only", "table_wise", "--only", "planner_duplex", "--only", "ceiling"),
    *("--set", "schedule.block_s=0.2", "--set", "network.interface=eth0"),
)


def link_bytes(contestant: ContestantResult) -> list[float]:
    counted = [block.link_bytes for block in contestant.blocks]
    assert None not in counted
    return [num_bytes for num_bytes in counted if num_bytes is not None]


@pytest.mark.dealt_suite(seconds=35)
def test_a_report_counts_what_crosses_the_link_and_says_where_it_ran(tmp_path: Path) -> None:
    with EmulatedCluster(hosts=2, ranks_per_host=1, link="1gbit") as cluster:
        cluster.run([*COMMAND, "--output", str(tmp_path / "page.md")], timeout_s=300)
        description = cluster.describe()

    result = BenchResult.load(tmp_path / "page.json")
    assert [contestant.name for contestant in result.measured()] == [
        *("planner", "table_wise", "planner_duplex", "ceiling")
    ]
    *trained, ceiling = result.measured()
    for contestant in trained:
        # With one rank per host, all that is sent crosses the link, with its headers.
        ideal = sum(part.sent_bytes for part in contestant.traffic)
        assert all(ideal < link < 1.15 * ideal for link in link_bytes(contestant))
    assert max(link_bytes(ceiling)) < 0.01 * min(link_bytes(trained[0]))
    assert result.setting.cluster == description
    launcher = "torchrec-2dsp cluster --hosts 2 --ranks-per-host 1 --link 1000mbit -- -m "
    assert result.setting.command.startswith(launcher + "torchrec_2dsp bench --config configs/")
    assert description in (tmp_path / "page.md").read_text()


@pytest.mark.alone
@pytest.mark.dealt_suite(seconds=45)
@pytest.mark.parametrize("hosts", [1, 2])
def test_ranks_compute_side_by_side_and_wait_for_the_slowest(tmp_path: Path, hosts: int) -> None:
    with EmulatedCluster(hosts, 2, "none", processor_per_rank=True) as cluster:
        command = ["-m", "tests.cluster.programs", "compute", str(tmp_path / "times.json")]
        cluster.run(command, timeout_s=200)
        assert "a processor for every rank" in cluster.describe()
    seconds = json.loads((tmp_path / "times.json").read_text())
    print(seconds)

    num_ranks = 2 * hosts
    for cluster_s, real_s in seconds.values():
        assert real_s == pytest.approx(dilation_for(num_ranks) * cluster_s, rel=0.05)
    assert seconds["alone"][0] == pytest.approx(0.5, rel=0.05)
    assert seconds["even"][0] == pytest.approx(10 * 0.1, rel=0.05)
    assert seconds["uneven"][0] == pytest.approx(1.3 * seconds["even"][0], rel=0.05)
    # The last stage begins one batch later for each earlier stage.
    assert seconds["pipeline"][0] == pytest.approx((16 + num_ranks - 1) * 0.1, rel=0.05)


PROGRAMS = {
    "bench": (*COMMAND, "--output", "OUT/page.md"),
    "calibrate": ("-m", "torchrec_2dsp", "calibrate", "--output", "OUT/hardware.toml"),
    "train": (
        *("-m", "torchrec_2dsp", "train", "--config", "demo", "--set", "output.folder=OUT/runs"),
        *("--set", "loop.steps=3", "--set", "loop.eval_steps=1", "--output", "OUT/record.json"),
    ),
}


@pytest.mark.alone
@pytest.mark.dealt_suite(seconds=45)
@pytest.mark.parametrize("program", PROGRAMS)
def test_programs_run_in_slower_time(tmp_path: Path, program: str) -> None:
    command = [part.replace("OUT", str(tmp_path)) for part in PROGRAMS[program]]
    with EmulatedCluster(2, 1, "1gbit", processor_per_rank=True) as cluster:
        cluster.run(command, timeout_s=400)

    if program == "bench":
        result = BenchResult.load(tmp_path / "page.json")
        assert "a processor for every rank" in result.setting.cluster
        for contestant in result.measured():
            # Traced steps aren't the blocks' steps.
            step_s = statistics.median(block.step_s for block in contestant.blocks)
            assert 0.5 < sum(phase.seconds for phase in contestant.phases) / step_s < 2
        # Without communication, a step takes its rank's compute time, in a forked process as well.
        ceiling = next(each for each in result.measured() if each.kind == "ceiling")
        assert ceiling.compute is not None
        assert min(block.step_s for block in ceiling.blocks) < 1.6 * ceiling.compute.mean_s
    elif program == "calibrate":
        # Gloo's own all-to-all may send and receive in turns.
        cost = Calibration.load(tmp_path / "hardware.toml").all_to_all(full_duplex=True)
        assert cost.link_s_per_byte == pytest.approx(8e-9, rel=0.15)
    else:
        assert len(TrainRecord.load(tmp_path / "record.json").runs) == 3
