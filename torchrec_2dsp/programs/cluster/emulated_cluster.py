"""Run commands on several emulated hosts, with several ranks each, on one Linux machine."""

import atexit
import codecs
import contextlib
import itertools
import os
import re
import resource
import shlex
import signal
import site
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import NoReturn, TextIO

from torchrec_2dsp.programs.cluster.kernel import (
    CONGESTION_CONTROL,
    ClusterConfigError,
    ClusterError,
    CommandFailed,
    on_host,
    probe,
    run_tool,
)
from torchrec_2dsp.programs.cluster.network import (
    InterfaceBytes,
    Link,
    Network,
    address,
    hostname,
    process_ids,
    read_interface_bytes,
    remove,
    remove_orphans,
)

GRACE_S = 15
"""The time that other hosts may continue after a failure, so that their errors show too."""

_SOURCES = str(Path(__file__).parents[3])
_POLL_S = 0.1
_LAST_WORDS_S = 5
_TAIL_LINES = 60
# torchrun's closing summary
_FAILURE = re.compile(r"rank +: (\d+) \(local_rank: \d+\)\s+exitcode +: (-?\d+)")


@dataclass(frozen=True)
class LaunchResult:
    """The result of a command that succeeded on every host."""

    tails: tuple[str, ...]
    """The end of each host's output, rank by rank."""

    wall_s: float
    """Seconds from process start until the last process ends."""


class _Host:
    """One host's processes."""

    def __init__(self, network: Network, number: int, ranks_per_host: int, folder: Path) -> None:
        self.exit_code: int | None = None
        """The exit code; `None` while running, and if the host had to be stopped."""
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
            # One file per rank and stream, to tell them apart in errors and to follow rank 0's.
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
        for pid in process_ids(self._network.hosts[self._number]):
            with contextlib.suppress(ProcessLookupError):
                if b"\0LOCAL_RANK=" in Path(f"/proc/{pid}/environ").read_bytes():
                    resource.prlimit(pid, resource.RLIMIT_CORE, (0, 0))
                    os.kill(pid, signal.SIGABRT)

    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def stop(self) -> None:
        """Kill the first process; the kernel then kills all others on the host."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def failures(self) -> list[str]:
        """Return the ranks that torchrun reports as failed, or else the host if it failed."""
        if self.exit_code == 0:
            return []
        log = self._torchrun_log.read_text(errors="replace")
        ranks = [f"rank {rank} (exit code {code})" for rank, code in _FAILURE.findall(log)]
        return ranks or [f"host {self._number} (exit code {self.exit_code})"]

    def tail(self) -> str:
        """Return the end of each rank's output, or torchrun's if only that explains the failure."""
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
    """Prints rank 0's output as it comes."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._positions = {"stdout": 0, "stderr": 0}
        # A character may be half written at the time of reading.
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
    """Return the caller's environment plus ranks' settings and the cluster's description."""
    inherited = os.environ.get("PYTHONPATH", "")
    # A checkout may not be installed.
    own = "" if _SOURCES in site.getsitepackages() else _SOURCES
    return os.environ | {
        "GLOO_SOCKET_IFNAME": "eth0",
        "OMP_NUM_THREADS": "1",
        "PYTHONFAULTHANDLER": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, (own, inherited))),
        "EMULATED_CLUSTER": description,
        "EMULATED_CLUSTER_LAUNCHER": launcher,
    }


def _wait(hosts: list[_Host], deadline: float, follower: _Follower) -> bool:
    """Wait until all hosts end; return True if one missed the deadline."""
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


class Terminated(KeyboardInterrupt):
    """Raised on SIGTERM or SIGHUP, to clean up as after Ctrl-C."""

    def __init__(self, number: int) -> None:
        self.number = number
        """The signal's number."""
        super().__init__(signal.Signals(number).name)


class EmulatedCluster:
    """A cluster with ``hosts`` x ``ranks_per_host`` ranks and one rate-limited link per host.

    Nothing is left behind, however the caller ends: an exception, Ctrl-C or SIGTERM removes the
    cluster at once. SIGKILL kills its processes at once, and the next cluster on this machine
    removes its namespaces.
    """

    def __init__(
        self,
        hosts: int,
        ranks_per_host: int,
        link: str = "1gbit",
        *,
        delay_ms: float = 0.0,
        processor_per_rank: bool = False,
    ) -> None:
        """Set up the network.

        Args:
            hosts: the number of hosts.
            ranks_per_host: the number of ranks on each of them.
            link: each host's rate in each direction: "1gbit", "none".
            delay_ms: the delay one way.
            processor_per_rank: whether ranks run as if each had its own processor, in slower
                time; see `torchrec_2dsp.programs.dilation`.
        """
        for name, value in (("hosts", hosts), ("ranks_per_host", ranks_per_host)):
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ClusterConfigError(f"{name}={value!r} is not a positive integer")
        self.hosts = hosts
        """The number of hosts."""
        self.ranks_per_host = ranks_per_host
        """The number of ranks per host."""
        self.link = Link.parse(link, delay_ms)
        """The link between hosts."""
        self.dilation = 1.0
        """The factor by which time passes slower for ranks."""
        if processor_per_rank:
            # Loads torch, which takes seconds: not before the arguments are checked.
            from torchrec_2dsp.programs.dilation import dilation_for

            self.dilation = dilation_for(hosts * ranks_per_host)
            self.link = replace(self.link, dilation=self.dilation)
        self.processor_per_rank = processor_per_rank
        """True if ranks run as if each had its own processor."""
        self._network = Network(hosts, self.link)
        self._run_numbers = itertools.count()

    def run(self, command: Sequence[str], *, timeout_s: float = 600) -> LaunchResult:
        """Run a Python command on every rank, through torchrun, one command at a time.

        Rank 0's output is printed as it comes; the result has the end of every rank's output.

        Args:
            command: a script, or "-m" and a module; then its arguments.
            timeout_s: the time after which to give up and show each rank's stack.
        """
        if not command:
            raise ClusterConfigError("the command is empty; give a script, or -m and a module")
        if command[0].startswith("-") and (command[0] != "-m" or len(command) < 2):
            raise ClusterConfigError(
                f"the command begins with {command[0]!r}; begin with a script, or with -m and a "
                "module"
            )
        self._check_is_up()
        environment = rank_environment(self.describe(), self.launcher())
        if self.dilation > 1.0:
            from torchrec_2dsp.programs import dilation

            command = ["-m", dilation.__name__, *command]
            environment[dilation.VARIABLE] = str(self.dilation)
        return self._launch(command, environment, timeout_s)

    def _launch(
        self, command: Sequence[str], environment: dict[str, str], timeout_s: float
    ) -> LaunchResult:
        start = time.monotonic()
        folder = self.folder / f"run{next(self._run_numbers)}"
        hosts: list[_Host] = []
        follower = _Follower(folder / "host0")
        try:
            for number in range(self.hosts):
                host = _Host(self._network, number, self.ranks_per_host, folder / f"host{number}")
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
            failures = [failure for host in hosts if host.exit_code for failure in host.failures()]
            what = f"failed after {wall_s:.0f} s: {', '.join(failures)}"
        elif late:
            what = f"missed the deadline of {timeout_s:g} s"
        else:
            return LaunchResult(tails, wall_s)
        raise CommandFailed(f"`{shlex.join(command)}` {what}", exit_codes, tails)

    def interface_bytes(self, host: int) -> InterfaceBytes:
        """Return the bytes that a host has sent and received so far."""
        self._check_is_up()
        namespace = self._network.hosts[host]
        return read_interface_bytes(
            run_tool("ip", "netns", "exec", namespace, "cat", "/proc/net/dev")
        )

    @property
    def folder(self) -> Path:
        """A folder that all hosts see, with every rank's output. It is removed with the cluster."""
        return self._network.folder

    def describe(self) -> str:
        """Describe the cluster for reports. Ranks find the text in ``EMULATED_CLUSTER``."""
        kernel = probe()
        if self.link.delay_ms:
            delay = f"{self.link.delay_ms:g} ms of delay one way"
        else:
            delay = "no delay" if kernel.can_delay else "no delay (this kernel has no netem)"
        rate = "no limit" if self.link.bits_per_s is None else f"{self.link} each way"
        control = CONGESTION_CONTROL
        if not kernel.can_choose_congestion_control:
            control = "the kernel's default"
        slower = "; a processor for every rank" if self.processor_per_rank else ""
        if self.dilation > 1.0:
            slower += (
                f", in time that passes {self.dilation:g} times slower; what is measured there is "
                "divided by that"
            )
        return (
            f"{self.hosts} x {self.ranks_per_host} ranks (hosts x ranks per host), emulated on one "
            f"machine; per host {rate}, {delay}, congestion control {control}{slower}"
        )

    def launcher(self) -> str:
        """Return the command line for such a cluster, also in ``EMULATED_CLUSTER_LAUNCHER``."""
        delay = f" --delay-ms {self.link.delay_ms:g}" if self.link.delay_ms else ""
        slower = " --processor-per-rank" if self.processor_per_rank else ""
        return (
            f"torchrec-2dsp cluster --hosts {self.hosts} --ranks-per-host {self.ranks_per_host} "
            f"--link {self.link.rate}{delay}{slower} --"
        )

    def close(self) -> None:
        """Stop all processes and remove the network. A second call does nothing."""
        if self in _open_clusters and self._network.name.is_mine():
            remove(self._network.name)
            _open_clusters.discard(self)
            atexit.unregister(self.close)
            if not _open_clusters:
                _replace_handler(_terminate, signal.SIG_DFL)

    def __enter__(self) -> "EmulatedCluster":
        remove_orphans()
        _open_clusters.add(self)
        atexit.register(self.close)
        try:
            # Signals that would otherwise end Python without cleanup.
            _replace_handler(signal.SIG_DFL, _terminate)
            self._network.set_up()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_is_up(self) -> None:
        if self not in _open_clusters:
            raise ClusterError("the cluster isn't up; use it inside `with EmulatedCluster(...)`")


_open_clusters: set[EmulatedCluster] = set()
_SIGNALS = (signal.SIGTERM, signal.SIGHUP)
_Handler = Callable[[int, FrameType | None], NoReturn] | signal.Handlers


def _terminate(number: int, frame: FrameType | None) -> NoReturn:
    raise Terminated(number)


def _replace_handler(old: _Handler, new: _Handler) -> None:
    """Replace the signal handler ``old`` with ``new``, in the main thread only."""
    if threading.current_thread() is threading.main_thread():
        for number in _SIGNALS:
            if signal.getsignal(number) is old:
                signal.signal(number, new)
