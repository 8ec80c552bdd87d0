"""`Peers`: the process groups of ranks that exchange rows, host by host."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist


@dataclass(frozen=True)
class Peers:
    """Process groups of ranks that exchange rows: ranks that hold copies of the same rows, or the
    owners of rows and the ranks that ask for them."""

    everyone: dist.ProcessGroup
    """All ranks that exchange rows."""

    in_host: dist.ProcessGroup | None = None
    """The ranks on this host, if there are several hosts with several ranks each."""

    across: dist.ProcessGroup | None = None
    """One rank of each host, in the same place as this one; set together with ``in_host``."""

    @property
    def is_layered(self) -> bool:
        """Whether rows can be added up inside hosts before they leave them."""
        return self.in_host is not None


def by_host(ranks: Sequence[int], ranks_per_host: int) -> list[list[int]] | None:
    """The ranks of each host; `None` unless several hosts have equally many, more than one.

    Example:
        >>> from torchrec_2dsp.comms.peers import by_host
        >>> by_host([0, 2, 4, 6], ranks_per_host=4)
        [[0, 2], [4, 6]]
        >>> by_host([0, 2, 4, 6], ranks_per_host=2) is None
        True
    """
    hosts: dict[int, list[int]] = {}
    for rank in ranks:
        hosts.setdefault(rank // ranks_per_host, []).append(rank)
    sizes = {len(peers) for peers in hosts.values()}
    return list(hosts.values()) if len(hosts) > 1 and len(sizes) == 1 and sizes != {1} else None
