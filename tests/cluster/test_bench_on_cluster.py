"""The benchmark on a cluster: what its interfaces count, and what its reports say of it."""

from pathlib import Path

import pytest

from torchrec_2dsp.programs.bench.results import BenchResult, ContestantResult
from torchrec_2dsp.programs.cluster.emulated_cluster import EmulatedCluster

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


@pytest.mark.dealt_suite
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
