"""Tables in host memory train like ones in device memory, where their hot rows are.

A CPU has only one memory, so there only the plans' and kernels' settings are tested.
"""

from dataclasses import replace
from pathlib import Path

import pytest

import torchrec_2dsp as tdsp
from tests.support.devices import KERNEL_ROUNDING, on_gpus
from tests.support.loops import shard
from tests.support.models import HOT_ROWS, MIXED, SEQUENCES
from tests.support.parity import FOUR, ONE, TWO, Cell, check_cells
from tests.support.prefetching import compare
from tests.support.ranks import RankPool
from tests.support.slices import Deal
from tests.support.trips import Trip, check_arrivals
from torchrec_2dsp._compat.fbgemm import EmbeddingLocation
from torchrec_2dsp.shard.parted import sharded_tables

HOST = Cell(TWO, compute_kernel="fused_uvm")
ROWS = replace(HOST, exchange="row", hot_rows=HOT_ROWS)
CELLS = (
    HOST,
    replace(HOST, sharding="table_wise", mesh=ONE),
    replace(HOST, sharding="column_wise"),
    replace(HOST, exchange="nonempty", sharding="table_wise", hot_rows=HOT_ROWS),
    replace(HOST, optimizer="sgd", sync=tdsp.WeightSync(policy=tdsp.every(1)), mesh=FOUR),
    ROWS,
    replace(ROWS, mesh=ONE, owners="hash"),
    replace(ROWS, spec=MIXED, hot_rows=()),
    replace(ROWS, spec=SEQUENCES, hot_rows=HOT_ROWS[:1]),
    replace(ROWS, optimizer="adagrad"),
)


@pytest.mark.dealt_file
def test_training_equals_the_unsharded_model(ranks4: RankPool, dealt: Deal) -> None:
    check_cells(dealt(CELLS), ranks4)


def locations(rank: int, world_size: int) -> list[set[tuple[EmbeddingLocation, bool]]]:
    """Return the memory of the tables' and the hot rows' kernels, and whether it is pinned."""
    (part,) = sharded_tables(shard(ROWS))
    assert part.hot_rows is not None
    return [
        {(tbe.embedding_specs[0][2], tbe.uvm_host_mapped) for tbe in tbes}
        for tbes in ([kernel.tbe for kernel in part.kernels()], part.hot_rows.kernels())
    ]


def test_hot_rows_are_in_the_memory_of_the_device(ranks4: RankPool) -> None:
    if on_gpus():
        cold, hot = EmbeddingLocation.MANAGED, EmbeddingLocation.DEVICE
    else:
        cold = hot = EmbeddingLocation.HOST
    assert ranks4.run(locations) == [[{(cold, True)}, {(hot, False)}]] * 4


def gap_of_prefetch(rank: int, world_size: int) -> float:
    return compare(rank, world_size, replace(ROWS, mesh=ONE, hot_rows=()))[0]


def test_prefetched_rows_come_from_there(ranks4: RankPool) -> None:
    assert max(ranks4.run(gap_of_prefetch)) <= KERNEL_ROUNDING


def test_checkpoints_move_between_memories(ranks4: RankPool, tmp_path: Path) -> None:
    device = replace(ROWS, compute_kernel="fused")
    check_arrivals(ranks4, [Trip(ROWS, device), Trip(device, HOST)], tmp_path)
