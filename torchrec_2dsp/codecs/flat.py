"""`FlatCodec`: flat numbers in fewer bytes, in blocks with a scale each."""

from dataclasses import dataclass

import torch

from torchrec_2dsp.codecs.rows import RowCodec


@dataclass(frozen=True)
class FlatCodec:
    """Encodes numbers without rows, such as gradients of dense parameters.

    Example:
        >>> import torch
        >>> from torchrec_2dsp.codecs.flat import FlatCodec
        >>> from torchrec_2dsp.codecs.rows import IntegerRows
        >>> codec, numbers = FlatCodec(IntegerRows(bits=8), block=64), torch.linspace(-1, 1, 100)
        >>> sent = codec.encode(numbers)
        >>> sent.nbytes, codec.num_bytes(100)
        (132, 132)
        >>> bool((codec.decode(sent, 100) - numbers).abs().max() <= 1 / 250)
        True
    """

    codec: RowCodec
    """How a block of numbers looks."""

    block: int = 128
    """How many numbers share a scale. The last block is filled up with zeros."""

    def num_bytes(self, size: int) -> int:
        """The bytes of ``size`` encoded numbers."""
        return self._num_blocks(size) * self.codec.num_bytes(self.block)

    def encode(self, numbers: torch.Tensor) -> torch.Tensor:
        """Numbers as they travel: from `[size]`, float32, to `[num_bytes]`, uint8."""
        size = numbers.numel()
        missing = self._num_blocks(size) * self.block - size
        filled = torch.nn.functional.pad(numbers, (0, missing))
        return self.codec.encode(filled.view(-1, self.block)).view(-1).view(torch.uint8)

    def decode(self, encoded: torch.Tensor, size: int) -> torch.Tensor:
        """Numbers as they have come, `[size]`, float32."""
        shape = (self._num_blocks(size), self.codec.columns(self.block))
        blocks = encoded.view(self.codec.dtype).view(shape)
        return self.codec.decode(blocks, self.block).view(-1)[:size]

    def error_bound(self, numbers: torch.Tensor) -> torch.Tensor:
        """For each number, the most by which it may change."""
        size = numbers.numel()
        missing = self._num_blocks(size) * self.block - size
        blocks = torch.nn.functional.pad(numbers, (0, missing)).view(-1, self.block)
        return self.codec.error_bound(blocks).repeat_interleave(self.block)[:size]

    def _num_blocks(self, size: int) -> int:
        return -(-size // self.block)
