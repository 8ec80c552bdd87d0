"""Checkpoints move between meshes without loss, and training continues as if never stopped."""

import itertools
from contextlib import suppress
from pathlib import Path
from typing import cast

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import torchrec_2dsp as tdsp
from tests.support.buckets import bucket
from tests.support.models import SEQUENCES, ModelSpec, TableSpec, make_batch
from tests.support.oracle import local_loss
from tests.support.parity import Cell, local_shards, make_oracle
from tests.support.ranks import RankPool
from tests.support.slices import Deal
from tests.support.trips import (
    HOT,
    M14,
    M22,
    M22_CONTIGUOUS,
    M41,
    OTHER_HOT,
    TOLERANCE,
    Trip,
    batches,
    check_arrivals,
    distance,
    full_state,
    make,
    state_entries,
    stock,
    train,
)
from torchrec_2dsp.parallel.checkpoint import load_checkpoint, save_checkpoint

MEAN = ModelSpec(pooling="mean")


def trip(
    source: tuple[tdsp.Mesh2D, str], target: tuple[tdsp.Mesh2D, str], **options: object
) -> Trip:
    """Build a trip; ``options`` apply to both sides, except ``hot_rows``: ``(source, target)``."""
    source_hot, target_hot = options.pop("hot_rows", ((), ()))  # type: ignore[misc]
    return Trip(
        Cell(*source, hot_rows=source_hot, **options),  # type: ignore[arg-type]
        Cell(*target, hot_rows=target_hot, **options),  # type: ignore[arg-type]
    )


FEW_ROWS = ModelSpec(
    (TableSpec("t0", 1, 8, ("f0",)), TableSpec("t1", 33, 8, ("f1",))), pooling="mean"
)
"""A table with fewer rows than ranks of a host, so that some have none; small enough that training
doesn't diverge, though all samples look up the same row."""

TRIPS = [
    # every mesh to every other one, both layouts
    trip((M22, "table_wise"), (M14, "table_wise")),
    trip((M14, "table_wise"), (M41, "table_wise"), optimizer="sgd"),
    trip((M41, "table_wise"), (M22_CONTIGUOUS, "row_wise"), hot_rows=((), HOT)),
    trip((M22_CONTIGUOUS, "row_wise"), (M22, "table_wise"), hot_rows=(HOT, OTHER_HOT)),
    trip((M22, "row_wise"), (M22_CONTIGUOUS, "row_wise"), optimizer="sgd", hot_rows=(HOT, HOT)),
    trip((M22, "row_wise"), (M41, "row_wise"), hot_rows=(HOT, ()), spec=MEAN),
    trip((M14, "row_wise"), (M22, "row_wise"), optimizer="adagrad", hot_rows=((), OTHER_HOT)),
    trip((M14, "row_wise"), (M22_CONTIGUOUS, "table_row_wise"), hot_rows=(HOT, ())),
    trip((M41, "table_row_wise"), (M14, "table_row_wise"), hot_rows=(OTHER_HOT, HOT)),
    trip((M22, "table_row_wise"), (M22, "table_wise"), optimizer="sgd"),
    # row-wise moments per column shard: the same columns, however the rows are split
    trip((M22, "column_wise"), (M14, "column_wise"), hot_rows=((), HOT)),
    trip((M41, "column_wise"), (M22_CONTIGUOUS, "grid_shard"), hot_rows=(HOT, OTHER_HOT)),
    trip((M22, "grid_shard"), (M41, "table_column_wise")),
    trip((M14, "grid_shard"), (M22, "grid_shard"), hot_rows=(HOT, ())),
    trip((M22_CONTIGUOUS, "table_column_wise"), (M14, "column_wise"), hot_rows=((), OTHER_HOT)),
    trip((M22, "grid_shard"), (M22_CONTIGUOUS, "grid_shard"), spec=FEW_ROWS),
    trip((M22_CONTIGUOUS, "grid_shard"), (M14, "column_wise"), spec=FEW_ROWS),
    # without row-wise moments the columns may change
    trip((M22, "column_wise"), (M41, "row_wise"), optimizer="adagrad", hot_rows=(HOT, HOT)),
    trip((M14, "table_wise"), (M22, "grid_shard"), optimizer="sgd", hot_rows=(HOT, OTHER_HOT)),
    trip((M22, "data_parallel"), (M14, "data_parallel")),
    trip((M41, "data_parallel"), (M22, "row_wise"), hot_rows=((), HOT)),
    trip((M22_CONTIGUOUS, "table_wise"), (M41, "data_parallel"), optimizer="adagrad"),
    trip((M22, "row_wise"), (M22, "data_parallel"), hot_rows=(HOT, ())),
    # sequences
    trip((M22, "table_wise"), (M14, "table_wise"), spec=SEQUENCES),
    trip((M14, "table_wise"), (M22_CONTIGUOUS, "row_wise"), spec=SEQUENCES),
    trip((M41, "row_wise"), (M22, "table_wise"), spec=SEQUENCES, optimizer="sgd"),
    trip((M22_CONTIGUOUS, "column_wise"), (M41, "column_wise"), spec=SEQUENCES),
    trip((M22, "data_parallel"), (M14, "row_wise"), spec=SEQUENCES),
    # one copy in the world for some tables
    Trip(Cell(M22, in_world=("t1",)), Cell(M14, "table_wise", hot_rows=HOT)),
    Trip(Cell(M41, "table_wise", hot_rows=HOT), Cell(M22, in_world=("t0", "t2"))),
    Trip(
        Cell(M22, spec=SEQUENCES, in_world=("t0",)),
        Cell(M41, spec=SEQUENCES, in_world=("t1",)),
    ),
    # the other way to keep replicas equal; for SGD it is exact
    trip((M22, "row_wise"), (M41, "table_wise"), optimizer="sgd", sync=tdsp.WeightSync()),
]


def test_a_model_travels_between_meshes(ranks4: RankPool, tmp_path: Path, dealt: Deal) -> None:
    check_arrivals(ranks4, dealt(TRIPS), tmp_path)


def test_a_model_travels_through_an_object_store(ranks4: RankPool, tmp_path: Path) -> None:
    trips = [trip((M22, "row_wise"), (M14, "table_wise"), hot_rows=(HOT, ()))]
    check_arrivals(ranks4, trips, bucket(tmp_path))
    files = {path.name for path in (tmp_path / "0").iterdir()}
    assert files >= {".metadata", "checksums.json"}
    assert files.isdisjoint({"save.lock", ".metadata.tmp"})


STOCK_TRIPS = [
    Trip(stock("table_wise"), Cell(M22, "row_wise", hot_rows=HOT)),
    Trip(Cell(M22, "row_wise", hot_rows=HOT), stock("table_wise")),
    Trip(stock("table_wise"), Cell(M22, hot_rows=HOT, in_world=("t1",))),
    Trip(Cell(M22, hot_rows=HOT, in_world=("t1",)), stock("table_wise")),
    Trip(stock("table_row_wise"), Cell(M41, "table_wise")),
    Trip(Cell(M22_CONTIGUOUS, "table_row_wise"), stock("row_wise")),
    Trip(stock("column_wise"), Cell(M22, "grid_shard", hot_rows=OTHER_HOT)),
    Trip(Cell(M22, "column_wise", hot_rows=HOT), stock("grid_shard")),
    Trip(stock("grid_shard"), Cell(M41, "table_column_wise")),
    Trip(stock("data_parallel", optimizer="sgd"), Cell(M22, "table_wise", optimizer="sgd")),
    Trip(Cell(M22, "data_parallel"), stock("row_wise")),
    Trip(stock("table_wise"), Cell(M22, "data_parallel")),
    Trip(stock("table_wise", spec=SEQUENCES), Cell(M22, "table_wise", spec=SEQUENCES)),
    Trip(Cell(M22, "table_wise", spec=SEQUENCES), stock("row_wise", spec=SEQUENCES)),
    Trip(Cell(M41, "row_wise", optimizer="adagrad"), stock("column_wise", optimizer="adagrad")),
]


NARROW = ModelSpec(
    tables=(
        TableSpec("t0", 33, 4, ("f0",)),
        TableSpec("t1", 25, 4, ("f1",)),
        TableSpec("t2", 33, 8, ("f2",)),
    )
)
"""A grid table of this model with one column shard lives on one host only. TorchRec rounds the
row count of its empty DTensors on the other hosts up, which DCP alone refuses to load."""


def test_a_model_travels_over_hosts(ranks8: RankPool, tmp_path: Path) -> None:
    contiguous = tdsp.Mesh2D(2, 4, tdsp.RankLayout.CONTIGUOUS)
    trips = [trip((tdsp.Mesh2D(4, 2), "column_wise"), (contiguous, "grid_shard"), spec=NARROW)]
    check_arrivals(ranks8, trips, tmp_path)


def test_a_model_travels_to_stock_torchrec_and_back(
    ranks4: RankPool, tmp_path: Path, dealt: Deal
) -> None:
    check_arrivals(ranks4, dealt(STOCK_TRIPS), tmp_path)


MESHES = (M22, M22_CONTIGUOUS, M14, M41)
SPLITTING_ROWS = ("table_wise", "row_wise", "table_row_wise")
SPLITTING_COLUMNS = ("column_wise", "table_column_wise", "grid_shard")


@pytest.mark.slow
@pytest.mark.parametrize("shardings", [SPLITTING_ROWS, SPLITTING_COLUMNS], ids=lambda kind: kind[0])
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_every_way_to_travel(
    ranks4: RankPool, tmp_path: Path, mesh: tdsp.Mesh2D, shardings: tuple[str, ...]
) -> None:
    """Trips connect all meshes and sharding types with row-wise moments, also with hot rows."""
    hot_rows = (((), HOT), (HOT, OTHER_HOT), (OTHER_HOT, ()), (HOT, HOT))
    trips = [
        trip((mesh, source), (target_mesh, target), hot_rows=hot_rows[(number + number // 4) % 4])
        for number, (source, target, target_mesh) in enumerate(
            itertools.product(shardings, shardings, MESHES)
        )
    ]
    assert len(trips) == 36
    check_arrivals(ranks4, trips, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_every_way_to_stock_and_back(ranks4: RankPool, tmp_path: Path, mesh: tdsp.Mesh2D) -> None:
    """Trips to and from TorchRec cover all sharding types with row-wise moments."""
    trips = [
        Trip(*(sides if to_stock else sides[::-1]))
        for shardings in (SPLITTING_ROWS, SPLITTING_COLUMNS)
        for ours in shardings
        for theirs in shardings
        for to_stock in (True, False)
        for sides in [(Cell(mesh, ours, hot_rows=HOT), stock(theirs))]
    ]
    assert len(trips) == 36
    check_arrivals(ranks4, trips, tmp_path)


def differences(rank: int, world_size: int) -> tuple[float, float, str]:
    """Return distances before and after changing a moment, and a changed replica's error."""
    cell = Cell(tdsp.Mesh2D(2, 1), "row_wise")
    model, optimizer = make(cell)
    train(model, optimizer, cell, range(1))
    oracle = make_oracle(cell)
    oracle.step(batches(cell, 0, world_size))
    before = full_state(model)
    ((_, shard),) = (
        (name, value) for name, value in state_entries(model, None) if "t2.mom" in name
    )
    ((moment, _),) = local_shards(shard)
    moment[32] += 1
    changed = full_state(model)
    moment[0] += rank
    with pytest.raises(AssertionError) as caught:
        full_state(model)
    return distance(before, oracle), distance(changed, oracle), str(caught.value)


def test_the_comparison_sees_one_moment_and_one_replica(ranks2: RankPool) -> None:
    for before, changed, text in ranks2.run(differences):
        assert before < TOLERANCE
        assert changed == pytest.approx(1, abs=TOLERANCE)
        assert "momentum1 differ" in text


ROLLED_BACK = [
    Cell(M22, "row_wise"),
    Cell(M22, "table_wise", hot_rows=HOT),
    Cell(M22, "data_parallel"),
    Cell(M22, "row_wise", sync=tdsp.WeightSync()),
    Cell(M22, "row_wise", sync=tdsp.WeightSync(), hot_rows=HOT),
]


def go_back(rank: int, world_size: int, cells: list[Cell], folder: Path) -> list[list[bool]]:
    """Tell by cell and failure whether a step after the rollback equals the earlier one."""
    return [
        [
            is_as_before(cell, folder / f"{number}", until)
            for until in ("backward", "sync", "lookup")
        ]
        for number, cell in enumerate(cells)
    ]


def is_as_before(cell: Cell, folder: Path, until: str) -> bool:
    """Diverge after a save, load it, and compare the next step with the one before."""
    model, optimizer = make(cell)
    train(model, optimizer, cell, range(2))
    save_checkpoint(folder / until, model, optimizer)
    train(model, optimizer, cell, range(2, 3))
    expected = full_state(model, optimizer)
    optimizer.zero_grad()
    batch = make_batch(cell.spec, seed=dist.get_rank())
    (local_loss(model(batch)) * (torch.nan if dist.get_rank() == 1 else 1.0)).backward()
    with suppress(tdsp.errors.NotFiniteError):
        if until == "sync":
            cast(tdsp.ModelParallel2D, model).sync()
        if until == "lookup":
            model(batch)
    load_checkpoint(folder / until, model, optimizer)
    train(model, optimizer, cell, range(2, 3))
    actual = full_state(model, optimizer)
    return all(torch.equal(actual[name], expected[name]) for name in expected)


def test_a_model_that_diverged_goes_back_to_a_checkpoint(ranks4: RankPool, tmp_path: Path) -> None:
    for answers in ranks4.run(go_back, ROLLED_BACK, tmp_path):
        assert answers == [[True] * 3] * len(ROLLED_BACK)


WIDER = ModelSpec(
    (*ModelSpec().tables[:1], TableSpec("new", 21, 8, ("f9",)), *ModelSpec().tables[1:])
)


def add_a_table(rank: int, world_size: int, folder: Path) -> list[str]:
    """Load an older model's tables as the guide says; return the entries that aren't as due."""
    source, optimizer = make(old := Cell(M22, "row_wise", hot_rows=HOT))
    train(source, optimizer, old, range(3))
    save_checkpoint(folder, source, optimizer)
    target, optimizer = make(wider := Cell(M14, "table_wise", spec=WIDER))
    train(target, optimizer, wider, range(20, 22))
    due = full_state(target) | {
        name: value for name, value in full_state(source).items() if ".t" in name
    }
    for part, loaded in {"model": target, "fused_optimizer": target.fused_optimizer}.items():
        values = loaded.state_dict()
        kept = {name: value for name, value in values.items() if not name.startswith("over.")}
        dcp.load(
            {part: kept},
            checkpoint_id=folder,
            planner=dcp.DefaultLoadPlanner(allow_partial_load=True),
        )
        loaded.load_state_dict(values)
    actual = full_state(target)
    return [name for name in due if not torch.equal(actual[name], due[name])]


def test_a_table_is_added(ranks4: RankPool, tmp_path: Path) -> None:
    assert ranks4.run(add_a_table, tmp_path / "older") == [[]] * 4
