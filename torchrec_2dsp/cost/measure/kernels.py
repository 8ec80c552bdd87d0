"""Time what a rank does with rows, while all other ranks do the same."""

from collections.abc import Callable, Iterator
from itertools import chain
from typing import NamedTuple

import torch
import torch.distributed as dist

from torchrec_2dsp._compat.fbgemm import (
    ComputeDevice,
    EmbeddingLocation,
    EmbOptimType,
    PoolingMode,
    SplitTableBatchedEmbeddingBagsCodegen,
)
from torchrec_2dsp.cost.measure.fit import KernelSample, Timed
from torchrec_2dsp.cost.measure.timing import group_device, repeated_seconds

_FLOAT_BYTES = 4
_NUM_ROWS = 2**18
_NUM_TABLES = 4
_DIMS = (16, 64, 128)
_NUM_IDS = (2**12, 2**14, 2**16)
_TABLE_BYTES = (2**24, 2**25, 2**26)
"""Beyond what caches hold, as tables are."""


class _Piece(NamedTuple):
    """Some work that can be done again and again."""

    name: str
    items: float
    num_bytes: float
    run: Callable[[], object]


def measure_kernels(
    world: dist.ProcessGroup, *, progress: Callable[[str], object]
) -> dict[str, list[KernelSample]]:
    """Samples of each kind of work, by the name that a calibration has for it; on all ranks alike.

    Args:
        world: the ranks that work at the same time.
        progress: called with what is being measured.

    Collectives:
        Those of `repeated_seconds`.
    """
    samples: dict[str, list[KernelSample]] = {}
    device = group_device(world)
    for piece in chain(_lookups(device), _moves(device), _sorts(device), _passes(device)):
        if piece.name not in samples:
            progress(f"{piece.name} of rows")
        timed = Timed.of(repeated_seconds(piece.run, world))
        sample = KernelSample(piece.items, piece.num_bytes, timed)
        samples.setdefault(piece.name, []).append(sample)
    return samples


def _lookups(device: torch.device) -> Iterator[_Piece]:
    """FBGEMM's kernel, with one id per bag and any row as probable as any other."""
    for dim in _DIMS:
        tbe = _tables(dim, device)
        for num_ids in _NUM_IDS:
            ids = torch.randint(0, _NUM_ROWS // _NUM_TABLES, (num_ids,), device=device)
            offsets = torch.arange(num_ids + 1, device=device)
            num_bytes = float(num_ids * dim * _FLOAT_BYTES)
            # Arguments, as the loop's variables are others when a piece is run later.
            yield _Piece("lookup", num_ids, num_bytes, lambda t=tbe, i=ids, o=offsets: t(i, o))
            looked_up = tbe(ids, offsets)
            gradient = torch.rand_like(looked_up)
            yield _Piece(
                "update",
                num_ids,
                num_bytes,
                lambda out=looked_up, grad=gradient: out.backward(grad, retain_graph=True),
            )


def _tables(dim: int, device: torch.device) -> SplitTableBatchedEmbeddingBagsCodegen:
    is_cpu = device.type == "cpu"
    place = EmbeddingLocation.HOST if is_cpu else EmbeddingLocation.DEVICE
    compute = ComputeDevice.CPU if is_cpu else ComputeDevice.CUDA
    return SplitTableBatchedEmbeddingBagsCodegen(
        [(_NUM_ROWS // _NUM_TABLES, dim, place, compute)] * _NUM_TABLES,
        optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        pooling_mode=PoolingMode.SUM,
        device=device,
    )


def _moves(device: torch.device) -> Iterator[_Piece]:
    """Rows to other places, and rows that are added up there."""
    for dim in _DIMS:
        for num_rows in _NUM_IDS:
            rows = torch.rand(num_rows, dim, device=device)
            sums = torch.zeros_like(rows)
            places = torch.randint(0, num_rows, (num_rows,), device=device)
            num_bytes = float(rows.nbytes)
            yield _Piece("gather", num_rows, num_bytes, lambda r=rows, p=places: r[p])
            yield _Piece(
                "add",
                num_rows,
                num_bytes,
                lambda s=sums, r=rows, p=places: s.index_add_(0, p, r),
            )


def _sorts(device: torch.device) -> Iterator[_Piece]:
    for num_ids in _NUM_IDS:
        ids = torch.randint(0, _NUM_ROWS, (num_ids,), device=device)
        yield _Piece("sort", num_ids, 0.0, lambda i=ids: torch.unique(i, return_inverse=True))


def _passes(device: torch.device) -> Iterator[_Piece]:
    """Over whole tables."""
    for num_bytes in _TABLE_BYTES:
        table = torch.zeros(num_bytes // _FLOAT_BYTES, device=device)
        yield _Piece("dense_update", 0.0, num_bytes, lambda t=table: t.add_(t, alpha=-0.1))
