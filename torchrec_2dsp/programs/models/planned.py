"""How programs plan a model over a dataset: alike, whoever trains it."""

from collections.abc import Sequence
from typing import Any, cast

from torch import nn
from torchrec.distributed.planner import ParameterConstraints
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
from torchrec.distributed.planner.types import Topology
from torchrec.distributed.types import ModuleSharder

from torchrec_2dsp.access.stats import AccessStats
from torchrec_2dsp.plan.plan2d import Plan2D
from torchrec_2dsp.planner.planner2d import Planner2D
from torchrec_2dsp.programs.config.sections import ExchangeConfig
from torchrec_2dsp.programs.data.dataset import BatchShape
from torchrec_2dsp.programs.models.exchange import pinned
from torchrec_2dsp.programs.models.model import table_name

_RESERVATION = 0.15
"""The share of the memory that isn't for tables."""


def planner_arguments(
    data: BatchShape, sharding_types: Sequence[str], topology: Topology, batch_size: int
) -> dict[str, Any]:
    """The arguments that TorchRec's planner and this package's are given alike.

    Args:
        data: says which tables there are, and how long their bags are.
        sharding_types: the types that the planner may choose from; all without any.
        topology: the machines.
        batch_size: samples per rank and step.
    """
    return {
        "topology": topology,
        "batch_size": batch_size,
        "constraints": {
            table_name(feature.name): ParameterConstraints(
                sharding_types=list(sharding_types) or None,
                pooling_factors=[feature.mean_ids],
            )
            for feature in data.features
        },
        "storage_reservation": FixedPercentageStorageReservation(_RESERVATION),
        "debug": False,
    }


def collective_plan(
    planner: Planner2D,
    model: nn.Module,
    sharder: object,
    *,
    pins: ExchangeConfig | None,
    data: BatchShape,
    access: AccessStats | None = None,
) -> Plan2D:
    """The plan of a model on all ranks.

    Args:
        planner: makes the plan.
        model: the unsharded model over ``data``.
        sharder: the sharder of its tables, or a list of sharders.
        pins: the exchange, the owners and the hot rows that tables get; none for the planner's.
        data: the features; synthetic ones know which of their rows are used most.
        access: says which rows are used most, if the data doesn't.

    Collectives:
        One broadcast of a pickled object from rank 0 of the world.
    """
    sharders = sharder if isinstance(sharder, list) else [sharder]
    plan = planner.collective_plan(model, cast(list[ModuleSharder[nn.Module]], sharders))
    return plan if pins is None else pinned(plan, pins, data, access)
