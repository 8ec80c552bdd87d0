"""Row gradients from several ranks, summed while the ranks keep computing.

At a lookup, ranks tell each other how many rows they touch. After the backward they send rows and
gradients. When a lookup needs the rows again, each rank waits for the sums:

    rank 0: rows 1, 4     \\                    / rows 1, 4, 7 with the same sums
    rank 1: rows 4, 7     - sums by row -------- rows 1, 4, 7 with the same sums
"""

import enum
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.distributed as dist

from torchrec_2dsp._compat.fbgemm import OptimizerStep
from torchrec_2dsp.codecs.rows import EXACT, RowCodec
from torchrec_2dsp.comms.collectives import Arriving, beside_kernels, start_all_to_all_ragged
from torchrec_2dsp.comms.groups import Peers
from torchrec_2dsp.errors import SyncError
from torchrec_2dsp.rows.gradients import (
    Block,
    BlockGradients,
    LookupRows,
    RowGradients,
    RowSum,
    stable_sort,
)

Sizes = list[list[list[int]]]
"""Row counts by sending rank, block and receiving rank."""


@dataclass(frozen=True)
class Hop:
    """One exchange within a group, after which every rank sums what it received."""

    group: dist.ProcessGroup

    stride: int = 0
    """The number of adjacent keys per owner, which alone receives their rows. 0: all ranks receive
    all rows."""

    @property
    def num_ranks(self) -> int:
        """The group's size."""
        return dist.get_world_size(self.group)

    def part_sizes(self, keys: torch.Tensor) -> torch.Tensor:
        """Count the rows for each owner, without waiting for a GPU."""
        if not self.stride:
            return torch.full((1,), keys.numel(), device=keys.device)
        owners = self._owners(keys)
        return owners.new_zeros(self.num_ranks).index_add_(0, owners, torch.ones_like(owners))

    def start(
        self,
        rows: BlockGradients,
        sizes: Sequence[Sequence[int]],
        block: Block,
        codec: RowCodec,
    ) -> "ArrivingRows | ArrivingTables":
        """Send a block's rows; ``sizes`` are by sending, then by receiving rank.

        This rank's own gradients are rounded, too, so that all ranks add the same numbers.

        Collectives:
            Two all-to-alls on the group, of keys and of gradients, not waited for.
        """
        rank = dist.get_rank(self.group)
        keys, grads = rows.keys.to(block.key_dtype), codec.encode(rows.grads)
        if not self.stride:
            counts = [part_sizes[0] for part_sizes in sizes]
            sent = [[values] * self.num_ranks for values in (keys, grads)]
        else:
            counts = [part_sizes[rank] for part_sizes in sizes]
            _, order = stable_sort(self._owners(rows.keys))
            sent = [values[order].split(list(sizes[rank])) for values in (keys, grads)]
        coming_keys, coming_grads = (
            start_all_to_all_ragged(parts, counts, self.group) for parts in sent
        )
        return ArrivingRows(coming_keys, coming_grads, codec, rows.grads.shape[1])

    def _owners(self, keys: torch.Tensor) -> torch.Tensor:
        """Return each key's owner; owners of contiguous ranges would differ in work."""
        return (keys // self.stride) % self.num_ranks


@dataclass(frozen=True)
class WholeTablesHop(Hop):
    """Exchanges all rows' gradients in one message, for tables whose rows are mostly touched."""

    def start(
        self,
        rows: BlockGradients,
        sizes: Sequence[Sequence[int]],
        block: Block,
        codec: RowCodec,
    ) -> "ArrivingTables":
        """Send a block's gradients, with zeros for rows that this rank didn't touch.

        Collectives:
            One all-reduce on the group, not waited for.
        """
        sums = rows.grads.new_zeros((block.num_rows, block.dim))
        sums.index_copy_(0, rows.keys, rows.grads)
        work = dist.all_reduce(sums, group=self.group, async_op=True)
        assert work is not None
        return ArrivingTables(sums, work, self.num_ranks)


@dataclass(frozen=True)
class ArrivingTables:
    """A block's summed gradients in flight, one for each row of its tables."""

    sums: torch.Tensor
    """`[rows, dim]`, complete once `work` is done."""
    work: dist.Work
    num_ranks: int
    saved_bytes: ClassVar[int] = 0
    """Bytes that a codec saves: none, because sums travel uncompressed."""

    @property
    def num_bytes(self) -> int:
        """Bytes sent to other ranks by a ring all-reduce."""
        return 2 * (self.num_ranks - 1) * self.sums.nbytes // self.num_ranks

    def wait(self) -> None:
        """Wait until all sums have arrived."""
        self.work.wait()

    def sum(self) -> BlockGradients:
        """Wait, then return the rows whose sum isn't zero."""
        self.wait()
        keys = self.sums.any(dim=1).nonzero().view(-1)
        return BlockGradients(keys, self.sums.index_select(0, keys))


@dataclass(frozen=True)
class ArrivingRows:
    """A block's rows in flight from all ranks in a group."""

    keys: Arriving
    grads: Arriving
    codec: RowCodec
    dim: int
    """The gradients' width."""

    @property
    def num_bytes(self) -> int:
        """Bytes sent to other ranks."""
        return self.keys.sent.nbytes + self.grads.sent.nbytes

    @property
    def saved_bytes(self) -> int:
        """Bytes that the codec saves on this rank."""
        num_bytes = self.grads.sent.shape[0] * self.dim * torch.float32.itemsize
        return num_bytes - self.grads.sent.nbytes

    def wait(self) -> None:
        """Wait until all rows have arrived."""
        self.keys.wait()
        self.grads.wait()

    def sum(self) -> BlockGradients:
        """Wait, then sum all ranks' rows by key, in rank order."""
        places = self.keys.places()
        rows = RowSum(self.keys.wait().index_select(0, places), places)
        sums = rows.of(self.codec.decode(self.grads.wait(), self.dim))
        return BlockGradients(rows.keys.long(), sums)


@dataclass(frozen=True)
class Route:
    """Hops after which every rank has the sums over all ranks.

    If several peers share a host, each first sums a part of the host's rows, so that a row
    leaves the host once; rows from other hosts are shared within the host at the end.
    """

    level: tuple[Hop, ...]
    """Hops between hosts, or among all peers."""
    before: tuple[Hop, ...] = ()
    """Hops inside hosts, before the others."""
    after: tuple[Hop, ...] = ()
    """Hops inside hosts, after the others."""

    @property
    def hops(self) -> tuple[Hop, ...]:
        """All hops in order."""
        return (*self.before, *self.level, *self.after)


def routes(peers: Peers) -> tuple[Route, Route]:
    """Return two routes: every rank gathers all rows, or each row's owner sums it first.

    The first sends every rank's rows to every other rank. The second sends rows once to their
    owners, and the sums once to all ranks, which is less if many ranks touch the same rows.
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
    """Return whether owners save a group enough rows to justify a second round.

    Example:
        Four ranks have 100 rows each. Without owners, a rank sends 300 rows. With owners, it sends
        75 rows to them, and a quarter of the sums to three ranks. That saves little if most rows
        are touched by a single rank.

        >>> from torchrec_2dsp.replicas.exchange import saves_bytes_by_owner
        >>> saves_bytes_by_owner(4, num_sent=400, num_distinct=150)
        True
        >>> saves_bytes_by_owner(4, num_sent=400, num_distinct=350)
        False
    """
    return num_sent / num_ranks + num_distinct < 0.9 * num_sent


_SMALL_BYTES = 2**14
"""Tables this small travel whole, because such a message takes no longer than an empty one."""


def saves_bytes_as_tables(blocks: Sequence[Block], sent_rows: Sequence[int]) -> bool:
    """Return whether an all-reduce of whole tables sends no more than a gather of touched rows.

    ``sent_rows`` counts these over all peers, by block. A gather sends a row to n - 1 peers;
    an all-reduce sends an n-th of a table twice to each of them.

    Example:
        >>> from torchrec_2dsp.replicas.exchange import saves_bytes_as_tables
        >>> from torchrec_2dsp.rows.gradients import Block
        >>> table = Block(dim=64, features=(0,), tables=(0,), bases=(0,), num_rows=1_000)
        >>> [saves_bytes_as_tables([table], [num_rows]) for num_rows in (1_900, 2_000)]
        [False, True]
    """
    whole_bytes = gathered_bytes = 0
    for block, num_rows in zip(blocks, sent_rows, strict=True):
        row_bytes = block.dim * torch.float32.itemsize
        whole_bytes += 2 * block.num_rows * row_bytes
        gathered_bytes += num_rows * (row_bytes + block.key_dtype.itemsize)
    return whole_bytes <= max(gathered_bytes, _SMALL_BYTES)


@dataclass(frozen=True)
class Announcement:
    """An all-gather in flight: each rank's row counts per owner on the first hop."""

    headers: torch.Tensor
    """For each rank, row counts by block and owner, then the learning rate's bits."""
    num_blocks: int
    """The TBE's blocks; 0 without peers."""
    work: dist.Work | None

    def arrived(self) -> tuple[Sizes, float]:
        """Wait, then return all ranks' row counts and their common learning rate."""
        with beside_kernels(self.headers.device):
            if self.work is not None:
                self.work.wait()
            headers = self.headers.tolist()
        rates = {struct.unpack("d", struct.pack("q", header.pop()))[0] for header in headers}
        # A rank that doesn't know the learning rate sends NaN.
        distinct_rates = sorted(rate for rate in rates if not math.isnan(rate))
        if len(distinct_rates) != 1:
            raise SyncError(
                "ranks that hold the same rows have different learning rates "
                f"{distinct_rates}; set the same schedule on every rank"
            )
        if not self.num_blocks:
            return [], distinct_rates[0]
        of_block = len(headers[0]) // self.num_blocks
        starts = range(0, len(headers[0]), of_block)
        sizes = [[header[start : start + of_block] for start in starts] for header in headers]
        return sizes, distinct_rates[0]


@dataclass(frozen=True)
class TrackedLookup:
    """A lookup with what its backward needs to capture row gradients."""

    rows: LookupRows
    iteration: int
    announcement: Announcement | None
    """The announcement to the peers; `None` if several lookups share one."""


class GradientState(enum.Enum):
    """The row gradients' progress; it only moves down this list."""

    CAPTURED = "a backward has left them on this rank"
    SENDING = "they are on their way to peers in this host, or to all peers if none share a host"
    ON_OTHER_HOSTS = "the sums of this host are on their way to other hosts"
    ARRIVED = "this rank has the sum over all ranks"


class GradientExchange:
    """Sums one TBE's row gradients over the ranks that hold the same rows.

    While rows travel, nothing else may use the peers' groups.
    """

    def __init__(
        self,
        blocks: Sequence[Block],
        device: torch.device,
        peers: Peers | None,
        codec: RowCodec = EXACT,
        *,
        may_send_tables: bool = False,
    ) -> None:
        self.num_ranks = 1 if peers is None else dist.get_world_size(peers.everyone)
        self.by_owner = False
        """True if an owner sums each row next time, as the last overlap suggests. All peers have
        seen the same overlap, so all choose the same route. If you set it, set it to the same
        value on all peers, between two steps."""
        self.blocks = tuple(blocks)
        """The TBE's blocks."""
        self.codec = codec
        self.device = device
        self._peers = None if self.num_ranks == 1 else peers
        if self._peers is None:
            return
        self._gathered, self._owned = routes(self._peers)
        whole_tables = Route((WholeTablesHop(self._peers.everyone),))
        self._whole_tables = whole_tables if may_send_tables else None
        # Between two ranks owners never save bytes, so rows needn't be counted by owner.
        announced_route = self._owned if self.num_ranks > 2 else self._gathered
        self._first_hop = announced_route.hops[0]
        members = dist.get_process_group_ranks(self._peers.everyone)
        first = dist.get_process_group_ranks(self._first_hop.group)
        self._places = [members.index(rank) for rank in first]

    def announce(self, keys: Sequence[torch.Tensor], learning_rate: float) -> Announcement:
        """Tell the peers each block's count of touched keys; NaN is an unknown learning rate.

        Collectives:
            One all-gather of 8 bytes per block and owner and 8 bytes more, not waited for.
        """
        device = torch.device("cpu") if self._peers is None else self.device
        (bits,) = struct.unpack("q", struct.pack("d", learning_rate))
        rate = torch.full((1,), bits, device=device)
        if self._peers is None:
            return Announcement(rate[None], 0, None)
        header = torch.cat([*(self._first_hop.part_sizes(of_block) for of_block in keys), rate])
        headers = header.new_empty(self.num_ranks * header.numel())
        group = self._peers.everyone
        work = dist.all_gather_single(headers, header, group=group, async_op=True)
        return Announcement(headers.view(self.num_ranks, -1), len(keys), work)

    def send(self, pending: "PendingGradients") -> None:
        """Start the exchange of captured gradients.

        Collectives:
            Per block two all-to-alls, of keys and of gradients, or an all-reduce of all rows'
            gradients; not waited for.
        """
        announcement = pending.lookup.announcement
        assert announcement is not None, "peers are told before gradients are sent"
        announced, learning_rate = announcement.arrived()
        if self._peers is None:
            pending.start(self, Route(()), [], learning_rate)
            return
        route = self._route(announced)
        sizes = [announced[place] for place in self._places]
        if not route.hops[0].stride:
            sizes = [[[sum(parts)] for parts in blocks] for blocks in sizes]
        pending.num_bytes += announcement.headers.nbytes // self.num_ranks * (self.num_ranks - 1)
        pending.start(self, route, sizes, learning_rate)

    def _route(self, announced: Sizes) -> Route:
        """Choose a route, the same on all peers."""
        if self._whole_tables is not None:
            sent_rows = [sum(map(sum, of_block)) for of_block in zip(*announced, strict=True)]
            if saves_bytes_as_tables(self.blocks, sent_rows):
                return self._whole_tables
        return self._owned if self.by_owner else self._gathered


class PendingGradients:
    """One backward's row gradients, from their capture until they are applied."""

    def __init__(
        self, gradients: Sequence[BlockGradients], lookup: TrackedLookup, divisor: int
    ) -> None:
        self.lookup = lookup
        self.num_bytes = 0
        """Bytes sent to other ranks."""
        self.saved_bytes = 0
        """Bytes that a codec has saved."""
        self.learning_rate: float | None = None
        """All ranks' learning rate, known once the gradients are sent."""
        self.blocks = tuple(gradients)
        """For each block, the sums so far: first this rank's, then over more and more ranks."""
        self.state = GradientState.CAPTURED
        """The gradients' progress."""
        self._divisor = divisor
        self._num_done = 0
        self._num_sent = 0
        self._arriving: list[ArrivingRows | ArrivingTables] = []

    def start(
        self, exchange: GradientExchange, route: Route, sizes: Sizes, learning_rate: float
    ) -> None:
        """Start a route's first hop; `GradientExchange.send` calls it.

        Collectives:
            `Hop.start`'s for each block, on the first hop's group.
        """
        assert self.state is GradientState.CAPTURED, "row gradients are sent once"
        self._exchange, self._route = exchange, route
        self.learning_rate = learning_rate
        self.state = GradientState.SENDING
        if route.hops:
            self._start_hop(sizes)

    def send_to_other_hosts(self) -> None:
        """Sum this host's peers' gradients, and send the sums to other hosts.

        Collectives:
            The hops inside the host are waited for, the next hop isn't.
        """
        while self._num_done < len(self._route.before):
            self._finish_hop()
        self.state = GradientState.ON_OTHER_HOSTS

    def wait(self) -> None:
        """Wait until all ranks' gradients have arrived.

        Collectives:
            The remaining hops, waited for.
        """
        while self._num_done < len(self._route.hops) - 1:
            self._finish_hop()
        for arriving in self._arriving:
            arriving.wait()

    def gradients(self) -> RowGradients:
        """Wait, then return the sums over all ranks, to be applied once.

        Collectives:
            `wait`'s.
        """
        assert self.learning_rate is not None, "row gradients are sent before they are applied"
        if self.state is not GradientState.ARRIVED:
            while self._num_done < len(self._route.hops):
                self._finish_hop()
            if self._divisor != 1:
                for block in self.blocks:
                    block.grads.div_(self._divisor)
            self.state = GradientState.ARRIVED
        step = OptimizerStep(self.learning_rate, self.lookup.iteration)
        return RowGradients(self.blocks, step)

    def _finish_hop(self) -> None:
        """Wait for a hop, and start the next one, if any."""
        self.blocks = tuple(arriving.sum() for arriving in self._arriving)
        self._num_done += 1
        route = self._route
        if self._num_done == len(route.before) + len(route.level):
            num_distinct = sum(block.keys.numel() for block in self.blocks)
            num_ranks = route.level[0].num_ranks
            self._exchange.by_owner = saves_bytes_by_owner(num_ranks, self._num_sent, num_distinct)
        if self._num_done < len(route.hops):
            self._start_hop(self._gather_sizes())

    def _gather_sizes(self) -> Sizes:
        """Gather the number of rows that each rank sends on the next hop."""
        hop = self._route.hops[self._num_done]
        own_sizes = torch.stack([hop.part_sizes(block.keys) for block in self.blocks])
        sizes = own_sizes.new_empty((hop.num_ranks * len(own_sizes), own_sizes.shape[1]))
        dist.all_gather_single(sizes, own_sizes, group=hop.group)
        self.num_bytes += own_sizes.nbytes * (hop.num_ranks - 1)
        return sizes.view(hop.num_ranks, *own_sizes.shape).tolist()

    def _start_hop(self, sizes: Sizes) -> None:
        hop = self._route.hops[self._num_done]
        if self._num_done == len(self._route.before):
            self._num_sent = sum(n for blocks in sizes for parts in blocks for n in parts)
        sizes_by_block = zip(*sizes, strict=True)
        self._arriving = [
            hop.start(gradients, block_sizes, block, self._exchange.codec)
            for gradients, block_sizes, block in zip(
                self.blocks, sizes_by_block, self._exchange.blocks, strict=True
            )
        ]
        self.num_bytes += sum(arriving.num_bytes for arriving in self._arriving)
        self.saved_bytes += sum(arriving.saved_bytes for arriving in self._arriving)
