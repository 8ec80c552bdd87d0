"""Check an emulated cluster's speed with the collectives that training uses.

`check_links` runs this module on all ranks, with a file: it measures, prints a table on rank 0 and
writes the numbers to that JSON file.
"""

import dataclasses
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path

from torchrec_2dsp.programs.cluster.emulated_cluster import EmulatedCluster
from torchrec_2dsp.programs.cluster.kernel import ClusterConfigError, SelfCheckFailed
from torchrec_2dsp.programs.cluster.network import Link, read_interface_bytes

TOLERANCE = 0.15
"""The relative shortfall to accept: headers take 4 % of a link, TCP stalls some more, and the
cores aren't always free."""

_COUNTED_BYTES = 2 * 2**20
_TIMEOUT_S = 300


@dataclass(frozen=True, kw_only=True)
class SelfCheck:
    """Measured speeds, in bytes on the wire without headers, and byte counts, by collective."""

    host_bytes_per_s: dict[str, float]
    """Bytes per second from one host to the others, over all its ranks."""

    rank_bytes_per_s: dict[str, float | None]
    """Bytes per second from one rank to the others on its host; `None` if it has none."""

    expected_bytes: dict[str, int]
    """Bytes that a host must send in one collective across hosts."""

    sent_bytes: dict[str, int]
    """Bytes that the host's interface counted, headers included."""

    def problems(self, link: Link) -> list[str]:
        """Describe the measurements that contradict the link's rate; none if it has no limit."""
        contradictions = []
        for name, expected in self.expected_bytes.items():
            counted = self.sent_bytes[name]
            if not expected <= counted <= (1 + TOLERANCE) * expected:
                contradictions.append(
                    f"an {name} should send {_megabytes(expected)} per host, and the interface "
                    f"counted {_megabytes(counted)}"
                )
        if link.bytes_per_s is not None:
            for name, rate in self.host_bytes_per_s.items():
                off = rate / link.bytes_per_s - 1
                if abs(off) > TOLERANCE:
                    contradictions.append(
                        f"{name} between hosts runs at {_bits(rate)}, {off:+.0%} off the link's "
                        f"{_bits(link.bytes_per_s)}; {TOLERANCE:.0%} are allowed"
                    )
        return contradictions

    def __str__(self) -> str:
        lines = [
            f"{'':12}{'host to hosts':>16}{'rank in host':>16}{'must send':>12}{'counted':>12}"
        ]
        for name, rate in self.host_bytes_per_s.items():
            neighbour = self.rank_bytes_per_s[name]
            cells = f"{_bits(rate):>16}{'-' if neighbour is None else _bits(neighbour):>16}"
            sizes = (self.expected_bytes[name], self.sent_bytes[name])
            lines.append(f"{name:12}{cells}" + "".join(f"{_megabytes(n):>12}" for n in sizes))
        return "\n".join(lines)


def check_links(cluster: EmulatedCluster) -> SelfCheck:
    """Measure a cluster; raise `SelfCheckFailed` if its speed doesn't match its link.

    A first failure is measured again, because another program may have been busy.
    """
    if cluster.hosts < 2:
        raise ClusterConfigError("hosts=1 has no links to check; use 2 or more")
    check = _measure_on(cluster)
    if check.problems(cluster.link):
        check = _measure_on(cluster)
    if problems := check.problems(cluster.link):
        raise SelfCheckFailed(f"{_explain(cluster, check)}; {'; '.join(problems)}")
    return check


def _explain(cluster: EmulatedCluster, check: SelfCheck) -> str:
    """Explain a failure: a run without a limit shows if the machine is too slow for the link."""
    bytes_per_s = cluster.link.bytes_per_s
    busy = "another program may be using the processor: repeat it on an idle machine"
    if bytes_per_s is None or min(check.host_bytes_per_s.values()) > bytes_per_s:
        return f"the links aren't what they say; {busy}"
    arguments = (cluster.hosts, cluster.ranks_per_host, "none")
    per_rank = cluster.processor_per_rank
    with type(cluster)(*arguments, processor_per_rank=per_rank) as unlimited:
        free = _measure_on(unlimited).host_bytes_per_s
    rates = " and ".join(f"{name} at {_bits(rate)}" for name, rate in free.items())
    free_rates = f"which without a limit runs {rates}"
    if min(free.values()) < bytes_per_s:
        return (
            f"{cluster.link} is faster than this machine, {free_rates}; use a slower link, or "
            "'none'"
        )
    return f"the links are slower than {cluster.link} on this machine, {free_rates}; {busy}"


def _measure_on(cluster: EmulatedCluster) -> SelfCheck:
    path = cluster.folder / "check.json"
    cluster.run(["-m", __name__, str(path)], timeout_s=_TIMEOUT_S)
    return SelfCheck(**json.loads(path.read_text()))


def _measure() -> SelfCheck:
    """Measure the cluster on every rank."""
    import torch.distributed as dist

    from torchrec_2dsp.programs.link_speeds import measure_link_speeds

    local_world_size = int(os.environ["LOCAL_WORLD_SIZE"])
    speeds = measure_link_speeds(local_world_size=local_world_size)
    num_hosts = dist.get_world_size() // local_world_size
    once = local_world_size * _COUNTED_BYTES * (num_hosts - 1) // num_hosts
    return SelfCheck(
        host_bytes_per_s={
            name: local_world_size * speed
            for name, speed in speeds.across_hosts.items()
            if speed is not None
        },
        rank_bytes_per_s=dict(speeds.in_host),
        expected_bytes={"all-to-all": once, "all-reduce": 2 * once},
        sent_bytes=_count(local_world_size),
    )


def _count(local_world_size: int) -> dict[str, int]:
    """Count this host's bytes in one collective among ranks with the same local rank."""
    import torch
    import torch.distributed as dist

    from torchrec_2dsp.cost.measuring.collectives import subgroup
    from torchrec_2dsp.mesh import Mesh2D
    from torchrec_2dsp.programs.link_speeds import COLLECTIVES

    by_place = Mesh2D(local_world_size, dist.get_world_size() // local_world_size)
    sent: dict[str, int] = {}
    with subgroup(by_place.rank_matrix(), is_full_duplex=False) as group:
        payload = torch.ones(_COUNTED_BYTES // group.size() // 4 * group.size())
        for name, (run, _) in COLLECTIVES.items():
            for _ in range(2):  # The first makes the connections.
                before = read_interface_bytes(Path("/proc/net/dev").read_text())
                dist.barrier()
                run(torch.empty_like(payload), payload, group)
                dist.barrier()
                after = read_interface_bytes(Path("/proc/net/dev").read_text())
                sent[name] = after.since(before).sent
    return sent


def _bits(bytes_per_s: float) -> str:
    bits_per_s = 8 * bytes_per_s
    return (
        f"{bits_per_s / 1e9:.3g} Gbit/s" if bits_per_s >= 1e9 else f"{bits_per_s / 1e6:.0f} Mbit/s"
    )


def _megabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:.2f} MB"


def main(file: str) -> None:
    """Run the measurements on one rank; rank 0 writes them."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    check = _measure()
    if dist.get_rank() == 0:
        print(check, flush=True)
        Path(file).write_text(json.dumps(dataclasses.asdict(check)))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
