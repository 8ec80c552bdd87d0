"""The work of a contestant's step, for a cost model: its tables, its wire and the rest."""

import statistics
from dataclasses import replace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn

from torchrec_2dsp.cost.workload import DenseWork, Workload
from torchrec_2dsp.programs.bench.config import BenchConfig, PlannedContestant, TwoDContestant
from torchrec_2dsp.programs.bench.data import shape_of
from torchrec_2dsp.programs.calibrate.timing import repeated_seconds
from torchrec_2dsp.programs.data.synthetic import SyntheticData
from torchrec_2dsp.programs.models.kinds import build_any_model
from torchrec_2dsp.programs.models.model import rank_device
from torchrec_2dsp.programs.models.optimizer import plain_dense_optimizer
from torchrec_2dsp.programs.models.planned import true_access


def tables_work(config: BenchConfig) -> Workload:
    """The work of a step with the tables, whoever trains them."""
    shape = shape_of(config.data)
    model = build_any_model(shape, config.model, tables_device="meta")
    access = true_access(shape) if isinstance(shape, SyntheticData) else None
    return Workload.of_model(model, batch_size=config.schedule.batch_size, access=access)


def workload_of(
    contestant: PlannedContestant, tables: Workload, dim: int, dense: DenseWork | None
) -> Workload:
    """The work of a contestant's step.

    Args:
        contestant: how it communicates.
        tables: what `tables_work` gave.
        dim: of the tables.
        dense: what the model does beside them, if that is known.
    """
    wire = _bytes_per_number(contestant.qcomms, dim)
    return replace(
        tables,
        dense=dense or DenseWork(),
        prefetches_rows=isinstance(contestant, TwoDContestant) and contestant.prefetch_rows,
        full_duplex=contestant.full_duplex,
        forward_wire_bytes=wire,
        backward_wire_bytes=wire,
    )


def measure_dense(config: BenchConfig, world: dist.ProcessGroup) -> DenseWork:
    """Time a model of clicks without its tables, on all ranks at once.

    Collectives:
        Those of `repeated_seconds`.
    """
    device = rank_device(config.schedule.device)
    data = cast(SyntheticData, config.data)
    model: Any = build_any_model(data, config.model, tables_device="meta")
    model = model.model
    parts = nn.ModuleList([model.dense_arch, model.inter_arch, model.over_arch]).to(device)
    batch_size, num_tables = config.schedule.batch_size, len(data.features)
    numbers = torch.rand(batch_size, data.num_dense, device=device)
    vectors = torch.rand(batch_size, num_tables, config.model.dim, device=device)
    vectors.requires_grad_()
    clicks = torch.randint(0, 2, (batch_size,), device=device).float()
    optimizer = plain_dense_optimizer(config.optimizer, parts.parameters())

    def forward() -> torch.Tensor:
        scores = model.over_arch(model.inter_arch(model.dense_arch(numbers), vectors))
        return nn.functional.binary_cross_entropy_with_logits(scores.squeeze(-1), clicks)

    def step() -> None:
        optimizer.zero_grad()
        forward().backward()
        optimizer.step()

    forward_s = statistics.median(repeated_seconds(forward, world))
    step_s = statistics.median(repeated_seconds(step, world))
    return DenseWork(
        forward_s=forward_s,
        backward_s=max(0.0, step_s - forward_s),
        gradient_bytes=float(sum(weight.nbytes for weight in parts.parameters())),
    )


def _bytes_per_number(qcomms: str, dim: int) -> float:
    """Bytes of a number that travels; INT8 has a scale and an offset for each row."""
    return {"fp32": 4.0, "fp16": 2.0, "int8": 1 + 8 / dim}[qcomms]
