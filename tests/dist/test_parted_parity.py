"""Tables with one copy in the world beside tables with one in each group, against the oracle."""

from itertools import product
from typing import Any

import pytest
import torch
from torchrec.distributed.planner import ParameterConstraints
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

import torchrec_2dsp as tdsp
from tests.support.models import BAGS, HOT_ROWS, SEQUENCES, make_batch
from tests.support.oracle import local_loss
from tests.support.parity import TOLERANCE, Cell, check_cells, make_parallel
from tests.support.ranks import RankPool
from tests.support.slices import Deal
from torchrec_2dsp.shard.parted import sharded_tables

MESHES = (
    tdsp.Mesh2D(2, 2),
    tdsp.Mesh2D(2, 2, tdsp.RankLayout.CONTIGUOUS),
    tdsp.Mesh2D(4, 1),
)
SUM, MEAN, WEIGHTED = BAGS
EXACT = {"optimizer": "rowwise_adagrad", "sync": tdsp.GradientSync()}
AVERAGED = {"optimizer": "sgd", "sync": tdsp.WeightSync(dense_above=1.0)}


def test_bags(ranks4: RankPool, dealt: Deal) -> None:
    """Every pair of exchange, mesh, and pooling with a sync; not all three with all."""
    kinds = ((SUM, HOT_ROWS, EXACT), (MEAN, (), AVERAGED), (WEIGHTED, HOT_ROWS, EXACT))
    cells = []
    for (column, mesh), (row, exchange) in product(
        enumerate(MESHES), enumerate(("pooled", "row", "nonempty"))
    ):
        spec, hot_rows, method = kinds[(column + row) % len(kinds)]
        cells.append(
            Cell(mesh, spec=spec, exchange=exchange, hot_rows=hot_rows, in_world=("t1",), **method)
        )
    cells += [
        Cell(MESHES[0], in_world=("t0", "t2")),
        Cell(MESHES[0], in_world=("t1",), owners="hash", exchange="row", hot_rows=HOT_ROWS),
    ]
    cells = dealt(cells)
    check_cells(cells, ranks4, 4, must_sync=True)


def test_sequences(ranks4: RankPool, dealt: Deal) -> None:
    cells = [
        Cell(mesh, spec=SEQUENCES, exchange=exchange, in_world=("t1",), **method)
        for mesh in MESHES
        for exchange, method in (("pooled", EXACT), ("row", EXACT), ("row", AVERAGED))
    ]
    cells = dealt(cells)
    check_cells(cells, ranks4, 4, must_sync=True)


@pytest.mark.dealt_file
def test_rows_of_a_host_travel_together(ranks8: RankPool) -> None:
    """Groups span two hosts of two ranks, beside a table on four hosts."""
    mesh = tdsp.Mesh2D(2, 4)
    cells = [Cell(mesh, exchange=kind, in_world=("t1",)) for kind in ("row_per_host", "pooled")]
    check_cells(cells, ranks8, 4, tolerance=TOLERANCE, must_sync=True)


def modes_of(rank: int, world_size: int, cell: Cell) -> list[bool]:
    parallel = make_parallel(cell, world_size, 2).eval()
    return [part.module.training for part in sharded_tables(parallel)]


@pytest.mark.dealt_file
def test_all_parts_are_told_of_evaluation(ranks4: RankPool) -> None:
    assert ranks4.run(modes_of, Cell(MESHES[0], in_world=("t1",))) == [[False, False]] * 4


def bad_ids(rank: int, world_size: int, cell: Cell) -> list[str]:
    """Return the errors for one rank's bad id in either kind of table; a good batch is trained
    after each."""
    parallel = make_parallel(cell, world_size, 2)
    said = []
    for feature in ("f0", "f1"):
        batch = make_batch(cell.spec, rank)
        if rank == 1:
            batch[feature].values()[0] = 10_000
        with pytest.raises(tdsp.errors.InputError) as caught:
            parallel(batch)
        said.append(str(caught.value))
        local_loss(parallel(make_batch(cell.spec, rank))).backward()
    return said


@pytest.mark.dealt_file
def test_bad_ids_of_all_parts_are_told_on_every_rank(ranks4: RankPool) -> None:
    first, *others = ranks4.run(bad_ids, Cell(MESHES[0], in_world=("t1",)), timeout_s=60)
    assert all(one == first for one in others)
    assert ["'t0'" in first[0], "'t1'" in first[1]] == [True, True]


def shared_features(rank: int, world_size: int, kind: type) -> float:
    """Return the gap between the sharded and the unsharded module's outputs, by name."""
    torch.manual_seed(0)
    is_bag = kind is EmbeddingBagCollection
    config = EmbeddingBagConfig if is_bag else EmbeddingConfig
    tables = [
        config(name=name, num_embeddings=20, embedding_dim=4, feature_names=features)
        for name, features in (("t0", ["f0", "f1"]), ("t1", ["f1", "f2"]), ("t2", ["f3"]))
    ]
    module = kind(tables=tables)
    weights = {name: value.clone() for name, value in module.state_dict().items()}
    sharder: Any = (
        tdsp.EmbeddingBagCollectionSharder2D() if is_bag else tdsp.EmbeddingCollectionSharder2D()
    )
    planner = tdsp.Planner2D(
        mesh=MESHES[0],
        storage_reservation=FixedPercentageStorageReservation(0.0),
        constraints={
            f"t{number}": ParameterConstraints(sharding_types=["row_wise"]) for number in range(3)
        },
    )
    plan = tdsp.pin(planner.plan(module, [sharder]), "t1", num_groups=1)
    sharded = sharder.shard(module, plan.plan[""], None)
    sharded.load_state_dict(weights)
    features = KeyedJaggedTensor.from_lengths_sync(
        keys=["f3", "f0", "f2", "f1"],
        values=torch.randint(0, 20, (16,)),
        lengths=torch.full((16,), 1),
    )
    with torch.no_grad():
        expected, found = module(features), sharded(features).wait()
    values = dict(_by_name(expected))
    gaps = [(one - values.pop(name)).abs().max().item() for name, one in _by_name(found)]
    assert not values, f"{sorted(values)} are missing"
    return max(gaps)


def _by_name(output: KeyedTensor | dict[str, JaggedTensor]) -> list[tuple[str, torch.Tensor]]:
    if isinstance(output, KeyedTensor):
        return list(output.to_dict().items())
    return [(name, one.values()) for name, one in output.items()]


@pytest.mark.dealt_file
@pytest.mark.parametrize("kind", [EmbeddingBagCollection, EmbeddingCollection])
def test_features_may_look_up_tables_of_both_kinds(ranks4: RankPool, kind: type) -> None:
    assert max(ranks4.run(shared_features, kind)) < 1e-6
