"""Hosts, a switch between them, and limited links, out of network namespaces.

Each host is a namespace whose processes share its loopback. Its eth0 is a cable to a port of a
bridge, which has a namespace of its own: the machine's own network is left alone. Both ends of
a cable limit what they send, so a link is limited in both directions at once.
"""

import contextlib
import ipaddress
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from torchrec_2dsp.programs.cluster.errors import ClusterConfigError, ClusterError
from torchrec_2dsp.programs.cluster.kernel import congestion_control_route, probe, run_tool
from torchrec_2dsp.programs.cluster.link import Link
from torchrec_2dsp.programs.cluster.names import ClusterName

# Namespaces isolate, so all clusters use the same addresses.
SUBNET = ipaddress.ip_network("10.77.0.0/24")
MAX_HOSTS = SUBNET.num_addresses - 2

_NAMESPACES = Path("/var/run/netns")
_END_TIMEOUT_S = 10


@dataclass(frozen=True)
class InterfaceBytes:
    """The bytes that one host's interfaces have counted since it was made, headers included."""

    sent: int
    """Bytes to other hosts."""

    received: int
    """Bytes from other hosts."""

    inside: int
    """Between processes of this host."""

    def since(self, earlier: "InterfaceBytes") -> "InterfaceBytes":
        """The bytes that were added after an earlier reading."""
        return InterfaceBytes(
            self.sent - earlier.sent,
            self.received - earlier.received,
            self.inside - earlier.inside,
        )


def read_interface_bytes(text: str) -> InterfaceBytes:
    """The counters in the text of a host's ``/proc/net/dev``."""
    counters = {}
    for line in text.splitlines()[2:]:
        interface, _, fields = line.partition(":")
        values = [int(field) for field in fields.split()]
        counters[interface.strip()] = (values[0], values[8])
    received, sent = counters["eth0"]
    return InterfaceBytes(sent=sent, received=received, inside=counters["lo"][1])


def address(host: int) -> str:
    """The address of a host."""
    return str(SUBNET[host + 1])


def hostname(host: int) -> str:
    """The name of a host."""
    return f"host{host}"


def check_num_hosts(num_hosts: int) -> None:
    """Raise if there aren't as many addresses."""
    if num_hosts > MAX_HOSTS:
        raise ClusterConfigError(
            f"hosts={num_hosts} are more than the {MAX_HOSTS} addresses of {SUBNET}; "
            f"use at most {MAX_HOSTS}"
        )


class Network:
    """The namespaces of one cluster."""

    def __init__(self, num_hosts: int, link: Link) -> None:
        check_num_hosts(num_hosts)
        self.name = ClusterName.new()
        """Begins the name of everything that the cluster makes."""
        self.hosts = tuple(self.name.host(number) for number in range(num_hosts))
        """The namespaces of the hosts."""
        self._link = link

    @property
    def folder(self) -> Path:
        """The folder of the cluster's files."""
        return Path(tempfile.gettempdir()) / str(self.name)

    @property
    def hosts_file(self) -> Path:
        """The ``/etc/hosts`` of every host."""
        return self.folder / "hosts"

    def set_up(self) -> None:
        """Make namespaces, cables and limits."""
        kernel = probe()
        if kernel.refusal:
            raise ClusterError(f"no cluster can be emulated here: {kernel.refusal}")
        if self._link.delay_ms and not kernel.can_delay:
            raise ClusterConfigError(
                f"delay_ms={self._link.delay_ms} needs the netem queue, which this kernel "
                "doesn't have; use delay_ms=0"
            )
        self.folder.mkdir(mode=0o700)
        self.hosts_file.write_text(_hosts_file(len(self.hosts)))
        names = [self.name.switch, *self.hosts]
        run_tool("ip", "-batch", "-", commands=[f"netns add {name}" for name in names])
        switch = ["link set lo up", "link add br0 type bridge", "link set br0 up"]
        limits = []
        for number, host in enumerate(self.hosts):
            switch.append(f"link add port{number} type veth peer name eth0 netns {host}")
            switch.append(f"link set port{number} master br0 up")
            limits += self._link.limit_commands(f"port{number}", delayed=False)
        run_tool("ip", "-n", self.name.switch, "-batch", "-", commands=switch)
        run_tool("tc", "-n", self.name.switch, "-batch", "-", commands=limits)
        for number, host in enumerate(self.hosts):
            commands = [
                "link set lo up",
                f"addr add {address(number)}/{SUBNET.prefixlen} dev eth0",
                "link set eth0 up",
            ]
            if kernel.can_choose_congestion_control:
                commands.append(congestion_control_route(str(SUBNET), address(number)))
            run_tool("ip", "-n", host, "-batch", "-", commands=commands)
            limits = self._link.limit_commands("eth0", delayed=True)
            run_tool("tc", "-n", host, "-batch", "-", commands=limits)

    def take_down(self) -> None:
        """Remove all that `set_up` made, however far it came, and what runs in it."""
        _remove(self.name)

    def interface_bytes(self, host: int) -> InterfaceBytes:
        """The counters of a host."""
        namespace = self.hosts[host]
        return read_interface_bytes(
            run_tool("ip", "netns", "exec", namespace, "cat", "/proc/net/dev")
        )

    def process_ids(self, host: int) -> list[int]:
        """The processes that run on a host."""
        return _process_ids(self.hosts[host])


def remove_orphans() -> list[ClusterName]:
    """Remove what clusters left behind whose owner ended without a chance to do it (SIGKILL)."""
    entries = [*_entries(_NAMESPACES), *_entries(Path(tempfile.gettempdir()))]
    orphans = {name for entry in entries if (name := ClusterName.of(entry)) and name.is_orphan()}
    for name in orphans:
        _remove(name)
    return sorted(orphans, key=str)


def namespaces_of(name: ClusterName) -> list[str]:
    """The namespaces of a cluster that exist."""
    return [entry for entry in _entries(_NAMESPACES) if ClusterName.of(entry) == name]


def _hosts_file(num_hosts: int) -> str:
    lines = ["127.0.0.1 localhost"]
    for number in range(num_hosts):
        # A socket for both IP versions gives an IPv4 peer by the second form.
        lines += [f"{form}{address(number)} {hostname(number)}" for form in ("", "::ffff:")]
    return "\n".join([*lines, ""])


def _remove(name: ClusterName) -> None:
    namespaces = namespaces_of(name)
    _kill_all(namespaces)
    errors = []
    for namespace in namespaces:
        try:
            run_tool("ip", "netns", "del", namespace)
        except ClusterError as error:
            # Another process may have been removing the same orphan.
            if namespace in namespaces_of(name):
                errors.append(str(error))
    shutil.rmtree(Path(tempfile.gettempdir()) / str(name), ignore_errors=True)
    if errors:
        raise ClusterError("; ".join(errors))


def _kill_all(namespaces: Iterable[str]) -> None:
    """End what runs in them, and wait until it's gone."""
    deadline = time.monotonic() + _END_TIMEOUT_S
    while time.monotonic() < deadline:
        running = [pid for namespace in namespaces for pid in _process_ids(namespace)]
        if not running:
            return
        for pid in running:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


def _process_ids(namespace: str) -> list[int]:
    try:
        return [int(pid) for pid in run_tool("ip", "netns", "pids", namespace).split()]
    except ClusterError:
        return []  # It has just been removed.


def _entries(folder: Path) -> list[str]:
    return os.listdir(folder) if folder.is_dir() else []
