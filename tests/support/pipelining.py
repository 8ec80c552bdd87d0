"""A model with layers that can be cut, trained by any wrapper beside its oracle."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import torchrec_2dsp as tdsp
from tests.support.cells import Cell
from tests.support.loops import shard
from tests.support.models import BagModel, ModelSpec, make_batch
from tests.support.oracle import Oracle
from tests.support.parity import LR, Gap, compare, relative_gap

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
    """A layer with two paths, one of which has parameters that can be split."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs + self.down(torch.tanh(self.up(self.norm(inputs))))


def tensor_parallel_plan() -> dict[str, ParallelStyle]:
    """Return the styles of the layers that can be split."""
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
    """Return eight layers, some without parameters, one of which returns a view."""
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
    """Reduce a rank's losses; the mean without samples would be NaN."""
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
        """The reduction of a rank's losses."""
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
    """Destroy a wrapper's groups: gloo's threads wake up as long as there are any."""
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
