"""The predictions of a cost model for contestants, from their plans alone."""

import statistics
from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from torchrec.distributed.types import ShardingPlan

from torchrec_2dsp.cost.calibration import Calibration
from torchrec_2dsp.cost.model import CostModel
from torchrec_2dsp.cost.step_cost import StepCost
from torchrec_2dsp.cost.workload import DenseWork
from torchrec_2dsp.mesh import Mesh2D
from torchrec_2dsp.plan.plan2d import Plan2D
from torchrec_2dsp.programs.bench.config import BenchConfig, CeilingContestant, PlannedContestant
from torchrec_2dsp.programs.bench.worker import Place
from torchrec_2dsp.programs.bench.workload import tables_work, workload_of


class Predicted(NamedTuple):
    """The predicted steps of a benchmark."""

    steps: dict[str, dict[str, float]]
    """Seconds by part, of the step of each contestant."""
    dense_from: tuple[str, ...]
    """The ceilings that say what a step takes beside its tables; without any, the model without its
    tables was timed."""


def predicted_steps(
    config: BenchConfig,
    plans: Mapping[str, ShardingPlan],
    dense: DenseWork | None,
    place: Place,
    ceilings: Mapping[str, float],
) -> Predicted:
    """The predicted steps of contestants that train; nothing without a calibration.

    Args:
        config: names the calibration, and the workload.
        plans: what each contestant trains by.
        dense: what the model does beside its tables, when it does nothing else.
        place: how many ranks there are, and on how many hosts.
        ceilings: seconds of the steps of those that were measured.
    """
    if dense is None:
        return Predicted({}, ())
    tables = tables_work(config)
    costs = CostModel(Calibration.load(config.calibration), place.local_world_size)
    in_2d = {
        name: plan
        if isinstance(plan, Plan2D)
        else Plan2D.from_stock(plan, Mesh2D(1, place.world_size))
        for name, plan in plans.items()
    }

    def cost(plan: Plan2D, contestant: PlannedContestant, dense: DenseWork) -> StepCost:
        return costs.step_cost(plan, workload_of(contestant, tables, config.model.dim, dense))

    beside: dict[str, float] = {}
    for name, step_s in ceilings.items():
        contestant = config.contestants[name]
        # Of replicas, part of what keeps them equal is computing, too.
        if isinstance(contestant, CeilingContestant) and in_2d[name].mesh.num_groups == 1:
            of_tables = cost(in_2d[name], config.planned[contestant.of], DenseWork())
            rest_s = step_s - of_tables.lookup_s - of_tables.rows_s - of_tables.update_s
            if rest_s > 0:
                beside[name] = rest_s
    if beside:
        dense = _as_long_as(dense, statistics.median(beside.values()))
    steps = {
        name: cost(plan, config.planned[name], dense).as_dict()
        for name, plan in in_2d.items()
        if name in config.planned
    }
    return Predicted(steps, tuple(beside))


def _as_long_as(dense: DenseWork, seconds: float) -> DenseWork:
    """Divided into forward and backward as before."""
    scale = seconds / (dense.forward_s + dense.backward_s)
    return replace(dense, forward_s=scale * dense.forward_s, backward_s=scale * dense.backward_s)


def calibration_warning(config: BenchConfig, local_world_size: int) -> str:
    """The differences to the machines that the calibration was made on; empty if there are none."""
    if not config.calibration:
        return ""
    differences = Calibration.load(config.calibration).differences(
        local_world_size=local_world_size, device=config.schedule.device
    )
    return (
        f"{config.calibration} is of other machines: {'; '.join(differences)}"
        if differences
        else ""
    )
