"""What a cost model says of contestants, from their plans alone."""

import statistics
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.types import ShardingPlan

from torchrec_2dsp.access.stats import AccessStats
from torchrec_2dsp.access.table_access import TableAccess
from torchrec_2dsp.bench.config import BenchConfig
from torchrec_2dsp.bench.worker import Place
from torchrec_2dsp.cost.calibration import Calibration
from torchrec_2dsp.cost.measure.timing import repeated_seconds
from torchrec_2dsp.cost.model import CostModel
from torchrec_2dsp.cost.workload import DenseWork, Workload
from torchrec_2dsp.data.synthetic import SyntheticConfig
from torchrec_2dsp.mesh.mesh2d import Mesh2D
from torchrec_2dsp.plan.plan2d import Plan2D
from torchrec_2dsp.recipe.model import build_model, rank_device, table_name

_LOG_LENGTH = 1e9
"""Lookups of a log so long that it has every row as often as its probability says."""


def predicted_steps(
    config: BenchConfig,
    plans: Mapping[str, ShardingPlan],
    dense: DenseWork | None,
    place: Place,
) -> dict[str, dict[str, float]]:
    """Seconds of steps by part, for contestants that train; nothing without a calibration.

    Args:
        config: names the calibration, and the workload.
        plans: what each contestant trains by.
        dense: what the model does beside its tables.
        place: how many ranks there are, and on how many hosts.
    """
    if dense is None:
        return {}
    model = build_model(config.data, config.model, tables_device="meta")
    workload = Workload.of_model(
        model, batch_size=config.schedule.batch_size, access=true_access(config.data)
    )
    costs = CostModel(Calibration.load(config.calibration), place.local_world_size)
    predicted = {}
    for name, plan in plans.items():
        if (one := config.planned.get(name)) is None:
            continue
        wire = _wire_bytes(one.qcomms, config.model.dim)
        its_workload = replace(
            workload,
            dense=dense,
            full_duplex=one.full_duplex,
            forward_wire_bytes=wire,
            backward_wire_bytes=wire,
        )
        if not isinstance(plan, Plan2D):
            plan = Plan2D.from_stock(plan, Mesh2D(1, place.world_size))
        predicted[name] = costs.step_cost(plan, its_workload).as_dict()
    return predicted


def calibration_warning(config: BenchConfig, local_world_size: int) -> str:
    """What is unlike the machines that the calibration was made on; empty if nothing is."""
    if not config.calibration:
        return ""
    found = Calibration.load(config.calibration).differences(
        local_world_size=local_world_size, device=config.schedule.device
    )
    return f"{config.calibration} is of other machines: {'; '.join(found)}" if found else ""


def true_access(data: SyntheticConfig) -> AccessStats:
    """Which rows the synthetic log uses how often, by its own probabilities."""
    tables: dict[str, TableAccess] = {}
    for feature in data.features:
        zipf = data.distribution(feature)
        ranks = np.arange(1, feature.num_rows + 1)
        tables[table_name(feature.name)] = TableAccess.of_rows(
            feature.num_rows,
            _LOG_LENGTH / feature.mean_ids,
            zipf.row_of_rank(ranks),
            zipf.probability(ranks) * _LOG_LENGTH,
        )
    return AccessStats(tables)


def measure_dense(config: BenchConfig, world: dist.ProcessGroup) -> DenseWork:
    """Time the model without its tables, on all ranks at once.

    Collectives:
        Those of `repeated_seconds`.
    """
    device = rank_device(config.schedule.device)
    model = cast(Any, build_model(config.data, config.model, tables_device="meta")).model
    parts = nn.ModuleList([model.dense_arch, model.inter_arch, model.over_arch]).to(device)
    batch_size, num_tables = config.schedule.batch_size, len(config.data.features)
    numbers = torch.rand(batch_size, config.data.num_dense, device=device)
    vectors = torch.rand(batch_size, num_tables, config.model.dim, device=device)
    vectors.requires_grad_()
    clicks = torch.randint(0, 2, (batch_size,), device=device).float()
    optimizer = torch.optim.SGD(parts.parameters(), lr=config.optimizer.dense_lr)

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


def _wire_bytes(qcomms: str, dim: int) -> float:
    """Of a number; INT8 has a scale and an offset for each row."""
    return {"fp32": 4.0, "fp16": 2.0, "int8": 1 + 8 / dim}[qcomms]
