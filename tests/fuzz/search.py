"""Plans that `parallelize` makes: its inputs, and the case with its choices."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

import torchrec_2dsp as tdsp
from tests.fuzz.case import Case, SearchCase, TableCase, table_name
from torchrec_2dsp.access.table_access import TableAccess
from torchrec_2dsp.plan.parameter_sharding import ParameterSharding2D, base_type

_NUM_SAMPLES = 1_000
"""The samples of a log that was counted."""
_DEMANDS: dict[str, Callable[[TableCase], dict[str, Any]]] = {
    "sharding": lambda table: {"sharding_types": [table.sharding], "min_partition": 4},
    "exchange": lambda table: {"exchange": [table.exchange]},
    "transport": lambda table: {"transport": [table.transport]},
    "hot": lambda table: {"hot_rows": len(table.hot_rows)},
    "once": lambda table: {"num_groups": 1 if table.once else "each"},
}


def calibration_of(search: SearchCase) -> tdsp.Calibration:
    """Return the named calibration, with its link and kernel times scaled."""
    values = tdsp.Calibration.load(search.calibration).model_dump(exclude_none=True)
    values["collectives"] = _scaled(values["collectives"], search.link_factor)
    values["kernels"] = _scaled(values["kernels"], search.kernel_factor)
    return tdsp.Calibration.model_validate(values)


def _scaled(costs: dict[str, dict[str, float]], factor: float) -> dict[str, dict[str, float]]:
    """Multiply all costs' seconds by a factor."""
    return {
        name: {unit: value * (factor if "_s" in unit else 1) for unit, value in cost.items()}
        for name, cost in costs.items()
    }


def access_of(case: Case, search: SearchCase) -> tdsp.AccessStats | None:
    """Return access counts for lookups with the case's skew."""
    if search.access == "none":
        return None
    counted = {}
    for name, table in case.tables.items():
        if search.access == "all" or name.startswith("m0"):
            shares = torch.arange(1, table.rows + 1).double().pow(-case.skew)
            num_lookups = _NUM_SAMPLES * len(table.features) * case.max_length / 2
            counts = (num_lookups * shares / shares.sum()).round()
            counted[name] = TableAccess.of_counts(counts.numpy(), _NUM_SAMPLES)
    return tdsp.AccessStats(counted)


def constraints_of(case: Case) -> dict[str, tdsp.ParameterConstraints2D]:
    """Return constraints for the tables that have demands."""
    return {
        name: tdsp.ParameterConstraints2D(**_DEMANDS[table.demand](table))
        for name, table in case.tables.items()
        if table.demand != "none"
    }


def chosen_case(case: Case, plan: tdsp.Plan2D) -> Case:
    """Return the case with the plan's choices filled in."""
    shardings = {name: of for _, module in plan.modules() for name, of in module.tables()}
    modules = tuple(
        replace(
            module,
            tables=tuple(
                _chosen_table(table, shardings[table_name(number, index)], plan.mesh)
                for index, table in enumerate(module.tables)
            ),
        )
        for number, module in enumerate(case.modules)
    )
    return replace(
        case,
        groups=plan.mesh.num_groups,
        size=plan.mesh.group_size,
        layout=plan.mesh.layout.value,
        modules=modules,
        full_duplex=plan.full_duplex,
        loop="plain" if case.loop == "plain" else plan.pipeline.value,
    )


def _chosen_table(table: TableCase, sharding: ParameterSharding2D, mesh: tdsp.Mesh2D) -> TableCase:
    hot_set = sharding.hot_set
    spec: Any = sharding.sharding_spec
    columns = {shard.shard_offsets[1] for shard in spec.shards} if spec is not None else {0}
    return replace(
        table,
        sharding=base_type(sharding.sharding_type),
        place=0,
        exchange=sharding.exchange.value,
        transport=sharding.transport.value,
        owners=sharding.owners.value,
        hot="none" if hot_set is None else "some",
        chosen_hot=() if hot_set is None else tuple(int(row) for row in hot_set.row_ids),
        chosen_blocks=len(columns),
        once=sharding.num_groups == 1 and mesh.num_groups > 1,
    )


def contradiction(case: Case, chosen: Case) -> str:
    """Describe a choice in a plan that the case doesn't allow; empty if there is none."""
    search = case.search
    assert search is not None
    if search.has_mesh and chosen.mesh != case.mesh:
        return f"{chosen.mesh} in place of {case.mesh}"
    access = access_of(case, search) or {}
    for name, table in case.tables.items():
        other = chosen.tables[name]
        num_used = len(access[name].rows) if name in access else table.rows
        fulfilled = {
            "none": True,
            "sharding": table.sharding == other.sharding,
            "exchange": table.exchange == other.exchange,
            "transport": table.transport == other.transport or other.sharding == "data_parallel",
            "hot": min(len(table.hot_rows), num_used) == len(other.hot_rows),
            "once": other.once == (table.once and chosen.groups > 1),
        }
        allowed = {"fp32", *search.precision}
        is_free = search.precision == ("any",) or table.demand == "transport"
        if not fulfilled[table.demand]:
            return f"{name} has another {table.demand}: {other}"
        # A table for which no exchange is possible is left free.
        has_choice = bool(search.exchange) and table.demand not in ("exchange", "sharding")
        if has_choice and other.exchange not in search.exchange:
            return f"{name} has exchange {other.exchange}, and {search.exchange} are allowed"
        if not is_free and other.transport not in allowed:
            return f"{name} travels in {other.transport}, and {search.precision} is allowed"
        if table.demand != "sharding" and other.num_blocks > 1:
            return f"{name} has column shards, whose moments are others"
    return ""
