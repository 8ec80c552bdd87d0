"""Averages of whole shards: large ones in place, small ones together."""

import pytest

import torchrec_2dsp as tdsp
from tests.support.loops import Tensors, largest_gap, make_stream, train
from tests.support.models import ModelSpec, TableSpec
from tests.support.parity import Cell
from tests.support.ranks import RankPool
from torchrec_2dsp.comms.counting import count_collectives
from torchrec_2dsp.replicas import whole_shard

WHOLE = tdsp.WeightSync(rows=tdsp.SyncedRows.ALL)
LARGE = ModelSpec(
    (
        TableSpec("t0", 1600, 8, ("f0",)),
        TableSpec("t1", 960, 16, ("f1", "f2")),
        TableSpec("t2", 1320, 8, ("f3",)),
    )
)


def whole_in_chunks(rank: int, world_size: int, chunk_bytes: int) -> tuple[Tensors, set[str]]:
    """What averaging whole shards comes to, and the collectives that it is made of."""
    cell = Cell(tdsp.Mesh2D(2, 2), spec=LARGE, sync=WHOLE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(whole_shard, "_CHUNK_BYTES", chunk_bytes)
        with count_collectives() as seen:
            trained = train(cell, rank, make_stream(cell, 2))
    # Each rank has half of the rows of each table, and their moments.
    large = {4 * 800 * 8, 4 * 480 * 16, 4 * 660 * 8}
    reduced = [one for one in seen.records if one.op.startswith("all_reduce")]
    return trained, {
        one.op for one in reduced if one.num_bytes in large or one.op == "all_reduce_coalesced"
    }


def test_large_shards_are_averaged_where_they_are(ranks4: RankPool) -> None:
    together = ranks4.run(whole_in_chunks, 2**20)
    apart = ranks4.run(whole_in_chunks, 20_000)
    for (expected, joined), (found, parted) in zip(together, apart, strict=True):
        assert largest_gap(found, expected) == 0.0
        assert joined == {"all_reduce_coalesced"}
        # Moments are small enough to travel together.
        assert parted == {"all_reduce", "all_reduce_coalesced"}


def trained_with_an_empty_shard(rank: int, world_size: int) -> Tensors:
    """By a model whose first table has no row on every second rank of a group."""
    spec = ModelSpec((TableSpec("t0", 1, 8, ("f0",)), *LARGE.tables[1:]))
    cell = Cell(tdsp.Mesh2D(2, 2), spec=spec, sync=WHOLE)
    return train(cell, rank, make_stream(cell, 2))


def test_shards_without_rows_are_left_out(ranks4: RankPool) -> None:
    copies = ranks4.run(trained_with_an_empty_shard)
    for one, other in (copies[:2], copies[2:]):
        assert largest_gap(one, other) == 0.0
