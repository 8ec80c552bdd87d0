"""`RowFetch`: a row-exchange sharding's output exchange, and a batch's context.

TorchRec's row-wise sharding sends every bag's partial sums to its sample's rank. Here owners
look up the requested rows, rows travel to the ranks that asked, and are pooled there. In the
backward, one gradient per distinct row returns to its owner.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn
from torchrec.distributed.types import Awaitable, QuantizedCommCodecs
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_2dsp._compat.torchrec import (
    EmbeddingShardingContext,
    SequenceEmbeddingsAllToAll,
    SequenceShardingContext,
)
from torchrec_2dsp.comms.groups import Peers
from torchrec_2dsp.comms.row_wire import RowWire
from torchrec_2dsp.shard.row_exchange.journey import AskedRows, RowJourney
from torchrec_2dsp.shard.row_exchange.lookup import OwnedRows, RowLookup
from torchrec_2dsp.shard.row_exchange.requests import HostHandover, Requested, RowBlock, pool_rows


@dataclass(kw_only=True)
class RowContext(EmbeddingShardingContext):
    """TorchRec's batch context in one sharding, with the rows that the batch needs."""

    requested: Requested
    journeys: list[RowJourney] = field(default_factory=list)
    """The rows' journeys, block by block, if some come early."""
    before: list[RowJourney] = field(default_factory=list)
    """The last batch's journeys, whose gradients may lag behind this batch's lookup."""

    def record_stream(self, stream: torch.Stream) -> None:
        """Keep the tensors alive for ``stream``."""
        super().record_stream(stream)
        self.requested.record_stream(stream)


@dataclass(kw_only=True)
class SequenceRowContext(RowContext, SequenceShardingContext):
    """A `RowContext` for sequences."""


class RowFetch(nn.Module):
    """A row-exchange sharding's output exchange: sends rows to ranks that need them."""

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
            One all-to-all for each block, waited for by what is returned; one more in the
            backward. If a host's ranks ask together, as many inside the host.
        """
        requested = sharding_ctx.requested
        if sharding_ctx.journeys and all(journey.has_begun for journey in sharding_ctx.journeys):
            pairs = zip(sharding_ctx.journeys, owned, strict=True)
            fetching = [journey.fetch(rows) for journey, rows in pairs]
            return PooledRows(fetching, requested, self._in_host)
        num_asked = [needed.counts.sum(dim=1) for needed in requested.from_owners]
        num_given = [counts.sum(dim=0) for counts in owned.counts]
        # All at once: on a GPU this waits for the device.
        splits = torch.stack([torch.stack(pair) for pair in zip(num_asked, num_given, strict=True)])
        fetching = [
            exchange(rows, lengths=counts, input_splits=num_coming, output_splits=num_leaving)
            for exchange, rows, counts, (num_coming, num_leaving) in zip(
                self._exchanges, owned, owned.counts, splits.tolist(), strict=True
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
        """Let a batch's rows come early, and the last batch's gradients lag.

        Returns a journey per block; none on a rank that exchanges with no other.

        Collectives:
            For each block, `RowJourney`'s and `RowJourney.let_lag`'s.
        """
        if self._asking.size() == 1:
            return []
        journeys = []
        pairs = zip(lookup.parts(asked_ids), lookup.parts(running), strict=True)
        for block, ((kernel, ids), (_, running_ids)) in enumerate(pairs):
            rows = AskedRows.of(kernel, ids)
            changed = kernel.row_numbers(running_ids)
            if running_ctx.before:
                # These gradients may lag until the early rows of this batch have set out.
                changed = torch.cat([changed, running_ctx.before[block].numbers])
            num_wanted = requested.from_owners[block].counts.sum(dim=1).tolist()
            wire = self._wires[block]
            journeys.append(RowJourney(kernel, rows, changed, num_wanted, wire, expect))
            if running_ctx.journeys:
                running_ctx.journeys[block].let_lag(rows.numbers)
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
