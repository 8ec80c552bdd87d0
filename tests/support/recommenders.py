"""Train a recommender of `programs.models` sharded in one way or another, or in one process."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchrec.datasets.utils import Batch
from torchrec.distributed.planner import ParameterConstraints
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.optim import SemisyncOptimizer
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

import torchrec_2dsp as tdsp
from tests.support.dense_training import whole
from tests.support.devices import rank_device
from tests.support.planning import group_plan_of
from torchrec_2dsp.optim import MomentScaledRowWiseAdaGradOptimizer
from torchrec_2dsp.programs.data.dataset import Dataset, Split
from torchrec_2dsp.programs.models.model import tables_of

LR, DENSE_LR, STEPS, GLOBAL_BATCH = 0.05, 0.1, 4, 16


@dataclass(frozen=True)
class Way:
    """A way to train: how tables are sharded, how the dense part runs, by which loop."""

    sharding_type: str = "row_wise"
    num_groups: int = 1
    exchange: str = "pooled"
    hot_rows: int = 0
    dense: Callable[[], Any] = lambda: None
    """Makes the data-parallel wrapper; the default is TorchRec's, DDP."""
    pipeline: type[TrainPipelineSparseDist[Any, Any]] | None = None


@dataclass
class TrainedModel:
    """A rank's losses and dense weights, and what the caller asked for at the end."""

    losses: list[float] = field(default_factory=list)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    at_end: Any = None


def batches_of(dataset: Dataset, rank: int, world_size: int, split: Split) -> Iterator[Batch]:
    batches = dataset.batches(
        split, global_batch_size=GLOBAL_BATCH, rank=rank, world_size=world_size
    )
    return (next(batches) for _ in range(STEPS))


def train_sharded(
    model: nn.Module,
    dataset: Dataset,
    way: Way,
    at_end: Callable[[Any], Any] = lambda model: None,
) -> TrainedModel:
    """Train on all ranks.

    Args:
        model: unsharded.
        dataset: the batches.
        way: how to train.
        at_end: called with the model without wrappers, in evaluation mode.
    """
    world_size = dist.get_world_size()
    parallel = shard_model(model, way)
    optimizer = optimizer_of(parallel, way)
    trained = TrainedModel()
    batches = batches_of(dataset, dist.get_rank(), world_size, Split.TRAIN)
    if way.pipeline is None:
        for batch in batches:
            optimizer.zero_grad()
            loss, _ = parallel(batch)
            loss.backward()
            parallel.sync()
            optimizer.step()
            trained.losses.append(loss.item())
    else:
        pipeline = way.pipeline(parallel, optimizer, rank_device())
        trained.losses = [pipeline.progress(batches)[0].item() for _ in range(STEPS)]
        pipeline.detach()
    parallel.sync_now()
    dense = in_backward_optimizer_filter(parallel.module.named_parameters())
    trained.weights = {name: whole(value) for name, value in dense}
    parallel.eval()
    with torch.no_grad():
        trained.at_end = at_end(parallel.module)
    return trained


def shard_model(model: nn.Module, way: Way) -> tdsp.ModelParallel2D:
    """Return the model on all ranks, with the weights that it has."""
    mesh = tdsp.Mesh2D(way.num_groups, dist.get_world_size() // way.num_groups)
    rule = tdsp.MomentScaledRowWiseAdaGrad(LR)
    sharders: Any = [
        tdsp.EmbeddingBagCollectionSharder2D(rule, keep_weights=True),
        tdsp.EmbeddingCollectionSharder2D(rule),
    ]
    tables = [config.name for config in tables_of(model)]
    constraints = {
        table: ParameterConstraints(sharding_types=[way.sharding_type]) for table in tables
    }
    plan = group_plan_of(model, mesh, sharders=sharders, constraints=constraints)
    for table in tables:
        plan = tdsp.pin(plan, table, exchange=way.exchange, hot_rows=range(way.hot_rows))
    return tdsp.ModelParallel2D(
        model, plan=plan, sharders=sharders, data_parallel_wrapper=way.dense()
    )


def optimizer_of(parallel: Any, way: Way) -> KeyedOptimizer:
    """Return the fused optimizer, SGD for everything else, and meetings after every step."""
    params: Any = dict(in_backward_optimizer_filter(parallel.named_parameters()))
    dense: KeyedOptimizer = KeyedOptimizerWrapper(
        params, lambda values: torch.optim.SGD(values, lr=DENSE_LR, foreach=False)
    )
    wrapper = parallel._data_parallel_wrapper
    if isinstance(wrapper, tdsp.LocalDense):
        # Means of one step's changes are the steps of the mean gradient.
        outer = KeyedOptimizerWrapper(
            params, lambda values: tdsp.DiLoCo(values, wrapper, 1.0, momentum=0.0)
        )
        dense = SemisyncOptimizer(params.values(), dense, outer, num_local_steps=1)
    return CombinedOptimizer([parallel.fused_optimizer, dense])


def train_unsharded(
    model: nn.Module,
    dataset: Dataset,
    num_parts: int,
    at_end: Callable[[Any], Any] = lambda model: None,
) -> TrainedModel:
    """Train in this process, on the mean of the losses of the batch's parts."""
    named = dict(model.named_parameters())
    is_table = {
        name: name.split(".")[-3:][:1] in (["embeddings"], ["embedding_bags"]) for name in named
    }
    tables = [value for name, value in named.items() if is_table[name]]
    others = {name: value for name, value in named.items() if not is_table[name]}
    optimizers: list[torch.optim.Optimizer] = [
        MomentScaledRowWiseAdaGradOptimizer(tables, lr=LR, moment_scale=1.0),
        torch.optim.SGD(others.values(), lr=DENSE_LR),
    ]
    parts = [batches_of(dataset, rank, num_parts, Split.TRAIN) for rank in range(num_parts)]
    trained = TrainedModel()
    for batches in zip(*parts, strict=True):
        losses = torch.stack([model(batch)[0] for batch in batches])
        for optimizer in optimizers:
            optimizer.zero_grad()
        losses.mean().backward()
        for optimizer in optimizers:
            optimizer.step()
        trained.losses.append(losses.mean().item())
    trained.weights = {name: value.detach() for name, value in others.items()}
    model.eval()
    with torch.no_grad():
        trained.at_end = at_end(model)
    return trained


def largest_gap(weights: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> float:
    """Return the largest difference between a rank's weights and the whole model's."""
    assert weights
    assert weights.keys() <= expected.keys()
    return max((weights[name] - expected[name]).abs().max().item() for name in weights)
