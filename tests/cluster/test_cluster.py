"""Real clusters: links have their stated rates, failures are readable, nothing is left behind."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest

from torchrec_2dsp.programs.cluster import emulated_cluster
from torchrec_2dsp.programs.cluster.emulated_cluster import EmulatedCluster
from torchrec_2dsp.programs.cluster.kernel import (
    ClusterConfigError,
    ClusterName,
    CommandFailed,
    probe,
    run_tool,
)
from torchrec_2dsp.programs.cluster.network import namespaces_of, process_ids

pytestmark = [pytest.mark.usefixtures("needs_cluster"), pytest.mark.dealt_file]

PROGRAM = ("-m", "tests.cluster.programs")
START_TIMEOUT_S = 60
END_TIMEOUT_S = 10


def processes_with(text: str) -> list[int]:
    """Return the machine's processes whose command line contains the text."""
    results = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if text.encode() in (folder / "cmdline").read_bytes():
                results.append(int(folder.name))
    return results


def names_of(pid: int) -> set[ClusterName]:
    """Return a process's clusters, from the existing namespaces."""
    names = {ClusterName.of(entry) for entry in os.listdir("/var/run/netns")}
    return {name for name in names if name is not None and name.pid == pid}


def wait_until_gone(text: str) -> list[int]:
    deadline = time.monotonic() + END_TIMEOUT_S
    while (left := processes_with(text)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


@pytest.mark.alone
def test_links_are_as_fast_as_they_say_and_hosts_keep_to_themselves(tmp_path: Path) -> None:
    num_bytes, bytes_per_s = 4_000_000, 200e6 / 8

    def measure(cluster: EmulatedCluster, file: Path) -> tuple[float, dict, dict]:
        cluster.run([*PROGRAM, "exchange", str(file), str(num_bytes)])
        across, inside = json.loads(file.read_text()).values()
        # Both ranks on a host share its link.
        return 2 * num_bytes / across["seconds"] / bytes_per_s, across, inside

    with EmulatedCluster(hosts=2, ranks_per_host=2, link="200mbit") as cluster:
        share, across, inside = measure(cluster, tmp_path / "first.json")
        if not 0.85 < share < 1.0:  # The machine may have been busy.
            share, across, inside = measure(cluster, tmp_path / "second.json")
    assert 0.85 < share < 1.0
    # Headers count.
    assert 2 * num_bytes < across["sent"] < 2.2 * num_bytes
    assert across["inside"] < 0.1 * num_bytes
    assert 2 * num_bytes < inside["inside"] < 2.2 * num_bytes
    assert inside["sent"] < 0.1 * num_bytes
    assert inside["seconds"] < 0.5 * across["seconds"]


def test_both_ends_of_a_cable_limit() -> None:
    with EmulatedCluster(hosts=2, ranks_per_host=1, link="200mbit") as cluster:
        name = cluster._network.name
        ends = [(name.host(1), "eth0"), (name.switch, "port0"), (name.switch, "port1")]
        for namespace, device in ends:
            limit = run_tool("tc", "-n", namespace, "qdisc", "show", "dev", device)
            assert limit.startswith("qdisc tbf")
            assert "rate 200Mbit" in limit
        if probe().can_choose_congestion_control:
            assert "congctl cubic" in run_tool("ip", "-n", name.host(1), "route", "show")


def test_ranks_know_their_hosts_and_two_clusters_live_side_by_side(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        emulated_cluster, "_POLL_S", 4.0
    )  # So that there is output after the last look.
    folders = [tmp_path / "one", tmp_path / "other"]
    with (
        EmulatedCluster(hosts=1, ranks_per_host=2, link="none") as single,
        EmulatedCluster(hosts=2, ranks_per_host=1) as other,
    ):
        threads = []
        for cluster, folder in zip((single, other), folders, strict=True):
            folder.mkdir()
            command = [*PROGRAM, "report", str(folder)]
            threads.append(threading.Thread(target=cluster.run, args=(command,)))
            threads[-1].start()
        for thread in threads:
            thread.join()
        single.close()
        assert single.hosts == 1
        assert other.interface_bytes(1).received > 0
    facts = {
        (folder.name, rank): json.loads((folder / f"rank{rank}.json").read_text())
        for folder in folders
        for rank in range(2)
    }
    hosts = {key: (fact["hostname"], fact["address"]) for key, fact in facts.items()}
    assert hosts == {
        ("one", 0): ("host0", "10.77.0.1"),
        ("one", 1): ("host0", "10.77.0.1"),
        ("other", 0): ("host0", "10.77.0.1"),
        ("other", 1): ("host1", "10.77.0.2"),
    }
    assert facts["other", 1] == {
        **{"hostname": "host1", "address": "10.77.0.2", "name_of_peer": "host1"},
        **{"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0"},
        **{"GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"},
    }
    assert capsys.readouterr().out == "rank 0 was here: ü\n" * 2
    assert names_of(os.getpid()) == set()


def test_a_crash_is_explained_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(emulated_cluster, "GRACE_S", 1)
    with (
        pytest.raises(CommandFailed, match=r"failed after \d+ s: rank 1 \(exit code 1\)") as caught,
        EmulatedCluster(hosts=2, ranks_per_host=1) as cluster,
    ):
        cluster.run([*PROGRAM, "crash", "1", str(tmp_path)])
    error = caught.value
    assert error.exit_codes == (None, 1)
    assert "ValueError: rank 1 has a reason" in error.tails[1]
    assert "hello from 0" in error.tails[0]
    assert "in wait_for_ever" in error.tails[0]
    assert all(tail in str(error) for tail in error.tails)
    assert wait_until_gone(str(tmp_path)) == []
    assert names_of(os.getpid()) == set()


def test_the_deadline_shows_where_ranks_hang(tmp_path: Path) -> None:
    with EmulatedCluster(hosts=2, ranks_per_host=1) as cluster:
        for timeout_s in (5, 20, 100):
            with pytest.raises(CommandFailed, match=f"missed the deadline of {timeout_s} s") as e:
                cluster.run([*PROGRAM, "hang", str(tmp_path)], timeout_s=timeout_s)
            shown = all("in wait_for_ever" in tail for tail in e.value.tails)
            if shown:  # On a busy machine they may not have got there in 5 s.
                break
        assert wait_until_gone(str(tmp_path)) == []
        assert shown
        assert e.value.exit_codes == (None, None)


def test_what_ranks_cannot_do_is_explained_by_torchrun() -> None:
    with EmulatedCluster(hosts=1, ranks_per_host=1) as cluster:
        network = cluster._network
        network.hosts_file.unlink()
        with pytest.raises(CommandFailed, match=r"failed after \d+ s: host 0 \(exit code") as e:
            cluster.run(["script.py"])
    assert "-- torchrun\nmount: " in e.value.tails[0]


@pytest.mark.parametrize(
    ("number", "exit_code"),
    [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -signal.SIGKILL)],
    ids=["SIGINT", "SIGTERM", "SIGKILL"],
)
def test_an_owner_that_is_ended_leaves_nothing(
    number: signal.Signals, exit_code: int, tmp_path: Path
) -> None:
    command = [*PROGRAM, "hang", str(tmp_path)]
    options = ["--hosts", "2", "--ranks-per-host", "1"]
    # A shell makes background processes ignore Ctrl-C, and their children inherit that.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    owner = subprocess.Popen(
        [sys.executable, "-m", "torchrec_2dsp", "cluster", *options, "--", *command],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        cwd=Path(__file__).parents[2],
    )
    signal.signal(signal.SIGINT, before)
    deadline = time.monotonic() + START_TIMEOUT_S
    while len(list(tmp_path.iterdir())) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    (name,) = names_of(owner.pid)
    folder = Path(tempfile.gettempdir()) / str(name)
    assert len(namespaces_of(name)) == 3
    owner.send_signal(number)
    _, errors = owner.communicate(timeout=START_TIMEOUT_S)
    assert owner.returncode == exit_code, errors.decode()
    assert wait_until_gone(str(tmp_path)) == []
    if number == signal.SIGKILL:
        assert len(namespaces_of(name)) == 3
        with EmulatedCluster(hosts=1, ranks_per_host=1):
            pass  # Making one removes orphans.
    assert namespaces_of(name) == []
    assert not folder.exists()


def test_the_command_line_returns_what_the_command_does() -> None:
    def exit_code(*arguments: str) -> tuple[int, str]:
        result = subprocess.run(
            [sys.executable, "-m", "torchrec_2dsp", "cluster", *arguments],
            capture_output=True,
            text=True,
            cwd=Path(__file__).parents[2],
        )
        return result.returncode, result.stderr

    single = ("--hosts", "1", "--ranks-per-host", "1", "--")
    code, errors = exit_code(*single, *PROGRAM, "leave", "0")
    assert code == 0
    assert (
        "1 x 1 ranks (hosts x ranks per host), emulated on one machine; per host 1 Gbit" in errors
    )
    code, errors = exit_code(*single, *PROGRAM, "leave", "3")
    assert code == 1  # torchrun's
    assert "rank 0 (exit code 3)" in errors
    assert exit_code() == (2, "error: nothing to do; give a command after `--`, or --check\n")
    code, errors = exit_code("--link", "fast", "--check")
    assert code == 2
    assert "error: --link='fast' is not a rate" in errors


def test_an_error_inside_removes_the_network() -> None:
    cluster = EmulatedCluster(3, 1, "none")
    with pytest.raises(ZeroDivisionError) as caught, cluster:
        raise ZeroDivisionError(names_of(os.getpid()))
    assert len(caught.value.args[0]) == 1
    assert names_of(os.getpid()) == set()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_closing_ends_whatever_runs_on_a_host() -> None:
    with EmulatedCluster(1, 1) as cluster:
        (host,) = cluster._network.hosts
        stray = subprocess.Popen(["ip", "netns", "exec", host, "sleep", "600"])
        while process_ids(host) == []:
            time.sleep(0.01)
    assert stray.wait(timeout=1) == -signal.SIGKILL


def test_a_network_that_cannot_be_made_is_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = EmulatedCluster(2, 1)
    monkeypatch.setattr(type(cluster.link), "limit_commands", lambda *_, **__: ["nonsense"])
    with pytest.raises(RuntimeError, match="nonsense"), cluster:
        pass
    assert names_of(os.getpid()) == set()


def test_a_delay_is_refused_where_the_kernel_cannot() -> None:
    if probe().can_delay:
        with EmulatedCluster(2, 1, delay_ms=5.0) as cluster:
            assert "5 ms of delay" in cluster.describe()
        return
    assert "no delay (this kernel has no netem)" in EmulatedCluster(2, 1).describe()
    with pytest.raises(ClusterConfigError, match="needs the netem queue"):
        EmulatedCluster(2, 1, delay_ms=5.0).__enter__()
    assert names_of(os.getpid()) == set()
