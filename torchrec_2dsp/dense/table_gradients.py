"""`TableGradients`: a hook of DDP's for data-parallel tables, of which a batch touches few rows.

Every rank has the gradient of a whole table, and most of its rows are zero. For each bucket: all
ranks tell each other how many rows they have touched; then each sends these, and all add up the
same. Where that would be more than an all-reduce, it is an all-reduce.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist

from torchrec_2dsp.dense.gradient_report import GradientReport

_NUMBER_BYTES = 4
"""Rows travel with their numbers in int32."""


class TableSize(NamedTuple):
    """The size of a data-parallel table."""

    num_rows: int
    dim: int


class TableGradients:
    """Means of the gradients of data-parallel tables over all ranks, by the rows they touch.

    The numbers are those of an all-reduce, up to the order in which ranks are added.
    """

    def __init__(self, tables: Mapping[int, Sequence[TableSize]], group: dist.ProcessGroup) -> None:
        """
        Args:
            tables: the tables in each parameter, which has one after the other, by its id.
            group: the ranks that add up.
        """
        self._tables, self._group = tables, group
        self._num_ranks = dist.get_world_size(group)
        self.total = GradientReport()
        """What this rank has sent so far."""

    def reduce(self, _: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Replace the gradients of a bucket by their mean over the ranks; DDP calls it.

        Collectives:
            One all-gather of 8 bytes for each table, waited for; then an all-gather of rows, or an
            all-reduce, not waited for.
        """
        buffer = bucket.buffer()
        tables = list(self._split(bucket))
        touched = [table.any(dim=1).nonzero().view(-1) for table in tables]
        counts = self._gather_counts(touched, buffer.device)
        message = _MessageForm([table.shape[1] for table in tables], buffer.dtype)
        capacity = max(message.num_bytes(of_rank) for of_rank in counts)
        gathered_bytes = float((self._num_ranks - 1) * capacity)
        dense_bytes = 2.0 * (self._num_ranks - 1) / self._num_ranks * buffer.nbytes
        self.total += GradientReport(
            num_bytes=min(gathered_bytes, dense_bytes), dense_bytes=dense_bytes
        )
        if dense_bytes <= gathered_bytes:
            work = dist.all_reduce(buffer.div_(self._num_ranks), group=self._group, async_op=True)
            assert work is not None
            return work.get_future().then(lambda future: future.value()[0])
        if capacity == 0:
            # No rank has touched a row, so the gradients of all are zero, and nothing is sent.
            untouched: torch.futures.Future[torch.Tensor] = torch.futures.Future(
                devices=[buffer.device] if buffer.is_cuda else None
            )
            untouched.set_result(buffer)
            return untouched
        own = buffer.new_empty(capacity, dtype=torch.uint8)
        message.write(
            own, [(rows, table[rows]) for rows, table in zip(touched, tables, strict=True)]
        )
        received = own.new_empty(self._num_ranks * capacity)
        work = dist.all_gather_into_tensor(received, own, group=self._group, async_op=True)
        assert work is not None

        def add_up(arrived: torch.futures.Future[object]) -> torch.Tensor:
            arrived.wait()
            buffer.zero_()
            # In the order of ranks, so that all ranks compute the same bits.
            for of_rank, sent in zip(counts, received.split(capacity), strict=True):
                parts = message.read(sent, of_rank)
                for table, (rows, gradients) in zip(tables, parts, strict=True):
                    table.index_add_(0, rows, gradients / self._num_ranks)
            return buffer

        return work.get_future().then(add_up)

    def _split(self, bucket: dist.GradBucket) -> Iterator[torch.Tensor]:
        """The gradients of a bucket by table, as its own memory, a row for each row of a table."""
        start = 0
        for param in bucket.parameters():
            for num_rows, dim in self._tables[id(param)]:
                size = num_rows * dim
                yield bucket.buffer()[start : start + size].view(num_rows, dim)
                start += size

    def _gather_counts(
        self, touched: Sequence[torch.Tensor], device: torch.device
    ) -> list[list[int]]:
        """How many rows of each table each rank has touched."""
        own = torch.tensor([rows.numel() for rows in touched], device=device)
        counts = own.new_empty(self._num_ranks * own.numel())
        dist.all_gather_into_tensor(counts, own, group=self._group)
        return counts.view(self._num_ranks, -1).tolist()


@dataclass(frozen=True)
class _MessageForm:
    """The form of a rank's message: the numbers of its rows by table, then their gradients."""

    dims: Sequence[int]
    """The columns of each table."""

    dtype: torch.dtype
    """The type of gradients."""

    def num_bytes(self, counts: Sequence[int]) -> int:
        """How long a message with so many rows of each table is."""
        size = self.dtype.itemsize
        own = sum(
            count * (_NUMBER_BYTES + dim * size)
            for count, dim in zip(counts, self.dims, strict=True)
        )
        # Ranks' messages are read in place, one after the other.
        return -(-own // 8) * 8

    def write(
        self, message: torch.Tensor, parts: Sequence[tuple[torch.Tensor, torch.Tensor]]
    ) -> None:
        """Write rows, and their gradients, of each table."""
        start = 0
        numbers = [rows.int() for rows, _ in parts]
        for piece in (*numbers, *(gradients for _, gradients in parts)):
            piece_bytes = piece.contiguous().view(-1).view(torch.uint8)
            message[start : start + piece_bytes.numel()] = piece_bytes
            start += piece_bytes.numel()
        message[start:] = 0

    def read(
        self, message: torch.Tensor, counts: Sequence[int]
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Rows, and their gradients, of each table."""
        numbers_end = _NUMBER_BYTES * sum(counts)
        numbers = message[:numbers_end].view(torch.int32).split(list(counts))
        parts, start = [], numbers_end
        for rows, count, dim in zip(numbers, counts, self.dims, strict=True):
            end = start + count * dim * self.dtype.itemsize
            parts.append((rows, message[start:end].view(self.dtype).view(count, dim)))
            start = end
        return parts
