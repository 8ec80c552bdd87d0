"""`RowWire`: all-to-alls of rows and their gradients, encoded by TorchRec's codecs."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torchrec.distributed.types import QuantizedCommCodec, QuantizedCommCodecs


@dataclass(frozen=True)
class TravellingRows:
    """Rows on their way to this rank."""

    values: torch.Tensor
    """The rows as they travel, encoded and flat."""
    sent: torch.Tensor
    """The send buffer, kept alive until it has been sent."""
    work: dist.Work
    dim: int
    """Columns of a row."""
    codec: QuantizedCommCodec[Any] | None
    context: Any
    """The codec's context."""

    def wait(self) -> torch.Tensor:
        """The rows in the order of their senders, after waiting for them: `[rows, dim]`."""
        self.work.wait()
        values = self.values
        if self.codec is not None:
            values = self.codec.decode(values, self.context)
        return values.view(-1, self.dim)


@dataclass(frozen=True)
class RowWire:
    """Sends rows and their gradients between the ranks of a group."""

    group: dist.ProcessGroup
    codecs: QuantizedCommCodecs | None
    """How rows and gradients are encoded; `None` if they travel as they are."""

    def start_rows(
        self, rows: torch.Tensor, sent: Sequence[int], received: Sequence[int]
    ) -> TravellingRows:
        """Send rows of tables.

        Args:
            rows: the rows that this rank sends, in the order of the ranks that get them.
            sent: how many rows each rank gets.
            received: how many rows each rank has for this one.

        Collectives:
            One all-to-all, not waited for.
        """
        return self._start(rows, sent, received, self.codecs and self.codecs.forward)

    def start_gradients(
        self, rows: torch.Tensor, sent: Sequence[int], received: Sequence[int]
    ) -> TravellingRows:
        """Send gradients of rows as `start_rows` sends rows; their codec may be another one."""
        return self._start(rows, sent, received, self.codecs and self.codecs.backward)

    def _start(
        self,
        rows: torch.Tensor,
        sent: Sequence[int],
        received: Sequence[int],
        codec: QuantizedCommCodec[Any] | None,
    ) -> TravellingRows:
        dim = rows.shape[1]
        values, context = rows.reshape(-1), None
        sizes = [[dim * count for count in counts] for counts in (received, sent)]
        if codec is not None:
            context = codec.create_context()
            values = codec.encode(values, context)
            sizes = [
                [codec.calc_quantized_size(size, context) for size in of_ranks]
                for of_ranks in sizes
            ]
        arriving = values.new_empty(sum(sizes[0]))
        work = dist.all_to_all_single(arriving, values, *sizes, group=self.group, async_op=True)
        assert work is not None
        return TravellingRows(arriving, values, work, dim, codec, context)
