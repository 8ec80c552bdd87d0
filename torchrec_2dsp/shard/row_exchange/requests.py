"""`RowRequests`: a rank asks owners for its batch's distinct rows.

Where a group spans hosts, a row that several ranks of a host need crosses once. The rank with an
owner's place on its own host asks that owner: the host's ranks first ask *it*, it asks for each
distinct row, and hands the rows on. Gradients return the same way and are added there.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import record_function
from torchrec.distributed.types import Awaitable
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_2dsp._compat.torchrec import KJTAllToAll, SequenceEmbeddingsAllToAll
from torchrec_2dsp.comms.mesh_groups import Peers
from torchrec_2dsp.shard.row_exchange.needed_rows import (
    NeededRows,
    RowBlock,
    RowNumbering,
    part_by_part,
    pool_rows,
)


@dataclass(frozen=True)
class HostRows:
    """Rows that a host's ranks need from the owners with this rank's place on their hosts."""

    needed: NeededRows
    """The distinct rows; the occurrences are what was asked for, rank by rank. Its counts are of
    those owners, host by host."""
    given: torch.Tensor
    num_given: tuple[int, ...]
    num_taken: tuple[int, ...]

    def record_stream(self, stream: torch.Stream) -> None:
        """Keep the tensors alive for ``stream``."""
        self.given.record_stream(stream)  # pyright: ignore[reportArgumentType]
        self.needed.record_stream(stream)


class HostRequests:
    """Collects requests for rows inside a host, before they leave it."""

    def __init__(self, numberings: Sequence[RowNumbering], host: dist.ProcessGroup) -> None:
        self._numberings = tuple(numberings)
        self._host = host

    def collect(self, needed: Sequence[NeededRows]) -> list[HostRows]:
        """Ask for the rows that each block needs.

        Collectives:
            Two all-to-alls on the host, waited for: how many keys come, and the keys.
        """
        num_places, place = dist.get_world_size(self._host), dist.get_rank(self._host)
        per_block = [of_block.counts.view(num_places, -1).sum(dim=1) for of_block in needed]
        num_taken = torch.stack(per_block, dim=1)
        num_given = torch.empty_like(num_taken)
        dist.all_to_all_single(num_given, num_taken, group=self._host)
        takes, gives = torch.stack([num_taken, num_given]).tolist()
        keys = self._exchange([of_block.sums.keys for of_block in needed], takes, gives)
        of_blocks = []
        for block, (numbering, block_keys) in enumerate(zip(self._numberings, keys, strict=True)):
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

    def _exchange(
        self, keys: list[torch.Tensor], sent: list[list[int]], received: list[list[int]]
    ) -> Sequence[torch.Tensor]:
        """Send keys to the ranks at their places; return those received, by block."""
        outgoing = part_by_part(keys, list(zip(*sent, strict=True)))
        incoming = outgoing.new_empty(sum(map(sum, received)))
        sizes = [[sum(of_rank) for of_rank in counts] for counts in (received, sent)]
        dist.all_to_all_single(incoming, outgoing, *sizes, group=self._host)
        of_blocks = [sum(of_block) for of_block in zip(*received, strict=True)]
        return part_by_part(incoming.split(sizes[0]), received).split(of_blocks)


class HostHandover(nn.Module):
    """Hands rows that have come to a host to the ranks that need them.

    Gradients return the same way, and are added by row.
    """

    def __init__(self, host: dist.ProcessGroup, device: torch.device) -> None:
        super().__init__()
        self._exchange = SequenceEmbeddingsAllToAll(host, [1] * host.size(), device)

    def forward(self, rows: torch.Tensor, of_host: HostRows) -> Awaitable[torch.Tensor]:
        """Start to hand rows on.

        Collectives:
            One all-to-all on the host, waited for by what is returned; one more in the backward.
            They are not quantised: inside a host, bytes are cheap, and gradients are added exactly.
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

    @property
    def from_owners(self) -> list[NeededRows]:
        """The rows that this rank has asked owners for."""
        return self.needed if self.of_host is None else [rows.needed for rows in self.of_host]

    def record_stream(self, stream: torch.Stream) -> None:
        """Keep the tensors alive for ``stream``."""
        for rows in [*self.needed, *(self.of_host or [])]:
            rows.record_stream(stream)


class RowRequests(nn.Module):
    """TorchRec's input exchange of a row-exchange sharding: sends distinct ids to row owners."""

    def __init__(self, blocks: Sequence[RowBlock], owners: Peers, device: torch.device) -> None:
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
        """Ask for a batch's rows.

        Returns all ranks' requests to this one: a key per table, a bag per rank, with local ids.

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
