"""Time a collective between two computations, where ranks don't come together."""

import statistics
from collections.abc import Callable

import torch
import torch.distributed as dist

from torchrec_2dsp.cost.measure.timing import group_device, repeated_seconds, slowest_rank_seconds

_TURNS = 4
_COMPUTED_S = 0.01
_SIZES = {"cpu": 384, "cuda": 4096}
_REPEATS = 9


def measure_turn(world: dist.ProcessGroup) -> float:
    """Seconds that a short all-to-all takes more than by itself, on all ranks alike.

    Collectives:
        Short all-to-alls, and those of `slowest_rank_seconds`.
    """
    device = group_device(world)
    size = _SIZES[device.type]
    matrix = torch.rand(size, size, device=device)
    product_s = statistics.median(repeated_seconds(lambda: matrix @ matrix, world))
    num_products = max(1, round(_COMPUTED_S / product_s))
    sent = torch.ones(world.size(), device=device)

    def compute() -> None:
        for _ in range(num_products):
            torch.mm(matrix, matrix)

    def exchange() -> None:
        dist.all_to_all_single(torch.empty_like(sent), sent, group=world)

    def seconds(*parts: Callable[[], None]) -> float:
        def turns() -> None:
            for _ in range(_TURNS):
                for part in parts:
                    part()

        return statistics.median(slowest_rank_seconds(turns, world, _REPEATS)) / _TURNS

    alone = seconds(compute) + seconds(exchange)
    return max(0.0, seconds(compute, exchange) - alone)
