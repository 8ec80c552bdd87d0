"""`RowWire`: all-to-alls of rows, in the types in which TorchRec's codecs let them travel."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torchrec.distributed.types import QuantizedCommCodec, QuantizedCommCodecs


@dataclass(frozen=True)
class TravellingRows:
    """Rows on their way."""

    values: torch.Tensor
    """As they travel, flat."""
    sent: torch.Tensor
    """Kept until it has left."""
    work: dist.Work
    dim: int
    """Columns of a row."""
    codec: QuantizedCommCodec[Any] | None
    context: Any
    """Of the codec."""

    def wait(self) -> torch.Tensor:
        """The rows, rank by rank: `[rows, dim]`."""
        self.work.wait()
        values = self.values
        if self.codec is not None:
            values = self.codec.decode(values, self.context)
        return values.view(-1, self.dim)


@dataclass(frozen=True)
class RowWire:
    """Between the ranks of a group."""

    group: dist.ProcessGroup
    codecs: QuantizedCommCodecs | None
    """`None` for rows that travel as they are."""

    def start_rows(
        self, rows: torch.Tensor, sent: Sequence[int], received: Sequence[int]
    ) -> TravellingRows:
        """Send rows of tables.

        Args:
            rows: those of this rank, by the rank that gets them.
            sent: how many each rank gets.
            received: how many each rank has for this one.

        Collectives:
            One all-to-all, not waited for.
        """
        return self._start(rows, sent, received, self.codecs and self.codecs.forward)

    def start_gradients(
        self, rows: torch.Tensor, sent: Sequence[int], received: Sequence[int]
    ) -> TravellingRows:
        """The same for gradients, which may have a codec of their own."""
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
            sizes = [[codec.calc_quantized_size(of, context) for of in one] for one in sizes]
        arriving = values.new_empty(sum(sizes[0]))
        work = dist.all_to_all_single(arriving, values, *sizes, group=self.group, async_op=True)
        assert work is not None
        return TravellingRows(arriving, values, work, dim, codec, context)
