"""`RowRequests`: finds a batch's distinct rows and asks their owners.

Every id becomes a *key*, its row's number in owner order. One sort of a kernel's keys finds the
distinct rows, by owner and by table, and where each one goes.

If a group spans hosts, a row that several ranks of a host need crosses once. An owner is asked
by the rank with its place on the other host: the host's ranks first ask *that rank*, which asks for
each distinct row, and hands the rows on. Gradients return the same way and are added there.
"""

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import record_function
from torchrec.distributed.types import Awaitable
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_2dsp._compat.fbgemm import starts_of, sum_bags
from torchrec_2dsp._compat.torchrec import (
    GroupedEmbeddingConfig,
    KJTAllToAll,
    SequenceEmbeddingsAllToAll,
)
from torchrec_2dsp.comms.groups import Peers
from torchrec_2dsp.comms.row_wire import narrow_ids
from torchrec_2dsp.plan.parameter_sharding import MAX_ROWS, RowSpread
from torchrec_2dsp.rows.gradients import RowSum, repeated, sources_of_bags, transposed

_MAX_INT32 = torch.iinfo(torch.int32).max


@dataclass(frozen=True)
class RowBlock:
    """A kernel's tables, cut into one block per owner."""

    tables: tuple[str, ...]
    features: tuple[str, ...]
    """The tables' features, table by table."""
    feature_tables: tuple[int, ...]
    """Each feature's table."""
    rows_per_owner: tuple[int, ...]
    """Rows per owner, by table; the last owners may have fewer."""
    spreads: tuple[RowSpread | None, ...]
    """Each table's spread over owners; `None` for blocks."""
    pooling: str
    """"SUM", "MEAN", or "NONE" for a sequence."""

    @classmethod
    def of(cls, config: GroupedEmbeddingConfig, is_spread: Container[str]) -> "RowBlock":
        """Return a kernel's block; it is the same on any rank."""
        tables = config.embedding_tables
        metadata = [table.global_metadata for table in tables]
        return cls(
            tables=tuple(table.name for table in tables),
            features=tuple(name for table in tables for name in table.feature_names),
            feature_tables=tuple(
                index for index, table in enumerate(tables) for _ in table.feature_names
            ),
            rows_per_owner=tuple(
                of_table.shards_metadata[0].shard_sizes[0]
                for of_table in metadata
                if of_table is not None
            ),
            spreads=tuple(
                RowSpread(table.num_embeddings) if table.name in is_spread else None
                for table in tables
            ),
            pooling=config.pooling.value,
        )

    @property
    def stride(self) -> int:
        """The number of keys per owner."""
        return sum(self.rows_per_owner)

    @property
    def bases(self) -> tuple[int, ...]:
        """Each table's first key, relative to its owner's first key."""
        return tuple(sum(self.rows_per_owner[:table]) for table in range(len(self.tables)))


@dataclass(frozen=True)
class Bags:
    """The occurrences to sum, sample by sample, like rows in a `KeyedTensor`."""

    num_features: int
    lengths: torch.Tensor
    """The number of occurrences in each bag."""
    weights: torch.Tensor | None
    """The occurrences' weights; `None` if all are 1."""


@dataclass(frozen=True)
class NeededRows:
    """The distinct rows that the local batch needs from one block, by owner."""

    sums: RowSum
    """The rows, with the sums of their gradients."""
    places: torch.Tensor
    """Each occurrence's row: for bags bag by bag, else in batch order."""
    counts: torch.Tensor
    """Row counts by owner and table: `[owners, tables]`."""
    bags: Bags | None
    """The bags; `None` for a sequence."""
    first_owner: int = 0
    """The first owner that is counted, in key order."""

    def of_place(self, place: int, num_places: int) -> "NeededRows":
        """Return these rows, counted only for the owners at ``place``, which own all of them."""
        counts = self.counts.view(num_places, -1, self.counts.shape[1])[place]
        return replace(self, counts=counts, first_owner=place * counts.shape[0])

    def weighed(self, weigh: Callable[[torch.Tensor], torch.Tensor]) -> "NeededRows":
        """Return these rows for bags with other weights, which ``weigh`` computes from theirs."""
        assert self.bags is not None
        assert self.bags.weights is not None
        bags = replace(self.bags, weights=weigh(self.bags.weights))
        return replace(self, sums=self.sums.weighed(weigh), bags=bags)

    def record_stream(self, stream: torch.Stream) -> None:
        """Keep the tensors alive for ``stream``."""
        tensors = [self.places, self.counts]
        if self.bags is not None:
            tensors += [self.bags.lengths, self.bags.weights]
        for tensor in tensors:
            if tensor is not None:
                tensor.record_stream(stream)  # pyright: ignore[reportArgumentType]
        self.sums.record_stream(stream)


class RowNumbering:
    """Numbers a block's rows by keys.

    Owners are sorted by their place on their hosts: first all hosts' first ranks, then all second
    ranks. So a place's rows are adjacent, and within them a host's rows.
    """

    def __init__(
        self, block: RowBlock, num_owners: int, ranks_per_host: int, device: torch.device
    ) -> None:
        self._block = block
        self._num_owners = num_owners
        bases = torch.tensor(block.bases, device=device)
        by_table = [
            [base, rows, block.stride - rows]
            for base, rows in zip(block.bases, block.rows_per_owner, strict=True)
        ]
        if any(block.spreads):
            for numbers, spread in zip(by_table, block.spreads, strict=True):
                numbers += (spread.step, spread.num_rows) if spread else (1, MAX_ROWS)
        by_feature = [by_table[table] for table in block.feature_tables]
        self._of_features = torch.tensor(by_feature, device=device)
        """Each feature's first key, its rows per owner, and the other keys per owner; if any tables
        are spread, also the step and the row count: `[features, numbers]`."""
        # Shorter numbers sort faster.
        num_keys = num_owners * block.stride
        key_dtype = torch.int32 if num_keys <= _MAX_INT32 else torch.int64
        owners = torch.arange(num_owners, device=device)
        starts = (owners[:, None] * block.stride + bases).reshape(-1).to(key_dtype)
        self._starts = starts
        """Each owner's first key for each table."""
        self._bounds = torch.cat([starts, starts.new_tensor([num_keys])])
        by_place = owners.view(-1, ranks_per_host).t().reshape(-1)
        self._positions = by_place.argsort() if 1 < ranks_per_host < num_owners else None
        """Each owner's place in key order; `None` if key order is owner order."""

    def find(self, features: KeyedJaggedTensor) -> NeededRows:
        """Return the distinct rows that the block's features need."""
        lengths = features.lengths().view(len(self._block.features), features.stride())
        keys = self._keys(features.values().long(), lengths.sum(dim=1)).to(self._bounds.dtype)
        if self._block.pooling == "NONE":
            return self.distinct(keys)
        weights, is_mean = features.weights_or_none(), self._block.pooling == "MEAN"
        weights = None if weights is None else weights.float()
        sources, weights = sources_of_bags(lengths, weights, keys.numel(), is_mean=is_mean)
        sums = RowSum(keys, sources, weights, finds_places=True)
        num_features, batch_size = lengths.shape
        by_feature = transposed(batch_size, num_features, keys.device, torch.int32)
        bag_lengths, places, weights = torch.ops.fbgemm.permute_1D_sparse_data(
            by_feature, lengths.reshape(-1), sums.places, weights, keys.numel()
        )
        by_sample = Bags(num_features, bag_lengths, weights)
        return NeededRows(sums, places, self._counts(sums), by_sample)

    def distinct(self, keys: torch.Tensor) -> NeededRows:
        """Return the distinct rows among ``keys``."""
        sums = RowSum(keys.to(self._bounds.dtype), finds_places=True)
        return NeededRows(sums, sums.places, self._counts(sums), bags=None)

    def ids(self, needed: NeededRows) -> torch.Tensor:
        """Return distinct rows' numbers in their owners' shards."""
        keys, counts = needed.sums.keys, needed.counts.reshape(-1)
        starts = self._starts.narrow(0, needed.first_owner * needed.counts.shape[1], counts.numel())
        return (keys - repeated(starts, counts, keys.numel())).int()

    def _counts(self, sums: RowSum) -> torch.Tensor:
        return torch.searchsorted(sums.keys, self._bounds).diff().view(self._num_owners, -1)

    def _keys(self, ids: torch.Tensor, ids_per_feature: torch.Tensor) -> torch.Tensor:
        per_id = repeated(self._of_features, ids_per_feature, ids.numel())
        bases, rows, others, *spread = per_id.unbind(dim=1)
        if spread:
            steps, num_rows = spread
            ids = ids * steps % num_rows
        owners = ids // rows
        keys = torch.addcmul(ids + bases, owners, others)
        if self._positions is not None:
            keys += (self._positions[owners] - owners) * self._block.stride
        return keys


def part_by_part(lists: Sequence[torch.Tensor], sizes: Sequence[Sequence[int]]) -> torch.Tensor:
    """Join lists cut into equally many parts: all first parts, then all second ones, ...

    Example:
        >>> import torch
        >>> from torchrec_2dsp.shard.row_exchange.requests import part_by_part
        >>> part_by_part([torch.tensor([1, 2]), torch.tensor([3, 4, 5])], [[1, 1], [2, 1]])
        tensor([1, 3, 4, 2, 5])
    """
    if len(lists) == 1:
        return lists[0]
    parts = [
        values.split(list(part_sizes)) for values, part_sizes in zip(lists, sizes, strict=True)
    ]
    return torch.cat([part for level in zip(*parts, strict=True) for part in level])


def pool_rows(rows: torch.Tensor, needed: NeededRows) -> torch.Tensor:
    """Give every occurrence its row, and sum the bags.

    Returns `[batch, features x dim]` for bags, `[ids, dim]` for a sequence. The backward adds up
    one gradient per row.
    """
    weights = None if needed.bags is None else needed.bags.weights
    pooled: torch.Tensor = _Pooled.apply(rows, needed, weights)  # pyright: ignore[reportAssignmentType]
    if needed.bags is None:
        return pooled
    return pooled.view(-1, needed.bags.num_features * rows.shape[1])


class _Pooled(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, needed: NeededRows, weights: torch.Tensor | None
    ) -> torch.Tensor:
        ctx.sums = needed.sums
        if needed.bags is None:
            return rows.index_select(0, needed.places)
        if ctx.needs_input_grad[2]:
            ctx.save_for_backward(rows, needed.places, needed.bags.lengths)
        # Rows may have arrived in 16 bits, and sums in 16 bits would be rounded at each addition.
        starts = starts_of(needed.bags.lengths)
        return sum_bags(rows.float(), needed.places, starts, weights).to(rows.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, torch.Tensor | None]:
        grad = grads[0].contiguous()
        of_weights = None
        if ctx.needs_input_grad[2]:
            rows, places, lengths = ctx.saved_tensors
            bags = torch.arange(len(lengths), device=places.device)
            per_id = repeated(bags, lengths, len(places))
            of_weights = (rows.index_select(0, places) * grad.index_select(0, per_id)).sum(dim=1)
        return ctx.sums.of(grad.float()).to(grad.dtype), None, of_weights


@dataclass(frozen=True)
class HostRows:
    """Rows that a host's ranks need from the owners with this rank's place on their hosts."""

    needed: NeededRows
    """The distinct rows; the occurrences are the ranks' requests, rank by rank. The counts are for
    those owners' rows, host by host."""
    given: torch.Tensor
    num_given: tuple[int, ...]
    num_taken: tuple[int, ...]

    def record_stream(self, stream: torch.Stream) -> None:
        """Keep the tensors alive for ``stream``."""
        self.given.record_stream(stream)  # pyright: ignore[reportArgumentType]
        self.needed.record_stream(stream)


def collected_in_host(
    numberings: Sequence[RowNumbering], needed: Sequence[NeededRows], host: dist.ProcessGroup
) -> list[HostRows]:
    """Collect a host's requests for rows, block by block, before they leave it.

    Collectives:
        Two all-to-alls on the host, waited for: the number of keys, and the keys.
    """
    num_places, place = dist.get_world_size(host), dist.get_rank(host)
    per_block = [of_block.counts.view(num_places, -1).sum(dim=1) for of_block in needed]
    num_taken = torch.stack(per_block, dim=1)
    num_given = torch.empty_like(num_taken)
    dist.all_to_all_single(num_given, num_taken, group=host)
    takes, gives = torch.stack([num_taken, num_given]).tolist()
    keys = _exchanged_keys([of_block.sums.keys for of_block in needed], takes, gives, host)
    of_blocks = []
    for block, (numbering, block_keys) in enumerate(zip(numberings, keys, strict=True)):
        of_host = numbering.distinct(block_keys)
        of_blocks.append(
            HostRows(
                of_host.of_place(place, num_places),
                num_given[:, block],
                num_given=tuple(of_rank[block] for of_rank in gives),
                num_taken=tuple(of_rank[block] for of_rank in takes),
            )
        )
    return of_blocks


def _exchanged_keys(
    keys: list[torch.Tensor],
    sent: list[list[int]],
    received: list[list[int]],
    host: dist.ProcessGroup,
) -> Sequence[torch.Tensor]:
    """Send keys to the ranks at their places; return the received keys, by block."""
    outgoing = part_by_part(keys, list(zip(*sent, strict=True)))
    incoming = outgoing.new_empty(sum(map(sum, received)))
    sizes = [[sum(of_rank) for of_rank in counts] for counts in (received, sent)]
    dist.all_to_all_single(incoming, outgoing, *sizes, group=host)
    of_blocks = [sum(of_block) for of_block in zip(*received, strict=True)]
    return part_by_part(incoming.split(sizes[0]), received).split(of_blocks)


class HostHandover(nn.Module):
    """Hands rows that have arrived at a host to the ranks that need them.

    Gradients return the same way, and are added by row.
    """

    def __init__(self, host: dist.ProcessGroup, device: torch.device) -> None:
        super().__init__()
        self._exchange = SequenceEmbeddingsAllToAll(host, [1] * host.size(), device)

    def forward(self, rows: torch.Tensor, of_host: HostRows) -> Awaitable[torch.Tensor]:
        """Start handing rows on.

        Collectives:
            One all-to-all on the host, waited for by what is returned; one more in the backward.
            They aren't quantised: inside a host bytes are cheap, and gradients are added exactly.
        """
        return self._exchange(
            pool_rows(rows, of_host.needed),
            lengths=of_host.given[None],
            input_splits=list(of_host.num_taken),
            output_splits=list(of_host.num_given),
        )


_LABEL = "## request rows ##"


@dataclass(frozen=True)
class Requested:
    """A batch's requests, block by block."""

    needed: list[NeededRows]
    of_host: list[HostRows] | None
    """The rows that this host's ranks need, if they ask together."""
    from_owners: list[NeededRows]
    """The rows that this rank has asked owners for."""
    num_asked: list[list[int]]
    """The number of these rows, by owner."""

    def weighed(self, weigh: Callable[[torch.Tensor], torch.Tensor]) -> "Requested":
        """Return these requests for bags with other weights, which ``weigh`` makes of theirs."""
        return replace(self, needed=[rows.weighed(weigh) for rows in self.needed])

    def record_stream(self, stream: torch.Stream) -> None:
        """Keep the tensors alive for ``stream``."""
        for rows in [*self.needed, *(self.of_host or [])]:
            rows.record_stream(stream)


class RowRequests(nn.Module):
    """A row-exchange sharding's input exchange: sends distinct ids to row owners."""

    def __init__(self, blocks: Sequence[RowBlock], owners: Peers, device: torch.device) -> None:
        super().__init__()
        self._blocks, self._sizes = blocks, [len(block.features) for block in blocks]
        num_owners = dist.get_world_size(owners.everyone)
        per_host = num_owners if owners.in_host is None else dist.get_world_size(owners.in_host)
        self._numberings = [RowNumbering(block, num_owners, per_host, device) for block in blocks]
        self._host = owners.in_host
        tables = [table for block in blocks for table in block.tables]
        group = owners.everyone if owners.across is None else owners.across
        num_asked = dist.get_world_size(group)
        self._keys = tables * num_asked
        self._exchange = KJTAllToAll(group, [len(tables)] * num_asked)
        narrow_ids(self._exchange, max(max(block.rows_per_owner) for block in blocks))
        self.requested: Requested | None = None
        """The last batch's requests; TorchRec's own row-wise input exchange keeps the id order the
        same way."""

    def forward(self, features: KeyedJaggedTensor) -> Awaitable[Awaitable[KeyedJaggedTensor]]:
        """Ask for a batch's rows.

        Returns all ranks' requests to this rank: a key per table, a bag per rank, with local ids.

        Collectives:
            TorchRec's input exchange, for one sample with all rows; before it two on
            the host, if its ranks ask together.
        """
        with record_function(_LABEL):
            parts = features.split(self._sizes)
            needed = [
                numbering.find(part)
                for numbering, part in zip(self._numberings, parts, strict=True)
            ]
            of_host = self._host and collected_in_host(self._numberings, needed, self._host)
            from_owners = needed if of_host is None else [rows.needed for rows in of_host]
            ids = [
                numbering.ids(rows)
                for numbering, rows in zip(self._numberings, from_owners, strict=True)
            ]
            counts = torch.cat([rows.counts for rows in from_owners], dim=1)
            # TorchRec would wait for this.
            by_owner = counts.tolist()
            parts = [iter(of_owner) for of_owner in by_owner]
            num_asked = [
                [sum(islice(part, len(block.tables))) for part in parts] for block in self._blocks
            ]
            self.requested = Requested(needed, of_host, from_owners, num_asked)
            request = KeyedJaggedTensor(
                keys=self._keys,
                values=part_by_part(ids, num_asked),
                lengths=counts.view(-1),
                stride=1,
                length_per_key=[*chain.from_iterable(by_owner)],
            )
        return self._exchange(request)
