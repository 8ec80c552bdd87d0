"""`EightBitRows`: a table's rows in 8 bits, which read and write like float32.

A row is stored like FBGEMM's fused 8-bit rows: a byte for each number, then the row's scale and its
smallest number in float32. Scales are powers of two, and smallest numbers multiples of them, so
reading is exact to the last bit, and writing a read row back changes nothing. Rows can be saved,
loaded and moved as float32. Some rows can be kept exactly, such as those with replicas.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_map

from torchrec_2dsp._compat.tensors import tensor_without_storage

NUM_EXTRA_BYTES = 8
"""A row's bytes in addition to its numbers' own."""

_LARGEST_CODE = 254
"""The steps between a row's extremes: one fewer than fit, as the smallest may drop by a step."""
_WRITTEN_TOGETHER = 2**16
"""The number of rows that are rounded at a time, as this takes several times their memory."""
_BITS = 24
"""The bits in a float32 number's significand."""


def encoded(rows: torch.Tensor, draws: torch.Tensor | None = None) -> torch.Tensor:
    """Return float32 rows in 8 bits.

    Numbers are rounded to the nearest, or up if their draw is large enough. A row with NaN or
    infinity becomes NaN.

    Args:
        rows: ``[rows, dim]``, float32.
        draws: 16 random bits for each number, as int16.

    Returns:
        Bytes, ``[rows, dim + 8]``.

    Example:
        >>> import torch
        >>> from torchrec_2dsp.rows.eight_bits import decoded, encoded
        >>> decoded(encoded(torch.tensor([[0.0, 0.1, 1.0]])))
        tensor([[0.0000, 0.1016, 1.0000]])
    """
    low, high = rows.aminmax(dim=1, keepdim=True)
    low, high = low.double(), high.double()
    # A step must not be smaller than float32's resolution at the largest number.
    smallest_scale = low.abs().maximum(high.abs()) * 2.0 ** (1 - _BITS)
    least = ((high - low) / _LARGEST_CODE).maximum(smallest_scale).clamp(min=2.0**-126)
    # 0.5 <= mantissa < 1, so that a power of two stays itself.
    mantissa, exponent = least.frexp()
    exponent = exponent - (mantissa == 0.5).int()
    scale = torch.ldexp(torch.ones_like(low), exponent)
    scale = torch.where((high - low).isfinite(), scale, torch.nan)
    smallest = ((low / scale).floor() * scale).float()
    scale = scale.float()
    steps = (rows - smallest) / scale
    if draws is None:
        steps.round_()
    else:
        steps.add_((draws.int() & 0xFFFF) / 2**16).floor_()
    codes = steps.nan_to_num_(0.0).clamp_(0, 255).to(torch.uint8)
    return torch.cat([codes, torch.cat([scale, smallest], dim=1).view(torch.uint8)], dim=1)


def decoded(packed: torch.Tensor) -> torch.Tensor:
    """Return rows in 8 bits as float32."""
    extra = packed[:, -NUM_EXTRA_BYTES:].clone(memory_format=torch.contiguous_format)
    scale, smallest = extra.view(torch.float32).split(1, dim=1)
    return packed[:, :-NUM_EXTRA_BYTES].float().mul_(scale).add_(smallest)


@dataclass
class RowStore:
    """Rows in 8 bits, with some kept exactly."""

    packed: torch.Tensor
    """All rows' bytes, ``[rows, dim + 8]``."""

    exact_numbers: torch.Tensor
    """The rows that are kept exactly, ascending."""

    exact: torch.Tensor
    """These rows in float32."""

    @classmethod
    def zeros(cls, num_rows: int, dim: int, device: torch.device) -> "RowStore":
        """Create rows of zeros, with none kept exactly."""
        packed = torch.zeros(num_rows, dim + NUM_EXTRA_BYTES, dtype=torch.uint8, device=device)
        numbers = torch.empty(0, dtype=torch.int64, device=device)
        return cls(packed, numbers, torch.empty(0, dim, device=device))

    def read(self, numbers: torch.Tensor) -> torch.Tensor:
        """Return the rows with these numbers."""
        rows = decoded(self.packed.index_select(0, numbers))
        if self.exact_numbers.numel():
            places, slots = self._exact_among(numbers)
            rows.index_copy_(0, places, self.exact.index_select(0, slots))
        return rows

    def write(
        self, numbers: torch.Tensor, rows: torch.Tensor, draws: torch.Tensor | None = None
    ) -> None:
        """Write the rows with these numbers, which must be distinct."""
        for first in range(0, numbers.numel(), _WRITTEN_TOGETHER):
            part = slice(first, first + _WRITTEN_TOGETHER)
            of_part = encoded(rows[part].float(), None if draws is None else draws[part])
            self.packed.index_copy_(0, numbers[part], of_part)
        if self.exact_numbers.numel():
            places, slots = self._exact_among(numbers)
            self.exact.index_copy_(0, slots, rows.index_select(0, places).float())

    @classmethod
    def unrounded(cls, num_rows: int, dim: int, device: torch.device) -> "RowStore":
        """Create unwritten rows, with all kept exactly."""
        store = cls.zeros(num_rows, dim, device)
        numbers = torch.arange(num_rows, device=device)
        return cls(store.packed, numbers, torch.empty(num_rows, dim, device=device))

    def keep_exactly(self, numbers: torch.Tensor) -> None:
        """Keep these rows, and no others, exactly from now on."""
        numbers = numbers.sort().values
        self.exact_numbers, self.exact = numbers, self.read(numbers)

    def _exact_among(self, numbers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the places of rows that are kept exactly, and their slots."""
        slots = torch.searchsorted(self.exact_numbers, numbers)
        slots.clamp_(max=self.exact_numbers.numel() - 1)
        places = (self.exact_numbers[slots] == numbers).nonzero().view(-1)
        return places, slots[places]


class EightBitRows(torch.Tensor):
    """A table's float32 rows, or some successive ones, in a `RowStore`.

    Rows are read and written by torch's row operators, such as `index_select`, `copy_` and
    ``rows[numbers] = values``; other operators get a float32 copy, which is written back if they
    change it. Views other than of successive rows are refused, as writes to them would be lost.
    """

    store: RowStore
    first: int

    @staticmethod
    def __new__(
        cls: type["EightBitRows"], store: RowStore, first: int = 0, num_rows: int | None = None
    ) -> "EightBitRows":
        """Present ``num_rows`` rows of a store, starting at ``first``; by default all."""
        num_rows = len(store.packed) if num_rows is None else num_rows
        shape = (num_rows, store.exact.shape[1])
        rows = tensor_without_storage(cls, shape, torch.float32, store.packed.device)
        rows.store, rows.first = store, first
        return rows

    def numbers(self) -> torch.Tensor:
        """Return these rows' numbers in the store."""
        return torch.arange(self.first, self.first + self.shape[0], device=self.store.packed.device)

    def __repr__(self, *, tensor_contents: object = None) -> str:  # pyright: ignore
        return f"EightBitRows({self.shape[0]} rows of {self.shape[1]} numbers)"

    def __reduce_ex__(self, protocol: Any) -> Any:
        return plain(self).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: Any) -> "EightBitRows":
        return EightBitRows(copy.deepcopy(self.store, memo), self.first, self.shape[0])

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any:
        return plain(self).__dlpack__(*args, **kwargs)

    def tolist(self) -> list[Any]:
        """Return the rows' numbers, as other tensors do."""
        return plain(self).tolist()

    def numpy(self, *, force: bool = False) -> Any:
        """Return a float32 copy of the rows as an array."""
        return plain(self).numpy(force=force)

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        run = _OPERATORS.get(func)
        if run is not None and isinstance(next(iter(args), None), EightBitRows):
            result = run(*args, **kwargs)
            if result is not NotImplemented:
                return result
        return _run_on_copies(func, args, kwargs)


def _run_on_copies(func: Any, args: Sequence[Any], kwargs: Any) -> Any:
    """Run an operator on float32 copies, and write back the copy that it changes."""
    copies: dict[int, torch.Tensor] = {}

    def float_copy(value: Any) -> Any:
        if not isinstance(value, EightBitRows):
            return value
        if id(value) not in copies:
            copies[id(value)] = plain(value)
        return copies[id(value)]

    first, is_in_place = args[0] if args else None, func.name().split(".")[0].endswith("_")
    if func.is_view or "out" in kwargs or (is_in_place and isinstance(first, Sequence)):
        raise NotImplementedError(
            f"{func} would show a part of rows that are kept in 8 bits, or write to a copy; read "
            "and write rows by their numbers, as in rows[numbers]"
        )
    result = func(*tree_map(float_copy, list(args)), **tree_map(float_copy, kwargs))
    if not is_in_place or not isinstance(first, EightBitRows):
        return result
    first.store.write(first.numbers(), copies[id(first)])
    return first


def _sliced(
    rows: EightBitRows,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> Any:
    """Return successive rows."""
    first, end, step = slice(start, end, step).indices(rows.shape[dim])
    if step != 1 or (dim % 2 == 1 and (first, end) != (0, rows.shape[1])):
        return NotImplemented
    if dim % 2 == 1:
        return EightBitRows(rows.store, rows.first, rows.shape[0])
    return EightBitRows(rows.store, rows.first + first, max(end - first, 0))


def _selected(rows: EightBitRows, dim: int, numbers: torch.Tensor) -> Any:
    return rows.store.read(numbers + rows.first) if dim == 0 else NotImplemented


def _indexed(rows: EightBitRows, indices: Sequence[torch.Tensor | None]) -> Any:
    numbers = _only_numbers(rows, indices)
    return NotImplemented if numbers is None else rows.store.read(numbers)


def _put(
    rows: EightBitRows,
    indices: Sequence[torch.Tensor | None],
    values: torch.Tensor,
    accumulate: bool = False,
) -> Any:
    numbers = _only_numbers(rows, indices)
    if numbers is None or accumulate:
        return NotImplemented
    rows.store.write(numbers, values.expand(numbers.numel(), rows.shape[1]))
    return rows


def _only_numbers(
    rows: EightBitRows, indices: Sequence[torch.Tensor | None]
) -> torch.Tensor | None:
    """Return the store's numbers of the indexed rows; `None` if columns are indexed."""
    numbers, *columns = indices
    if columns or numbers is None or numbers.dim() != 1:
        return None
    if numbers.dtype == torch.bool:
        numbers = numbers.nonzero().view(-1)
    return torch.where(numbers < 0, numbers + rows.shape[0], numbers) + rows.first


def _copied(rows: EightBitRows, dim: int, numbers: torch.Tensor, values: torch.Tensor) -> Any:
    if dim != 0:
        return NotImplemented
    rows.store.write(numbers + rows.first, values)
    return rows


def _all_copied(rows: EightBitRows, values: torch.Tensor, non_blocking: bool = False) -> Any:
    values = plain(values).to(rows.device)
    rows.store.write(rows.numbers(), values.expand(rows.shape))
    return rows


def _filling(func: Any) -> Callable[..., Any]:
    """Return an operator that draws or sets all numbers, some rows at a time."""

    def fill(rows: EightBitRows, *args: Any, **kwargs: Any) -> EightBitRows:
        for numbers in rows.numbers().split(_WRITTEN_TOGETHER):
            values = rows.store.exact.new_empty(numbers.numel(), rows.shape[1])
            rows.store.write(numbers, func(values, *args, **kwargs))
        return rows

    return fill


def _viewed(rows: EightBitRows, shape: Sequence[int]) -> Any:
    num_rows, dim = rows.shape
    is_whole = len(shape) == 2 and shape[1] == dim and shape[0] in (-1, num_rows)
    return _alike(rows) if is_whole else NotImplemented


def _alike(rows: EightBitRows) -> EightBitRows:
    return EightBitRows(rows.store, rows.first, rows.shape[0])


def _unwritten(rows: EightBitRows, size: Sequence[int], **options: Any) -> torch.Tensor:
    """Return a tensor to write to.

    DCP's asynchronous saves ask for one of the rows' size, and give it a copy of their store.
    """
    device = torch.device(options.get("device") or rows.device)
    if tuple(size) != tuple(rows.shape) or options.get("dtype") not in (None, torch.float32):
        return rows.store.exact.new_empty(size, **options)
    return EightBitRows(RowStore.unrounded(rows.shape[0], rows.shape[1], device))


_aten: Any = torch.ops.aten
_OPERATORS: dict[Any, Callable[..., Any]] = {
    _aten.detach.default: _alike,
    _aten.alias.default: _alike,
    _aten.slice.Tensor: _sliced,
    _aten.view.default: _viewed,
    _aten.index_select.default: _selected,
    _aten.index.Tensor: _indexed,
    _aten.index_put_.default: _put,
    _aten.index_copy_.default: _copied,
    _aten.copy_.default: _all_copied,
    **{
        func: _filling(func)
        for func in (
            _aten.uniform_.default,
            _aten.normal_.default,
            _aten.fill_.Scalar,
            _aten.zero_.default,
        )
    },
    _aten.is_pinned.default: lambda rows, *_: False,
    _aten.new_empty.default: _unwritten,
}
"""The operators that need no copy of all rows."""


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor itself, or a float32 copy of rows in 8 bits."""
    if isinstance(tensor, EightBitRows):
        return tensor.store.read(tensor.numbers())
    return tensor


def parts_of(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the tensors that hold a whole table's rows."""
    if isinstance(tensor, EightBitRows):
        return tensor.store.packed, tensor.store.exact
    return (tensor,)
