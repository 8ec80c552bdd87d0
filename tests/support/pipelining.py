"""A model whose layers can be pipelined or split, trained by any wrapper beside its oracle."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import torchrec_2dsp as tdsp
from tests.support.dense_training import whole
from tests.support.loops import shard
from tests.support.models import BagModel, ModelSpec, make_batch
from tests.support.oracle import Oracle
from tests.support.parity import EPS, LR, Cell, Gap, compare, relative_gap

WIDTH = 12
NUM_STEPS = 2
BATCH_SIZES = (7, 7, 7, 7)
"""No number of micro-batches divides a pipeline's samples."""

TABLES = {
    "table-wise": Cell(tdsp.Mesh2D(1, 4), sharding="table_wise", accumulates=True),
    "row-wise": Cell(tdsp.Mesh2D(1, 4), accumulates=True),
    "row exchange": Cell(tdsp.Mesh2D(1, 4), exchange="row", owners="hash", accumulates=True),
    "2D": Cell(tdsp.Mesh2D(2, 2)),
}
"""Tables sharded in different ways, whose gradients wait until an update."""

TWO_RANKS: list[dict[str, Any]] = [
    {"num_stages": 2, "num_micro_batches": 5},
    {
        "num_stages": 4,
        "num_micro_batches": 4,
        "stages_per_rank": 2,
        "schedule": "ZBVZeroBubble",
    },
]
"""Pipelines with two ranks, for two of them or for split layers."""


class Residual(nn.Module):
    """A residual layer; one path has parameters that can be split."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs + self.down(torch.tanh(self.up(self.norm(inputs))))


def tensor_parallel_plan() -> dict[str, ParallelStyle]:
    """Return parallel styles for the layers that can be split."""
    return {"stack.layers.*.up": ColwiseParallel(), "stack.layers.*.down": RowwiseParallel()}


class ItemLoss(nn.Module):
    """A squared error per sample, with a parameter, and a target that needs gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([0.5]))

    def forward(
        self, outputs: torch.Tensor, labels: torch.Tensor, items: torch.Tensor
    ) -> torch.Tensor:
        scores = torch.tanh(self.scale * (outputs * items).sum(dim=1)) + outputs.mean(dim=1)
        # Small steps, in which rounding doesn't grow.
        return 0.1 * (scores - labels).square()


def layers_of(item_dim: int) -> list[nn.Module]:
    """Return eight layers, some without parameters; one returns a view."""
    return [
        nn.Linear(WIDTH, WIDTH),
        nn.Tanh(),
        Residual(),
        nn.Linear(WIDTH, 2 * WIDTH),
        nn.Unflatten(1, (2, WIDTH)),
        nn.Linear(WIDTH, WIDTH // 2),
        nn.Sequential(nn.Flatten(), Residual()),
        nn.Linear(WIDTH, item_dim),
    ]


class StackModel(BagModel):
    """Bags under a layer under a `LayerStack`; returns each sample's loss."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__(spec)
        self.over = nn.Identity()
        self.bottom = nn.Linear(sum(table.dim for _, table in spec.features), WIDTH)
        self.item, table = spec.features[-1]
        self.stack = tdsp.LayerStack(layers_of(table.dim), ItemLoss())

    def forward(self, features: KeyedJaggedTensor, *, with_targets: bool = True) -> torch.Tensor:
        pooled = self.ebc(features)
        joined = torch.cat([pooled[name] for name in self.features], dim=1)
        inputs = torch.tanh(self.bottom(joined))
        if not with_targets:
            return self.stack(inputs)
        labels = features.lengths().view(len(self.features), -1).float().mean(dim=0)
        return self.stack(inputs, labels, pooled[self.item])


def stack_model(spec: ModelSpec) -> StackModel:
    """Build the model with seed 0."""
    torch.manual_seed(0)
    return StackModel(spec)


def dense_sgd(params: Any) -> torch.optim.Optimizer:
    """Build the default dense optimizer."""
    return torch.optim.SGD(params, lr=LR, foreach=False)


class StackOracle(Oracle):
    """The unsharded, uncut model, trained on all ranks' batches at once."""

    def __init__(
        self,
        cell: Cell,
        *,
        reduction: str = "mean",
        make_dense_optimizer: Callable[[Any], torch.optim.Optimizer] = dense_sgd,
    ) -> None:
        model = stack_model(cell.spec)
        super().__init__(cell.spec, optimizer=cell.optimizer, lr=LR, eps=cell.eps, model=model)
        self._reduction = reduction
        self.dense = {
            name: param for name, param in model.named_parameters() if not name.startswith("ebc")
        }
        self.dense_optimizer = make_dense_optimizer(list(self.dense.values()))

    def step_on(self, batches: Sequence[Sequence[KeyedJaggedTensor]]) -> list[float]:
        """Update once on some batches per rank; return each rank's mean loss."""
        self.model.zero_grad()
        losses = [
            sum(
                (
                    reduced(self.model(batch), self._reduction) / len(of_rank)
                    for batch in of_rank
                    if batch.stride()
                ),
                torch.zeros(()),
            )
            for of_rank in batches
        ]
        (sum(losses, torch.zeros(())) / len(batches)).backward()
        self.dense_optimizer.step()
        # All the rest is in tables.
        self.apply_([batch for of_rank in batches for batch in of_rank])
        return [loss.item() for loss in losses]


def reduced(losses: torch.Tensor, reduction: str) -> torch.Tensor:
    """Reduce a rank's losses; without samples, avoid the mean's NaN."""
    return losses.sum() if reduction == "sum" or not losses.numel() else losses.mean()


@dataclass(frozen=True)
class PipelineCell:
    """A way to train the model."""

    options: dict[str, Any]
    """The options of `PipelinedDense`."""

    cell: Cell = TABLES["row-wise"]
    """The tables, and the mesh."""

    num_batches: int = 1
    """Batches per update."""

    sizes: tuple[int, ...] = BATCH_SIZES
    """Each rank's number of samples."""

    def wrapper(self) -> tdsp.PipelinedDense:
        """Return a new wrapper."""
        return tdsp.PipelinedDense(**self.options)

    @property
    def reduction(self) -> str:
        """The reduction for a rank's losses."""
        return self.options.get("reduction", "mean")


@contextmanager
def pipelined(
    cell: Cell, wrapper: Any, unsharded: StackModel | None = None
) -> Iterator[tuple[DistributedModelParallel, dict[str, nn.Parameter]]]:
    """Yield the wrapped model and its dense parameters; close its process groups afterwards."""
    unsharded = unsharded or stack_model(cell.spec)
    model = shard(cell, model=unsharded, data_parallel_wrapper=wrapper)
    try:
        yield model, dict(in_backward_optimizer_filter(model.named_parameters()))
    finally:
        close_groups(wrapper)


def close_groups(wrapper: Any) -> None:
    """Destroy a wrapper's groups: gloo's threads keep waking up while any exist."""
    groups = getattr(wrapper, "_groups", None)
    if groups is not None:
        for group in (groups.agreements, groups.forward, groups.backward, groups.copies):
            dist.destroy_process_group(group)


def batch_for(cell: PipelineCell, step: int, part: int, rank: int) -> KeyedJaggedTensor:
    seed = 1000 * step + 100 * part + rank
    return make_batch(cell.cell.spec, seed=seed, batch_size=cell.sizes[rank])


def batches_for(cell: PipelineCell, step: int) -> list[list[KeyedJaggedTensor]]:
    return [
        [batch_for(cell, step, part, rank) for part in range(cell.num_batches)]
        for rank in range(len(cell.sizes))
    ]


@lru_cache(maxsize=16)
def trained_stack_oracle(
    spec: ModelSpec,
    optimizer: str,
    num_batches: int,
    sizes: tuple[int, ...],
    reduction: str = "mean",
    num_steps: int = NUM_STEPS,
    make_dense_optimizer: Callable[[Any], torch.optim.Optimizer] = dense_sgd,
) -> tuple[StackOracle, list[list[float]]]:
    """Return a trained oracle, which must not train further, and each rank's losses by step."""
    tables = Cell(tdsp.Mesh2D(1, len(sizes)), spec=spec, optimizer=optimizer)
    cell = PipelineCell({}, tables, num_batches, sizes)
    oracle = StackOracle(tables, reduction=reduction, make_dense_optimizer=make_dense_optimizer)
    by_step = [oracle.step_on(batches_for(cell, step)) for step in range(num_steps)]
    return oracle, [list(of_rank) for of_rank in zip(*by_step, strict=True)]


def step_of(
    model: nn.Module, optimizer: torch.optim.Optimizer, cell: PipelineCell, step: int, rank: int
) -> float:
    """Train a step; return this rank's loss."""
    optimizer.zero_grad()
    total = 0.0
    batches = [batch_for(cell, step, part, rank) for part in range(cell.num_batches)]
    for batch in tdsp.accumulate(model, batches) if len(batches) > 1 else batches:
        loss = reduced(model(batch), cell.reduction) / len(batches)
        loss.backward()
        total += loss.item()
    optimizer.step()
    return total


def run_pipeline(rank: int, world_size: int, cell: PipelineCell) -> Gap:
    """Train beside the oracle; compare losses, dense weights, tables and moments."""
    # How tables and layers are sharded changes nothing, so one oracle serves many cells.
    kind = (cell.cell.spec, cell.cell.optimizer, cell.num_batches, cell.sizes, cell.reduction)
    oracle, expected = trained_stack_oracle(*kind)
    with pipelined(cell.cell, cell.wrapper()) as (model, params):
        optimizer = dense_sgd(params.values())
        losses = [step_of(model, optimizer, cell, step, rank) for step in range(NUM_STEPS)]
        return compare(model, oracle, relative_gap(losses, expected[rank]))


PRODUCT_STEPS = 10
PRODUCT_BATCH_SIZE = 5
"""Not divisible by any number of micro-batches."""

_ONE_STAGE = ("GPipe", "1F1B")
_MORE_STAGES = ("Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
SCHEDULES = (*_ONE_STAGE, *_MORE_STAGES)


def pipeline(schedule: str, *, ranks: int = 2, **more: Any) -> Callable[[], Any]:
    """Return a factory for pipelines on ``ranks`` ranks."""
    per_rank = 1 if schedule in _ONE_STAGE else 2
    options: dict[str, Any] = {
        "num_stages": ranks * per_rank,
        "num_micro_batches": 4,
        "schedule": schedule,
        "stages_per_rank": per_rank,
    }
    return lambda: tdsp.PipelinedDense(**(options | more))


def split(tp: int, **more: Any) -> Callable[[], Any]:
    """Return a factory for tensor-parallel layers."""
    return lambda: tdsp.TensorParallelDense(tensor_parallel_plan(), tp=tp, **more)


def tensor_parallel() -> dict[str, Any]:
    """Return the options for a pipeline whose layers are split too."""
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
    """A cell's gaps to a single process that trains all ranks' batches."""

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
    """Return a cell with the named tables, on a world."""
    cell = TABLES[name]
    groups = cell.mesh.num_groups
    return replace(cell, mesh=tdsp.Mesh2D(groups, world_size // groups))


def run_product(rank: int, world_size: int, cell: ProductCell) -> ProductGap:
    """Train beside the oracle; compare losses, all weights and all moments."""
    tables, sizes = tables_on(cell.tables, world_size), (PRODUCT_BATCH_SIZE,) * world_size
    oracle, expected = trained_stack_oracle(
        tables.spec,
        tables.optimizer,
        cell.num_batches,
        sizes,
        num_steps=PRODUCT_STEPS,
        make_dense_optimizer=dense_adagrad,
    )
    work = PipelineCell({}, tables, cell.num_batches, sizes)
    with pipelined(tables, FORMS[cell.form]()) as (model, params):
        optimizer = dense_adagrad(list(params.values()))
        losses = [step_of(model, optimizer, work, step, rank) for step in range(PRODUCT_STEPS)]
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
