"""`StockCodec`: a codec of rows, as TorchRec's exchanges want one."""

from typing import Any

import torch
from torchrec.distributed.types import QuantizedCommCodec, QuantizedCommCodecs

from torchrec_2dsp.codecs.rows import RowCodec
from torchrec_2dsp.codecs.transport import Transport
from torchrec_2dsp.comms.encoded_bytes import note_encoded

_FLOAT_BYTES = torch.float32.itemsize


class StockCodec(QuantizedCommCodec[None]):
    """Encodes flat tensors, which are rows of ``dim`` numbers one after another.

    Example:
        >>> import torch
        >>> from torchrec_2dsp.codecs.rows import IntegerRows
        >>> from torchrec_2dsp.comms.stock_codec import StockCodec
        >>> codec = StockCodec(IntegerRows(bits=8), dim=64)
        >>> codec.encode(torch.zeros(3 * 64)).numel(), codec.calc_quantized_size(3 * 64)
        (198, 198)
    """

    def __init__(self, codec: RowCodec, dim: int) -> None:
        """
        Args:
            codec: how a row looks.
            dim: how many numbers a row has; all that is sent is a multiple of it.
        """
        self._codec, self._dim = codec, dim

    def encode(self, input_tensor: torch.Tensor, ctx: None = None) -> torch.Tensor:
        """The rows as they travel, flat."""
        encoded = self._codec.encode(input_tensor.reshape(-1, self._dim)).view(-1)
        note_encoded(_FLOAT_BYTES * input_tensor.numel(), encoded.nbytes)
        return encoded

    def decode(self, input_grad: torch.Tensor, ctx: None = None) -> torch.Tensor:
        """The rows as they have come, flat."""
        encoded = input_grad.reshape(-1, self._codec.columns(self._dim))
        return self._codec.decode(encoded, self._dim).view(-1)

    @property
    def quantized_dtype(self) -> torch.dtype:
        """The type of encoded numbers."""
        return self._codec.dtype

    def calc_quantized_size(self, input_len: int, ctx: None = None) -> int:
        """How many encoded numbers so many numbers become."""
        return input_len // self._dim * self._codec.columns(self._dim)

    def create_context(self) -> None:
        """Nothing: both ends know all they need."""
        return

    def padded_size(
        self, input_tensor: torch.Tensor, dim_per_rank: list[int], my_rank: int, qcomm_ctx: None
    ) -> tuple[int, int]:
        """The columns of a tensor, which need no padding."""
        return input_tensor.shape[-1], 0


def stock_codecs(transport: Transport, dim: int) -> QuantizedCommCodecs | None:
    """What encodes rows of ``dim`` numbers, and their gradients; `None` if they travel as they are.

    Args:
        transport: how they travel.
        dim: how many numbers a row has.
    """
    if transport is Transport.FP32:
        return None
    codec: Any = StockCodec(transport.codec_for(dim), dim)
    return QuantizedCommCodecs(forward=codec, backward=codec)
