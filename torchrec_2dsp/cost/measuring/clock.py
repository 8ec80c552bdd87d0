"""`Clock`: times work on all ranks at once; `Sampling`: how much a calibration times."""

import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import TypeVar

import torch
import torch.distributed as dist

from torchrec_2dsp.comms.alarm import agree, as_ours
from torchrec_2dsp.errors import CalibrationError

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """A calibration's sizes, repeats and deadline."""

    deadline_s: float = math.inf
    """The time after which only what a fit needs is measured."""

    tolerance: float = 1.0
    """The factor by which fits may be worse than a careful one's; see `fit.unexplained`."""

    warm_ups: int = 2
    """Uncounted runs before the counted ones."""

    repeated_s: float = 0.05
    """Seconds for repeating short work."""

    min_repeats: int = 4
    max_repeats: int = 30

    step: int = 8
    """The largest factor from one message's size to the next one's."""

    long_s: float = 0.1
    """The duration above which larger messages provide no new information."""

    longest_s: float = math.inf
    """The predicted duration to which a message's growth, beyond a doubling, is limited."""

    largest_bytes: int = 2**24
    """The largest message."""

    beside_repeats: int = 9
    """Repeats of collectives that overlap with computation."""

    most_elements: int = 2**26
    """The elements in an exchange that overlaps with computation, over all ranks."""

    rows: tuple[tuple[int, int], ...] = tuple(product((16, 64, 128), (2**11, 2**13, 2**15)))
    """Dims and row counts. With more rows, their memory would be allocated page by page, each
    time anew."""

    table_bytes: tuple[int, ...] = (2**24, 2**25, 2**26)
    """More than caches hold, as tables are."""

    num_tokens: tuple[int, ...] = (2**8, 2**10, 2**12)
    widths: tuple[int, ...] = (64, 256, 1024)


CAREFUL = Sampling()
"""Takes minutes, for a file that is kept."""

QUICK = Sampling(
    deadline_s=17.0,
    tolerance=2.0,
    warm_ups=1,
    repeated_s=0.02,
    min_repeats=3,
    max_repeats=8,
    step=64,
    long_s=0.06,
    longest_s=0.18,
    beside_repeats=5,
    rows=((64, 2**15), (128, 2**13), (16, 2**15), (64, 2**11)),
    table_bytes=(2**26, 2**24),
    num_tokens=(2**8, 2**11),
    widths=(64, 512),
)
"""Takes seconds, for the start of a training without a calibration."""


def group_device(group: dist.ProcessGroup) -> torch.device:
    """Return the device for a group's tensors."""
    if "nccl" in dist.get_backend(group):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


class Clock:
    """Times what all ranks do together by the slowest rank; results are equal on all ranks.

    If local work fails on a rank, the rank continues with the clock's messages, so that all ranks
    raise the error.
    """

    def __init__(
        self,
        world: dist.ProcessGroup,
        sampling: Sampling = CAREFUL,
        device: torch.device | None = None,
    ) -> None:
        self.world = world
        """All ranks."""
        self.sampling = sampling
        self.device = device or group_device(world)
        """The device for work and messages; by default the one that the backend serves."""
        self._start = time.perf_counter()
        self._elapsed_s = 0.0

    def is_late(self, share: float) -> bool:
        """Tell whether a share of the time until the deadline has passed; the same on all ranks."""
        return self._elapsed_s > share * self.sampling.deadline_s

    def repeated_seconds(self, run: Callable[[], object], once: float = 0.0) -> list[float]:
        """Return `seconds` of as many repeats as are useful: shorter runs repeat more.

        Uncounted runs come first, unless ``once`` gives a run's approximate duration.
        """
        sampling = self.sampling
        if not once:
            *_, once = self.seconds(run, sampling.warm_ups)
        repeats = min(
            max(round(sampling.repeated_s / once), sampling.min_repeats), sampling.max_repeats
        )
        return self.seconds(run, 1 if self.is_late(1.0) else repeats)

    def seconds(self, run: Callable[[], object], repeats: int) -> list[float]:
        """Return the slowest rank's seconds for each repeat, which all ranks begin together.

        Collectives:
            Per repeat an all-reduce of one element, in addition to ``run``'s; at the end an
            all-reduce of the times. An agreement, if a rank has failed.
        """
        error: Exception | None = None
        seconds = torch.zeros(repeats + 1, dtype=torch.float64)
        for repeat in range(repeats):
            self.check(error)
            start = time.perf_counter()
            try:
                run()
                self._wait()
            except Exception as raised:
                error = raised
            seconds[repeat] = time.perf_counter() - start
        seconds[-1] = time.perf_counter() - self._start if error is None else math.inf
        slowest = seconds.to(self.device)
        dist.all_reduce(slowest, dist.ReduceOp.MAX, group=self.world)
        *times, elapsed_s = slowest.tolist()
        if elapsed_s == math.inf:
            self._raise(error)
        self._elapsed_s = elapsed_s
        return times

    def check(self, error: Exception | None = None) -> None:
        """Wait for all ranks; raise on all of them if one has an error.

        Collectives:
            An all-reduce of one element; an agreement, if a rank has failed.
        """
        num_failed = torch.tensor([float(error is not None)], device=self.device)
        dist.all_reduce(num_failed, group=self.world)
        self._wait()
        if num_failed.item():
            self._raise(error)

    def guarded(self, items: Iterable[T]) -> Iterator[T]:
        """Yield items; if a rank fails to produce one, all ranks learn of it in the next message.

        Collectives:
            A `check` at the end.
        """
        iterator = iter(items)
        while True:
            try:
                item = next(iterator)
            except StopIteration:
                break
            except Exception as error:
                self.check(error)
                raise
            yield item
        self.check()

    def _raise(self, error: Exception | None) -> None:
        agree(self.world, error=None if error is None else as_ours(error, CalibrationError))

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
