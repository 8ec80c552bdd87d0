"""`Hop`, an exchange of row gradients in a group, and `Route`, hops that add up over all ranks."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from torchrec_2dsp.codecs.rows import RowCodec
from torchrec_2dsp.comms.collectives import Arriving, start_all_to_all_ragged
from torchrec_2dsp.comms.peers import Peers
from torchrec_2dsp.rows.gradients import BlockGradients, RowSum

Sizes = list[list[list[int]]]
"""How many rows travel: by the rank that sends them, then by block, then by the rank they go to."""


@dataclass(frozen=True)
class Hop:
    """One exchange within a group: every rank adds up what it gets."""

    group: dist.ProcessGroup

    stride: int = 0
    """How many adjacent keys have the same owner, which alone gets their rows. 0: all ranks get all
    rows."""

    @property
    def num_ranks(self) -> int:
        """How many ranks take part."""
        return dist.get_world_size(self.group)

    @property
    def num_owners(self) -> int:
        """How many owners a rank's rows are dealt to; 1 if all ranks get all rows."""
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
        codec: RowCodec,
    ) -> "ArrivingRows":
        """Send a block's rows.

        Args:
            rows: this rank's rows.
            sizes: how many rows travel: by the rank that sends them, then by the rank they go to.
            key_dtype: a type that the block's keys fit into.
            codec: how gradients travel. This rank rounds its own ones, too, so that all ranks add
                the same numbers.

        Collectives:
            Two all-to-alls on the group, of keys and of gradients, not waited for.
        """
        rank = dist.get_rank(self.group)
        keys, grads = rows.keys.to(key_dtype), codec.encode(rows.grads)
        if not self.stride:
            counts = [part_sizes[0] for part_sizes in sizes]
            sent = [[values] * self.num_ranks for values in (keys, grads)]
        else:
            counts = [part_sizes[rank] for part_sizes in sizes]
            order = self._owners(rows.keys).sort(stable=True).indices
            sent = [values[order].split(list(sizes[rank])) for values in (keys, grads)]
        coming_keys, coming_grads = (
            start_all_to_all_ragged(parts, counts, self.group) for parts in sent
        )
        return ArrivingRows(coming_keys, coming_grads, codec, rows.grads.shape[1])

    def _owners(self, keys: torch.Tensor) -> torch.Tensor:
        """The owner of each key. In tables sorted by use, owners of ranges would differ in work."""
        return (keys // self.stride) % self.num_ranks


@dataclass(frozen=True)
class ArrivingRows:
    """The rows of a block from all ranks of a group, on their way."""

    keys: Arriving
    grads: Arriving
    codec: RowCodec
    """How the gradients travel."""
    dim: int
    """How many numbers a gradient has."""

    @property
    def num_bytes(self) -> int:
        """Bytes that this rank sends to others."""
        return self.keys.sent.nbytes + self.grads.sent.nbytes

    @property
    def saved_bytes(self) -> int:
        """Bytes that this rank would send besides, were its gradients not encoded."""
        num_bytes = self.grads.sent.shape[0] * self.dim * torch.float32.itemsize
        return num_bytes - self.grads.sent.nbytes

    def wait(self) -> None:
        """Wait until all rows have arrived."""
        self.keys.wait()
        self.grads.wait()

    def sum(self) -> BlockGradients:
        """The sums by row of what all ranks have sent, added in rank order, after a wait."""
        keys, places = self.keys.wait().long(), self.keys.places()
        rows = RowSum(keys[places], places)
        return BlockGradients(rows.keys, rows.of(self.codec.decode(self.grads.wait(), self.dim)))


@dataclass(frozen=True)
class Route:
    """Hops after which every rank has the sums over all ranks.

    Where several peers share a host, each first adds up a part of the host's rows, so that a row
    leaves a host once; what has come from other hosts is shared in the host at the end.
    """

    level: tuple[Hop, ...]
    """Hops between hosts, or among all peers."""
    before: tuple[Hop, ...] = ()
    """Hops inside hosts, which come first."""
    after: tuple[Hop, ...] = ()
    """Hops inside hosts, which come last."""

    @property
    def hops(self) -> tuple[Hop, ...]:
        """All hops in their order."""
        return (*self.before, *self.level, *self.after)


def routes(peers: Peers) -> tuple[Route, Route]:
    """Two routes: every rank gathers all rows, or an owner of each row adds it up first.

    The first sends every rank's rows to every other rank. The second sends rows once to their
    owners and the sums once to all ranks, which is less if many ranks touch the same rows.
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
    """Whether owners save a group enough rows to be worth a second round.

    Args:
        num_ranks: how many ranks the group has.
        num_sent: how many rows all ranks have, counted for each.
        num_distinct: how many different rows these are.

    Example:
        Four ranks have 100 rows each. Without owners, a rank sends 300 rows. With owners, it sends
        75 rows to them, and a quarter of the sums to three ranks: that saves little if most rows
        are touched by a single rank.

        >>> from torchrec_2dsp.replicas.hops import saves_bytes_by_owner
        >>> saves_bytes_by_owner(4, num_sent=400, num_distinct=150)
        True
        >>> saves_bytes_by_owner(4, num_sent=400, num_distinct=350)
        False
    """
    return num_sent / num_ranks + num_distinct < 0.9 * num_sent
