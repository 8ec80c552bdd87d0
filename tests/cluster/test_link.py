"""Rates, queues, names and addresses: tests that need neither root nor a namespace."""

import dataclasses
import os
import subprocess
import sys

import pytest

from torchrec_2dsp.programs.cluster.emulated_cluster import EmulatedCluster
from torchrec_2dsp.programs.cluster.kernel import ClusterConfigError, ClusterError, ClusterName
from torchrec_2dsp.programs.cluster.network import (
    MAX_HOSTS,
    InterfaceBytes,
    Link,
    address,
    read_interface_bytes,
)
from torchrec_2dsp.programs.dilation import dilation_for

NET_DEV = """Inter-|   Receive                                                |  Transmit
 face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs drop
    lo:     700       5    0    0    0     0          0         0      700       5    0    0
  eth0:    1234      10    0    0    0     0          0         0     5678      20    0    0
"""


@pytest.mark.parametrize(
    ("rate", "bits_per_s"),
    [
        ("500kbit", 500_000),
        ("200mbit", 200_000_000),
        ("1gbit", 10**9),
        ("2.5gbit", 2_500_000_000),
        ("none", None),
        ("unlimited", None),
    ],
)
def test_rates(rate: str, bits_per_s: int | None) -> None:
    assert Link.parse(rate).bits_per_s == bits_per_s


@pytest.mark.parametrize("rate", ["", "fast", "1", "1gb", "1Gbit", "-1gbit", "0mbit", "1 gbit"])
def test_bad_rates_are_named(rate: str) -> None:
    with pytest.raises(ClusterConfigError, match=r"is not a rate; use for instance '200mbit'") as e:
        Link.parse(rate)
    assert f"link={rate!r}" in str(e.value)


@pytest.mark.parametrize("delay_ms", [-1.0, float("nan"), float("inf")])
def test_bad_delays_are_named(delay_ms: float) -> None:
    with pytest.raises(ClusterConfigError, match=f"delay_ms={delay_ms} is not a time"):
        Link.parse("1gbit", delay_ms)


@pytest.mark.parametrize(
    ("rate", "queue_bytes", "burst_bytes"),
    [
        ("10mbit", 262_144, 131_072),
        ("1gbit", 1_250_000, 131_072),
        ("10gbit", 4_194_304, 1_250_000),
    ],
)
def test_queues_hold_ten_milliseconds(rate: str, queue_bytes: int, burst_bytes: int) -> None:
    link = Link.parse(rate)
    assert (link.queue_bytes, link.burst_bytes) == (queue_bytes, burst_bytes)


def test_links_are_slower_where_time_is() -> None:
    link = Link.parse("1gbit", delay_ms=2, dilation=4)
    delay, limit = link.limit_commands("d", delayed=True)
    assert "netem delay 8000us" in delay
    assert "rate 250000000bit" in limit
    assert (link.queue_bytes, link.rate) == (312_500, "1000mbit")
    assert link.name != Link.parse("1gbit", delay_ms=2).name
    assert dilation_for(10**6) == 1000 * dilation_for(1000)


def test_one_end_delays_and_both_limit() -> None:
    link = Link.parse("1gbit", delay_ms=0.5)
    limit = "tbf rate 1000000000bit burst 131072 limit 1250000"
    assert link.limit_commands("p", delayed=False) == [f"qdisc add dev p root handle 1: {limit}"]
    assert link.limit_commands("e", delayed=True) == [
        "qdisc add dev e root handle 1: netem delay 500us limit 100000",
        f"qdisc add dev e parent 1:1 handle 10: {limit}",
    ]
    assert Link.parse("none").limit_commands("e", delayed=True) == []


def test_links_in_words() -> None:
    assert Link.parse("2.5gbit").rate == "2500mbit"
    assert Link.parse("none").rate == "none"
    texts = [str(Link.parse(rate)) for rate in ("200mbit", "2.5gbit", "none")]
    assert texts == ["200 Mbit/s", "2.5 Gbit/s", "no limit"]


def test_names_are_unique_and_tell_their_owner() -> None:
    name, other = ClusterName.new(), ClusterName.new()
    assert name != other
    assert name.pid == os.getpid()
    for namespace in (str(name), name.host(3), name.switch):
        assert ClusterName.of(namespace) == name
    for foreign in ("tb_h0", "emulated", "emulated-1-2-3", "x" + name.host(0), "emulated-a-1-2-3"):
        assert ClusterName.of(foreign) is None


def test_orphans_are_told_from_the_living() -> None:
    own = ClusterName.new()
    assert own.is_mine()
    assert not own.is_orphan()
    reused = dataclasses.replace(own, start_ticks=own.start_ticks - 1)
    assert reused.is_orphan()
    elsewhere = dataclasses.replace(reused, pid_namespace=1)
    assert not elsewhere.is_orphan()
    assert not dataclasses.replace(own, pid=os.getppid()).is_mine()


def test_a_process_that_ended_owns_nothing() -> None:
    imports = "from torchrec_2dsp.programs.cluster.kernel import ClusterName"
    code = f"{imports}; print(ClusterName.new(), flush=True);"
    command = [sys.executable, "-c", code + "input()"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as owner:
        assert owner.stdin is not None
        assert owner.stdout is not None
        name = ClusterName.of(owner.stdout.readline().strip())
        assert name is not None
        assert not name.is_orphan()
        owner.stdin.close()
        os.waitid(os.P_PID, owner.pid, os.WEXITED | os.WNOWAIT)
        assert name.is_orphan()  # Not yet reaped.
    assert name.is_orphan()


def test_addresses() -> None:
    assert [address(host) for host in (0, 1, MAX_HOSTS - 1)] == [
        "10.77.0.1",
        "10.77.0.2",
        "10.77.0.254",
    ]


def test_counters_are_read() -> None:
    counted = read_interface_bytes(NET_DEV)
    assert counted == InterfaceBytes(sent=5678, received=1234, inside=700)
    assert counted.since(InterfaceBytes(5000, 1000, 100)) == InterfaceBytes(678, 234, 600)


@pytest.mark.parametrize(
    ("hosts", "ranks_per_host", "message"),
    [
        (0, 1, "hosts=0 is not a positive integer"),
        (1, -2, "ranks_per_host=-2 is not a positive integer"),
        (True, 1, "hosts=True is not a positive integer"),
        (255, 1, "hosts=255 are more than the 254 addresses of 10.77.0.0/24; use at most 254"),
    ],
)
def test_bad_sizes_are_named(hosts: int, ranks_per_host: int, message: str) -> None:
    with pytest.raises(ClusterConfigError, match=message):
        EmulatedCluster(hosts, ranks_per_host)


def test_bad_commands_are_named() -> None:
    cluster = EmulatedCluster(1, 1)
    with pytest.raises(ClusterConfigError, match="the command is empty"):
        cluster.run([])
    for command in (["-c", "pass"], ["-m"]):
        with pytest.raises(ClusterConfigError, match="begin with a script, or with -m and a mod"):
            cluster.run(command)
    with pytest.raises(ClusterError, match="isn't up; use it inside `with Emu"):
        cluster.run(["script.py"])
    with pytest.raises(ClusterError, match="isn't up"):
        cluster.interface_bytes(0)
