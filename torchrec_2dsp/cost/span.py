"""`Span`: how the ranks of a process group lie on hosts, and with whom they share a host's link."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from torchrec_2dsp.mesh import Mesh2D


@dataclass(frozen=True)
class Span:
    """Process groups of one kind, all alike and all busy at the same time.

    Example:
        Four groups of two ranks, each over two hosts of four ranks.

        >>> from torchrec_2dsp import Mesh2D
        >>> from torchrec_2dsp.cost.span import Span
        >>> Span.of_sharding_groups(Mesh2D(num_groups=4, group_size=2), local_world_size=4)
        Span(num_ranks=2, ranks_per_host=1, groups_per_host=4)
    """

    num_ranks: int
    """How many ranks one group has."""

    ranks_per_host: int
    """How many ranks one group has on the host that has most of them."""

    groups_per_host: int
    """How many groups have ranks on one host."""

    @classmethod
    def of(cls, groups: Sequence[Sequence[int]], local_world_size: int) -> "Span":
        """The span of groups of world ranks, on hosts of ``local_world_size`` of them each."""
        on_hosts = [Counter(rank // local_world_size for rank in group) for group in groups]
        by_host = Counter(host for num_on_host in on_hosts for host in num_on_host)
        return cls(
            num_ranks=max(len(group) for group in groups),
            ranks_per_host=max(max(num_on_host.values()) for num_on_host in on_hosts),
            groups_per_host=max(by_host.values()),
        )

    @classmethod
    def of_world(cls, world_size: int, local_world_size: int) -> "Span":
        """All ranks as one group."""
        return cls(world_size, min(world_size, local_world_size), 1)

    @classmethod
    def of_sharding_groups(cls, mesh: Mesh2D, local_world_size: int) -> "Span":
        """The sharding groups of a mesh."""
        return cls.of(mesh.rank_matrix(), local_world_size)

    @classmethod
    def of_replica_peers(cls, mesh: Mesh2D, local_world_size: int) -> "Span":
        """The replica peers of a mesh."""
        peers = list(zip(*mesh.rank_matrix(), strict=True))
        return cls.of(peers, local_world_size)

    @property
    def crosses_hosts(self) -> bool:
        """Whether a group has ranks on several hosts."""
        return self.num_ranks > self.ranks_per_host

    @property
    def num_hosts(self) -> int:
        """How many hosts a group lies on."""
        return -(-self.num_ranks // self.ranks_per_host)

    def inside_hosts(self) -> "Span":
        """The parts of the groups that lie on one host, as groups of their own."""
        return Span(self.ranks_per_host, self.ranks_per_host, self.groups_per_host)

    def across_hosts(self) -> "Span":
        """The ranks with the same place on their hosts, as groups of their own."""
        return Span(self.num_hosts, 1, self.groups_per_host * self.ranks_per_host)
