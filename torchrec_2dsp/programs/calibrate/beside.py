"""Time collectives and computing together: one after the other, and at the same time."""

import statistics
from collections.abc import Callable

import torch
import torch.distributed as dist

from torchrec_2dsp.programs.calibrate.timing import (
    group_device,
    repeated_seconds,
    slowest_rank_seconds,
)

_TURNS = 4
_COMPUTED_S = 0.01
_SIZES = {"cpu": 384, "cuda": 4096}
_REPEATS = 9
_SMALLEST = 2**14
"""The elements for each rank of the smallest message."""
_LARGEST = 2**26
"""Elements for all ranks together."""


class Beside:
    """The time of collectives where ranks compute as well; the same on all ranks.

    Collectives:
        All-to-alls, in all that it does, and those of `slowest_rank_seconds`.
    """

    def __init__(self, world: dist.ProcessGroup) -> None:
        """
        Args:
            world: all ranks.
        """
        self._world = world
        self._device = group_device(world)
        size = _SIZES[self._device.type]
        self._matrix = torch.rand(size, size, device=self._device)
        self._product_s = statistics.median(repeated_seconds(self._multiply, world))

    def turn_s(self) -> float:
        """Seconds that a short all-to-all takes more between two computations than by itself."""
        compute, exchange = self._computing(_COMPUTED_S), self._exchanging(1)
        alone = self._seconds(compute) + self._seconds(exchange)
        return max(0.0, self._seconds(compute, exchange) - alone)

    def hidden_share(self) -> float:
        """The share of a long all-to-all that takes no time if ranks compute meanwhile."""
        num_elements = _SMALLEST
        exchange = self._exchanging(num_elements)
        most = _LARGEST // self._world.size()
        while self._seconds(exchange) < _COMPUTED_S and 2 * num_elements <= most:
            num_elements *= 2
            exchange = self._exchanging(num_elements)
        exchange_s = self._seconds(exchange)
        compute = self._computing(exchange_s)
        compute_s = self._seconds(compute)
        both_s = self._seconds(self._exchanging(num_elements, compute))
        saved_s = (exchange_s + compute_s - both_s) / min(exchange_s, compute_s)
        return min(max(saved_s, 0.0), 1.0)

    def _multiply(self) -> None:
        torch.mm(self._matrix, self._matrix)

    def _computing(self, seconds: float) -> Callable[[], None]:
        num_products = max(1, round(seconds / self._product_s))

        def compute() -> None:
            for _ in range(num_products):
                self._multiply()

        return compute

    def _exchanging(
        self, num_elements: int, meanwhile: Callable[[], None] = lambda: None
    ) -> Callable[[], None]:
        sent = torch.ones(self._world.size() * num_elements, device=self._device)
        received = torch.empty_like(sent)

        def exchange() -> None:
            work = dist.all_to_all_single(received, sent, group=self._world, async_op=True)
            assert work is not None
            meanwhile()
            work.wait()

        return exchange

    def _seconds(self, *parts: Callable[[], None]) -> float:
        def turns() -> None:
            for _ in range(_TURNS):
                for part in parts:
                    part()

        return statistics.median(slowest_rank_seconds(turns, self._world, _REPEATS)) / _TURNS
