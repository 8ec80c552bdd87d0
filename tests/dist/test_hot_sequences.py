"""Hot rows of sequences: every id gets its row, from a replica or from its home."""

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torchrec.distributed.planner import ParameterConstraints
from torchrec.modules.embedding_configs import EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import torchrec_2dsp as tdsp
from tests.dist.test_hot_set_refresh import backwards_after_a_refresh, gap_after_refreshes
from tests.support.loops import warnings_of
from tests.support.models import SEQUENCE_TABLES, SEQUENCES
from tests.support.parity import ONE, TOLERANCE, TWO, Cell, run_cells
from tests.support.ranks import RankPool
from tests.support.trips import Trip, check_arrivals, stock

pytestmark = pytest.mark.dealt_file

SOME = (("t0", (0, 1, 5, 39)), ("t1", (0, 2)))
EVERYTHING = tuple((table.name, tuple(range(table.num_rows))) for table in SEQUENCE_TABLES)
HOT = Cell(ONE, "table_wise", spec=SEQUENCES, hot_rows=SOME)


@pytest.mark.parametrize("mesh", [ONE, TWO], ids=str)
def test_training_equals_the_unsharded_model(ranks4: RankPool, mesh: tdsp.Mesh2D) -> None:
    cells = [
        replace(HOT, mesh=mesh, sharding=sharding, optimizer=optimizer, hot_rows=hot_rows)
        for (sharding, optimizer), hot_rows in product(
            (("table_wise", "sgd"), ("column_wise", "adagrad"), ("row_wise", "rowwise_adagrad")),
            ((("t1", (7,)),), SOME, EVERYTHING),
        )
    ]
    rows = replace(HOT, mesh=mesh, sharding="row_wise", exchange="row")
    cells += [rows, replace(rows, hot_rows=EVERYTHING), replace(rows, owners="hash")]
    cells += [replace(HOT, mesh=mesh, optimizer="sgd", sync=tdsp.WeightSync())]
    for gaps in ranks4.run(run_cells, cells, 4, timeout_s=200):
        for cell, gap in zip(cells, gaps, strict=True):
            assert gap.worst <= TOLERANCE, f"{cell}: {gap}"


@pytest.mark.parametrize("hot_rows", [(), SOME], ids=["cold", "hot"])
def test_a_batch_s_weights_are_ignored(ranks4: RankPool, hot_rows: Any) -> None:
    """An unsharded `EmbeddingCollection` ignores them, in the backward, too."""
    spec = replace(SEQUENCES, weighted=True)
    cold = Cell(TWO, "row_wise", spec=spec, hot_rows=hot_rows)
    cells = [
        cold,
        replace(cold, exchange="row"),
        replace(cold, optimizer="sgd", sync=tdsp.WeightSync()),
    ]
    cells += [replace(cold, mesh=ONE, optimizer="sgd"), replace(cold, sharding="table_wise")]
    for gaps in ranks4.run(run_cells, cells, 4):
        for cell, gap in zip(cells, gaps, strict=True):
            assert gap.worst <= TOLERANCE, f"{cell}: {gap}"


def test_refreshes_change_nothing(ranks4: RankPool) -> None:
    cells = [HOT, replace(HOT, mesh=TWO, sharding="row_wise", exchange="row")]
    for gaps in ranks4.run(gap_after_refreshes, cells):
        assert max(gaps) <= TOLERANCE
    assert max(ranks4.run(backwards_after_a_refresh, HOT)) <= 1e-5


def test_checkpoints_are_stock_torchrec_s(ranks4: RankPool, tmp_path: Path) -> None:
    check_arrivals(ranks4, [Trip(HOT, stock("row_wise", spec=SEQUENCES))], tmp_path)


def sequences(rank: int, world_size: int) -> list[tuple[list[float], list[int], list[int]]]:
    """Rows that hold their number, looked up with their ids: values, lengths and ids by feature."""
    model = cast(Any, torch.nn.Module())
    model.ec = EmbeddingCollection(
        tables=[
            EmbeddingConfig(40, 8, name="t0", feature_names=["f0", "f1"]),
            EmbeddingConfig(40, 8, name="t1", feature_names=["f2"]),
        ],
        need_indices=True,
    )
    weight = torch.arange(40.0)[:, None].expand(40, 8)
    for table in cast(Any, model.ec).embeddings.values():
        table.weight.data.copy_(weight)
    sharders: Any = [tdsp.EmbeddingCollectionSharder2D(fused_params={"learning_rate": 0.1})]
    # Their replicas have different widths.
    constraints = {
        "t0": ParameterConstraints(sharding_types=["column_wise"], min_partition=4),
        "t1": ParameterConstraints(sharding_types=["row_wise"]),
    }
    mesh = tdsp.Mesh2D(1, 2)
    planner = tdsp.Planner2D(mesh=mesh, batch_size=3, constraints=constraints)
    plan = planner.collective_plan(model, sharders)
    for table in ("t0", "t1"):
        plan = tdsp.pin(plan, table, hot_rows=[1, 7, 20])
    parallel: Any = tdsp.ModelParallel2D(model, plan=plan, sharders=sharders)
    batch = KeyedJaggedTensor(
        ["f0", "f1", "f2"],
        torch.tensor([7, 3, 1, 1, 39, 20, 7, 7, 38, 7]),
        lengths=torch.tensor([3, 0, 3, 0, 2, 0, 1, 0, 1]),
    )
    with torch.no_grad():
        found = parallel.module.ec(batch)
    return [
        (one.values()[:, 3].tolist(), one.lengths().tolist(), cast(Any, one.weights()).tolist())
        for one in (found["f0"], found["f1"], found["f2"])
    ]


def test_sequences_keep_their_order(ranks2: RankPool) -> None:
    expected = [([7, 3, 1, 1, 39, 20], [3, 0, 3]), ([7, 7], [0, 2, 0]), ([38, 7], [1, 0, 1])]
    for answer in ranks2.run(sequences):
        for (values, lengths, ids), (rows, expected_lengths) in zip(answer, expected, strict=True):
            assert (values, lengths, ids) == (rows, expected_lengths, rows)


def test_they_save_bytes_with_torchrec_s_exchange(ranks4: RankPool) -> None:
    """TorchRec's exchange ships a vector per id, so no warning is needed."""
    assert ranks4.run(warnings_of, [HOT]) == [[[]]] * 4
