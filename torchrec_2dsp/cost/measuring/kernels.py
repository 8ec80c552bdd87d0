"""Time a rank's work on rows, while all other ranks do the same."""

from collections.abc import Callable, Iterator
from functools import cache, partial
from itertools import product, zip_longest
from typing import NamedTuple

import torch
import torch.nn.functional as F

from torchrec_2dsp._compat.fbgemm import (
    ComputeDevice,
    EmbeddingLocation,
    EmbOptimType,
    PoolingMode,
    Tbe,
)
from torchrec_2dsp.codecs.rows import RowCodec, Transport
from torchrec_2dsp.cost.calibration import encoding
from torchrec_2dsp.cost.measuring.clock import Clock, Sampling
from torchrec_2dsp.cost.measuring.fit import KernelSample, KernelWork, Timed
from torchrec_2dsp.rows.gradients import RowSum
from torchrec_2dsp.rows.update import DirectLookup, rule_for

_FLOAT_BYTES = 4
_NUM_ROWS = 2**18
_NUM_TABLES = 4
_NUM_ASKING = 4
"""The number of ranks whose rows an owner looks up together."""
_BAG_SIZES = (1, 16)
_ROWS_OF_A_TABLE = (64, _NUM_ROWS // _NUM_TABLES)
"""The number of rows from which ids are drawn: few, which all repeat in caches, or many."""
_FEWEST = 2
"""The number of samples that a fit needs."""


class _Piece(NamedTuple):
    """Work that can be repeated."""

    name: str
    work: KernelWork
    run: Callable[[], object]


def measure_kernels(
    clock: Clock, *, share: float, progress: Callable[[str], object]
) -> dict[str, list[KernelSample]]:
    """Time each kind of work, by its name in a calibration; equal on all ranks.

    Once ``share`` of the time has passed, only the first samples of each kind are taken.

    Collectives:
        The clock's.
    """
    samples: dict[str, list[KernelSample]] = {}
    device, sampling = clock.device, clock.sampling
    kinds = (_bags, _owned_rows, _needed_rows, _moves, _passes, _matmuls, _encodings)
    if device.type == "cuda":
        kinds = (*kinds, _host_rows)
    # In turns, so that a late end, or a temporary slowdown, affects all kinds.
    turns = zip_longest(*(kind(device, sampling) for kind in kinds))
    for piece in clock.guarded(piece for turn in turns for piece in turn if piece is not None):
        of_kind = samples.setdefault(piece.name, [])
        if len(of_kind) >= _FEWEST and clock.is_late(share):
            continue
        progress(f"{piece.name} of rows")
        of_kind.append(KernelSample(piece.work, Timed.of(clock.repeated_seconds(piece.run))))
    return samples


def _bags(device: torch.device, sampling: Sampling) -> Iterator[_Piece]:
    """Yield FBGEMM's kernel, with short and long bags, from few rows and from many."""
    tables_of = cache(partial(_tables, pooling=PoolingMode.SUM, device=device))
    # All ranks draw the same ids, so that they count equally many rows.
    generator = torch.Generator().manual_seed(0)
    for dim, num_ids in sampling.rows:
        for size, num_rows in product(_BAG_SIZES, _ROWS_OF_A_TABLE):
            shape = (_NUM_TABLES, num_ids // _NUM_TABLES)
            tables = torch.randint(0, num_rows, shape, generator=generator)
            distinct = sum(of_table.unique().numel() for of_table in tables)
            ids = tables.view(-1).to(device)
            offsets = torch.arange(0, num_ids + 1, size, device=device)
            rows = num_ids, num_ids // size, distinct
            work = KernelWork(num_ids, *(float(number * dim * _FLOAT_BYTES) for number in rows))
            yield from _there_and_back("", work, partial(tables_of(dim), ids, offsets))


def _owned_rows(device: torch.device, sampling: Sampling) -> Iterator[_Piece]:
    """Yield row exchange's work for other ranks, whose rows are in request order."""
    tables_of = cache(partial(_tables, pooling=PoolingMode.NONE, device=device))
    for dim, num_ids in sampling.rows:
        tbe = tables_of(dim)
        rule = rule_for(tbe)
        direct = None if rule is None else DirectLookup(tbe, rule)
        forward = partial(tbe, *_asked_rows(num_ids, device))
        look_up = forward if direct is None else partial(direct.lookup, forward)
        work = KernelWork(num_ids, float(num_ids * dim * _FLOAT_BYTES))
        yield from _there_and_back("row_", work, look_up)


def _host_rows(device: torch.device, sampling: Sampling) -> Iterator[_Piece]:
    """Yield a GPU's lookups of rows in host memory."""
    for dim, num_ids in sampling.rows:
        tbe = _tables(dim, PoolingMode.NONE, device, EmbeddingLocation.MANAGED)
        look_up = partial(tbe, *_asked_rows(num_ids, device))
        work = KernelWork(num_ids, float(num_ids * dim * _FLOAT_BYTES))
        yield _Piece("host_memory", work, look_up)


def _asked_rows(num_ids: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids as requested by other ranks, in row order, and offsets for one id each."""
    lists = (_NUM_TABLES * _NUM_ASKING, num_ids // _NUM_TABLES // _NUM_ASKING)
    ids = torch.randint(0, _NUM_ROWS // _NUM_TABLES, lists, device=device)
    return ids.sort(dim=1).values.view(-1), torch.arange(num_ids + 1, device=device)


def _there_and_back(
    prefix: str, work: KernelWork, look_up: Callable[[], torch.Tensor]
) -> Iterator[_Piece]:
    yield _Piece(f"{prefix}lookup", work, look_up)
    looked_up = look_up()
    gradient = torch.rand_like(looked_up)
    update = partial(looked_up.backward, gradient, retain_graph=True)
    yield _Piece(f"{prefix}update", work, update)


def _tables(
    dim: int,
    pooling: PoolingMode,
    device: torch.device,
    on_gpus: EmbeddingLocation = EmbeddingLocation.DEVICE,
) -> Tbe:
    is_cpu = device.type == "cpu"
    place = EmbeddingLocation.HOST if is_cpu else on_gpus
    compute = ComputeDevice.CPU if is_cpu else ComputeDevice.CUDA
    return Tbe(
        [(_NUM_ROWS // _NUM_TABLES, dim, place, compute)] * _NUM_TABLES,
        optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        pooling_mode=pooling,
        device=device,
        # As in training: the driver may move managed memory.
        uvm_host_mapped=True,
    )


def _needed_rows(device: torch.device, sampling: Sampling) -> Iterator[_Piece]:
    """Yield the search for a batch's distinct rows, and for each id's place among them."""
    for num_ids in dict.fromkeys(num_ids for _, num_ids in sampling.rows):
        keys = torch.randint(0, num_ids, (num_ids,), device=device, dtype=torch.int32)
        find = partial(RowSum, keys, finds_places=True)
        yield _Piece("find", KernelWork(num_ids, 0.0), find)


def _moves(device: torch.device, sampling: Sampling) -> Iterator[_Piece]:
    """Yield moving rows to their places, and summing gradients by row."""
    for dim, num_ids in sampling.rows:
        rows = torch.rand(num_ids, dim, device=device)
        keys = torch.randint(0, num_ids, (num_ids,), device=device, dtype=torch.int32)
        sums = RowSum(keys, finds_places=True)
        places, starts = sums.places, torch.arange(num_ids, device=device)
        work = KernelWork(num_ids, float(rows.nbytes))
        pool = partial(F.embedding_bag, places, rows, starts, mode="sum")
        yield _Piece("pool", work, pool)
        yield _Piece("add", work, partial(sums.of, rows))


def _passes(device: torch.device, sampling: Sampling) -> Iterator[_Piece]:
    """Yield passes over whole tables."""
    for num_bytes in sampling.table_bytes:
        table = torch.zeros(num_bytes // _FLOAT_BYTES, device=device)
        update = partial(table.add_, table, alpha=-0.1)
        yield _Piece("dense_update", KernelWork(0.0, num_bytes), update)


def _matmuls(device: torch.device, sampling: Sampling) -> Iterator[_Piece]:
    """Yield a dense part's layers, narrow and wide, over few samples and over many."""
    for num_rows, width in product(sampling.num_tokens, sampling.widths):
        rows = torch.rand(num_rows, width, device=device)
        weight = torch.rand(width, width, device=device)
        operations = 2.0 * num_rows * width * width
        work = KernelWork(operations, float(2 * rows.nbytes + weight.nbytes))
        yield _Piece("matmul", work, partial(torch.matmul, rows, weight))


def _encodings(device: torch.device, sampling: Sampling) -> Iterator[_Piece]:
    """Yield encoding and decoding rows."""
    for (dim, num_rows), transport in product(sampling.rows, Transport):
        if transport is Transport.FP32:
            continue
        rows = torch.rand(num_rows, dim, device=device)

        def there_and_back(
            codec: RowCodec = transport.codec, rows: torch.Tensor = rows
        ) -> torch.Tensor:
            return codec.decode(codec.encode(rows), rows.shape[1])

        work = KernelWork(num_rows, float(rows.nbytes))
        yield _Piece(encoding(transport), work, there_and_back)
