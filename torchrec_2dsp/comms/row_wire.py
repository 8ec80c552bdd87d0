"""Rows and ids on the wire: codecs for TorchRec's exchanges, and all-to-alls of rows."""

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torchrec.distributed.types import QuantizedCommCodec, QuantizedCommCodecs
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_2dsp._compat.torchrec import KJTAllToAll
from torchrec_2dsp.codecs.ids import num_id_bytes, pack_ids, unpack_ids
from torchrec_2dsp.codecs.rows import RowCodec, Transport
from torchrec_2dsp.comms.counting import note_encoded

_FLOAT_BYTES = torch.float32.itemsize


class StockCodec(QuantizedCommCodec[None]):
    """Encodes flat tensors, which consist of rows of ``dim`` numbers."""

    def __init__(self, codec: RowCodec, dim: int) -> None:
        self._codec, self._dim = codec, dim

    def encode(self, input_tensor: torch.Tensor, ctx: None = None) -> torch.Tensor:
        """Encode flat rows."""
        encoded = self._codec.encode(input_tensor.reshape(-1, self._dim)).view(-1)
        note_encoded(_FLOAT_BYTES * input_tensor.numel(), encoded.nbytes)
        return encoded

    def decode(self, input_grad: torch.Tensor, ctx: None = None) -> torch.Tensor:
        """Decode flat rows."""
        encoded = input_grad.reshape(-1, self._codec.columns(self._dim))
        return self._codec.decode(encoded, self._dim).view(-1)

    @property
    def quantized_dtype(self) -> torch.dtype:
        """The encoded numbers' type."""
        return self._codec.dtype

    def calc_quantized_size(self, input_len: int, ctx: None = None) -> int:
        """Return the number of encoded numbers for ``input_len`` numbers."""
        return input_len // self._dim * self._codec.columns(self._dim)

    def create_context(self) -> None:
        """Return `None`: both ends know all they need."""
        return

    def padded_size(
        self, input_tensor: torch.Tensor, dim_per_rank: list[int], my_rank: int, qcomm_ctx: None
    ) -> tuple[int, int]:
        """Return the tensor's columns, which need no padding."""
        return input_tensor.shape[-1], 0


def stock_codecs(transport: Transport, dim: int) -> QuantizedCommCodecs | None:
    """Return the codecs for rows of ``dim`` numbers and their gradients; `None` for plain fp32."""
    if transport is Transport.FP32:
        return None
    codec: Any = StockCodec(transport.codec_for(dim), dim)
    return QuantizedCommCodecs(forward=codec, backward=codec)


@dataclass(frozen=True)
class TravellingRows:
    """Rows in flight to this rank."""

    values: torch.Tensor
    """The rows, encoded and flat."""
    sent: torch.Tensor
    """The send buffer, which must outlive the collective."""
    work: dist.Work
    dim: int
    codec: QuantizedCommCodec[Any] | None
    context: Any

    def wait(self) -> torch.Tensor:
        """Wait, then return the rows in their senders' order: `[rows, dim]`."""
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
    """The codecs for rows and gradients; `None` sends them unencoded."""

    def start_rows(
        self, rows: torch.Tensor, sent: Sequence[int], received: Sequence[int]
    ) -> TravellingRows:
        """Send rows, ordered by receiving rank; ``sent`` and ``received`` count them by rank.

        Collectives:
            One all-to-all, not waited for.
        """
        return self._start(rows, sent, received, self.codecs and self.codecs.forward)

    def start_gradients(
        self, rows: torch.Tensor, sent: Sequence[int], received: Sequence[int]
    ) -> TravellingRows:
        """Send row gradients as `start_rows` sends rows, possibly with another codec."""
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


class NarrowIds(KeyedJaggedTensor):
    """A batch that gives TorchRec's exchange a row of bytes for each id, and takes such rows."""

    num_bytes: int

    @classmethod
    def of(cls, features: KeyedJaggedTensor, num_bytes: int) -> KeyedJaggedTensor:
        """Return the batch with ids in ``num_bytes``, or unchanged if they are as short."""
        if features.values().itemsize <= num_bytes:
            return features
        # A copy keeps the lengths and offsets that are already known.
        narrow = copy(features)
        narrow.__class__ = cls
        assert isinstance(narrow, cls)
        narrow.num_bytes = num_bytes
        return narrow

    def dist_tensors(self) -> list[torch.Tensor]:
        """Return the tensors to exchange."""
        lengths, ids, *others = super().dist_tensors()
        return [lengths, pack_ids(ids, self.num_bytes), *others]

    @staticmethod
    def dist_init(
        keys: list[str], tensors: list[torch.Tensor], *args: Any, **kwargs: Any
    ) -> KeyedJaggedTensor:
        """Build a batch from exchanged tensors."""
        lengths, packed, *others = tensors
        return KeyedJaggedTensor.dist_init(
            keys, [lengths, unpack_ids(packed), *others], *args, **kwargs
        )


def narrow_ids(exchange: KJTAllToAll, num_rows: int) -> None:
    """Let an exchange send ids of tables with up to ``num_rows`` in as few bytes as they need."""
    num_bytes = num_id_bytes(num_rows)
    # A hook, because TorchRec's pipelines replace `forward` by one that fuses exchanges.
    exchange.register_forward_pre_hook(lambda _, inputs: (NarrowIds.of(inputs[0], num_bytes),))
