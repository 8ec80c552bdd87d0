"""The kernel's abilities and tools, a cluster's names, and its errors."""

import itertools
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from functools import cache
from pathlib import Path


class ClusterError(RuntimeError):
    """An emulated cluster that can't be made, or can't do what was asked of it."""


class ClusterConfigError(ClusterError, ValueError):
    """Arguments that no cluster can have."""


class CommandFailed(ClusterError):
    """A host ended with an error or missed the deadline. The message shows every host's output."""

    def __init__(
        self, summary: str, exit_codes: tuple[int | None, ...], tails: tuple[str, ...]
    ) -> None:
        self.exit_codes = exit_codes
        """The exit code of each host; None for a host that was stopped while it ran."""
        self.tails = tails
        """The end of each host's output."""
        states = ["stopped" if code is None else f"exit code {code}" for code in exit_codes]
        parts = [
            f"==== host {host} ({state})\n{tail.rstrip()}"
            for host, (state, tail) in enumerate(zip(states, tails, strict=True))
        ]
        super().__init__("\n".join([summary, *parts]))


class SelfCheckFailed(ClusterError):
    """The network isn't as fast, or not as slow, as it was set to be."""


_PATTERN = re.compile(r"emulated-(\d+)-(\d+)-(\d+)-(\d+)(-.+)?")
_numbers = itertools.count()


@dataclass(frozen=True)
class ClusterName:
    """The name of one cluster: its owner, beyond doubt, and a number.

    A process id alone may be given to another process later, and means nothing to a container
    with process ids of its own: hence the start time and the process-id namespace.
    """

    pid_namespace: int
    """The namespace (an inode number) in which `pid` is valid."""

    pid: int
    """The process that owns the cluster."""

    start_ticks: int
    """When that process started, in clock ticks since the machine did."""

    number: int
    """The number of the cluster among the owner's."""

    @classmethod
    def new(cls) -> "ClusterName":
        """Return a name for this process that nobody had before."""
        pid = os.getpid()
        start_ticks = _start_ticks(pid)
        assert start_ticks is not None
        return cls(_pid_namespace(), pid, start_ticks, next(_numbers))

    @classmethod
    def of(cls, namespace: str) -> "ClusterName | None":
        """Return the cluster that a namespace belongs to; None if the name isn't one of ours.

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
        """Whether the owner is known to have ended."""
        return self.pid_namespace == _pid_namespace() and self.start_ticks != _start_ticks(self.pid)

    def is_mine(self) -> bool:
        """Whether this process is the owner, not a fork of it."""
        return self.pid == os.getpid()

    def host(self, number: int) -> str:
        """Return the namespace of a host."""
        return f"{self}-host{number}"

    @property
    def switch(self) -> str:
        """The namespace of the bridge between the hosts."""
        return f"{self}-switch"

    def __str__(self) -> str:
        return f"emulated-{self.pid_namespace}-{self.pid}-{self.start_ticks}-{self.number}"


def _pid_namespace() -> int:
    return os.stat("/proc/self/ns/pid").st_ino


def _start_ticks(pid: int) -> int | None:
    """None for a process that doesn't exist, or has ended and only waits to be reaped."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The program's name, in parentheses, may have spaces and parentheses itself.
    state, *fields = stat.rpartition(")")[2].split()
    return None if state in "ZX" else int(fields[18])


CONGESTION_CONTROL = "cubic"
"""Connections that share a link share it fairly, and it fills shallow queues."""

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
    """The abilities that were found."""

    refusal: str
    """Why there can be no cluster; empty if there can."""

    can_delay: bool
    """Whether there is a queue that delays (netem)."""

    can_choose_congestion_control: bool
    """Whether connections can be made to use `CONGESTION_CONTROL`."""


def available() -> str:
    """Empty if clusters can be made here, else the reason why not."""
    return probe().refusal


@cache
def probe() -> Kernel:
    """Try what a cluster needs."""
    if os.geteuid() != 0:
        return _refusal("network namespaces need root")
    for tool, package in _PACKAGES.items():
        if shutil.which(tool) is None:
            return _refusal(f"the program {tool} is missing (package {package})")
    namespace = f"{ClusterName.new()}-probe"
    try:
        run_tool("ip", "netns", "add", namespace)
        try:
            return _probe(namespace)
        finally:
            run_tool("ip", "netns", "del", namespace)
    except ClusterError as error:
        return _refusal(f"the kernel refuses: {error}")


def run_tool(*command: str, commands: list[str] | None = None) -> str:
    """Return the output of a program; ``commands`` are the lines that its ``-batch -`` reads."""
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
    """Return the prefix of a command that runs it in a namespace as on a host of its own.

    It has a host name, an ``/etc/hosts`` and process ids of its own, and it and all its
    descendants are killed when the calling thread ends, however that happens.
    """
    return [
        *("ip", "netns", "exec", namespace),
        *("setpriv", "--pdeathsig", "KILL"),
        *("unshare", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc"),
        *("sh", "-ec", _MOVE_IN, hostname, hosts_file),
    ]


def congestion_control_route(subnet: str, address: str) -> str:
    """Return the `ip` command that makes connections over eth0 use `CONGESTION_CONTROL`.

    The setting for a whole namespace would do, but some kernels allow it to few algorithms.
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


def _refusal(reason: str) -> Kernel:
    return Kernel(reason, can_delay=False, can_choose_congestion_control=False)
