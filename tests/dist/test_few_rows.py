"""Tables with fewer rows than ranks start equal everywhere, and outputs have one type."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torchrec.modules.embedding_configs import DataType

import torchrec_2dsp as tdsp
from tests.support.loops import make_stream
from tests.support.models import ModelSpec, TableSpec, build
from tests.support.parity import (
    LR,
    Cell,
    local_shards,
    make_sharder,
    shard,
)
from tests.support.ranks import RankPool
from torchrec_2dsp.shard.initial_tables import BLOCK_ROWS, drawn_block

pytestmark = pytest.mark.dealt_file


SEED = 11
# More rows than a block, and shards that end inside one.
TABLES = (TableSpec("t0", 2_500, 8, ("f0",)), TableSpec("t1", 3, 16, ("f1", "f2")))
BAGS = ModelSpec(tables=TABLES)
SEQUENCES = ModelSpec(tables=(TABLES[0], replace(TABLES[1], dim=8)), sequence=True)
MESHES = [tdsp.Mesh2D(1, 4), tdsp.Mesh2D(2, 2), tdsp.Mesh2D(4, 1)]
CELLS = [
    *(
        Cell(mesh, sharding, BAGS)
        for mesh in MESHES
        for sharding in ("row_wise", "column_wise", "table_wise", "data_parallel")
    ),
    *(Cell(mesh, kind, BAGS) for mesh in MESHES[:2] for kind in ("grid_shard", "table_row_wise")),
    *(Cell(mesh, "row_wise", BAGS, exchange="row", owners="hash") for mesh in MESHES),
    Cell(MESHES[1], "row_wise", BAGS, exchange="row", hot_rows=(("t0", (5, 2_000)),)),
    Cell(MESHES[1], "row_wise", BAGS, in_world=("t0",)),
    Cell(MESHES[1], "row_wise", SEQUENCES),
    Cell(MESHES[1], "row_wise", replace(BAGS, data_type=DataType.FP16)),
]


def expected_tables(cell: Cell) -> dict[str, torch.Tensor]:
    """Draw the whole tables, block by block."""
    model: Any = build(cell.spec)
    is_bags = not cell.spec.sequence
    configs = model.ebc.embedding_bag_configs() if is_bags else model.ec.embedding_configs()
    return {
        config.name: torch.cat(
            [
                drawn_block(config, SEED, number)
                for number in range(-(-config.num_embeddings // BLOCK_ROWS))
            ]
        )
        for config in configs
    }


def compared(rank: int, world_size: int, cell: Cell) -> int:
    """Compare the cell's shards on this rank, and count their values."""
    sharder: Any = make_sharder(cell)
    drawing = type(sharder)(sharder.optimizer, init_seed=SEED)
    parallel = shard(cell, drawing, build(cell.spec, seed=rank), load=False)
    expected, num_equal = expected_tables(cell), 0
    for name, value in parallel.state_dict().items():
        table = name.split(".")[-2]
        if table not in expected:
            continue
        for part, (row, column) in local_shards(value):
            rows, columns = part.shape
            wanted = expected[table][row : row + rows, column : column + columns]
            assert torch.equal(part.detach(), wanted.to(part.dtype)), name
            num_equal += part.numel()
    return num_equal


def test_tables_start_equal_everywhere(two_hosts: RankPool) -> None:
    for cell in CELLS:
        assert sum(two_hosts.run(compared, cell)) == cell.num_values, str(cell)


FEW = ModelSpec((TableSpec("t0", 3, 8, ("f0",)),))
HALF_OUTPUTS = [
    Cell(MESHES[0], "table_wise", FEW),
    Cell(MESHES[0], "row_wise", FEW),
    Cell(MESHES[0], "table_wise", FEW, exchange="nonempty"),
    Cell(MESHES[0], "table_wise", replace(FEW, sequence=True)),
    Cell(MESHES[0], "row_wise", replace(FEW, sequence=True)),
    Cell(MESHES[0], "row_wise", replace(FEW, pooling="mean"), exchange="row"),
    Cell(MESHES[0], "row_wise", replace(FEW, weighted=True), exchange="row"),
]


def half_outputs(rank: int, world_size: int, cell: Cell) -> float:
    """Return the largest gap to the unsharded outputs, before and after a step."""
    sharder = make_sharder(replace(cell, optimizer="sgd", output=DataType.FP16))
    parallel, whole, batches = shard(cell, sharder), build(cell.spec), make_stream(cell, 1)[0]

    def output(model: Any, batch: Any) -> torch.Tensor:
        module = model.ec if cell.spec.sequence else model.ebc
        rows = module(batch)["f0"]
        return rows.values() if cell.spec.sequence else rows

    gaps = []
    for _ in range(2):
        rows = output(parallel.module, batches[rank])
        assert rows.dtype == torch.float16
        gaps.append((rows.float() - output(whole, batches[rank])).abs().max().item())
        rows.float().sum().backward()
        parallel.sync_now()  # type: ignore[operator]
        torch.stack([output(whole, batch).sum() for batch in batches]).mean().backward()
        table: Any = next(iter(whole.parameters()))
        table.data -= LR * table.grad
        table.grad = None
    return max(gaps)


@pytest.mark.parametrize("cell", HALF_OUTPUTS, ids=str)
def test_ranks_without_rows_return_the_type_of_the_others(ranks4: RankPool, cell: Cell) -> None:
    """Outputs and their gradients stay within the rounding to 11 bits."""
    assert max(ranks4.run(half_outputs, cell)) < 2e-3
