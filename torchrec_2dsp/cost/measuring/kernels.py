"""Time a rank's work on rows, while all other ranks do the same."""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain, product
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F

from torchrec_2dsp._compat.fbgemm import (
    ComputeDevice,
    EmbeddingLocation,
    EmbOptimType,
    PoolingMode,
    SplitTableBatchedEmbeddingBagsCodegen,
)
from torchrec_2dsp.codecs.rows import RowCodec, Transport
from torchrec_2dsp.cost.calibration import encoding
from torchrec_2dsp.cost.measuring.collectives import group_device, repeated_seconds
from torchrec_2dsp.cost.measuring.fit import KernelSample, Timed
from torchrec_2dsp.rows.gradients import RowSum
from torchrec_2dsp.rows.update import DirectLookup, rule_for

_FLOAT_BYTES = 4
_NUM_ROWS = 2**18
_NUM_TABLES = 4
_NUM_ASKING = 4
"""Ranks whose rows an owner looks up together."""
_DIMS = (16, 64, 128)
_NUM_IDS = (2**11, 2**13, 2**15)
"""More ids would need tensors that get their memory page by page, each time anew."""
_BAG_SIZES = (1, 16)
_ROWS_OF_A_TABLE = (64, _NUM_ROWS // _NUM_TABLES)
"""Numbers of rows that ids are drawn from: few, which all repeat in caches, or many."""
_TOKENS = (2**8, 2**10, 2**12)
_WIDTHS = (64, 256, 1024)
_TABLE_BYTES = (2**24, 2**25, 2**26)
"""Beyond what caches hold, as tables are."""


class _Piece(NamedTuple):
    """Work that can be repeated."""

    name: str
    items: float
    num_bytes: float
    run: Callable[[], object]
    vector_bytes: float = 0.0
    row_bytes: float = 0.0


def measure_kernels(
    world: dist.ProcessGroup, *, progress: Callable[[str], object]
) -> dict[str, list[KernelSample]]:
    """Time each kind of work, by its name in a calibration; equal on all ranks.

    Collectives:
        Same as `repeated_seconds`.
    """
    samples: dict[str, list[KernelSample]] = {}
    device = group_device(world)
    for piece in chain(
        _bags(device),
        _owned_rows(device),
        _needed_rows(device),
        _moves(device),
        _passes(device),
        _matmuls(device),
        _encodings(device),
    ):
        if piece.name not in samples:
            progress(f"{piece.name} of rows")
        timed = Timed.of(repeated_seconds(piece.run, world))
        sample = KernelSample(
            piece.items,
            piece.num_bytes,
            timed,
            vector_bytes=piece.vector_bytes,
            row_bytes=piece.row_bytes,
        )
        samples.setdefault(piece.name, []).append(sample)
    return samples


def _bags(device: torch.device) -> Iterator[_Piece]:
    """Yield FBGEMM's kernel, with short and long bags, from few rows and from many."""
    for dim in _DIMS:
        tbe = _tables(dim, PoolingMode.SUM, device)
        for num_ids, size, num_rows in product(_NUM_IDS, _BAG_SIZES, _ROWS_OF_A_TABLE):
            tables = torch.randint(0, num_rows, (_NUM_TABLES, num_ids // _NUM_TABLES))
            distinct = sum(of_table.unique().numel() for of_table in tables)
            ids = tables.view(-1).to(device)
            offsets = torch.arange(0, num_ids + 1, size, device=device)
            of_bags = {
                "vector_bytes": float(num_ids // size * dim * _FLOAT_BYTES),
                "row_bytes": float(distinct * dim * _FLOAT_BYTES),
            }
            look_up = partial(tbe, ids, offsets)
            for piece in _there_and_back("", dim, num_ids, look_up):
                yield piece._replace(**of_bags)


def _owned_rows(device: torch.device) -> Iterator[_Piece]:
    """Yield row exchange's work for other ranks, whose rows come in their order."""
    for dim in _DIMS:
        tbe = _tables(dim, PoolingMode.NONE, device)
        rule = rule_for(tbe)
        direct = None if rule is None else DirectLookup(tbe, rule)
        for num_ids in _NUM_IDS:
            lists = (_NUM_TABLES * _NUM_ASKING, num_ids // _NUM_TABLES // _NUM_ASKING)
            ids = torch.randint(0, _NUM_ROWS // _NUM_TABLES, lists, device=device)
            ids = ids.sort(dim=1).values.view(-1)
            offsets = torch.arange(num_ids + 1, device=device)

            # Arguments, as the loop's variables are others when a piece is run later.
            def look_up(
                tbe: Any = tbe, direct: Any = direct, lookup_input: Any = (ids, offsets)
            ) -> torch.Tensor:
                return (
                    tbe(*lookup_input)
                    if direct is None
                    else direct.lookup(lambda: tbe(*lookup_input))
                )

            yield from _there_and_back("row_", dim, num_ids, look_up)


def _there_and_back(
    prefix: str, dim: int, num_ids: int, look_up: Callable[[], torch.Tensor]
) -> Iterator[_Piece]:
    num_bytes = float(num_ids * dim * _FLOAT_BYTES)
    yield _Piece(f"{prefix}lookup", num_ids, num_bytes, look_up)
    looked_up = look_up()
    gradient = torch.rand_like(looked_up)
    yield _Piece(
        f"{prefix}update",
        num_ids,
        num_bytes,
        lambda: looked_up.backward(gradient, retain_graph=True),
    )


def _tables(
    dim: int, pooling: PoolingMode, device: torch.device
) -> SplitTableBatchedEmbeddingBagsCodegen:
    is_cpu = device.type == "cpu"
    place = EmbeddingLocation.HOST if is_cpu else EmbeddingLocation.DEVICE
    compute = ComputeDevice.CPU if is_cpu else ComputeDevice.CUDA
    return SplitTableBatchedEmbeddingBagsCodegen(
        [(_NUM_ROWS // _NUM_TABLES, dim, place, compute)] * _NUM_TABLES,
        optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        pooling_mode=pooling,
        device=device,
    )


def _needed_rows(device: torch.device) -> Iterator[_Piece]:
    """Yield the search for a batch's distinct rows, and for each id's place among them."""
    for num_ids in _NUM_IDS:
        keys = torch.randint(0, num_ids, (num_ids,), device=device, dtype=torch.int32)
        yield _Piece("find", num_ids, 0.0, lambda keys=keys: RowSum(keys).places())


def _moves(device: torch.device) -> Iterator[_Piece]:
    """Yield moving rows to where they are wanted, and summing gradients by row."""
    for dim in _DIMS:
        for num_ids in _NUM_IDS:
            rows = torch.rand(num_ids, dim, device=device)
            keys = torch.randint(0, num_ids, (num_ids,), device=device, dtype=torch.int32)
            sums = RowSum(keys)
            places, starts = sums.places(), torch.arange(num_ids, device=device)
            num_bytes = float(rows.nbytes)
            yield _Piece(
                "pool",
                num_ids,
                num_bytes,
                lambda p=places, r=rows, s=starts: F.embedding_bag(p, r, s, mode="sum"),
            )
            yield _Piece("add", num_ids, num_bytes, lambda s=sums, r=rows: s.of(r))


def _passes(device: torch.device) -> Iterator[_Piece]:
    """Yield passes over whole tables."""
    for num_bytes in _TABLE_BYTES:
        table = torch.zeros(num_bytes // _FLOAT_BYTES, device=device)
        yield _Piece("dense_update", 0.0, num_bytes, lambda t=table: t.add_(t, alpha=-0.1))


def _matmuls(device: torch.device) -> Iterator[_Piece]:
    """Yield layers of a dense part, narrow and wide, over few samples and over many."""
    for num_rows, width in product(_TOKENS, _WIDTHS):
        rows = torch.rand(num_rows, width, device=device)
        weight = torch.rand(width, width, device=device)
        operations = 2.0 * num_rows * width * width
        num_bytes = float(2 * rows.nbytes + weight.nbytes)
        yield _Piece("matmul", operations, num_bytes, lambda r=rows, w=weight: r @ w)


def _encodings(device: torch.device) -> Iterator[_Piece]:
    """Yield encoding rows and decoding them."""
    for transport, dim, num_rows in product(Transport, _DIMS, _NUM_IDS):
        if transport.codec.is_exact:
            continue
        rows = torch.rand(num_rows, dim, device=device)

        def there_and_back(
            codec: RowCodec = transport.codec, rows: torch.Tensor = rows
        ) -> torch.Tensor:
            return codec.decode(codec.encode(rows), rows.shape[1])

        yield _Piece(encoding(transport), num_rows, float(rows.nbytes), there_and_back)
