"""`RowRequests`: a rank asks owners for the distinct rows of its batch."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import record_function
from torchrec.distributed.types import Awaitable
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_2dsp._compat.torchrec import KJTAllToAll
from torchrec_2dsp.comms.mesh_groups import Peers
from torchrec_2dsp.shard.row_exchange.needed_rows import (
    NeededRows,
    RowBlock,
    RowNumbering,
    part_by_part,
)
from torchrec_2dsp.shard.row_exchange.per_host import HostRequests, HostRows

_LABEL = "## request rows ##"
"""In profiles."""


@dataclass(frozen=True)
class Requested:
    """What has been asked for a batch, block by block."""

    needed: list[NeededRows]
    """What this rank needs."""
    of_host: list[HostRows] | None
    """What the ranks of this host need, if they ask together."""

    @property
    def from_owners(self) -> list[NeededRows]:
        """What this rank has asked owners for."""
        return self.needed if self.of_host is None else [rows.needed for rows in self.of_host]

    def record_stream(self, stream: torch.Stream) -> None:
        """Keep the tensors alive for ``stream``."""
        for rows in [*self.needed, *(self.of_host or [])]:
            rows.record_stream(stream)


class RowRequests(nn.Module):
    """TorchRec's input exchange of a row-exchange sharding: distinct rows, to their owners."""

    def __init__(self, blocks: Sequence[RowBlock], owners: Peers, device: torch.device) -> None:
        """
        Args:
            blocks: kernel by kernel.
            owners: the ranks that have a part of the tables; layered if ranks of a host are to
                ask together.
            device: of the batches.
        """
        super().__init__()
        self._sizes = [len(block.features) for block in blocks]
        num_owners = dist.get_world_size(owners.everyone)
        per_host = num_owners if owners.in_host is None else dist.get_world_size(owners.in_host)
        self._numberings = [RowNumbering(block, num_owners, per_host, device) for block in blocks]
        self._host = owners.in_host and HostRequests(self._numberings, owners.in_host)
        tables = [table for block in blocks for table in block.tables]
        group = owners.everyone if owners.across is None else owners.across
        num_asked = dist.get_world_size(group)
        self._keys = tables * num_asked
        self._exchange = KJTAllToAll(group, [len(tables)] * num_asked)
        self.requested: Requested | None = None
        """What has been asked for the batch of the last call; TorchRec's own input exchange of
        row-wise tables keeps the order of ids in the same way."""

    def forward(self, features: KeyedJaggedTensor) -> Awaitable[Awaitable[KeyedJaggedTensor]]:
        """Ask for the rows of a batch.

        Args:
            features: those of the blocks, in their order.

        Returns:
            What all ranks ask this one for: a key for each table, a bag for each rank, in it the
            ids of rows in the local shard.

        Collectives:
            Those of TorchRec's input exchange, for one sample with all rows; before them two on
            the host, if its ranks ask together.
        """
        with record_function(_LABEL):
            parts = features.split(self._sizes)
            needed = [
                numbering.find(part)
                for numbering, part in zip(self._numberings, parts, strict=True)
            ]
            requested = Requested(needed, self._host and self._host.collect(needed))
            self.requested = requested
            needed = requested.from_owners
            ids = [
                numbering.ids(rows)
                for numbering, rows in zip(self._numberings, needed, strict=True)
            ]
            sizes = [rows.counts.sum(dim=1).tolist() for rows in needed] if len(ids) > 1 else []
            request = KeyedJaggedTensor(
                keys=self._keys,
                values=part_by_part(ids, sizes),
                lengths=torch.cat([rows.counts for rows in needed], dim=1).reshape(-1),
                stride=1,
            )
        return self._exchange(request)
