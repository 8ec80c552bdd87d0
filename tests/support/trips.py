"""Train, save a checkpoint, load it into a differently run model, and compare."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.fp_embeddingbag import FeatureProcessedEmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.types import ShardingPlan
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.warmup import WarmupOptimizer, WarmupPolicy, WarmupStage

import torchrec_2dsp as tdsp
from tests.support.devices import copied, on_rank_device, rank_device
from tests.support.models import build, make_batch
from tests.support.oracle import Oracle, local_loss, trained_oracle
from tests.support.parity import (
    FUSED,
    LR,
    Cell,
    local_shards,
    local_world_size,
    make_optimizer,
    oracle_of,
    shard,
    types_of,
)
from tests.support.planning import AnyTypeSharder, torchrecs_planner
from tests.support.ranks import RankPool
from torchrec_2dsp.parallel.checkpoint import load_checkpoint, save_checkpoint
from torchrec_2dsp.parallel.checkpoint.address import Place

M22, M14, M41 = tdsp.Mesh2D(2, 2), tdsp.Mesh2D(1, 4), tdsp.Mesh2D(4, 1)
M22_CONTIGUOUS = tdsp.Mesh2D(2, 2, tdsp.RankLayout.CONTIGUOUS)
HOT = (("t0", (0, 1, 5, 39)), ("t1", (0, 2, 3)))
OTHER_HOT = (("t0", (1, 4)), ("t2", (0, 1, 32)))
TOLERANCE = 2e-6
"""Floats are added in another order on another mesh; weights are below 1."""


@dataclass(frozen=True)
class StockCell(Cell):
    """A cell run by TorchRec's own planner, sharders and wrapper; its mesh is one group."""

    def __str__(self) -> str:
        return f"stock {super().__str__()}"


@dataclass(frozen=True)
class Trip:
    """A checkpoint's source and target cells."""

    source: Cell
    target: Cell

    def __str__(self) -> str:
        return f"{self.source} -> {self.target}"


@dataclass(frozen=True)
class Arrival:
    """A rank's results from a trip."""

    num_tensors: int
    """Full tables and moments that both sides have."""
    different: tuple[str, ...]
    """Tensors that differ in any bit after the load."""
    equal_before: tuple[str, ...]
    """Tensors that were equal even before the load, so that it proves nothing."""
    source_gap: float
    """Distance of the saving side's tables and moments from the oracle, after more steps."""
    target_gap: float
    """The same of the loading side."""
    extra: object
    """The object that came back."""


def make(cell: Cell) -> tuple[DistributedModelParallel, CombinedOptimizer]:
    """Return the cell's model with seed 0's weights, and its optimizers."""
    model = make_stock(cell) if isinstance(cell, StockCell) else shard(cell)
    return model, make_optimizer(model)


def make_stock(cell: Cell, plan: ShardingPlan | None = None) -> DistributedModelParallel:
    """Return the cell's model, built by TorchRec alone, with its planner or a plan."""
    model = build(cell.spec, seed=0)
    weights: Any = {name: value.clone() for name, value in model.state_dict().items()}
    kind = EmbeddingCollectionSharder if cell.spec.sequence else AnyTypeSharder
    fused_params = {"optimizer": FUSED[cell.optimizer], "learning_rate": LR, "eps": cell.eps}
    sharders: Any = [kind(fused_params=fused_params)]
    if cell.spec.positions:
        sharders = [FeatureProcessedEmbeddingBagCollectionSharder(*sharders)]
    parallel = DistributedModelParallel(
        module=on_rank_device(model),
        device=rank_device(),
        plan=stock_planner(cell).plan(model, sharders) if plan is None else plan,
        sharders=sharders,
    )
    parallel.load_state_dict(weights)
    return parallel


def stock_planner(cell: Cell) -> EmbeddingShardingPlanner:
    """Return TorchRec's planner on this world, which shards every table the cell's way."""
    topology = Topology(
        world_size=dist.get_world_size(),
        compute_device=rank_device().type,
        local_world_size=local_world_size(),
    )
    return torchrecs_planner(topology, constraints=types_of(cell))


def batches(cell: Cell, step: int, world_size: int) -> list:
    return [make_batch(cell.spec, seed=1000 * step + rank) for rank in range(world_size)]


def train(
    model: DistributedModelParallel, optimizer: CombinedOptimizer, cell: Cell, steps: range
) -> None:
    for step in steps:
        optimizer.zero_grad()
        backward(model, cell, step)
        optimizer.step()


def backward(model: DistributedModelParallel, cell: Cell, step: int) -> None:
    batch = make_batch(cell.spec, seed=1000 * step + dist.get_rank())
    local_loss(model(batch)).backward()


def full_state(
    model: DistributedModelParallel, optimizer: CombinedOptimizer | None = None
) -> dict[str, torch.Tensor]:
    """Gather every table and moment, whole; replicas must be equal."""
    # Arrays: hundreds of small tensors take long to pickle.
    own = [
        (name, offsets, copied(part).numpy())
        for name, value in state_entries(model, optimizer)
        for part, offsets in local_shards(value)
    ]
    pieces: list[list[tuple[str, tuple[int, ...], np.ndarray]]] = [[]] * dist.get_world_size()
    dist.all_gather_object(pieces, own)
    every = [
        (name, offsets, torch.from_numpy(part))
        for of_rank in pieces
        for name, offsets, part in of_rank
    ]
    ends: dict[str, list[int]] = {}
    for name, offsets, part in every:
        end = [start + size for start, size in zip(offsets, part.shape, strict=False)]
        ends[name] = [max(pair) for pair in zip(end, ends.get(name, end), strict=True)]
    whole = {name: torch.full(end, torch.nan) for name, end in ends.items()}
    for name, offsets, part in every:
        spans = zip(offsets, part.shape, strict=False)
        region = whole[name][tuple(slice(start, start + size) for start, size in spans)]
        if not region.isnan().all():
            assert torch.equal(region, part), f"replicas of {name} differ"
        region.copy_(part)
    assert not any(value.isnan().any() for value in whole.values())
    return whole


def state_entries(
    model: DistributedModelParallel, optimizer: CombinedOptimizer | None
) -> Iterator[tuple[str, object]]:
    """Yield names and values as in a checkpoint."""
    for name, value in model.state_dict().items():
        yield f"model.{name}", value
    states = model.fused_optimizer.state_dict()["state"]
    if optimizer is not None:
        states = {**optimizer.state_dict()["state"], **states}
    for param, state in states.items():
        for name, value in state.items():
            yield f"{param}.{name}", value


def distance(actual: dict[str, torch.Tensor], oracle: Oracle) -> float:
    """Return the largest difference from the oracle's tables, moments and dense weights."""
    expected = {f"model.{name}": value for name, value in oracle.model.state_dict().items()}
    for name in [name for name in actual if name.endswith(".momentum1")]:
        moments = oracle.moments[name.split(".")[-2]]
        # Row-wise ones stand one column shard after the other.
        expected[name] = moments if oracle.optimizer == "adagrad" else moments.T.reshape(-1)
    assert actual.keys() == expected.keys()
    return max((actual[name] - expected[name]).abs().max().item() for name in expected)


def travel(rank: int, world_size: int, trips: list[Trip], folder: Place) -> list[Arrival]:
    """Train, save, load elsewhere, compare, and train further on both sides."""
    return [arrive(trip, folder / str(number), world_size) for number, trip in enumerate(trips)]


def arrive(trip: Trip, path: Place, world_size: int) -> Arrival:
    source, source_optimizer = make(trip.source)
    train(source, source_optimizer, trip.source, range(3))
    expected = full_state(source)
    save_checkpoint(path, source, source_optimizer, extra={"step": 3})

    target, target_optimizer = make(trip.target)
    # The target has another past: its own steps, hot rows that are newer than their homes, and
    # a backward that waits for its sync.
    train(target, target_optimizer, trip.target, range(20, 22))
    before = full_state(target)
    train(target, target_optimizer, trip.target, range(22, 23))
    backward(target, trip.target, 23)
    extra = load_checkpoint(path, target, target_optimizer)
    loaded = full_state(target)
    assert loaded.keys() == expected.keys()

    # Many trips have the same source but for its mesh and its hot rows.
    sizes, max_length, num_steps = (6,) * world_size, 4, 6
    oracle, _ = trained_oracle(oracle_of(trip.source), 0, sizes, max_length, num_steps)
    gaps = []
    for model, optimizer, cell in (
        (source, source_optimizer, trip.source),
        (target, target_optimizer, trip.target),
    ):
        train(model, optimizer, cell, range(3, 6))
        gaps.append(distance(full_state(model), oracle))
    return Arrival(
        len(expected),
        tuple(name for name in expected if not torch.equal(loaded[name], expected[name])),
        tuple(name for name in expected if torch.equal(before[name], expected[name])),
        gaps[0],
        gaps[1],
        extra,
    )


def check_arrivals(pool: RankPool, trips: list[Trip], folder: Place) -> None:
    for of_rank in pool.run(travel, trips, folder, timeout_s=300):
        for trip, arrival in zip(trips, of_rank, strict=True):
            tables = len(trip.source.spec.tables)
            has_moments = trip.source.optimizer != "sgd"
            # A feature's position weights are one tensor; the last one has none in a collection.
            positions = {"": 0, "collection": -1}.get(trip.source.spec.positions, 0)
            positions += len(trip.source.spec.features) * bool(trip.source.spec.positions)
            assert arrival.num_tensors == tables * (1 + has_moments) + 2 + positions, trip
            assert arrival.different == (), trip
            assert arrival.equal_before == (), trip
            assert arrival.source_gap < TOLERANCE, trip
            assert arrival.target_gap < TOLERANCE, trip
            assert arrival.extra == {"step": 3}, trip


def stock(sharding: str, **options: object) -> Cell:
    return StockCell(M14, sharding, **options)  # type: ignore[arg-type]


def save(rank: int, world_size: int, cells: list[Cell], folder: Path, steps: int = 1) -> None:
    for number, cell in enumerate(cells):
        model, optimizer = make(cell)
        train(model, optimizer, cell, range(steps))
        save_checkpoint(folder / str(number), model, optimizer, extra={"step": steps})


def dense_optimizer(kind: str, model: torch.nn.Module) -> KeyedOptimizer:
    makers = {
        "adam": lambda params: torch.optim.Adam(params, lr=0.01),
        "decay": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.1),
        "momentum": lambda params: torch.optim.SGD(params, lr=0.01, momentum=0.9),
        "adagrad": lambda params: torch.optim.Adagrad(params, lr=0.01),
    }
    params = dict(in_backward_optimizer_filter(model.named_parameters()))
    if kind == "warmup":
        stages = [WarmupStage(WarmupPolicy.LINEAR, max_iters=8, value=0.1)]
        return WarmupOptimizer(dense_optimizer("momentum", model), stages, lr=0.1)
    return KeyedOptimizerWrapper(params, makers[kind])
