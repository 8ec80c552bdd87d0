"""The abilities of this machine's kernel and tools, asked once, in a namespace made for it."""

import os
import shutil
import subprocess
from dataclasses import dataclass
from functools import cache

from torchrec_2dsp.programs.cluster.errors import ClusterError
from torchrec_2dsp.programs.cluster.names import ClusterName

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
    """The output of a program; ``commands`` are the lines that its ``-batch -`` reads."""
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
    """The words before a program's arguments that run it in a namespace as on a host of its own.

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
    """The `ip` command that makes connections over eth0 use `CONGESTION_CONTROL`.

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
