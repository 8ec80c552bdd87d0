"""`Peers`: ranks that exchange rows, and where they sit."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist


@dataclass(frozen=True)
class Peers:
    """Process groups of ranks that exchange rows: of those that hold copies of the same ones, or
    of their owners and whoever asks for them."""

    everyone: dist.ProcessGroup
    """All of them."""

    in_host: dist.ProcessGroup | None = None
    """Those on this host, if several hosts have several of them each."""

    across: dist.ProcessGroup | None = None
    """One on each host, those with the same place on theirs; together with ``in_host``."""

    @property
    def is_layered(self) -> bool:
        """Whether rows can be added up inside hosts before they leave them."""
        return self.in_host is not None


def by_host(ranks: Sequence[int], ranks_per_host: int) -> list[list[int]] | None:
    """Peers host by host, `None` unless several hosts have the same number of several peers.

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
