"""Every dense wrapper, with every table sharding, beside one process."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed.tensor import DTensor

import torchrec_2dsp as tdsp
from tests.support.cells import EPS, Cell
from tests.support.dense_training import whole
from tests.support.parity import LR, compare
from tests.support.pipelining import (
    TABLES,
    PipelineCell,
    Residual,
    StackOracle,
    pipelined,
    step_of,
    tensor_parallel_plan,
    trained_stack_oracle,
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
    **{
        f"PP of 4 ranks, {schedule}": pipeline(schedule, ranks=4, num_micro_batches=8)
        for schedule in SCHEDULES
    },
    **{f"PP {schedule}, FSDP": pipeline(schedule, fully_shard=True) for schedule in SCHEDULES},
    "PP strided, FSDP": pipeline("1F1B", fully_shard=True, layout=tdsp.RankLayout.STRIDED),
    "PP, TP": pipeline("1F1B", **tensor_parallel()),
    "PP zero bubble, TP": pipeline("ZBVZeroBubble", **tensor_parallel()),
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


def tables_on(name: str, world_size: int) -> Cell:
    """Return the named tables, on a world."""
    cell = TABLES[name]
    groups = cell.mesh.num_groups
    return replace(cell, mesh=tdsp.Mesh2D(groups, world_size // groups))


def run_product(rank: int, world_size: int, cell: ProductCell) -> ProductGap:
    """Train beside the oracle; compare losses, all weights and all moments."""
    tables, sizes = tables_on(cell.tables, world_size), (BATCH_SIZE,) * world_size
    oracle, expected = trained_stack_oracle(
        tables.spec,
        tables.optimizer,
        cell.num_batches,
        sizes,
        num_steps=NUM_STEPS,
        make_dense_optimizer=dense_adagrad,
    )
    work = PipelineCell({}, tables, cell.num_batches, sizes)
    with pipelined(tables, FORMS[cell.form]()) as (model, params):
        optimizer = dense_adagrad(list(params.values()))
        losses = [step_of(model, optimizer, work, step, rank) for step in range(NUM_STEPS)]
        loss_gap = max(abs(a - b) for a, b in zip(losses, expected[rank], strict=True))
        gap = compare(model, oracle, loss_gap)
        held = [
            param.to_local() if isinstance(param, DTensor) else param for param in params.values()
        ]
        num_dense = sum(param.numel() for param in oracle.dense.values())
        held_share = sum(part.numel() for part in held) / num_dense
        moments = [
            _relative_gap(
                whole(optimizer.state[param]["sum"]), _moment(oracle, name.removeprefix("module."))
            )
            for name, param in params.items()
        ]
    return ProductGap(gap.worst, max(moments), len(moments), gap.num_values, held_share)


def _moment(oracle: StackOracle, name: str) -> torch.Tensor:
    return oracle.dense_optimizer.state[oracle.dense[name]]["sum"]


def _relative_gap(actual: torch.Tensor, expected: torch.Tensor) -> float:
    assert actual.shape == expected.shape
    return float((actual - expected).abs().max() / expected.abs().max().clamp(min=1e-12))
