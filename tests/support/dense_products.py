"""Every dense wrapper, with every table sharding, beside one process."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torchrec.distributed.model_parallel import DistributedModelParallel

import torchrec_2dsp as tdsp
from tests.support.cells import EPS, Cell
from tests.support.dense_training import whole
from tests.support.models import ModelSpec
from tests.support.parity import LR, compare
from tests.support.pipelining import (
    TABLES,
    PipelineCell,
    Residual,
    StackOracle,
    batch_for,
    batches_for,
    pipelined,
    tensor_parallel_plan,
)

NUM_STEPS = 10
BATCH_SIZE = 5
"""Not divisible by any number of micro-batches."""

_ONE_STAGE = ("GPipe", "1F1B")
_MORE_STAGES = ("Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
SCHEDULES = (*_ONE_STAGE, *_MORE_STAGES)


def pipeline(schedule: str, *, ranks: int = 2, **more: Any) -> Callable[[], Any]:
    """Return a maker of pipelines with so many positions."""
    per_rank = 1 if schedule in _ONE_STAGE else 2
    options: dict[str, Any] = {
        "num_stages": ranks * per_rank,
        "num_micro_batches": 4,
        "schedule": schedule,
        "stages_per_rank": per_rank,
    }
    return lambda: tdsp.PipelinedDense(**(options | more))


def split(tp: int, **more: Any) -> Callable[[], Any]:
    """Return a maker of tensor-parallel layers."""
    return lambda: tdsp.TensorParallelDense(tensor_parallel_plan(), tp=tp, **more)


def tensor_parallel() -> dict[str, Any]:
    """Return the options of a pipeline whose layers are split too."""
    return {"plan": tensor_parallel_plan(), "tp": 2}


FORMS: dict[str, Callable[[], Any]] = {
    "DDP": lambda: None,
    "FSDP": lambda: tdsp.FullyShardedDense(units=[Residual]),
    "FSDP at once": tdsp.FullyShardedDense,
    "FSDP, gathered once": lambda: tdsp.FullyShardedDense(
        units=[Residual], reshard_after_forward=False
    ),
    "HSDP": lambda: tdsp.FullyShardedDense(num_copies=2),
    "TP": split(4),
    "TP, FSDP": split(2),
    "TP, HSDP": split(2, num_copies=2),
    "TP of one rank, HSDP": split(1, num_copies=2),
    "TP of one rank, copies": split(1, num_copies=4),
    **{f"PP {schedule}": pipeline(schedule) for schedule in SCHEDULES},
    **{f"PP {schedule}, FSDP": pipeline(schedule, fully_shard=True) for schedule in SCHEDULES},
    "PP strided, FSDP": pipeline("1F1B", fully_shard=True, layout=tdsp.RankLayout.STRIDED),
    "PP, TP": pipeline("1F1B", **tensor_parallel()),
    "PP, TP, FSDP": pipeline("1F1B", fully_shard=True, **tensor_parallel()),
    "PP zero bubble, TP, FSDP": pipeline("ZBVZeroBubble", fully_shard=True, **tensor_parallel()),
    "one stage, TP, FSDP": pipeline("1F1B", ranks=1, fully_shard=True, **tensor_parallel()),
}
"""The wrappers, for 4 ranks and more."""


@dataclass(frozen=True)
class ProductCell:
    """A dense wrapper with a table sharding."""

    form: str
    """A key of `FORMS`."""

    tables: str
    """A key of `TABLES`."""

    num_batches: int = 1
    """Batches per update."""


@dataclass(frozen=True)
class ProductGap:
    """A cell's distance from one process on all ranks' batches."""

    tables: float
    """The largest difference in table weights and moments, dense weights and losses."""

    dense_moment: float
    """The largest difference in a dense moment, relative to its parameter's largest."""

    num_moments: int
    num_values: int

    held_share: float
    """The share of the dense elements that a rank holds."""


def dense_adagrad(params: Any) -> torch.optim.Optimizer:
    """Build a dense optimizer with moments."""
    return torch.optim.Adagrad(params, lr=LR, eps=EPS, foreach=False)


@lru_cache(maxsize=4)
def product_oracle(
    spec: ModelSpec, num_batches: int, world_size: int
) -> tuple[StackOracle, list[list[float]]]:
    """Return a trained oracle, which must not train further, and each step's losses."""
    tables = Cell(tdsp.Mesh2D(1, world_size), spec=spec)
    cell = PipelineCell(tables, (), num_batches, (BATCH_SIZE,) * world_size)
    oracle = StackOracle(tables, make_dense_optimizer=dense_adagrad)
    return oracle, [oracle.step_on(batches_for(cell, step)) for step in range(NUM_STEPS)]


def tables_on(name: str, world_size: int) -> Cell:
    """Return the named tables, on a world."""
    cell = TABLES[name]
    groups = cell.mesh.num_groups
    return replace(cell, mesh=tdsp.Mesh2D(groups, world_size // groups))


@contextmanager
def product_model(
    cell: ProductCell, world_size: int
) -> Iterator[tuple[DistributedModelParallel, dict[str, Any], torch.optim.Optimizer]]:
    """Yield a cell's model, its dense parameters by name, and their optimizer."""
    with pipelined(tables_on(cell.tables, world_size), FORMS[cell.form]()) as (model, params):
        named = {name.removeprefix("module."): param for name, param in params.items()}
        yield model, named, dense_adagrad(list(named.values()))


def run_product(rank: int, world_size: int, cell: ProductCell) -> ProductGap:
    """Train beside the oracle; compare losses, all weights and all moments."""
    tables = tables_on(cell.tables, world_size)
    oracle, expected_losses = product_oracle(tables.spec, cell.num_batches, world_size)
    work = PipelineCell(tables, (), cell.num_batches, (BATCH_SIZE,) * world_size)
    loss_gap = 0.0
    with product_model(cell, world_size) as (model, params, optimizer):
        for step in range(NUM_STEPS):
            optimizer.zero_grad()
            total = 0.0
            batches = [batch_for(work, step, part, rank) for part in range(cell.num_batches)]
            for batch in tdsp.accumulate(model, batches) if len(batches) > 1 else batches:
                loss = model(batch).mean() / len(batches)
                loss.backward()
                total += loss.item()
            optimizer.step()
            loss_gap = max(loss_gap, abs(total - expected_losses[step][rank]))
        gap = compare(model, oracle, loss_gap)
        held = [
            param.to_local() if isinstance(param, DTensor) else param for param in params.values()
        ]
        num_dense = sum(param.numel() for param in oracle.dense.values())
        held_share = sum(part.numel() for part in held) / num_dense
        moments = [
            _relative_gap(whole(optimizer.state[param]["sum"]), _moment(oracle, name))
            for name, param in params.items()
        ]
    return ProductGap(gap.worst, max(moments), len(moments), gap.num_values, held_share)


def run_products(rank: int, world_size: int, cells: list[ProductCell]) -> list[ProductGap]:
    return [run_product(rank, world_size, cell) for cell in cells]


def _moment(oracle: StackOracle, name: str) -> torch.Tensor:
    return oracle.dense_optimizer.state[oracle.dense[name]]["sum"]


def _relative_gap(actual: torch.Tensor, expected: torch.Tensor) -> float:
    assert actual.shape == expected.shape
    return float((actual - expected).abs().max() / expected.abs().max().clamp(min=1e-12))
