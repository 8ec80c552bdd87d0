"""Names that tell which process a namespace belongs to, so that only orphans are ever removed."""

import itertools
import os
import re
from dataclasses import dataclass
from pathlib import Path

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
        """A name for this process that nobody had before."""
        pid = os.getpid()
        start_ticks = _start_ticks(pid)
        assert start_ticks is not None
        return cls(_pid_namespace(), pid, start_ticks, next(_numbers))

    @classmethod
    def of(cls, namespace: str) -> "ClusterName | None":
        """The cluster that a namespace belongs to; None if the name isn't one of ours.

        Example:
            >>> from torchrec_2dsp.programs.cluster.names import ClusterName
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
        """The namespace of a host."""
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
