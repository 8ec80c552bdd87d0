"""What a cost model says of contestants, from their plans alone."""

from collections.abc import Mapping

from torchrec.distributed.types import ShardingPlan

from torchrec_2dsp.bench.config import BenchConfig
from torchrec_2dsp.bench.worker import Place
from torchrec_2dsp.bench.workload import tables_work, workload_of
from torchrec_2dsp.cost.calibration import Calibration
from torchrec_2dsp.cost.model import CostModel
from torchrec_2dsp.cost.workload import DenseWork
from torchrec_2dsp.mesh.mesh2d import Mesh2D
from torchrec_2dsp.plan.plan2d import Plan2D


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
    tables = tables_work(config)
    costs = CostModel(Calibration.load(config.calibration), place.local_world_size)
    predicted = {}
    for name, plan in plans.items():
        if (one := config.planned.get(name)) is None:
            continue
        if not isinstance(plan, Plan2D):
            plan = Plan2D.from_stock(plan, Mesh2D(1, place.world_size))
        predicted[name] = costs.step_cost(
            plan, workload_of(one, tables, config.model.dim, dense)
        ).as_dict()
    return predicted


def calibration_warning(config: BenchConfig, local_world_size: int) -> str:
    """What is unlike the machines that the calibration was made on; empty if nothing is."""
    if not config.calibration:
        return ""
    found = Calibration.load(config.calibration).differences(
        local_world_size=local_world_size, device=config.schedule.device
    )
    return f"{config.calibration} is of other machines: {'; '.join(found)}" if found else ""
