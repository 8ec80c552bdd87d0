"""`RowExchange`: the row gradients of several ranks, brought together while they go on computing.

At the lookup, ranks tell each other how many rows they touch; in the backward, they send the rows
and their gradients; where the rows are needed next, each waits, and adds what all have sent.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from torchrec_2dsp.comms.collectives import Gathered, start_all_gather_ragged
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
        if self._group is None or self.num_ranks == 1:
            return InFlight(tuple(mine), learning_rate, 0, divisor)
        parts, num_bytes = [], announced.headers[0].nbytes
        for block, one, by_rank in zip(self._blocks, mine, zip(*counts, strict=True), strict=True):
            keys, grads = one.keys.to(block.key_dtype), one.grads.to(self._transport)
            num_bytes += keys.nbytes + grads.nbytes
            parts.append(
                _BlockInFlight(
                    start_all_gather_ragged(keys, by_rank, self._group),
                    start_all_gather_ragged(grads, by_rank, self._group),
                )
            )
        return InFlight(tuple(parts), learning_rate, num_bytes * (self.num_ranks - 1), divisor)


@dataclass(frozen=True)
class _BlockInFlight:
    """The gradients of a block, of all ranks."""

    keys: Gathered
    grads: Gathered

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

    def wait(self) -> None:
        """Until all ranks' gradients have come."""
        for part in self.parts:
            if isinstance(part, _BlockInFlight):
                part.keys.wait()
                part.grads.wait()

    def collect(self) -> tuple[BlockGradients, ...]:
        """Wait for all ranks' gradients; their sums."""
        return tuple(
            part if isinstance(part, BlockGradients) else part.collect(self.divisor)
            for part in self.parts
        )
