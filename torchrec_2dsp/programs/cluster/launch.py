"""Run one command on all ranks: torchrun in every host's namespace, watched to its end."""

import codecs
import contextlib
import os
import re
import resource
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from torchrec_2dsp.programs.cluster.errors import ClusterConfigError, CommandFailed
from torchrec_2dsp.programs.cluster.kernel import on_host
from torchrec_2dsp.programs.cluster.network import Network, address, hostname

GRACE_S = 15
"""How long other hosts may go on after one failed, so that their errors are seen too."""

_REPOSITORY = Path(__file__).parents[2]
_POLL_S = 0.1
_LAST_WORDS_S = 5
_TAIL_LINES = 60
# torchrun's closing summary
_FAILURE = re.compile(r"rank +: (\d+) \(local_rank: \d+\)\s+exitcode +: (-?\d+)")


@dataclass(frozen=True)
class LaunchResult:
    """A command that succeeded on every host."""

    exit_codes: tuple[int, ...]
    """The exit code of each host: zeros."""

    tails: tuple[str, ...]
    """The end of each host's output, rank by rank."""

    wall_s: float
    """Seconds from the start of the processes to the end of the last."""


def check_command(command: Sequence[str]) -> None:
    """Raise if torchrun can't run it."""
    if not command:
        raise ClusterConfigError("the command is empty; give a script, or -m and a module")
    if command[0].startswith("-") and (command[0] != "-m" or len(command) < 2):
        raise ClusterConfigError(
            f"the command begins with {command[0]!r}; begin with a script, or with -m and a module"
        )


def run(
    network: Network,
    ranks_per_host: int,
    command: Sequence[str],
    environment: dict[str, str],
    folder: Path,
    timeout_s: float,
) -> LaunchResult:
    """Run ``command`` on every rank of the network; raise `CommandFailed` unless all succeed."""
    start = time.monotonic()
    hosts: list[_Host] = []
    follower = _Follower(folder / "host0")
    try:
        for number in range(len(network.hosts)):
            host = _Host(network, number, ranks_per_host, folder / f"host{number}")
            hosts.append(host)
            host.start(command, environment)
        late = _wait(hosts, start + timeout_s, follower)
        if late:
            _ask_for_stacks(hosts)
    finally:
        for host in hosts:
            host.stop()
        follower.catch_up()
    wall_s = time.monotonic() - start
    exit_codes = tuple(host.exit_code for host in hosts)
    tails = tuple(host.tail() for host in hosts)
    if any(exit_codes):
        failed = ", ".join(
            failure for host in hosts if host.exit_code for failure in host.failures()
        )
        what = f"failed after {wall_s:.0f} s: {failed}"
    elif late:
        what = f"missed the deadline of {timeout_s:g} s"
    else:
        return LaunchResult(tuple(code or 0 for code in exit_codes), tails, wall_s)
    raise CommandFailed(f"`{shlex.join(command)}` {what}", exit_codes, tails)


class _Host:
    """The processes of one host."""

    def __init__(self, network: Network, number: int, ranks_per_host: int, folder: Path) -> None:
        self.exit_code: int | None = None
        """None while it runs, and if it had to be stopped."""
        self._network = network
        self._number = number
        self._ranks_per_host = ranks_per_host
        self._folder = folder
        self._torchrun_log = folder / "torchrun.log"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, command: Sequence[str], environment: dict[str, str]) -> None:
        self._folder.mkdir(parents=True)
        torchrun = [
            *(sys.executable, "-m", "torch.distributed.run"),
            *("--nnodes", str(len(self._network.hosts)), "--node-rank", str(self._number)),
            *("--nproc-per-node", str(self._ranks_per_host)),
            *("--master-addr", hostname(0), "--master-port", "29500"),
            *("--local-addr", address(self._number)),
            # One file per rank and stream: told apart in errors, and rank 0's to be followed.
            *("--redirects", "3", "--log-dir", str(self._folder)),
        ]
        namespace = self._network.hosts[self._number]
        place = on_host(namespace, hostname(self._number), str(self._network.hosts_file))
        with self._torchrun_log.open("wb") as log:
            self._process = subprocess.Popen(
                [*place, *torchrun, *command],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is for the caller, who then stops the hosts.
            )

    def poll(self) -> int | None:
        if self._process is not None and self.exit_code is None:
            self.exit_code = self._process.poll()
        return self.exit_code

    def abort_ranks(self) -> None:
        """Let every rank print its stacks and die."""
        if self.poll() is not None:
            return
        for pid in self._network.process_ids(self._number):
            with contextlib.suppress(ProcessLookupError):
                if b"\0LOCAL_RANK=" in Path(f"/proc/{pid}/environ").read_bytes():
                    resource.prlimit(pid, resource.RLIMIT_CORE, (0, 0))
                    os.kill(pid, signal.SIGABRT)

    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def stop(self) -> None:
        """The kernel ends all processes of the host with the first."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def failures(self) -> list[str]:
        """The ranks that torchrun says have failed, or else the host if it did."""
        if self.exit_code == 0:
            return []
        log = self._torchrun_log.read_text(errors="replace")
        ranks = [f"rank {rank} (exit code {code})" for rank, code in _FAILURE.findall(log)]
        return ranks or [f"host {self._number} (exit code {self.exit_code})"]

    def tail(self) -> str:
        """The end of what each rank printed; of what torchrun did where only that explains it."""
        first = self._number * self._ranks_per_host
        files: list[tuple[str, Path]] = []
        for local_rank in range(self._ranks_per_host):
            for stream in ("stdout", "stderr"):
                for path in _rank_files(self._folder, local_rank, stream):
                    files.append((f"rank {first + local_rank}, {stream}", path))
        if not files or any(failure.startswith("host") for failure in self.failures()):
            files.append(("torchrun", self._torchrun_log))
        texts = [(title, _last_lines(path)) for title, path in files]
        return "\n".join(f"-- {title}\n{text}" for title, text in texts if text)


class _Follower:
    """Prints what rank 0 prints, as it comes."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._positions = {"stdout": 0, "stderr": 0}
        # A character may be half written when it is read.
        utf8 = codecs.getincrementaldecoder("utf-8")
        self._decoders = {stream: utf8("replace") for stream in self._positions}

    def catch_up(self) -> None:
        targets: dict[str, TextIO] = {"stdout": sys.stdout, "stderr": sys.stderr}
        for stream, target in targets.items():
            for path in _rank_files(self._folder, 0, stream):
                with path.open("rb") as file:
                    file.seek(self._positions[stream])
                    new = file.read()
                if new:
                    self._positions[stream] += len(new)
                    target.write(self._decoders[stream].decode(new))
                    target.flush()


def rank_environment(description: str, launcher: str) -> dict[str, str]:
    """The caller's environment, what ranks need, and what reports say of the cluster."""
    inherited = os.environ.get("PYTHONPATH")
    return os.environ | {
        "GLOO_SOCKET_IFNAME": "eth0",
        "OMP_NUM_THREADS": "1",
        "PYTHONFAULTHANDLER": "1",
        "PYTHONPATH": os.pathsep.join([str(_REPOSITORY), *([inherited] if inherited else [])]),
        "EMULATED_CLUSTER": description,
        "EMULATED_CLUSTER_LAUNCHER": launcher,
    }


def _wait(hosts: list[_Host], deadline: float, follower: _Follower) -> bool:
    """Until all hosts ended; whether it became too late for one."""
    has_failed = False
    while None in (exit_codes := [host.poll() for host in hosts]):
        if any(exit_codes) and not has_failed:
            has_failed = True
            deadline = min(deadline, time.monotonic() + GRACE_S)
        if time.monotonic() > deadline:
            return True
        follower.catch_up()
        time.sleep(_POLL_S)
    return False


def _ask_for_stacks(hosts: list[_Host]) -> None:
    for host in hosts:
        host.abort_ranks()
    deadline = time.monotonic() + _LAST_WORDS_S
    while any(host.is_running() for host in hosts) and time.monotonic() < deadline:
        time.sleep(_POLL_S)


def _rank_files(folder: Path, local_rank: int, stream: str) -> list[Path]:
    return list(folder.glob(f"*/attempt_0/{local_rank}/{stream}.log"))


def _last_lines(path: Path) -> str:
    lines = path.read_text(errors="replace").splitlines()
    return "\n".join(lines[-_TAIL_LINES:])
