"""The cost model's predicted bytes for a step, against the bytes sent."""

from collections import Counter, defaultdict
from dataclasses import replace

import pytest
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import torchrec_2dsp as tdsp
from tests.support.loops import plain_loop, shard
from tests.support.models import ModelSpec, TableSpec, build
from tests.support.parity import Cell, group_plan, make_optimizer, make_sharder
from tests.support.ranks import RankPool
from torchrec_2dsp.comms.counting import count_collectives
from torchrec_2dsp.cost.collectives import Span
from torchrec_2dsp.cost.loads import Loads, Placed
from torchrec_2dsp.cost.table_loads import add_table
from torchrec_2dsp.cost.workload import Workload

BATCH = 256
SPEC = ModelSpec((TableSpec("t0", 1_000, 16, ("f0",)), TableSpec("t1", 500, 8, ("f1", "f2"))))
BAGS = Cell(tdsp.Mesh2D(1, 4), spec=SPEC)
SEQUENCE = replace(
    BAGS,
    spec=ModelSpec(
        (TableSpec("t0", 1_000, 8, ("f0",)), TableSpec("t1", 500, 8, ("f1", "f2"))), sequence=True
    ),
)
CELLS = [
    *(
        replace(BAGS, sharding=kind)
        for kind in (
            "table_wise",
            "column_wise",
            "row_wise",
            "table_row_wise",
            "grid_shard",
            "data_parallel",
        )
    ),
    replace(BAGS, sharding="table_wise", exchange="nonempty"),
    replace(BAGS, exchange="row"),
    replace(BAGS, exchange="row_per_host"),
    replace(SEQUENCE, sharding="table_wise"),
    replace(SEQUENCE, sharding="row_wise"),
    replace(SEQUENCE, exchange="row"),
]
IDS_PER_BAG = 2


def batch_of(cell: Cell, seed: int) -> KeyedJaggedTensor:
    """Draw two ids per bag uniformly."""
    generator = torch.Generator().manual_seed(seed)
    sizes = [table.num_rows for _, table in cell.spec.features]
    ids = [torch.randint(0, size, (BATCH * IDS_PER_BAG,), generator=generator) for size in sizes]
    return KeyedJaggedTensor.from_lengths_sync(
        keys=[name for name, _ in cell.spec.features],
        values=torch.cat(ids),
        lengths=torch.full((BATCH * len(sizes),), IDS_PER_BAG, dtype=torch.int32),
    )


Bytes = dict[str, float]


def sent(rank: int, world_size: int, cells: list[Cell]) -> list[tuple[Bytes, Bytes]]:
    """Return this rank's input bytes per operation in a step, and the prediction for all ranks."""
    results = []
    for cell in cells:
        parallel = shard(cell)
        optimizer = make_optimizer(parallel)
        plain_loop(parallel, optimizer, [batch_of(cell, 10 + rank)])
        with count_collectives() as seen:
            plain_loop(parallel, optimizer, [batch_of(cell, rank)])
        totals: Counter[str] = Counter()
        for record in seen.records:
            totals[record.op] += record.num_bytes
        results.append((dict(totals), by_operation(predicted(cell))))
    return results


def predicted(cell: Cell) -> Loads:
    """Predict the bytes for the plan that the ranks run."""
    model = build(cell.spec)
    plan = group_plan(cell, model, make_sharder(cell))
    workload = Workload.of_model(model, batch_size=BATCH)
    span = Span.of(cell.mesh.rank_matrix(), local_world_size=2)
    loads = Loads(4)
    for _, module in plan.modules():
        for name, sharding in module.tables():
            work = workload.table(name)
            work = replace(work, ids_per_sample=work.ids_per_sample * IDS_PER_BAG)
            add_table(loads, Placed.of(work, sharding), workload, span)
    return loads


def by_operation(loads: Loads) -> dict[str, float]:
    """Sum all ranks' input bytes per operation, own parts included."""
    to_all = ("ids_to", "pooled_from", "pooled_to", "rows_from", "rows_to")
    to_host = ("host_rows_from", "host_rows_to")
    # Between places there are two ranks in a group, as there are in a host.
    across = ("across_from", "across_to")
    return {
        "all_to_all_single": sum(4 * getattr(loads, name).sum() for name in to_all)
        + sum(2 * getattr(loads, name).sum() for name in (*to_host, *across)),
        "reduce_scatter": float((loads.scattered + loads.host_scattered).sum()),
        "all_gather": float((loads.gathered + loads.host_gathered).sum()),
        "all_reduce": float(loads.all_reduced_bytes.sum()),
    }


@pytest.fixture(scope="module")
def counted(two_hosts: RankPool) -> list[tuple[Bytes, Bytes]]:
    """Return each cell's bytes, measured over all ranks and predicted by the cost model."""
    ranks = two_hosts.run(sent, CELLS)
    results = []
    for of_ranks in zip(*ranks, strict=True):
        totals: defaultdict[str, float] = defaultdict(float)
        for entry, _ in of_ranks:
            for op, num_bytes in entry.items():
                totals[op] += num_bytes
        results.append((dict(totals), of_ranks[0][1]))
    return results


@pytest.mark.parametrize("number", range(len(CELLS)), ids=lambda number: str(CELLS[number]))
def test_a_step_sends_what_the_model_says(counted: list[tuple[Bytes, Bytes]], number: int) -> None:
    totals, expected = counted[number]
    columns = sum(table.dim for _, table in CELLS[number].spec.features)
    expected["all_reduce"] += 4 * 4 * (columns + 1)  # Of the dense layer.
    for kind, num_bytes in expected.items():
        actual = sum(value for op, value in totals.items() if op.startswith(kind))
        # Sizes and flags, a few bytes for each rank and feature, aren't in the model.
        assert actual == pytest.approx(num_bytes, rel=0.02, abs=2_000), kind
