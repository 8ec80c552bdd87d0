"""Checkpoints contain whole tables under stock names, each exactly once, and nothing else."""

from pathlib import Path
from typing import cast

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torchrec.optim.keyed import CombinedOptimizer

import torchrec_2dsp as tdsp
from tests.support.models import SEQUENCES, BagModel, ModelSpec, TableSpec
from tests.support.parity import Cell, make_oracle, shard
from tests.support.ranks import RankPool
from tests.support.trips import (
    HOT,
    M14,
    M22,
    M22_CONTIGUOUS,
    M41,
    OTHER_HOT,
    TOLERANCE,
    backward,
    batches,
    dense_optimizer,
    distance,
    full_state,
    make,
    make_stock,
    save,
    stock,
    train,
)
from torchrec_2dsp.comms.groups import WorldGroups
from torchrec_2dsp.parallel.checkpoint import (
    coordination as groups,
    load_checkpoint,
    save_checkpoint,
)

pytestmark = pytest.mark.dealt_file

BIG = ModelSpec(tables=tuple(TableSpec(f"t{n}", 6000 + n, 16, (f"f{n}",)) for n in range(4)))


def entries(path: Path) -> dict[str, TensorStorageMetadata]:
    actual = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    assert all(isinstance(entry, TensorStorageMetadata) for entry in actual.values())
    return actual  # type: ignore[return-value]


def shapes(path: Path) -> dict[str, tuple[int, ...]]:
    return {name: tuple(entry.size) for name, entry in entries(path).items()}


BAG_WEIGHTS = {
    "model.ebc.embedding_bags.t0.weight": (40, 8),
    "model.ebc.embedding_bags.t1.weight": (24, 16),
    "model.ebc.embedding_bags.t2.weight": (33, 8),
}
STATE = "fused_optimizer.state.ebc.embedding_bags"
OVER = {"model.over.weight": (1, 48), "model.over.bias": (1,), "extra": (11,)}


def test_names_and_shapes_are_those_of_whole_tables(ranks4: RankPool, tmp_path: Path) -> None:
    cells = [
        *(Cell(mesh, "row_wise", hot_rows=HOT) for mesh in (M22, M22_CONTIGUOUS, M14, M41)),
        Cell(M22, "table_wise"),
        Cell(M22, "table_row_wise", hot_rows=OTHER_HOT),
        stock("table_wise"),
        Cell(M22, "column_wise", hot_rows=HOT),
        Cell(M22, "grid_shard"),
        stock("column_wise"),
        Cell(M22, "grid_shard", optimizer="adagrad"),
        Cell(M22, "grid_shard", optimizer="sgd"),
        Cell(M22, "data_parallel", optimizer="sgd"),
        Cell(M22, "table_wise", spec=SEQUENCES),
        Cell(M22, "data_parallel"),
    ]
    ranks4.run(save, cells, tmp_path)
    actual = [shapes(tmp_path / str(number)) for number in range(len(cells))]

    row_wise = {f"{STATE}.{name}.weight.{name}.momentum1": (rows,) for name, rows in ROWS.items()}
    assert actual[:7] == [BAG_WEIGHTS | row_wise | OVER] * 7
    per_column_shard = {
        f"{STATE}.t0.weight.t0.momentum1": (40 * 2,),
        f"{STATE}.t1.weight.t1.momentum1": (24 * 4,),
        f"{STATE}.t2.weight.t2.momentum1": (33 * 2,),
    }
    assert actual[7:10] == [BAG_WEIGHTS | per_column_shard | OVER] * 3
    whole = {
        f"{STATE}.t0.weight.t0.momentum1": (40, 8),
        f"{STATE}.t1.weight.t1.momentum1": (24, 16),
        f"{STATE}.t2.weight.t2.momentum1": (33, 8),
    }
    assert actual[10] == BAG_WEIGHTS | whole | OVER
    assert actual[11:13] == [BAG_WEIGHTS | OVER] * 2
    assert actual[13] == {
        "model.ec.embeddings.t0.weight": (40, 8),
        "model.ec.embeddings.t1.weight": (24, 8),
        "fused_optimizer.state.ec.embeddings.t0.weight.t0.momentum1": (40,),
        "fused_optimizer.state.ec.embeddings.t1.weight.t1.momentum1": (24,),
        "model.over.weight": (1, 24),
        "model.over.bias": (1,),
        "extra": (11,),
    }
    assert actual[14] == actual[0]


ROWS = {"t0": 40, "t1": 24, "t2": 33}


def test_each_shard_is_written_once_and_by_all_ranks(ranks4: RankPool, tmp_path: Path) -> None:
    cells = [
        Cell(mesh, sharding, spec=BIG, hot_rows=(("t0", tuple(range(500))),))
        for mesh in (M22, M22_CONTIGUOUS, M14, M41)
        for sharding in ("row_wise", "table_wise")
    ]
    ranks4.run(save, cells, tmp_path, 0)

    payload_bytes = sum(4 * table.num_rows * (table.dim + 1) for table in BIG.tables)
    for number, cell in enumerate(cells):
        sizes = [file.stat().st_size for file in (tmp_path / str(number)).glob("*.distcp")]
        shards = {"row_wise": cell.mesh.group_size, "table_wise": 1}[cell.sharding]
        tables = [entry for name, entry in entries(tmp_path / str(number)).items() if ".t" in name]
        assert {len(entry.chunks) for entry in tables} == {shards}, cell
        # DCP adds a header with about 1 kB to each shard.
        assert payload_bytes < sum(sizes) < 1.05 * payload_bytes, cell
        assert len(sizes) == 4, cell
        assert max(sizes) < 1.1 * payload_bytes / 4, cell


def load_with_dcp_alone(rank: int, world_size: int, path: Path, cell: Cell) -> float:
    """Load as in the guide, with nothing but torch and TorchRec."""
    model = make_stock(cell)
    weights = {"model": model.state_dict()}
    dcp.load(weights, checkpoint_id=path)
    model.load_state_dict(weights["model"])  # type: ignore[arg-type]
    moments = {"fused_optimizer": model.fused_optimizer.state_dict()}
    dcp.load(moments, checkpoint_id=path)
    model.fused_optimizer.load_state_dict(moments["fused_optimizer"])

    oracle = make_oracle(cell)
    for step in range(3):
        oracle.step(batches(cell, step, world_size))
    return distance(full_state(model), oracle)


def test_stock_torchrec_needs_nothing_from_this_package(ranks4: RankPool, tmp_path: Path) -> None:
    ranks4.run(save, [Cell(M22, "row_wise", hot_rows=HOT)], tmp_path, 3)
    for sharding in ("table_wise", "row_wise"):
        gaps = ranks4.run(load_with_dcp_alone, tmp_path / "0", stock(sharding))
        assert max(gaps) < TOLERANCE


def go_on(rank: int, world_size: int, path: Path, cell: Cell, saved: Cell) -> float:
    """Load, and train three steps on this world's batches."""
    model, optimizer = make(cell)
    assert load_checkpoint(path, model, optimizer) == {"step": 3}
    train(model, optimizer, cell, range(3, 6))
    oracle = make_oracle(saved)
    for step in range(3):
        oracle.step(batches(saved, step, 4))
    for step in range(3, 6):
        oracle.step(batches(cell, step, world_size))
    return distance(full_state(model), oracle)


def test_a_smaller_world_goes_on(ranks4: RankPool, ranks2: RankPool, tmp_path: Path) -> None:
    saved = Cell(M22, "row_wise", hot_rows=HOT)
    ranks4.run(save, [saved], tmp_path, 3)
    for mesh, sharding in ((tdsp.Mesh2D(2, 1), "row_wise"), (tdsp.Mesh2D(1, 2), "table_wise")):
        cell = Cell(mesh, sharding, hot_rows=OTHER_HOT)
        assert max(ranks2.run(go_on, tmp_path / "0", cell, saved)) < TOLERANCE


def pending_is_saved(rank: int, world_size: int, path: Path, cell: Cell) -> None:
    """Save and load between a backward and its sync."""
    models = [make(cell)[0] for _ in range(2)]
    for model in models:
        backward(model, cell, 0)
    save_checkpoint(path, models[0])
    assert cast(tdsp.ModelParallel2D, models[1]).sync_now().num_rows > 0
    expected = full_state(models[1])
    load_checkpoint(path, models[1])
    loaded = full_state(models[1])
    assert all(torch.equal(loaded[name], expected[name]) for name in expected)


def test_a_backward_that_waits_for_its_sync_is_saved(ranks4: RankPool, tmp_path: Path) -> None:
    ranks4.run(pending_is_saved, tmp_path / "0", Cell(M22, "row_wise", hot_rows=HOT))


def dense_states(
    rank: int, world_size: int, folder: Path, kinds: list[str], combined: bool
) -> None:
    """Check that dense state is restored, also into a fresh optimizer, and training continues."""
    for kind in kinds:
        cell = Cell(M22, "row_wise", hot_rows=HOT)
        sides = []
        for steps in (3, 0, 1):
            model, _ = make(cell)
            dense = dense_optimizer(kind, model)
            optimizer = CombinedOptimizer([("x", model.fused_optimizer), ("y", dense)])
            train(model, optimizer, cell, range(steps))
            sides.append((model, optimizer, optimizer if combined else dense))
        path = folder / f"{kind}-{combined}"
        save_checkpoint(path, sides[0][0], sides[0][2])
        for model, _, stored in sides[1:]:
            load_checkpoint(path, model, stored)
        # A fresh DDP adds in another order in its first step.
        for tolerance, steps in ((0.0, range(0)), (TOLERANCE, range(3, 5))):
            for model, optimizer, _ in sides:
                train(model, optimizer, cell, steps)
            expected, *others = (full_state(model, optimizer) for model, optimizer, _ in sides)
            for state in others:
                assert state.keys() == expected.keys()
                for name in state:
                    assert (state[name] - expected[name]).abs().max() <= tolerance, (kind, name)


@pytest.mark.parametrize("combined", [False, True])
def test_the_dense_optimizer_is_stored_once(
    ranks2: RankPool, ranks4: RankPool, tmp_path: Path, combined: bool
) -> None:
    ranks4.run(dense_states, tmp_path, ["adam", "momentum", "adagrad", "warmup"], combined)
    fused = {f"{STATE}.{name}.weight.{name}.momentum1" for name in ROWS}
    prefix = "dense_optimizer.state." + ("y." if combined else "")
    expected = {
        "adam": ("step", "exp_avg", "exp_avg_sq"),
        "momentum": ("momentum_buffer",),
        "adagrad": ("step", "sum"),
    }
    for kind, states in expected.items():
        dense = {f"{prefix}over.{param}.{s}" for param in ("weight", "bias") for s in states}
        names = shapes(tmp_path / f"{kind}-{combined}").keys()
        assert names == BAG_WEIGHTS.keys() | OVER.keys() | fused | dense


def load_for_evaluation(rank: int, world_size: int, path: Path) -> None:
    """Load everything except optimizer states; `extra` is optional."""
    cell = Cell(tdsp.Mesh2D(2, 1), "row_wise")
    model, _ = make(cell)
    optimizer = dense_optimizer("adam", model)
    backward(model, cell, 0)
    optimizer.step()
    save_checkpoint(path, model, optimizer)
    expected = full_state(model)
    other, _ = make(cell)
    assert load_checkpoint(path, other) == {}
    loaded = full_state(other)
    assert all(torch.equal(loaded[name], expected[name]) for name in expected)


def test_the_dense_state_may_be_left_alone(ranks2: RankPool, tmp_path: Path) -> None:
    ranks2.run(load_for_evaluation, tmp_path / "0")


def over_a_group_of_its_own(rank: int, world_size: int, path: Path) -> bool:
    """Save and load over a separate group, as with NCCL worlds."""
    backend = dist.get_backend_config
    dist.get_backend_config = lambda group=None: "cuda:nccl"
    try:
        cell = Cell(tdsp.Mesh2D(2, 1), "row_wise")
        model, optimizer = make(cell)
        # Dicts built from sets have a different order on each rank.
        extra = {"a": [1, "two"], "b": 3}
        ordered = dict(sorted(extra.items(), reverse=bool(rank)))
        save_checkpoint(path, model, optimizer, extra=ordered)
        group = WorldGroups.current().shared["checkpoints"]
        assert load_checkpoint(path, model, optimizer) == extra
        return group is not dist.group.WORLD and groups.coordination_group() is group
    finally:
        dist.get_backend_config = backend


def test_plans_travel_over_gloo(ranks2: RankPool, tmp_path: Path) -> None:
    assert ranks2.run(over_a_group_of_its_own, tmp_path / "0") == [True, True]


class WithBuffers(BagModel):
    """A model with buffers that ranks may compute differently."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__(spec)
        for size in range(9):
            self.register_buffer(f"mean{size}", torch.zeros(size))


def buffers_after_a_load(rank: int, world_size: int, path: Path) -> set[float]:
    """Save with each rank's number in its buffers."""
    cell = Cell(tdsp.Mesh2D(1, world_size), "row_wise")
    model = shard(cell, model=WithBuffers(cell.spec))
    for buffer in model.buffers():
        buffer.fill_(rank + 1)
    save_checkpoint(path, model)
    for buffer in model.buffers():
        buffer.zero_()
    load_checkpoint(path, model)
    return {value for buffer in model.buffers() for value in buffer.tolist()}


def test_buffers_are_those_of_the_first_rank(ranks4: RankPool, tmp_path: Path) -> None:
    assert ranks4.run(buffers_after_a_load, tmp_path / "0") == [{1.0}] * 4
