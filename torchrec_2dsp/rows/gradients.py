"""Row gradients: `LookupRows` turns an output's gradient into one gradient per distinct row.

A TBE's tables with the same dim form a block, whose rows are numbered consecutively. A row's number
in its block is its *key*: one sort over keys replaces one per table.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod

import numpy as np
import torch

from torchrec_2dsp._compat.fbgemm import OptimizerStep, TbeShape, starts_of, sum_bags
from torchrec_2dsp.comms.collectives import constant


@dataclass(frozen=True)
class Block:
    """A TBE's tables with the same dim, their rows numbered in one sequence."""

    dim: int

    features: tuple[int, ...]
    """The TBE's features that look these tables up."""

    tables: tuple[int, ...]
    """These tables' numbers in the TBE, in feature order."""

    bases: tuple[int, ...]

    num_rows: int
    """The number of rows in all tables together."""

    @property
    def key_dtype(self) -> torch.dtype:
        """Return the smallest integer type, int32 or int64, that holds every key."""
        return torch.int32 if self.num_rows <= _MAX_INT32 else torch.int64

    def feature_bases(self, shape: TbeShape, device: torch.device) -> torch.Tensor:
        """Return each feature's first key, which is its table's first row's."""
        base_of = dict(zip(self.tables, self.bases, strict=True))
        bases = [base_of[shape.feature_tables[feature]] for feature in self.features]
        return constant(tuple(bases), device)

    def rows_of(self, keys: torch.Tensor) -> list[torch.Tensor]:
        """Return row numbers for ascending ``keys``, by table."""
        bounds = torch.tensor([*self.bases[1:]], dtype=torch.int64, device=keys.device)
        parts = keys.tensor_split(torch.searchsorted(keys, bounds).tolist())
        return [part - base for part, base in zip(parts, self.bases, strict=True)]


def blocks_of(shape: TbeShape) -> tuple[Block, ...]:
    """Return a TBE's blocks; most TBEs have one.

    Example:
        >>> from torchrec_2dsp._compat.fbgemm import TbeShape
        >>> from torchrec_2dsp.rows.gradients import blocks_of
        >>> shape = TbeShape((10, 20, 30), (8, 4, 8), (0, 1, 1, 2), False, False)
        >>> [(block.dim, block.tables, block.bases) for block in blocks_of(shape)]
        [(8, (0, 2), (0, 10)), (4, (1,), (0,))]
    """
    blocks = []
    for dim in dict.fromkeys(shape.table_dims[table] for table in shape.feature_tables):
        features = [
            feature
            for feature, table in enumerate(shape.feature_tables)
            if shape.table_dims[table] == dim
        ]
        tables = list(dict.fromkeys(shape.feature_tables[feature] for feature in features))
        bases, num_rows = [], 0
        for table in tables:
            bases.append(num_rows)
            num_rows += shape.table_rows[table]
        blocks.append(Block(dim, tuple(features), tuple(tables), tuple(bases), num_rows))
    return tuple(blocks)


@dataclass(frozen=True)
class BlockGradients:
    """A block's touched rows and their gradients."""

    keys: torch.Tensor
    """The rows' keys, ascending and distinct, int64 `[n]`."""

    grads: torch.Tensor
    """One gradient per row, float32 `[n, dim]`."""


def added_up(parts: Sequence[BlockGradients]) -> BlockGradients:
    """Sum several backwards' gradients by row."""
    rows = RowSum(torch.cat([part.keys for part in parts]))
    return BlockGradients(rows.keys, rows.of(torch.cat([part.grads for part in parts])))


@dataclass(frozen=True)
class RowGradients:
    """A TBE's touched rows and their gradients."""

    blocks: tuple[BlockGradients, ...]
    """One entry per block."""

    step: OptimizerStep
    """The learning rate and iteration at the lookup."""

    @property
    def num_rows(self) -> int:
        """The number of touched rows in all tables."""
        return sum(block.keys.numel() for block in self.blocks)


@dataclass(frozen=True)
class Lookup:
    """A TBE forward's inputs."""

    ids: torch.Tensor
    """Row ids, feature by feature."""
    offsets: torch.Tensor
    """Bag boundaries in ``ids``: features x batch + 1."""
    weights: torch.Tensor | None


class RowSum:
    """Sums contributions by row, which are sorted by row once, for all sums.

    A row's contributions are added in the given order. In the batch's order, that equals FBGEMM's
    fused backward on a CPU bit for bit (unweighted sums, one feature per table). The result is
    deterministic everywhere.
    """

    def __init__(
        self,
        keys: torch.Tensor,
        sources: torch.Tensor | None = None,
        weights: torch.Tensor | None = None,
        *,
        finds_places: bool = False,
    ) -> None:
        ascending, order = stable_sort(keys)
        self.keys, *rows, counts = torch.unique_consecutive(
            ascending, return_inverse=finds_places, return_counts=True
        )
        """The distinct rows' keys, ascending."""
        if finds_places:
            self.places = torch.empty_like(order).scatter_(0, order, *rows)
            """Each contribution's row as an index into `keys`, in the given order."""
        self._order, self._offsets = order, starts_of(counts)
        self._sources = order if sources is None else sources.index_select(0, order)
        self._weights = None if weights is None else weights.index_select(0, order)
        # The GPU has just been waited for anyway, to learn the number of rows.
        self.is_in_parts = keys.is_cuda and counts.numel() > 0 and int(counts.max()) > _PART
        """True if long sums are computed in parts, in parallel."""

    def record_stream(self, stream: torch.Stream) -> None:
        """Keep the tensors alive for ``stream``."""
        for tensor in vars(self).values():
            if isinstance(tensor, torch.Tensor):
                tensor.record_stream(stream)  # pyright: ignore[reportArgumentType]

    def of(self, contributions: torch.Tensor) -> torch.Tensor:
        """Sum each distinct row's contributions, `[n, dim]`."""
        if self.keys.numel() == 0:
            return contributions.new_empty((0, contributions.shape[1]))
        if not self.is_in_parts:
            return sum_bags(contributions, self._sources, self._offsets, self._weights)
        # Rows begin in the middle of parts, which are cut there, too.
        cuts = torch.arange(0, self._sources.numel(), _PART, device=self.keys.device)
        bounds = torch.cat([self._offsets, cuts]).sort().values
        parts = sum_bags(contributions, self._sources, bounds, self._weights)
        places = torch.arange(parts.shape[0], device=parts.device)
        return sum_bags(parts, places, torch.searchsorted(bounds, self._offsets))

    def weighed(self, weigh: Callable[[torch.Tensor], torch.Tensor]) -> "RowSum":
        """Return the same sum with other weights, which ``weigh`` makes of these."""
        assert self._weights is not None
        other = copy.copy(self)
        other._weights = weigh(self._weights).detach()
        return other

    def weight_gradients(self, rows: torch.Tensor, contributions: torch.Tensor) -> torch.Tensor:
        """Return the gradients of the weights with which rows were summed, in the given order.

        Each is the inner product of the weight's row and its contribution.
        """
        numbers = torch.arange(self.keys.numel(), device=self.keys.device)
        per_id = repeated(numbers, self._offsets.diff(), self._order.numel())
        products = rows.index_select(0, per_id) * contributions.index_select(0, self._sources)
        return products.new_empty(len(products)).index_copy_(0, self._order, products.sum(dim=1))


_PART = 512
"""The most contributions that are added sequentially if rows have more. A warp adds one
bag, so with a few very frequent ids, all other warps would wait for it."""


class LookupRows:
    """The rows that a lookup touches, known before their gradients."""

    def __init__(self, shape: TbeShape, blocks: Sequence[Block], lookup: Lookup) -> None:
        self._shape = shape
        self._blocks = tuple(blocks)
        self._offsets = lookup.offsets
        self.sums = tuple(
            _sum_by_row(shape, block, *occurrences)
            for block, occurrences in zip(blocks, _by_block(shape, blocks, lookup), strict=True)
        )
        """Each block's touched rows, with the contributions to their gradients."""

    def gradients(
        self, grad_output: torch.Tensor, max_gradient: float | None
    ) -> list[BlockGradients]:
        """Return each block's row gradients, clipped to ``max_gradient``."""
        grad_output = grad_output.float()
        if max_gradient is not None:
            grad_output = grad_output.clamp(-max_gradient, max_gradient)
        return [
            BlockGradients(rows.keys.long(), rows.of(self._contributions(block, grad_output)))
            for block, rows in zip(self._blocks, self.sums, strict=True)
        ]

    def weight_gradients(
        self, grad_output: torch.Tensor, read: Callable[[Block, torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        """Return the per-sample weights' gradients; ``read`` returns a block's rows by keys."""
        grad_output = grad_output.float()
        by_block = [
            rows.weight_gradients(
                read(block, rows.keys.long()), self._contributions(block, grad_output)
            )
            for block, rows in zip(self._blocks, self.sums, strict=True)
        ]
        if len(by_block) == 1:
            return by_block[0]
        num_features = len(self._shape.feature_tables)
        batch_size = (len(self._offsets) - 1) // num_features
        sizes = self._offsets.diff().view(num_features, batch_size).sum(dim=1).tolist()
        by_feature: dict[int, torch.Tensor] = {}
        for block, grads in zip(self._blocks, by_block, strict=True):
            parts = grads.split([sizes[feature] for feature in block.features])
            by_feature |= zip(block.features, parts, strict=True)
        return torch.cat([by_feature[feature] for feature in sorted(by_feature)])

    def _contributions(self, block: Block, grad_output: torch.Tensor) -> torch.Tensor:
        """Return a contribution per bag, `[batch x features, dim]`, or per id, `[ids, dim]`."""
        if len(self._blocks) > 1:
            dims = [self._shape.table_dims[table] for table in self._shape.feature_tables]
            columns = grad_output.split(dims, dim=1)
            grad_output = torch.cat([columns[feature] for feature in block.features], dim=1)
        return grad_output.reshape(-1, block.dim)


def _by_block(
    shape: TbeShape, blocks: Sequence[Block], lookup: Lookup
) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]]:
    """Return each block's ids, their count per bag, `[features, batch]`, and their weights."""
    num_features = len(shape.feature_tables)
    batch_size = (lookup.offsets.numel() - 1) // num_features
    lengths = lookup.offsets.diff().view(num_features, batch_size)
    weights = None if lookup.weights is None else lookup.weights.float()
    if len(blocks) == 1:
        return [(lookup.ids.long(), lengths, weights)]
    sizes = lengths.sum(dim=1).tolist()

    def of_block(block: Block, values: torch.Tensor) -> torch.Tensor:
        by_feature = values.split(sizes)
        return torch.cat([by_feature[feature] for feature in block.features])

    return [
        (
            of_block(block, lookup.ids).long(),
            lengths[list(block.features)],
            None if weights is None else of_block(block, weights),
        )
        for block in blocks
    ]


def _sum_by_row(
    shape: TbeShape,
    block: Block,
    ids: torch.Tensor,
    lengths: torch.Tensor,
    weights: torch.Tensor | None,
) -> RowSum:
    """Return the sum that turns the output's contributions into a block's row gradients."""
    bases = block.feature_bases(shape, ids.device)
    keys = ids + repeated(bases, lengths.sum(dim=1), ids.numel())
    if not keys.is_cpu:
        keys = keys.to(block.key_dtype)  # A GPU sorts by digits: half as many take half the time.
    if shape.is_sequence:
        return RowSum(keys, weights=weights)
    return RowSum(keys, *sources_of_bags(lengths, weights, ids.numel(), is_mean=shape.is_mean))


def stable_sort(numbers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return numbers >= 0 in ascending order, and their places; equal numbers keep their order.

    On a CPU, NumPy's vector instructions sort numbers joined to their places as single integers, in
    a tenth of the time of torch's stable sort.

    Example:
        >>> import torch
        >>> from torchrec_2dsp.rows.gradients import stable_sort
        >>> stable_sort(torch.tensor([5, 2, 5, 0]))
        (tensor([0, 2, 5, 5]), tensor([3, 1, 0, 2]))
    """
    if numbers.is_cpu and numbers.numel():
        keys, place_bits = numbers.numpy(), numbers.numel().bit_length()
        if keys.max() < 2 ** (63 - place_bits):
            joined = (keys.astype(np.int64) << place_bits) | np.arange(len(keys))
            joined.sort()
            memory = torch.empty((2, len(keys)), dtype=torch.int64)
            ascending, places = memory[0].view(numbers.dtype)[: len(keys)], memory[1]
            np.right_shift(joined, place_bits, out=ascending.numpy(), casting="unsafe")
            np.bitwise_and(joined, 2**place_bits - 1, out=places.numpy())
            return ascending, places
    ascending, places = numbers.sort(stable=True)
    return ascending, places


def false_and_true(flags: torch.Tensor, num_true: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the places of flags that are 0 and of those that are 1, without waiting for a GPU."""
    _, order = stable_sort(flags)
    false_at, true_at = order.split([flags.numel() - num_true, num_true])
    return false_at, true_at


def repeated(values: torch.Tensor, counts: torch.Tensor, size: int) -> torch.Tensor:
    """Repeat each value, or each row, as often as its count says, ``size`` in total.

    On a GPU each output looks its value up: in torch's kernel one warp writes all equal values.

    Example:
        >>> import torch
        >>> from torchrec_2dsp.rows.gradients import repeated
        >>> repeated(torch.tensor([7, 8, 9]), torch.tensor([2, 0, 1]), 3)
        tensor([7, 7, 9])
    """
    if values.is_cpu:
        return values.repeat_interleave(counts, dim=0, output_size=size)
    numbers = torch.arange(size, device=values.device)
    return values.index_select(0, torch.searchsorted(counts.cumsum(0), numbers, right=True))


def repeated_to_end(numbers: tuple[int, ...], counts: torch.Tensor, size: int) -> torch.Tensor:
    """Repeat each number but the last by its count, and the last one up to ``size``.

    If the counts are negative or too many, the last one may take the others' places.
    """
    if not counts.is_cpu:
        return repeated(constant(numbers, counts.device), counts, size)
    given = counts.numpy()
    if given.min(initial=0) < 0 or given.sum() > size:
        given = np.zeros_like(given)
    repeated_numbers = torch.empty(size, dtype=torch.int64)
    repeated_numbers.numpy()[:] = np.repeat(numbers, [*given, size - given.sum()])
    return repeated_numbers


def sources_of_bags(
    lengths: torch.Tensor, weights: torch.Tensor | None, num_ids: int, *, is_mean: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return each id's bag among those with gradients, and the id's factor in it.

    Ids are ordered by feature; ``lengths`` are `[features, batch]`. A mean is a weighted sum.
    """
    per_bag = lengths.reshape(-1)
    if is_mean:
        shares = repeated(per_bag.clamp(min=1).float().reciprocal(), per_bag, num_ids)
        weights = shares if weights is None else weights * shares
    # Gradients are ordered by sample, ids by feature.
    num_features, batch_size = lengths.shape
    places = transposed(num_features, batch_size, lengths.device)
    return repeated(places, per_bag, num_ids), weights


def transposed(
    num_rows: int, num_columns: int, device: torch.device, dtype: torch.dtype = torch.int64
) -> torch.Tensor:
    """Return each number's place in the transposed matrix, row by row.

    Batches of one size share the result; a GPU's streams, which don't wait for each other, don't.
    """
    stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
    return _transposed((num_columns, num_rows), device, dtype, stream)


@lru_cache(maxsize=8)
@torch.inference_mode(mode=False)
def _transposed(
    shape: tuple[int, int], device: torch.device, dtype: torch.dtype, stream: object
) -> torch.Tensor:
    return torch.arange(prod(shape), device=device, dtype=dtype).view(shape).t().reshape(-1)


_MAX_INT32 = torch.iinfo(torch.int32).max
