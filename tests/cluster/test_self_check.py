"""The self check passes if all measurements fit, and else reports which don't and why."""

import dataclasses
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest

from torchrec_2dsp.programs.cluster.emulated_cluster import EmulatedCluster
from torchrec_2dsp.programs.cluster.kernel import ClusterConfigError, SelfCheckFailed
from torchrec_2dsp.programs.cluster.network import Link
from torchrec_2dsp.programs.cluster.self_check import SelfCheck, check_links

GOOD = SelfCheck(
    host_bytes_per_s={"all-to-all": 118e6, "all-reduce": 119e6},
    rank_bytes_per_s={"all-to-all": 1e9, "all-reduce": None},
    expected_bytes={"all-to-all": 1_000_000, "all-reduce": 2_000_000},
    sent_bytes={"all-to-all": 1_050_000, "all-reduce": 2_000_000},
)
SLOW = dataclasses.replace(GOOD, host_bytes_per_s={"all-to-all": 60e6, "all-reduce": 119e6})


class FakeCluster:
    """A cluster that reports given measurements, one check after another."""

    checks: list[SelfCheck]

    processor_per_rank = False

    def __init__(self, hosts: int, ranks_per_host: int, link: str, **_: bool) -> None:
        self.hosts = hosts
        self.ranks_per_host = ranks_per_host
        self.link = Link.parse(link)
        self.folder = Path()

    def run(self, command: Sequence[str], *, timeout_s: float) -> None:
        assert timeout_s > 60
        check = self.checks.pop(0)
        Path(command[-1]).write_text(json.dumps(dataclasses.asdict(check)))

    def __enter__(self) -> "FakeCluster":
        return self

    def __exit__(self, *_: object) -> None:
        pass


def check_fake(link: str, *checks: SelfCheck, hosts: int = 2) -> SelfCheck:
    FakeCluster.checks = list(checks)
    result = check_links(cast(EmulatedCluster, FakeCluster(hosts, 2, link)))
    assert FakeCluster.checks == []
    return result


@pytest.fixture(autouse=True)
def _inside_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"host_bytes_per_s": {"all-to-all": 62.5e6}},
            "all-to-all between hosts runs at 500 Mbit/s, -50% off the link's 1 Gbit/s; 15% are",
        ),
        (
            {"host_bytes_per_s": {"all-reduce": 105e6}},
            "all-reduce between hosts runs at 840 Mbit/s, -16%",
        ),
        (
            {"host_bytes_per_s": {"all-reduce": 145e6}},
            "all-reduce between hosts runs at 1.16 Gbit/s, +16%",
        ),
        (
            {"sent_bytes": {"all-to-all": 900_000, "all-reduce": 2_000_000}},
            "an all-to-all should send 1.00 MB per host, and the interface counted 0.90 MB",
        ),
        (
            {"sent_bytes": {"all-to-all": 1_000_000, "all-reduce": 2_400_000}},
            "an all-reduce should send 2.00 MB per host, and the interface counted 2.40 MB",
        ),
    ],
)
def test_problems_name_the_numbers(change: dict[str, Any], message: str) -> None:
    (problem,) = dataclasses.replace(GOOD, **change).problems(Link.parse("1gbit"))
    assert message in problem


def test_what_fits_has_no_problems() -> None:
    assert GOOD.problems(Link.parse("1gbit")) == []
    assert GOOD.problems(Link.parse("none")) == []
    assert len(GOOD.problems(Link.parse("2gbit"))) == 2


def test_the_table() -> None:
    header, first, second = str(GOOD).splitlines()
    assert header.endswith("must send     counted")
    cells = [re.split(r"\s{2,}", line) for line in (first, second)]
    assert cells == [
        ["all-to-all", "944 Mbit/s", "8 Gbit/s", "1.00 MB", "1.05 MB"],
        ["all-reduce", "952 Mbit/s", "-", "2.00 MB", "2.00 MB"],
    ]


def test_one_bad_measurement_is_forgiven() -> None:
    assert check_fake("1gbit", GOOD) == GOOD
    assert check_fake("1gbit", SLOW, GOOD) == GOOD


def test_a_slow_link_is_not_blamed_on_a_machine_that_can_do_more() -> None:
    free = dataclasses.replace(GOOD, host_bytes_per_s={"all-to-all": 2e9, "all-reduce": 2e9})
    message = r"slower than 1 Gbit/s on this machine, .* at 16 Gbit/s; .* runs at 480 Mbit/s, -52%"
    with pytest.raises(SelfCheckFailed, match=message):
        check_fake("1gbit", SLOW, SLOW, free)


def test_a_link_that_is_too_fast_for_its_rate_is_not_blamed_on_the_machine() -> None:
    with pytest.raises(SelfCheckFailed, match=r"the links aren't what they say; .* \+89% off"):
        check_fake("500mbit", GOOD, GOOD)


def test_a_link_that_is_too_fast_for_the_machine_is_called_so() -> None:
    message = (
        r"100 Gbit/s is faster than this machine, which without a limit runs all-to-all at "
        r"944 Mbit/s and all-reduce at 952 Mbit/s; use a slower link, or 'none'; all-to-all betw"
    )
    with pytest.raises(SelfCheckFailed, match=message):
        check_fake("100gbit", GOOD, GOOD, GOOD)


def test_one_host_has_no_links() -> None:
    with pytest.raises(ClusterConfigError, match="hosts=1 has no links to check; use 2 or more"):
        check_fake("1gbit", hosts=1)


@pytest.mark.alone
@pytest.mark.dealt_suite(seconds=20)
@pytest.mark.usefixtures("needs_cluster")
def test_a_real_link(capsys: pytest.CaptureFixture[str]) -> None:
    with EmulatedCluster(2, 1, "200mbit") as cluster:
        check = check_links(cluster)
    assert check.rank_bytes_per_s["all-to-all"] is None
    assert str(check) in capsys.readouterr().out
