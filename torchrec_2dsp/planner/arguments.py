"""The arguments of `Planner2D`: checked, refused, or turned into what TorchRec's planner takes."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torchrec.distributed.planner.stats import EmbeddingStats
from torchrec.distributed.planner.types import ParameterConstraints, Stats

from torchrec_2dsp.codecs.rows import Transport
from torchrec_2dsp.errors import ConfigError
from torchrec_2dsp.mesh import Mesh2D
from torchrec_2dsp.plan.sync import SyncConfig
from torchrec_2dsp.planner.constraints import ParameterConstraints2D, members
from torchrec_2dsp.planner.torchrec.stats import Stats2D

NOT_MEASURED = (
    "planning without a calibration: bandwidths are the topology's, and latency and compute cost "
    "nothing, so the plan may be slower than TorchRec's; measure this cluster by the calibrate "
    "command and give Planner2D(calibration=...), or a mesh for TorchRec's own search"
)
"""The warning for users who plan by cost without a calibration."""


def checked_batch_size(batch_size: int) -> int:
    """The batch size, if it is one; `ConfigError` otherwise."""
    if batch_size < 1:
        raise ConfigError(f"batch_size={batch_size} leaves nothing to do; use 1 or more")
    return batch_size


def checked_transports(transports: Sequence[Transport | str] | str) -> tuple[Transport, ...]:
    """The transports that a user allows; `ConfigError` for unknown ones, or for none."""
    allowed = members(Transport, "transports", transports)
    if not allowed:
        raise ConfigError(f"transports={transports!r} allows nothing; use ['fp32'] for no rounding")
    return tuple(dict.fromkeys(allowed))


def refuse(text: str, **parts: Any) -> None:
    """Raise `ConfigError` for the first part that is given, which ``text`` has a place for."""
    given = [name for name, part in parts.items() if part is not None]
    if given:
        raise ConfigError(text.format(given[0]))


def refuse_stock_parts(
    enumerator: Any,
    proposer: Any,
    partitioner: Any,
    performance_model: Any,
    callbacks: Any,
    plan_loader: Any,
) -> None:
    """Raise `ConfigError` for what only TorchRec's search has a use for."""
    refuse(
        "a search by cost takes no {}: leave it out, or give a mesh and no calibration",
        enumerator=enumerator,
        proposer=proposer,
        partitioner=partitioner,
        performance_model=performance_model,
        callbacks=callbacks,
        plan_loader=plan_loader,
    )


def refuse_parts_by_cost(
    access: Any,
    workload: Any,
    constraints: Mapping[str, ParameterConstraints] | None,
    transports: Sequence[Transport],
) -> None:
    """Raise `ConfigError` for what only a search by cost has a use for, or can fulfil."""
    text = "{} is for a search by cost: give a calibration"
    refuse(text, access=access, workload=workload)
    if len(transports) > 1:
        allowed = [transport.value for transport in transports]
        raise ConfigError(text.format(f"transports={allowed}") + ", or allow a single one")
    for name, constraint in (constraints or {}).items():
        if isinstance(constraint, ParameterConstraints2D):
            demands = {
                "exchange": constraint.exchange,
                "transport": constraint.transport,
                "hot_rows": constraint.hot_rows or None,
            }
            demands["num_groups"] = (
                None if constraint.num_groups == "each" else constraint.num_groups
            )
            named = {f"{what}={value} for table {name!r}": value for what, value in demands.items()}
            refuse(text, **named)


def whole_world() -> Mesh2D:
    """All ranks as one group.

    Raises:
        ConfigError: nobody knows how many there are.
    """
    if not dist.is_initialized():
        raise ConfigError(
            "nothing says how many ranks there are: give a topology or a mesh, or call "
            "torch.distributed.init_process_group(...) first"
        )
    return Mesh2D(1, dist.get_world_size())


def stats_2d(stats: Stats | list[Stats] | None, mesh: Mesh2D, sync: SyncConfig) -> list[Stats]:
    """The stats of a planner; TorchRec's are wrapped, as they stop at unknown type names."""
    if stats is None:
        return [Stats2D(mesh=mesh, sync=sync)]
    return [
        Stats2D(stats_part, mesh=mesh, sync=sync)
        if isinstance(stats_part, EmbeddingStats)
        else stats_part
        for stats_part in (stats if isinstance(stats, list) else [stats])
    ]
