"""`Link`: the speed of a host's connection, and `Network`: the namespaces of one cluster."""

import contextlib
import ipaddress
import math
import os
import re
import shutil
import signal
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from operator import sub
from pathlib import Path

from torchrec_2dsp.programs.cluster.kernel import (
    ClusterConfigError,
    ClusterError,
    ClusterName,
    congestion_control_route,
    probe,
    run_tool,
)

_UNITS = {"kbit": 10**3, "mbit": 10**6, "gbit": 10**9}
_UNLIMITED = ("none", "unlimited")

_QUEUE_S = 0.010
_MIN_QUEUE_BYTES, _MAX_QUEUE_BYTES = 256 * 1024, 4 * 1024**2
_BURST_S = 0.001
_MIN_BURST_BYTES = 128 * 1024
_DELAY_QUEUE_PACKETS = 100_000


@dataclass(frozen=True)
class Link:
    """One host's link: its rate, the same in both directions at once, and its delay."""

    bits_per_s: int | None
    """The rate; `None` for no limit."""

    delay_ms: float = 0.0
    """The one-way delay, added to a host's outgoing packets."""

    dilation: float = 1.0
    """The factor by which the link is really slower, because time passes slower on its hosts."""

    @classmethod
    def parse(cls, rate: str, delay_ms: float = 0.0, dilation: float = 1.0) -> "Link":
        """Parse a rate like "200mbit", "1gbit" or "none".

        Example:
            >>> from torchrec_2dsp.programs.cluster.network import Link
            >>> Link.parse("2.5gbit").bits_per_s
            2500000000
        """
        if not (math.isfinite(delay_ms) and delay_ms >= 0):
            raise ClusterConfigError(f"delay_ms={delay_ms} is not a time; use 0 or more")
        if rate in _UNLIMITED:
            return cls(None, delay_ms, dilation)
        match = re.fullmatch(r"(\d+(?:\.\d+)?)(kbit|mbit|gbit)", rate)
        bits_per_s = round(float(match[1]) * _UNITS[match[2]]) if match else 0
        if not bits_per_s:
            raise ClusterConfigError(
                f"link={rate!r} is not a rate; use for instance '200mbit', '1gbit' or 'none'"
            )
        return cls(bits_per_s, delay_ms, dilation)

    @property
    def rate(self) -> str:
        """The rate in the format that `parse` reads."""
        return "none" if self.bits_per_s is None else f"{self.bits_per_s / 10**6:g}mbit"

    @property
    def name(self) -> str:
        """A name that is unique to the link's settings."""
        slower = "" if self.dilation == 1.0 else f"_dilated{self.dilation:g}"
        return f"{self.rate}_{self.delay_ms:g}ms{slower}"

    @property
    def bytes_per_s(self) -> float | None:
        """The rate in bytes per second; `None` for no limit."""
        return None if self.bits_per_s is None else self.bits_per_s / 8

    @property
    def queue_bytes(self) -> int:
        """The queue's size: about 10 ms at the link's rate. TCP oscillates with more or less."""
        num_bytes = round((self.bytes_per_s or 0) / self.dilation * _QUEUE_S)
        return min(max(num_bytes, _MIN_QUEUE_BYTES), _MAX_QUEUE_BYTES)

    @property
    def burst_bytes(self) -> int:
        """The number of bytes that may pass at once.

        It exceeds an offloaded packet (64 KiB), and covers what a late timer would lose (1 ms).
        """
        return max(round((self.bytes_per_s or 0) / self.dilation * _BURST_S), _MIN_BURST_BYTES)

    def limit_commands(self, device: str, *, delayed: bool) -> list[str]:
        """Return the `tc` commands that limit, and optionally delay, ``device``'s outgoing traffic.

        Each end of a connection limits one direction, but only one end may delay.
        """
        commands = []
        where = "root handle 1:"
        if delayed and self.delay_ms:
            delay_us = round(self.delay_ms * 1000 * self.dilation)
            queue = f"netem delay {delay_us}us limit {_DELAY_QUEUE_PACKETS}"
            commands.append(f"qdisc add dev {device} {where} {queue}")
            where = "parent 1:1 handle 10:"
        if self.bits_per_s is not None:
            rate = round(self.bits_per_s / self.dilation)
            queue = f"tbf rate {rate}bit burst {self.burst_bytes} limit "
            commands.append(f"qdisc add dev {device} {where} {queue}{self.queue_bytes}")
        return commands

    def __str__(self) -> str:
        if self.bits_per_s is None:
            return "no limit"
        if self.bits_per_s >= 10**9:
            return f"{self.bits_per_s / 1e9:g} Gbit/s"
        return f"{self.bits_per_s / 1e6:g} Mbit/s"


# Namespaces isolate, so all clusters use the same addresses.
SUBNET = ipaddress.ip_network("10.77.0.0/24")
MAX_HOSTS = SUBNET.num_addresses - 2

_NAMESPACES = Path("/var/run/netns")
_END_TIMEOUT_S = 10


@dataclass(frozen=True)
class InterfaceBytes:
    """One host's interface byte counters, headers included."""

    sent: int
    """Bytes to other hosts."""

    received: int
    """Bytes from other hosts."""

    inside: int
    """Bytes between this host's processes."""

    def since(self, earlier: "InterfaceBytes") -> "InterfaceBytes":
        """Return the bytes added since an earlier reading."""
        return InterfaceBytes(*map(sub, vars(self).values(), vars(earlier).values()))


def read_interface_bytes(text: str) -> InterfaceBytes:
    """Parse the counters from a host's ``/proc/net/dev``."""
    counters = {}
    for line in text.splitlines()[2:]:
        interface, _, fields = line.partition(":")
        values = [int(field) for field in fields.split()]
        counters[interface.strip()] = (values[0], values[8])
    received, sent = counters["eth0"]
    return InterfaceBytes(sent=sent, received=received, inside=counters["lo"][1])


def address(host: int) -> str:
    """Return a host's address."""
    return str(SUBNET[host + 1])


def hostname(host: int) -> str:
    """Return a host's name."""
    return f"host{host}"


class Network:
    """One cluster's namespaces."""

    def __init__(self, num_hosts: int, link: Link) -> None:
        if num_hosts > MAX_HOSTS:
            raise ClusterConfigError(
                f"hosts={num_hosts} are more than the {MAX_HOSTS} addresses of {SUBNET}; "
                f"use at most {MAX_HOSTS}"
            )
        self.name = ClusterName.new()
        """The prefix of all names that the cluster creates."""
        self.hosts = tuple(self.name.host(number) for number in range(num_hosts))
        """The hosts' namespaces."""
        self._link = link

    @property
    def folder(self) -> Path:
        """The folder for the cluster's files."""
        return Path(tempfile.gettempdir()) / str(self.name)

    @property
    def hosts_file(self) -> Path:
        """The ``/etc/hosts`` that every host has."""
        return self.folder / "hosts"

    def set_up(self) -> None:
        """Create namespaces, links and limits."""
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
                # Keeps one cluster's measurements from being used for another.
                f"link set eth0 alias {self._link.name}",
            ]
            if kernel.can_choose_congestion_control:
                commands.append(congestion_control_route(str(SUBNET), address(number)))
            run_tool("ip", "-n", host, "-batch", "-", commands=commands)
            limits = self._link.limit_commands("eth0", delayed=True)
            run_tool("tc", "-n", host, "-batch", "-", commands=limits)


def remove_orphans() -> None:
    """Remove leftovers from clusters whose owner was killed (SIGKILL)."""
    entries = [*_entries(_NAMESPACES), *_entries(Path(tempfile.gettempdir()))]
    orphans = {name for entry in entries if (name := ClusterName.of(entry)) and name.is_orphan()}
    for name in orphans:
        remove(name)


def namespaces_of(name: ClusterName) -> list[str]:
    """Return a cluster's existing namespaces."""
    return [entry for entry in _entries(_NAMESPACES) if ClusterName.of(entry) == name]


def _hosts_file(num_hosts: int) -> str:
    lines = ["127.0.0.1 localhost"]
    for number in range(num_hosts):
        # A dual-stack socket reports an IPv4 peer in the second form.
        lines += [f"{form}{address(number)} {hostname(number)}" for form in ("", "::ffff:")]
    return "\n".join([*lines, ""])


def remove(name: ClusterName) -> None:
    """Remove everything that `Network.set_up` created, even partially, and kill its processes."""
    namespaces = namespaces_of(name)
    _kill_all(namespaces)
    errors = []
    for namespace in namespaces:
        try:
            run_tool("ip", "netns", "del", namespace)
        except ClusterError as error:
            # Another process may have removed the same orphan concurrently.
            if namespace in namespaces_of(name):
                errors.append(str(error))
    shutil.rmtree(Path(tempfile.gettempdir()) / str(name), ignore_errors=True)
    if errors:
        raise ClusterError("; ".join(errors))


def _kill_all(namespaces: Iterable[str]) -> None:
    """Kill all processes in the namespaces, and wait until they are gone."""
    deadline = time.monotonic() + _END_TIMEOUT_S
    while time.monotonic() < deadline:
        running = [pid for namespace in namespaces for pid in process_ids(namespace)]
        if not running:
            return
        for pid in running:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


def process_ids(namespace: str) -> list[int]:
    """Return the ids of a host's processes."""
    try:
        return [int(pid) for pid in run_tool("ip", "netns", "pids", namespace).split()]
    except ClusterError:
        return []  # It has just been removed.


def _entries(folder: Path) -> list[str]:
    return os.listdir(folder) if folder.is_dir() else []
