"""Messages between stages: whole activations, or only the elements that `Thresholded` keeps.

    [7, 0, 0, -9, 0, 1, 0, 0]  --kept-->  values [7, -9, 1], places [0, 3, 5]

Gradients go back only for the kept elements, whose places both ends know from the forward.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch

from torchrec_2dsp.dense.thresholded import place_bytes
from torchrec_2dsp.errors import UnsupportedError

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_HEADER_SIZE = 16


@dataclass(frozen=True)
class TensorKind:
    """A tensor's shape without the batch, and its dtype."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    whole_dim: int = 0
    """The last dim of the activations whose kept elements these are; 0 if they are whole."""

    @classmethod
    def of(cls, tensor: torch.Tensor, whole_dim: int = 0) -> "TensorKind":
        """Return a tensor's kind."""
        return cls(tuple(tensor.shape[1:]), tensor.dtype, whole_dim)

    def empty(self, num_samples: int, device: torch.device) -> torch.Tensor:
        """Return an uninitialised tensor."""
        return torch.empty(num_samples, *self.shape, dtype=self.dtype, device=device)

    def check_like(self, before: "TensorKind", source: str) -> None:
        """Raise `UnsupportedError` unless a tensor is of the kind that its receivers expect."""
        if self != before:
            raise UnsupportedError(
                f"{source} of a pipelined LayerStack gives {self}, and {before} for an earlier "
                "call with inputs of the same shapes and types, which others still expect; shapes "
                "and types may depend only on the inputs' and on the mode"
            )

    def __str__(self) -> str:
        share = f", the largest of {self.whole_dim}" if self.whole_dim else ""
        return f"{self.dtype} of shape {('batch', *self.shape)}{share}".replace("'", "")

    def header(self, device: torch.device) -> torch.Tensor:
        """Encode the kind for a rank that doesn't know it."""
        numbers = [_DTYPES.index(self.dtype), self.whole_dim, len(self.shape), *self.shape]
        padding = [0] * (_HEADER_SIZE - len(numbers))
        return torch.tensor(numbers + padding, device=device)

    @classmethod
    def empty_header(cls, device: torch.device) -> torch.Tensor:
        """Return a tensor for receiving another rank's header."""
        return torch.empty(_HEADER_SIZE, dtype=torch.int64, device=device)

    @classmethod
    def from_header(cls, header: torch.Tensor) -> "TensorKind":
        """Decode another rank's kind."""
        dtype, whole_dim, num_dims, *sizes = header.tolist()
        return cls(tuple(sizes[:num_dims]), _DTYPES[dtype], whole_dim)

    def on_wire(self, wire: torch.dtype | None, *, is_gradient: bool) -> "TensorKind":
        """Return the kind of its message; kept elements and places are bytes."""
        dtype = wire or self.dtype
        if is_gradient or not self.whole_dim:
            return TensorKind(self.shape, dtype)
        num_rows, num_kept = math.prod(self.shape[:-1]), self.shape[-1]
        row_bytes = num_kept * dtype.itemsize + place_bytes(num_kept, self.whole_dim)
        return TensorKind((num_rows * row_bytes,), torch.uint8)


class Activations(NamedTuple):
    """A micro-batch's activations between two stages."""

    values: torch.Tensor
    """All elements, or only those that are kept."""

    places: torch.Tensor | None = None
    """The kept elements' places in the last dim, ascending; `None` if all are there."""

    whole_dim: int = 0
    """The last dim, if elements are missing."""

    @property
    def kind(self) -> TensorKind:
        """The kind of the values."""
        return TensorKind.of(self.values, self.whole_dim)

    def leaf(self, *, needs_gradient: bool) -> "Activations":
        """Return the same activations with detached values, which may get a gradient."""
        return self._replace(values=self.values.detach().requires_grad_(needs_gradient))

    def whole(self) -> torch.Tensor:
        """Return all elements, from which gradients flow back to the values."""
        if self.places is None:
            return self.values
        zeros = self.values.new_zeros(*self.values.shape[:-1], self.whole_dim)
        return zeros.scatter(-1, self.places, self.values)

    def message(self, wire: torch.dtype | None) -> torch.Tensor:
        """Return the message: values, or a row of bytes for each sample."""
        values = self.values.detach().to(wire or self.values.dtype)
        if self.places is None:
            return values
        return torch.cat([_as_bytes(values), _as_bytes(self._encoded_places())], dim=1)

    @classmethod
    def from_message(
        cls, message: torch.Tensor, kind: TensorKind, wire: torch.dtype | None
    ) -> "Activations":
        """Decode a message."""
        if not kind.whole_dim:
            return cls(message.to(kind.dtype))
        shape = (len(message), *kind.shape)
        num_bytes = math.prod(kind.shape) * (wire or kind.dtype).itemsize
        values = message[:, :num_bytes].contiguous().view(wire or kind.dtype).view(shape)
        places = _decoded_places(message[:, num_bytes:].contiguous(), shape, kind.whole_dim)
        return cls(values.to(kind.dtype), places, kind.whole_dim)

    def _encoded_places(self) -> torch.Tensor:
        assert self.places is not None
        if not _are_bits(self.places.shape[-1], self.whole_dim):
            return self.places.to(_place_dtype(self.whole_dim))
        *lead, _ = self.places.shape
        padded = -(-self.whole_dim // 8) * 8
        is_kept = torch.zeros(*lead, padded, dtype=torch.uint8, device=self.places.device)
        of_bytes = is_kept.scatter_(-1, self.places, 1).view(*lead, padded // 8, 8)
        return (of_bytes << _bit_numbers(self.places.device)).sum(dim=-1, dtype=torch.uint8)


def _decoded_places(encoded: torch.Tensor, shape: tuple[int, ...], whole_dim: int) -> torch.Tensor:
    if not _are_bits(shape[-1], whole_dim):
        dtype = _place_dtype(whole_dim)
        # Places from 2**15 on look negative in 16 bits.
        return encoded.view(dtype).view(shape).long() & (2 ** (8 * dtype.itemsize) - 1)
    bits = (encoded.view(*shape[:-1], -1, 1) >> _bit_numbers(encoded.device)) & 1
    return bits.flatten(-2).nonzero()[:, -1].view(shape)


def _are_bits(num_kept: int, whole_dim: int) -> bool:
    """Return whether each place has a bit, instead of each kept element a number."""
    return place_bytes(num_kept, whole_dim) < num_kept * _place_dtype(whole_dim).itemsize


def _place_dtype(whole_dim: int) -> torch.dtype:
    return torch.int16 if whole_dim <= 2**16 else torch.int32


def _bit_numbers(device: torch.device) -> torch.Tensor:
    return torch.arange(8, dtype=torch.uint8, device=device)


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """View a tensor as a row of bytes for each sample."""
    return tensor.reshape(len(tensor), -1).contiguous().view(torch.uint8)
