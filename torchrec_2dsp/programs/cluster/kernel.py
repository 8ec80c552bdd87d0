"""Kernel capabilities and tools, cluster names, and errors."""

import itertools
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from functools import cache
from pathlib import Path


class ClusterError(RuntimeError):
    """An emulated cluster can't be created, or can't do what was requested."""


class ClusterConfigError(ClusterError, ValueError):
    """Invalid cluster arguments."""


class CommandFailed(ClusterError):
    """A host failed or missed the deadline. The message shows every host's output."""

    def __init__(
        self, summary: str, exit_codes: tuple[int | None, ...], tails: tuple[str, ...]
    ) -> None:
        self.exit_codes = exit_codes
        """Each host's exit code; `None` for a host that was stopped while it ran."""
        self.tails = tails
        """The end of each host's output."""
        states = ["stopped" if code is None else f"exit code {code}" for code in exit_codes]
        parts = [
            f"==== host {host} ({state})\n{tail.rstrip()}"
            for host, (state, tail) in enumerate(zip(states, tails, strict=True))
        ]
        super().__init__("\n".join([summary, *parts]))


class SelfCheckFailed(ClusterError):
    """The network is faster or slower than configured."""


_PATTERN = re.compile(r"emulated-(\d+)-(\d+)-(\d+)-(\d+)(-.+)?")
_numbers = itertools.count()


@dataclass(frozen=True)
class ClusterName:
    """A cluster's name, which identifies its owner process, and a number.

    Process ids are reused, and differ between containers: hence the start time and the process-id
    namespace.
    """

    pid_namespace: int
    """The namespace (an inode number) in which `pid` is valid."""

    pid: int
    """The process that owns the cluster."""

    start_ticks: int
    """The process's start time, in clock ticks since boot."""

    number: int
    """The cluster's number within the owner process."""

    @classmethod
    def new(cls) -> "ClusterName":
        """Return a new, unique name for this process."""
        pid = os.getpid()
        start_ticks = _start_ticks(pid)
        assert start_ticks is not None
        return cls(_pid_namespace(), pid, start_ticks, next(_numbers))

    @classmethod
    def of(cls, namespace: str) -> "ClusterName | None":
        """Parse a namespace's cluster name; return None if the namespace isn't a cluster's.

        Example:
            >>> from torchrec_2dsp.programs.cluster.kernel import ClusterName
            >>> ClusterName.of("emulated-4026531836-77-123456-0-host1").pid
            77
            >>> ClusterName.of("docker0") is None
            True
        """
        match = _PATTERN.fullmatch(namespace)
        return cls(*(int(part) for part in match.groups()[:4])) if match else None

    def is_orphan(self) -> bool:
        """Return True if the owner is known to have ended."""
        return self.pid_namespace == _pid_namespace() and self.start_ticks != _start_ticks(self.pid)

    def is_mine(self) -> bool:
        """Return True if this process, not a fork of it, is the owner."""
        return self.pid == os.getpid()

    def host(self, number: int) -> str:
        """Return a host's namespace."""
        return f"{self}-host{number}"

    @property
    def switch(self) -> str:
        """The namespace with the bridge between hosts."""
        return f"{self}-switch"

    def __str__(self) -> str:
        return f"emulated-{self.pid_namespace}-{self.pid}-{self.start_ticks}-{self.number}"


def _pid_namespace() -> int:
    return os.stat("/proc/self/ns/pid").st_ino


def _start_ticks(pid: int) -> int | None:
    """Return a process's start time; None if it doesn't exist or is a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The program's name, in parentheses, may itself contain spaces and parentheses.
    state, *fields = stat.rpartition(")")[2].split()
    return None if state in "ZX" else int(fields[18])


CONGESTION_CONTROL = "cubic"
"""The congestion control that shares a link fairly and fills shallow queues."""

_PACKAGES = {
    "ip": "iproute2",
    "tc": "iproute2",
    **dict.fromkeys(["mount", "setpriv", "unshare"], "util-linux"),
}
_TOOL_TIMEOUT_S = 60
_MOVE_IN = """
echo "$0" > /proc/sys/kernel/hostname
mount --bind "$1" /etc/hosts
shift
exec "$@"
"""


@dataclass(frozen=True)
class Kernel:
    """The kernel's detected capabilities."""

    refusal: str
    """The reason why clusters are impossible; empty if they are possible."""

    can_delay: bool = False
    """True if the netem queueing discipline exists."""

    can_choose_congestion_control: bool = False
    """True if connections can be made to use `CONGESTION_CONTROL`."""


def available() -> str:
    """Return the reason why clusters can't be created here; empty if they can."""
    return probe().refusal


@cache
def probe() -> Kernel:
    """Try each capability that a cluster needs."""
    if os.geteuid() != 0:
        return Kernel("network namespaces need root")
    for tool, package in _PACKAGES.items():
        if shutil.which(tool) is None:
            return Kernel(f"the program {tool} is missing (package {package})")
    namespace = f"{ClusterName.new()}-probe"
    try:
        run_tool("ip", "netns", "add", namespace)
        try:
            return _probe(namespace)
        finally:
            run_tool("ip", "netns", "del", namespace)
    except ClusterError as error:
        return Kernel(f"the kernel refuses: {error}")


def run_tool(*command: str, commands: list[str] | None = None) -> str:
    """Return a program's output; ``commands`` are the lines for its ``-batch -`` input."""
    result = subprocess.run(
        command,
        input=None if commands is None else "".join(f"{line}\n" for line in commands),
        stdin=subprocess.DEVNULL if commands is None else None,
        capture_output=True,
        text=True,
        timeout=_TOOL_TIMEOUT_S,
    )
    if result.returncode:
        lines = "; ".join(commands or [])
        raise ClusterError(f"`{' '.join(command)}` {lines}: {result.stderr.strip()}")
    return result.stdout


def on_host(namespace: str, hostname: str, hosts_file: str) -> list[str]:
    """Return the prefix that runs a command in a namespace as if on a separate host.

    The command has its own host name, ``/etc/hosts`` and process ids; it and all its descendants
    are killed when the calling thread ends, for any reason.
    """
    return [
        *("ip", "netns", "exec", namespace),
        *("setpriv", "--pdeathsig", "KILL"),
        *("unshare", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc"),
        *("sh", "-ec", _MOVE_IN, hostname, hosts_file),
    ]


def congestion_control_route(subnet: str, address: str) -> str:
    """Return the `ip` command that makes connections over eth0 use `CONGESTION_CONTROL`.

    A namespace-wide setting would do, but some kernels restrict it to few algorithms.
    """
    route = f"route replace {subnet} dev eth0 proto kernel scope link src {address}"
    return f"{route} congctl {CONGESTION_CONTROL}"


def _probe(namespace: str) -> Kernel:
    address = "192.0.2.1"
    needed = [
        "link set lo up",
        "link add br0 type bridge",
        "link add eth0 type veth peer name port0",
        "link set port0 master br0 up",
        f"addr add {address}/24 dev eth0",
        "link set eth0 up",
    ]
    run_tool("ip", "-n", namespace, "-batch", "-", commands=needed)
    limit = "qdisc add dev eth0 root tbf rate 1gbit burst 128kb limit 256kb"
    run_tool("tc", "-n", namespace, "-batch", "-", commands=[limit])
    run_tool(*on_host(namespace, "probe", "/etc/hosts"), "true")
    delay = ("qdisc", "add", "dev", "port0", "root", "netem", "delay", "1ms")
    route = congestion_control_route("192.0.2.0/24", address).split()
    return Kernel(
        refusal="",
        can_delay=_works("tc", "-n", namespace, *delay),
        can_choose_congestion_control=_works("ip", "-n", namespace, *route),
    )


def _works(*command: str) -> bool:
    try:
        run_tool(*command)
    except ClusterError:
        return False
    return True
