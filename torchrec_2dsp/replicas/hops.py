"""Hops: exchanges after which fewer ranks have more of a row's gradient, or more ranks have all."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from torchrec_2dsp.comms.collectives import Arriving, start_all_to_all_ragged
from torchrec_2dsp.comms.peers import Peers
from torchrec_2dsp.rows.gradients import BlockGradients, RowSum

Sizes = list[list[list[int]]]
"""How many rows travel: by rank, then by block, then by the rank that gets them."""


@dataclass(frozen=True)
class Hop:
    """One exchange within a group: every rank adds up what it gets."""

    group: dist.ProcessGroup

    stride: int = 0
    """0: all ranks get all rows. Otherwise each row has one owner, that of its neighbour in key
    among so many, and only the owner gets it."""

    @property
    def num_ranks(self) -> int:
        """Ranks that take part."""
        return dist.get_world_size(self.group)

    @property
    def num_owners(self) -> int:
        """Into how many parts a rank's rows are dealt."""
        return self.num_ranks if self.stride else 1

    def part_sizes(self, keys: torch.Tensor) -> list[int]:
        """How many rows each owner gets."""
        if not self.stride:
            return [keys.numel()]
        return torch.bincount(self._owners(keys), minlength=self.num_owners).tolist()

    def start(
        self,
        rows: BlockGradients,
        sizes: Sequence[Sequence[int]],
        key_dtype: torch.dtype,
        transport: torch.dtype,
    ) -> "ArrivingRows":
        """Send a block's rows.

        Args:
            rows: of this rank.
            sizes: by rank, then by the rank that gets them.
            key_dtype: what the block's keys fit into.
            transport: the type in which gradients travel. This rank rounds its own ones, too, so
                that all ranks add the same numbers.

        Collectives:
            Two all-to-alls on the group, of keys and of gradients, not waited for.
        """
        rank = dist.get_rank(self.group)
        keys, grads = rows.keys.to(key_dtype), rows.grads.to(transport)
        if not self.stride:
            counts = [of_rank[0] for of_rank in sizes]
            sent = [[values] * self.num_ranks for values in (keys, grads)]
        else:
            counts = [of_rank[rank] for of_rank in sizes]
            order = self._owners(rows.keys).sort(stable=True).indices
            sent = [values[order].split(list(sizes[rank])) for values in (keys, grads)]
        return ArrivingRows(*(start_all_to_all_ragged(one, counts, self.group) for one in sent))

    def _owners(self, keys: torch.Tensor) -> torch.Tensor:
        """By key and not by range: rows sorted by frequency would make one owner do it all."""
        return (keys // self.stride) % self.num_ranks


@dataclass(frozen=True)
class ArrivingRows:
    """The rows of a block, from all ranks of a group."""

    keys: Arriving
    grads: Arriving

    @property
    def num_bytes(self) -> int:
        """Bytes that this rank sends to others."""
        return self.keys.sent.nbytes + self.grads.sent.nbytes

    def wait(self) -> None:
        """Until all have come."""
        self.keys.wait()
        self.grads.wait()

    def sum(self) -> BlockGradients:
        """Wait; what all ranks have sent, added in the order of ranks."""
        keys, places = self.keys.wait().long(), self.keys.places()
        rows = RowSum(keys[places], places)
        return BlockGradients(rows.keys, rows.of(self.grads.wait().float()))


@dataclass(frozen=True)
class Route:
    """Hops after which every rank has the sum over all.

    Where several peers share a host, each first adds up a part of the host's rows, so that a row
    leaves a host once; what has come from other hosts is shared in the host at the end.
    """

    level: tuple[Hop, ...]
    """Between hosts, or among all peers."""
    before: tuple[Hop, ...] = ()
    """Inside hosts."""
    after: tuple[Hop, ...] = ()
    """Inside hosts."""

    @property
    def hops(self) -> tuple[Hop, ...]:
        """All of them."""
        return (*self.before, *self.level, *self.after)


def routes(peers: Peers) -> tuple[Route, Route]:
    """How rows come together: all gathered by all, or first added up by an owner each.

    The first moves every rank's rows to every other one. The second moves them once to their
    owners and their sums once to everybody: less for many ranks that touch the same rows.
    """
    if peers.in_host is None or peers.across is None:
        everyone = peers.everyone
        return Route((Hop(everyone),)), Route((Hop(everyone, 1), Hop(everyone)))
    before, after = Hop(peers.in_host, 1), Hop(peers.in_host)
    across, dealt = Hop(peers.across), Hop(peers.across, before.num_ranks)
    return (
        Route((across,), (before,), (after,)),
        Route((dealt, across), (before,), (after,)),
    )


def saves_bytes_by_owner(num_ranks: int, num_sent: int, num_distinct: int) -> bool:
    """Whether owners make a group send fewer rows, by enough to be worth a second round.

    Args:
        num_ranks: of the group.
        num_sent: rows of all ranks.
        num_distinct: how many different ones these are.

    Example:
        Four ranks with 100 rows each: of 300 that a rank would send to the others, owners leave
        75 and a quarter of the sums, three times; little where most rows are of one rank alone.

        >>> from torchrec_2dsp.replicas.hops import saves_bytes_by_owner
        >>> saves_bytes_by_owner(4, num_sent=400, num_distinct=150)
        True
        >>> saves_bytes_by_owner(4, num_sent=400, num_distinct=350)
        False
    """
    return num_sent / num_ranks + num_distinct < 0.9 * num_sent
