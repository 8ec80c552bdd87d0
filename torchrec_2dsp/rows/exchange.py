"""`RowExchange`: the row gradients of several ranks, brought together while they go on computing.

At the lookup, ranks tell each other how many rows they touch; in the backward, they send the rows
and their gradients; where the rows are needed next, each waits, and adds what all have sent.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from torchrec_2dsp.errors import SyncError
from torchrec_2dsp.rows.blocks import Block
from torchrec_2dsp.rows.gradients import BlockGradients, RowSum


@dataclass(frozen=True)
class Announcement:
    """How many rows each rank touches, on its way."""

    headers: tuple[torch.Tensor, ...]
    """By rank: how many rows of each block, then the bits of the learning rate."""
    work: dist.Work | None

    def arrived(self) -> tuple[list[list[int]], float]:
        """Rows by rank, then by block; and the learning rate that all ranks have."""
        if self.work is not None:
            self.work.wait()
        headers = torch.stack(self.headers).cpu()
        rates = headers[:, -1].contiguous().view(torch.float64)
        # NaN stands for a rank that doesn't know it.
        known = rates[~rates.isnan()].unique()
        if known.numel() != 1:
            raise SyncError(
                f"ranks that hold the same rows have different learning rates {known.tolist()}; "
                "set the same schedule on every rank"
            )
        return headers[:, :-1].tolist(), float(known[0])


class RowExchange:
    """What one TBE tells its peers."""

    def __init__(
        self,
        blocks: Sequence[Block],
        device: torch.device,
        group: dist.ProcessGroup | None,
        transport: torch.dtype = torch.float32,
    ) -> None:
        """
        Args:
            blocks: of the TBE.
            device: where it is.
            transport: the type in which gradients travel. This rank rounds its own ones, too, so
                that all ranks add the same numbers.
            group: the ranks that hold the same rows, used by nothing else while rows travel.
        """
        self._blocks = tuple(blocks)
        self._device = device
        self._group = group
        self._transport = transport
        self.num_ranks = 1 if group is None else dist.get_world_size(group)
        """How many ranks' gradients are added."""
        self._rank = 0 if group is None else dist.get_rank(group)

    def announce(self, num_rows: Sequence[int], learning_rate: float) -> Announcement:
        """Tell the peers what this rank's gradients will look like.

        Args:
            num_rows: by block.
            learning_rate: what this rank knows of it.

        Collectives:
            One all-gather of 8 bytes per block and 8 bytes more, not waited for.
        """
        (rate,) = torch.tensor([learning_rate], dtype=torch.float64).view(torch.int64).tolist()
        header = torch.tensor([*num_rows, rate], device=self._device)
        if self.num_ranks == 1:
            return Announcement((header,), None)
        headers = tuple(torch.empty_like(header) for _ in range(self.num_ranks))
        work = dist.all_gather(list(headers), header, group=self._group, async_op=True)
        return Announcement(headers, work)

    def send(
        self, mine: Sequence[BlockGradients], announced: Announcement, divisor: int
    ) -> "InFlight":
        """Start the exchange.

        Args:
            mine: this rank's gradients, by block.
            announced: at the lookup.
            divisor: of the sum over ranks.

        Collectives:
            Two all-to-alls per block, of keys and of gradients, not waited for.
        """
        counts, learning_rate = announced.arrived()
        if self.num_ranks == 1:
            return InFlight(tuple(mine), learning_rate, 0, divisor)
        parts, num_bytes = [], announced.headers[0].nbytes
        for block, one, by_rank in zip(self._blocks, mine, zip(*counts, strict=True), strict=True):
            keys, grads = one.keys.to(block.key_dtype), one.grads.to(self._transport)
            num_bytes += keys.nbytes + grads.nbytes
            parts.append(_BlockInFlight(self._gather(keys, by_rank), self._gather(grads, by_rank)))
        return InFlight(tuple(parts), learning_rate, num_bytes * (self.num_ranks - 1), divisor)

    def _gather(self, mine: torch.Tensor, counts: Sequence[int]) -> "_Gathered":
        """The tensors of all ranks. Nothing is sent to oneself, and nothing copied for one peer."""
        num_others = self.num_ranks - 1
        values = mine.new_empty((sum(counts), *mine.shape[1:]))
        num_received = values.shape[0] - mine.shape[0]
        received = [0 if rank == self._rank else count for rank, count in enumerate(counts)]
        sent = [0 if rank == self._rank else mine.shape[0] for rank in range(self.num_ranks)]
        buffer = torch.cat([mine] * num_others) if num_others > 1 else mine
        work = dist.all_to_all_single(
            values[:num_received], buffer, received, sent, group=self._group, async_op=True
        )
        assert work is not None
        values[num_received:] = mine
        return _Gathered(values, buffer, work, tuple(counts), self._rank)


@dataclass(frozen=True)
class _Gathered:
    """Tensors of several ranks: those of the others in their order, then the own one."""

    values: torch.Tensor
    sent: torch.Tensor
    """Kept until it has left."""
    work: dist.Work
    counts: tuple[int, ...]
    """By rank."""
    rank: int

    def wait(self) -> torch.Tensor:
        """The values, all of which have come."""
        self.work.wait()
        return self.values

    def places(self) -> torch.Tensor:
        """Where the values of rank 0 stand, then those of rank 1, and so on."""
        others = [count for rank, count in enumerate(self.counts) if rank != self.rank]
        places = torch.arange(self.values.shape[0], device=self.values.device)
        parts = list(places.split([*others, self.counts[self.rank]]))
        parts.insert(self.rank, parts.pop())
        return torch.cat(parts)


@dataclass(frozen=True)
class _BlockInFlight:
    """The gradients of a block, of all ranks."""

    keys: _Gathered
    grads: _Gathered

    def collect(self, divisor: int) -> BlockGradients:
        # All ranks add in the order of ranks, so all get the same bits.
        keys, places = self.keys.wait().long(), self.keys.places()
        rows = RowSum(keys[places], places)
        grads = rows.of(self.grads.wait().float())
        return BlockGradients(rows.keys, grads if divisor == 1 else grads.div_(divisor))


@dataclass(frozen=True)
class InFlight:
    """One backward's gradients, on their way."""

    parts: tuple[_BlockInFlight | BlockGradients, ...]
    """By block; those of a single rank have arrived."""
    learning_rate: float
    """Of all ranks."""
    num_bytes: int
    """Bytes that this rank sends to others."""
    divisor: int

    def collect(self) -> tuple[BlockGradients, ...]:
        """Wait for all ranks' gradients; their sums."""
        return tuple(
            part if isinstance(part, BlockGradients) else part.collect(self.divisor)
            for part in self.parts
        )
