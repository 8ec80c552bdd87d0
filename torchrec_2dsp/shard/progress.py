"""What a sharded module counts beside its tables, so that a run can go on with the same bits."""

from typing import Any

from torchrec_2dsp._compat.fbgemm import (
    iteration_of,
    learning_rate_of,
    set_iteration,
    set_learning_rate,
)
from torchrec_2dsp.shard.tables import Tables2D


def progress_of(tables: Tables2D) -> dict[str, Any]:
    """What this rank's share of a module counts, while nothing is pending.

    The numbers belong to the plan and the rank: another plan has other kernels.
    """
    return {
        "actions": tables.sync_point.state_dict(),
        "iterations": [iteration_of(tbe) for tbe in tables.tbes()],
        "learning_rates": [learning_rate_of(tbe) for tbe in tables.tbes()],
    }


def restore_progress(tables: Tables2D, progress: dict[str, Any]) -> None:
    """Let the same share of the same module, under the same plan, go on from there."""
    tables.sync_point.load_state_dict(progress["actions"])
    for tbe, iteration, learning_rate in zip(
        tables.tbes(), progress["iterations"], progress["learning_rates"], strict=True
    ):
        set_iteration(tbe, iteration)
        set_learning_rate(tbe, learning_rate)


def max_iteration(tables: Tables2D) -> int:
    """How many forwards the kernel that has seen most of them has counted."""
    return max((iteration_of(tbe) for tbe in tables.tbes()), default=0)


def count_iterations_from(tables: Tables2D, iteration: int) -> None:
    """Let all kernels of this rank go on as after so many forwards."""
    for tbe in tables.tbes():
        set_iteration(tbe, iteration)
