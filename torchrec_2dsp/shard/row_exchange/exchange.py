"""`RowFetch`: a row-exchange sharding's output exchange, and a batch's context.

TorchRec's row-wise sharding sends every bag's partial sums to its sample's rank. Here owners
look up the requested rows and send them to the ranks that asked, which pool them. In the
backward, one gradient per distinct row returns to its owner.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import nn
from torchrec.distributed.types import Awaitable, QuantizedCommCodecs
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_2dsp._compat.fbgemm import starts_of
from torchrec_2dsp._compat.torchrec import (
    EmbeddingShardingContext,
    SequenceEmbeddingsAllToAll,
    SequenceShardingContext,
)
from torchrec_2dsp.comms.groups import Peers
from torchrec_2dsp.comms.row_wire import RowWire
from torchrec_2dsp.shard.row_exchange.journey import RowJourney, RowTraffic
from torchrec_2dsp.shard.row_exchange.lookup import OwnedRows, RowLookup, counts_of, num_by_rank
from torchrec_2dsp.shard.row_exchange.requests import HostHandover, Requested, RowBlock, pool_rows


@dataclass(kw_only=True)
class RowContext(EmbeddingShardingContext):
    """TorchRec's batch context in one sharding, with the rows that the batch needs."""

    requested: Requested
    journeys: list[RowJourney] = field(default_factory=list)
    """The rows' journeys, block by block, if some rows come early."""
    before: list[RowJourney] = field(default_factory=list)
    """The last batch's journeys, whose gradients may lag behind this batch's lookup."""

    @property
    def comes_by_journeys(self) -> bool:
        """True if early rows are in flight; the others are read when they are sent."""
        return bool(self.journeys) and all(journey.has_begun for journey in self.journeys)

    def record_stream(self, stream: torch.Stream) -> None:
        """Keep the tensors alive for ``stream``."""
        super().record_stream(stream)
        self.requested.record_stream(stream)


@dataclass(kw_only=True)
class SequenceRowContext(RowContext, SequenceShardingContext):
    """A `RowContext` for sequences."""


class RowFetch(nn.Module):
    """A row-exchange sharding's output exchange: sends rows to the ranks that need them."""

    def __init__(
        self,
        blocks: Sequence[RowBlock],
        owners: Peers,
        device: torch.device,
        codecs: Sequence[QuantizedCommCodecs | None],
    ) -> None:
        super().__init__()
        asking = owners.everyone if owners.across is None else owners.across
        self._asking = asking
        self._wires = [RowWire(asking, of_block) for of_block in codecs]
        self._exchanges = nn.ModuleList(
            SequenceEmbeddingsAllToAll(
                asking, [len(block.tables)] * asking.size(), device, of_block
            )
            for block, of_block in zip(blocks, codecs, strict=True)
        )
        self._in_host = owners.in_host and HostHandover(owners.in_host, device)

    def forward(self, owned: OwnedRows, sharding_ctx: RowContext) -> "PooledRows":
        """Start the fetch.

        Collectives:
            One all-to-all for each block, waited for by the returned awaitable; one more in the
            backward. If a host's ranks ask together, equally many inside the host.
        """
        requested = sharding_ctx.requested
        if sharding_ctx.comes_by_journeys:
            fetching = [journey.fetch() for journey in sharding_ctx.journeys]
            return PooledRows(fetching, requested, self._in_host)
        num_asked, num_given = requested.num_asked, num_by_rank(owned.counts)
        fetching = [
            exchange(rows, lengths=counts, input_splits=num_coming, output_splits=num_leaving)
            for exchange, rows, counts, num_coming, num_leaving in zip(
                self._exchanges, owned, owned.counts, num_asked, num_given, strict=True
            )
        ]
        return PooledRows(fetching, requested, self._in_host)

    def journeys(
        self,
        lookup: RowLookup,
        asked_ids: KeyedJaggedTensor,
        requested: Requested,
        running: KeyedJaggedTensor,
        running_ctx: RowContext,
        expect: Callable[[RowJourney], None],
    ) -> list[RowJourney]:
        """Let a batch's rows come early, and the previous batch's gradients lag.

        Returns a journey per block; none on a rank that exchanges with no other rank.

        Collectives:
            `RowJourney`'s and `RowJourney.let_lag`'s, for each block.
        """
        if self._asking.size() == 1:
            return []
        parts = lookup.parts(asked_ids)
        counts = [counts_of(ids) for _, ids in parts]
        changed = [journey.numbers for journey in running_ctx.journeys] or [
            kernel.row_numbers(ids) for kernel, ids in lookup.parts(running)
        ]
        if running_ctx.before:
            # These gradients may lag until this batch's early rows are in flight.
            before = [journey.numbers for journey in running_ctx.before]
            changed = [torch.cat(numbers) for numbers in zip(changed, before, strict=True)]
        journeys = []
        for block, num_asked in enumerate(num_by_rank(counts)):
            (kernel, ids), needed = parts[block], requested.from_owners[block]
            traffic = RowTraffic(
                numbers=kernel.row_numbers(ids),
                num_asked=num_asked,
                num_wanted=requested.num_asked[block],
                starts=starts_of(torch.cat([counts[block].sum(dim=0), needed.counts.sum(dim=1)])),
            )
            wire = self._wires[block]
            journeys.append(RowJourney(kernel, traffic, changed[block], wire, expect))
            if running_ctx.journeys:
                running_ctx.journeys[block].let_lag(traffic.numbers)
        return journeys


class PooledRows(Awaitable[torch.Tensor]):
    """Fetched rows, then summed by bag, `[batch, columns]`, or spread, `[ids, dim]`."""

    def __init__(
        self,
        fetching: Sequence[Awaitable[torch.Tensor]],
        requested: Requested,
        in_host: HostHandover | None,
    ) -> None:
        super().__init__()
        self._fetching = fetching
        self._requested = requested
        self._in_host = in_host

    def _wait_impl(self) -> torch.Tensor:
        fetching, needed = self._fetching, self._requested.needed
        if self._in_host is not None:
            assert self._requested.of_host is not None
            fetching = [
                self._in_host(fetched.wait(), of_host)
                for fetched, of_host in zip(fetching, self._requested.of_host, strict=True)
            ]
        pooled = [pool_rows(rows.wait(), of) for rows, of in zip(fetching, needed, strict=True)]
        is_sequence = needed[0].bags is None
        return pooled[0] if len(pooled) == 1 else torch.cat(pooled, dim=0 if is_sequence else 1)


def row_exchanges(
    lookups: Sequence[nn.Module], output_dists: Sequence[nn.Module]
) -> list[tuple[RowLookup, RowFetch] | None]:
    """Return each sharding's lookup and output exchange if it exchanges rows, else `None`."""
    return [
        (cast(RowLookup, lookup), output_dist) if isinstance(output_dist, RowFetch) else None
        for lookup, output_dist in zip(lookups, output_dists, strict=True)
    ]
