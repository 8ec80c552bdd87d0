"""The exchange, the owners, the transport and the hot rows of a config, pinned in a plan."""

from typing import Any

import numpy as np

from torchrec_2dsp.access.stats import AccessStats
from torchrec_2dsp.errors import ConfigError
from torchrec_2dsp.plan.parameter_sharding import (
    ROW_EXCHANGES,
    Exchange,
    ShardingType2D,
    base_type,
    kinds_of,
)
from torchrec_2dsp.plan.pin import pin
from torchrec_2dsp.plan.plan2d import Plan2D
from torchrec_2dsp.programs.config.sections import ExchangeConfig
from torchrec_2dsp.programs.data.dataset import BatchShape
from torchrec_2dsp.programs.data.synthetic import SyntheticConfig
from torchrec_2dsp.programs.models.model import table_name

_DATA_PARALLEL = ShardingType2D.DATA_PARALLEL.base.value


def pinned(
    plan: Plan2D, config: ExchangeConfig, data: BatchShape, access: AccessStats | None = None
) -> Plan2D:
    """The plan with what a config says of its tables, as far as their sharding types allow it.

    Args:
        plan: of the model over ``data``.
        config: what to pin.
        data: the features; synthetic ones know which of their rows are used most.
        access: says which rows are used most, if the data doesn't.
    """
    if config.prefetch_rows and config.exchange not in ROW_EXCHANGES:
        raise ConfigError("prefetch_rows is for an exchange of rows; set exchange='row'")
    types = {
        name: base_type(table.sharding_type)
        for _, part in plan.modules()
        for name, table in part.tables()
    }
    fitting = [name for name, kind in types.items() if kind in kinds_of(config.exchange)]
    if config.exchange is not Exchange.POOLED and not fitting:
        raise ConfigError(
            f"exchange={config.exchange.value!r} is for tables sharded "
            f"{', '.join(kinds_of(config.exchange))}, and the plan has none: set sharding_types"
        )
    for name in fitting:
        travels = types[name] != _DATA_PARALLEL
        plan = pin(
            plan,
            name,
            exchange=config.exchange,
            owners=config.owners,
            transport=config.row_transport if travels else None,
        )
    for feature in data.features if config.hot_rows else ():
        name = table_name(feature.name)
        if types.get(name, _DATA_PARALLEL) == _DATA_PARALLEL:
            continue  # The model has no such table, or all its rows are on every rank already.
        plan = pin(plan, name, hot_rows=_hottest(feature, config.hot_rows, data, access))
    return plan


def _hottest(
    feature: Any, num_rows: int, data: BatchShape, access: AccessStats | None
) -> list[int]:
    """The rows of a feature's table that are used most."""
    if access is not None:
        return access[table_name(feature.name)].rows[:num_rows].tolist()
    if not isinstance(data, SyntheticConfig):
        raise ConfigError(
            f"hot_rows={num_rows} needs to know which rows are used most; give access statistics"
        )
    ranks = np.arange(1, min(num_rows, feature.num_rows) + 1)
    return data.distribution(feature).row_of_rank(ranks).tolist()
