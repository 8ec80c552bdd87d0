"""Train a parity matrix cell by various loops, and compare the results."""

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import ParameterConstraints
from torchrec.distributed.train_pipeline import TrainPipelineBase, TrainPipelineSparseDist
from torchrec.distributed.train_pipeline.train_pipelines import TrainPipelineSparseDistLite
from torchrec.optim.keyed import KeyedOptimizer
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import torchrec_2dsp as tdsp
from tests.support.batches import make_variable_batch
from tests.support.devices import copied, rank_device
from tests.support.models import BagModel, ModelSpec, make_batch
from tests.support.oracle import local_loss
from tests.support.parity import LR, Cell, local_shards, make_optimizer, shard
from tests.support.planning import group_plan_of
from torchrec_2dsp.comms.counting import Collectives
from torchrec_2dsp.replicas.sync_action import SyncReason
from torchrec_2dsp.shard.parted import sharded_tables

Tensors = dict[str, torch.Tensor]
Stream = list[list[KeyedJaggedTensor]]
"""Batches by step, then by rank."""


def make_stream(cell: Cell, steps: int) -> Stream:
    """Return all ranks' batches."""
    make = make_variable_batch if cell.variable else make_batch
    return [
        [make(cell.spec, 1000 * step + rank) for rank in range(cell.mesh.world_size)]
        for step in range(steps)
    ]


def shard_tables(
    model: nn.Module,
    mesh: tdsp.Mesh2D,
    sharders: Any,
    types: Mapping[str, str],
    pins: Mapping[str, Mapping[str, Any]] | None = None,
    *,
    load: bool = True,
) -> Any:
    """Shard each table by its type and pinned choices; keep weights if ``load``."""
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    constraints = {
        name: ParameterConstraints(sharding_types=[kind], min_partition=4)
        for name, kind in types.items()
    }
    plan = group_plan_of(model, mesh, sharders=sharders, constraints=constraints)
    for name, pinned in (pins or {}).items():
        plan = tdsp.pin(plan, name, **pinned)
    parallel = tdsp.ModelParallel2D(model, device=rank_device(), plan=plan, sharders=sharders)
    if load:
        parallel.load_state_dict(cast(Any, weights))
    return parallel


class LossModel(BagModel):
    """Returns the loss and the detached scores, as TorchRec's pipelines expect."""

    def forward(self, features: KeyedJaggedTensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        scores = super().forward(features)
        return local_loss(scores), scores.detach()


def shard_loss_model(cell: Cell) -> DistributedModelParallel:
    """Shard a `LossModel`, or a `BagModel` where pipelines can't trace it."""
    if cell.spec.sequence:
        return shard(cell)
    torch.manual_seed(0)
    return shard(cell, model=LossModel(cell.spec))


def entries(parallel: DistributedModelParallel) -> dict[str, Any]:
    """Return both state dicts' entries, tables by path and states by ``path/state``."""
    values = dict(parallel.state_dict())
    for name, states in parallel.fused_optimizer.state_dict()["state"].items():
        values |= {f"{name}/{key}": state for key, state in states.items()}
    return values


def snapshot(parallel: DistributedModelParallel) -> Tensors:
    """Copy everything that this rank trains, read through state dicts as a user would."""
    return {
        f"{name}{number}": copied(part)
        for name, value in entries(parallel).items()
        for number, (part, _) in enumerate(local_shards(value))
    }


def largest_gap(left: Tensors, right: Tensors) -> float:
    """Return the largest difference between two snapshots; 0 if they are equal bit for bit."""
    assert left.keys() == right.keys()
    assert sum(value.numel() for value in left.values()) > 0
    gaps = [(left[name].float() - right[name].float()).abs() for name in left]
    return max(gap.nan_to_num(nan=math.inf).max().item() for gap in gaps if gap.numel())


@contextmanager
def counting_syncs(parallel: nn.Module) -> Iterator[list[tdsp.SyncReport]]:
    """Yield the reports on all syncs that weren't empty, whoever triggered them."""
    reports: list[tdsp.SyncReport] = []

    def counted(
        reach: Callable[[SyncReason], tdsp.SyncReport],
    ) -> Callable[[SyncReason], tdsp.SyncReport]:
        def reach_and_keep(reason: SyncReason) -> tdsp.SyncReport:
            report = reach(reason)
            if report.num_tensors:
                reports.append(report)
            return report

        return reach_and_keep

    actions = [action for part in sharded_tables(parallel) for action in part.sync_point._actions]
    for action in actions:
        cast(Any, action).reach = counted(action.reach)
    try:
        yield reports
    finally:
        for action in actions:
            del action.reach


def plain_loop(
    parallel: DistributedModelParallel,
    optimizer: torch.optim.Optimizer,
    batches: Iterable[KeyedJaggedTensor],
    *,
    accumulate: int = 1,
    before_step: Callable[[int], None] | None = None,
) -> list[float]:
    """Run a plain training loop, with an optimizer step after every ``accumulate`` backwards."""
    losses = []
    for index, batch in enumerate(batches):
        if index % accumulate == 0:
            if before_step is not None:
                before_step(index)
            optimizer.zero_grad()
        output = parallel(batch)
        loss = output[0] if isinstance(output, tuple) else local_loss(output)
        loss.backward()
        losses.append(loss.item())
        if isinstance(parallel, tdsp.ModelParallel2D):
            parallel.sync()
        if index % accumulate == accumulate - 1:
            optimizer.step()
    return losses


def gap_to_unsharded(
    alone: nn.Module, parallel: DistributedModelParallel, spec: ModelSpec, lr: float = LR
) -> float:
    """Train both on all ranks' batches; return the largest gap between a rank's losses."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    optimizer = make_optimizer(parallel, lr=lr)
    of_alone = torch.optim.SGD([p for p in alone.parameters() if p.requires_grad], lr=lr)
    gap = 0.0
    for step in range(4):
        batches = [make_batch(spec, 10 * step + other) for other in range(world_size)]
        optimizer.zero_grad()
        of_alone.zero_grad()
        losses = torch.stack([local_loss(alone(batch)) for batch in batches])
        losses.mean().backward()
        loss = local_loss(parallel(batches[rank]))
        loss.backward()
        optimizer.step()
        of_alone.step()
        gap = max(gap, (loss - losses[rank]).abs().item())
    return gap


PIPELINES: dict[str, type[Any]] = {
    "base": TrainPipelineBase,
    "sparse dist": TrainPipelineSparseDist,
    "lite": TrainPipelineSparseDistLite,
}
"""TorchRec's pipelines that run on the CPU."""
OTHER_BATCH = "a train pipeline is attached to the model, and has distributed another batch"
"""The error about a batch that a model gets past its pipeline."""


def pipeline_loop(
    kind: str,
    parallel: DistributedModelParallel,
    optimizer: KeyedOptimizer,
    batches: Sequence[KeyedJaggedTensor],
    **options: Any,
) -> list[float]:
    """Run a pipeline over a `LossModel` until its stream ends."""
    pipeline = PIPELINES[kind](parallel, optimizer, rank_device(), **options)
    losses = [local_loss(scores).item() for scores in drain(pipeline, batches)]
    assert len(losses) == len(batches)
    return losses


def drain(pipeline: Any, batches: Iterable[KeyedJaggedTensor]) -> list[torch.Tensor]:
    """Train until there are no more batches; return the pipeline's output for each."""
    stream, outputs = iter(batches), []
    with suppress(StopIteration):
        while True:
            outputs.append(pipeline.progress(stream))
    return outputs


def train(cell: Cell, rank: int, stream: Stream, kind: str = "plain", **options: Any) -> Tensors:
    """Train one loop over this rank's batches; return the snapshot."""
    parallel = shard_loss_model(cell)
    optimizer = make_optimizer(parallel)
    batches = [step[rank] for step in stream]
    if kind == "plain":
        plain_loop(parallel, optimizer, batches, **options)
    else:
        pipeline_loop(kind, parallel, optimizer, batches, **options)
    return snapshot(parallel)


@contextmanager
def logged(name: str = "torchrec_2dsp") -> Iterator[list[str]]:
    """Yield a list that collects a logger's messages."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger(name)
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield messages
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def all_to_all_bytes(counted: Collectives) -> list[int]:
    """Return the bytes that each all-to-all sent."""
    return [record.num_bytes for record in counted.records if record.op == "all_to_all_single"]
