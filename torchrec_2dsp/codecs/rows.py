"""`RowCodec`: rows of numbers in fewer bytes, each row separately.

    a row of dim numbers   --encode-->   codec.columns(dim) numbers of codec.dtype   --decode-->

Nothing else is sent, so both ends know every size, and a row's error doesn't depend on other rows.
"""

import enum
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch

from torchrec_2dsp._compat.triton import runs_triton
from torchrec_2dsp.errors import ConfigError

_SCALE_BYTES = 2
"""A scale is a bfloat16, which has float32's range."""
_SMALLEST_SCALE = torch.finfo(torch.bfloat16).smallest_normal
_SCALE_MARGIN = 1 + 2**-7
"""The factor by which scales grow before rounding, so that none is too small for its row."""
_LONGEST = 8192
"""The longest row that Triton's kernels take."""


class RowCodec(ABC):
    """Encodes and decodes rows.

    Example:
        >>> import torch
        >>> from torchrec_2dsp.codecs.rows import IntegerRows
        >>> codec, rows = IntegerRows(bits=4), torch.tensor([[0.7, -0.1, 0.0, 0.3]])
        >>> sent = codec.encode(rows)
        >>> sent.shape, sent.dtype
        (torch.Size([1, 4]), torch.uint8)
        >>> bool((codec.decode(sent, dim=4) - rows).abs().max() <= codec.error_bound(rows))
        True
    """

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype:
        """The encoded numbers' type."""

    @abstractmethod
    def columns(self, dim: int) -> int:
        """Return the number of encoded numbers for a row of ``dim`` numbers."""

    @abstractmethod
    def encode(self, rows: torch.Tensor) -> torch.Tensor:
        """Encode float32 rows, from `[rows, dim]` to `[rows, columns]`.

        A row with a number that isn't finite becomes a row that isn't finite either.
        """

    @abstractmethod
    def decode(self, encoded: torch.Tensor, dim: int) -> torch.Tensor:
        """Decode rows to float32 `[rows, dim]`."""

    @abstractmethod
    def error_bound(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the largest possible change to a number in each row, `[rows]`."""

    def num_bytes(self, dim: int) -> int:
        """Return an encoded row's size in bytes."""
        return self.columns(dim) * self.dtype.itemsize

    @abstractmethod
    def all_finite(self, encoded: torch.Tensor) -> bool:
        """Return whether all numbers will be finite on arrival."""


@dataclass(frozen=True)
class FloatRows(RowCodec):
    """Sends numbers as floats with fewer bits, or with all 32."""

    float_dtype: torch.dtype = torch.float32

    @property
    def dtype(self) -> torch.dtype:
        """The numbers' type on the wire."""
        return self.float_dtype

    def columns(self, dim: int) -> int:
        """Return ``dim``."""
        return dim

    def encode(self, rows: torch.Tensor) -> torch.Tensor:
        """Round rows to the other type."""
        return rows.to(self.float_dtype)

    def decode(self, encoded: torch.Tensor, dim: int) -> torch.Tensor:
        """Return rows in float32."""
        return encoded.float()

    def all_finite(self, encoded: torch.Tensor) -> bool:
        """Check the rows' sum, in one pass."""
        return bool(encoded.sum(dtype=torch.float32).isfinite())

    def error_bound(self, rows: torch.Tensor) -> torch.Tensor:
        """Return half the distance between neighbouring floats at a row's largest number.

        It is infinite beyond the type's range.
        """
        info = torch.finfo(self.float_dtype)
        largest = _largest(rows)
        if self.float_dtype is torch.float32:
            return torch.zeros_like(largest)
        bound = torch.clamp(largest * info.eps / 2, min=info.smallest_normal * info.eps / 2)
        return torch.where(largest > info.max, torch.inf, bound)


EXACT = FloatRows(torch.float32)
"""Sends numbers unencoded."""


@dataclass(frozen=True)
class IntegerRows(RowCodec):
    """Sends numbers as integers of 8 or 4 bits, in units of a scale per row.

    The integers' range is symmetric around zero, which stays zero.
    """

    bits: int
    """8, or 4 for two numbers per byte."""

    @property
    def dtype(self) -> torch.dtype:
        """Bytes."""
        return torch.uint8

    def columns(self, dim: int) -> int:
        """Return the integers' bytes plus two for the scale."""
        return -(-dim * self.bits // 8) + _SCALE_BYTES

    def encode(self, rows: torch.Tensor) -> torch.Tensor:
        """Return integers, then the scale."""
        num_rows, dim = rows.shape
        if rows.dtype == torch.float32 and _runs_kernel(rows, dim):
            from torchrec_2dsp.codecs.gpu_kernels import encode_rows

            return encode_rows(rows, self.columns(dim), bits=self.bits, unit=self._unit)
        scales = self._scales(rows)
        # Smaller scales' reciprocals would be infinite.
        units = torch.where(scales >= _SMALLEST_SCALE, scales.float().reciprocal(), 0.0)
        integers = (rows * units[:, None]).round_()
        encoded = torch.empty((num_rows, self.columns(dim)), dtype=torch.uint8, device=rows.device)
        numbers, scale_bytes = encoded.split([encoded.shape[1] - _SCALE_BYTES, _SCALE_BYTES], 1)
        if self.bits == 8:
            numbers.view(torch.int8).copy_(integers)
        else:
            numbers.copy_(_packed(integers))
        scale_bytes.copy_(scales.view(torch.uint8).view(num_rows, _SCALE_BYTES))
        return encoded

    def decode(self, encoded: torch.Tensor, dim: int) -> torch.Tensor:
        """Multiply the integers by their scales."""
        if _runs_kernel(encoded, dim):
            from torchrec_2dsp.codecs.gpu_kernels import decode_rows

            return decode_rows(encoded, dim, bits=self.bits)
        numbers, scales = encoded[:, :-_SCALE_BYTES], self._scales_of(encoded)
        if self.bits == 8:
            return numbers.view(torch.int8).float().mul_(scales)
        return _unpacked(numbers, dim).mul_(scales)

    def all_finite(self, encoded: torch.Tensor) -> bool:
        """Check the scales."""
        return bool(self._scales_of(encoded).sum().isfinite())

    def error_bound(self, rows: torch.Tensor) -> torch.Tensor:
        """Return half a scale, plus the rounding error of the quotient."""
        scales, largest = self._scales(rows).float(), _largest(rows)
        # The quotient of a number and its scale is rounded as well.
        bound = scales * 0.5 + largest * torch.finfo(torch.float32).eps
        return torch.where(scales >= _SMALLEST_SCALE, bound, largest)

    def _scales_of(self, encoded: torch.Tensor) -> torch.Tensor:
        """Return encoded rows' scales, `[rows, 1]`, float32."""
        # A copy, because views of wider types must begin at multiples of their size.
        scale_bytes = encoded[:, -_SCALE_BYTES:].clone(memory_format=torch.contiguous_format)
        return scale_bytes.view(torch.bfloat16).float()

    def _scales(self, rows: torch.Tensor) -> torch.Tensor:
        return (_largest(rows) * self._unit).to(torch.bfloat16)

    @property
    def _unit(self) -> float:
        """A scale divided by its row's largest number."""
        return _SCALE_MARGIN / (2 ** (self.bits - 1) - 1)


def _runs_kernel(rows: torch.Tensor, dim: int) -> bool:
    """Tell whether Triton's kernels, which hold whole rows, encode or decode ``rows``."""
    return rows.is_cuda and rows.numel() > 0 and 0 < dim <= _LONGEST and runs_triton(rows.device)


def _largest(rows: torch.Tensor) -> torch.Tensor:
    """Return each row's largest absolute value; 0 for empty rows."""
    if not rows.shape[1]:
        return rows.new_zeros(rows.shape[0])
    # Either of 0 and -0 may be the larger one.
    return torch.maximum(rows.amax(dim=1), rows.amin(dim=1).neg_()).abs_()


def _packed(integers: torch.Tensor) -> torch.Tensor:
    """Pack integers of -7 to 7 in pairs: the first takes a byte's lower half."""
    if integers.shape[1] % 2:
        integers = torch.nn.functional.pad(integers, (0, 1))
    # Both integers of a pair at once, as the bytes of a 16-bit number.
    halves = integers.to(torch.int8).contiguous().view(torch.int16)
    halves.bitwise_and_(0x0F0F)
    return (halves >> 4).bitwise_or_(halves).to(torch.uint8)


def _unpacked(pairs: torch.Tensor, dim: int) -> torch.Tensor:
    """Return the integers that `_packed` packed, as float32."""
    integer_pairs = _pair_of_each_byte(pairs.device).index_select(0, pairs.flatten().int())
    return (
        torch.view_as_real(integer_pairs).view(len(pairs), 2 * pairs.shape[1])[:, :dim].contiguous()
    )


@cache
def _pair_of_each_byte(device: torch.device) -> torch.Tensor:
    """Return each byte's two integers as one complex number, as a lookup unpacks fastest."""
    halves = torch.arange(16)
    integers = torch.where(halves < 8, halves, halves - 16).float()
    return torch.complex(integers.repeat(16), integers.repeat_interleave(16)).to(device)


@dataclass(frozen=True)
class FlatCodec:
    """Encodes numbers without rows, such as dense parameters' gradients.

    Example:
        >>> import torch
        >>> from torchrec_2dsp.codecs.rows import FlatCodec, IntegerRows
        >>> codec, numbers = FlatCodec(IntegerRows(bits=8), block=64), torch.linspace(-1, 1, 100)
        >>> sent = codec.encode(numbers)
        >>> sent.nbytes, codec.num_bytes(100)
        (132, 132)
        >>> bool((codec.decode(sent, 100) - numbers).abs().max() <= 1 / 250)
        True
    """

    codec: RowCodec
    """The codec for a block of numbers."""

    block: int = 128
    """The count of numbers that share a scale. Zeros fill the last block."""

    def num_bytes(self, size: int) -> int:
        """Return the bytes of ``size`` encoded numbers."""
        return self._num_blocks(size) * self.codec.num_bytes(self.block)

    def encode(self, numbers: torch.Tensor) -> torch.Tensor:
        """Encode float32 numbers, from `[size]` to uint8 `[num_bytes]`."""
        return self.codec.encode(self._blocks(numbers)).view(-1).view(torch.uint8)

    def decode(self, encoded: torch.Tensor, size: int) -> torch.Tensor:
        """Decode numbers to float32 `[size]`."""
        shape = (self._num_blocks(size), self.codec.columns(self.block))
        blocks = encoded.view(self.codec.dtype).view(shape)
        return self.codec.decode(blocks, self.block).view(-1)[:size]

    def error_bound(self, numbers: torch.Tensor) -> torch.Tensor:
        """Return each number's largest possible change."""
        bounds = self.codec.error_bound(self._blocks(numbers))
        return bounds.repeat_interleave(self.block)[: numbers.numel()]

    def _blocks(self, numbers: torch.Tensor) -> torch.Tensor:
        """Return numbers as `[blocks, block]`, padded with zeros."""
        missing = -numbers.numel() % self.block
        return torch.nn.functional.pad(numbers, (0, missing)).view(-1, self.block)

    def _num_blocks(self, size: int) -> int:
        return -(-size // self.block)


class Transport(enum.StrEnum):
    """The numbers' wire format. They are added and applied in float32 in any case.

    Example:
        >>> import torchrec_2dsp as tdsp
        >>> [(way.value, way.codec.num_bytes(64)) for way in tdsp.Transport]
        [('fp32', 256), ('bf16', 128), ('fp16', 128), ('int8', 66), ('int4', 34)]
    """

    FP32 = "fp32"
    """Numbers travel unencoded."""

    BF16 = "bf16"
    """Half the bytes, 8 bits of each number."""

    FP16 = "fp16"
    """Half the bytes, 11 bits of each number; numbers beyond 65,504 become infinite."""

    INT8 = "int8"
    """About a quarter of the bytes: integers of -127 to 127, in units of a scale per row."""

    INT4 = "int4"
    """About an eighth of the bytes: integers of -7 to 7, in units of a scale per row."""

    @property
    def codec(self) -> RowCodec:
        """The codec for rows."""
        return _CODECS[self]

    def codec_for(self, dim: int) -> RowCodec:
        """Return the codec for rows of ``dim`` numbers; a single number is shortest in bf16."""
        is_integer = self in (Transport.INT8, Transport.INT4)
        return _CODECS[Transport.BF16] if is_integer and dim == 1 else self.codec


_CODECS: dict[Transport, RowCodec] = {
    Transport.FP32: FloatRows(torch.float32),
    Transport.BF16: FloatRows(torch.bfloat16),
    Transport.FP16: FloatRows(torch.float16),
    Transport.INT8: IntegerRows(bits=8),
    Transport.INT4: IntegerRows(bits=4),
}


def transports_of(
    precision: "Transport | str | Sequence[Transport | str]",
) -> tuple[Transport, ...]:
    """Return the transports that a precision allows: "exact", "any", or a list of them.

    Example:
        >>> from torchrec_2dsp.codecs.rows import transports_of
        >>> [way.value for way in transports_of("exact")], len(transports_of("any"))
        (['fp32'], 5)
        >>> [way.value for way in transports_of(["fp32", "int8"])]
        ['fp32', 'int8']
    """
    if precision == "exact":
        return (Transport.FP32,)
    if precision == "any":
        return tuple(Transport)
    listed = [precision] if isinstance(precision, str) else precision
    try:
        allowed = tuple(dict.fromkeys(Transport(way) for way in listed))
    except ValueError as error:
        raise ConfigError(
            f"precision={precision!r}: use 'exact', 'any', or some of "
            f"{', '.join(repr(way.value) for way in Transport)}"
        ) from error
    if not allowed:
        raise ConfigError("precision=[] allows nothing; use 'exact' for no rounding")
    return allowed
