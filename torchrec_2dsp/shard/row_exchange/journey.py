"""`RowJourney`: a batch's rows in flight, some early and some late, and their gradients."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torchrec.distributed.types import Awaitable

from torchrec_2dsp._compat.fbgemm import OptimizerStep
from torchrec_2dsp._compat.torchrec import get_gradient_division
from torchrec_2dsp.comms.row_wire import RowWire, TravellingRows
from torchrec_2dsp.rows.gradients import false_and_true
from torchrec_2dsp.shard.row_exchange.lookup import RowKernel
from torchrec_2dsp.shard.stages import count_per_bag


@dataclass(frozen=True)
class Half:
    """Half of a batch's rows, as seen from both ends."""

    asked_at: torch.Tensor
    """The positions among the rows that this rank is asked for, rank by rank."""
    num_asked: list[int]
    wanted_at: torch.Tensor
    """The positions among the rows that this rank wants, owner by owner."""
    num_wanted: list[int]


@dataclass(frozen=True)
class RowTraffic:
    """A batch's rows in a kernel: those that ranks ask this one for, and those that it wants."""

    numbers: torch.Tensor
    """The requested rows' numbers in the kernel, rank by rank."""
    num_asked: list[int]
    """The number of rows that each rank asks for."""
    num_wanted: list[int]
    """The number of rows that this rank wants, by owner."""
    starts: torch.Tensor
    """The start of each rank's rows: of those asked for, then of those wanted, then the end."""


class Halves:
    """Splits the traffic between each pair of ranks into two halves."""

    def __init__(
        self, is_second: torch.Tensor, traffic: RowTraffic, group: dist.ProcessGroup
    ) -> None:
        """Tell each row's other end which half it is in.

        Collectives:
            One all-to-all with a byte per row, not waited for.
        """
        self._is_second_here, self._traffic = is_second, traffic
        self._is_second_there = is_second.new_empty(sum(traffic.num_wanted))
        self._work = dist.all_to_all_single(
            self._is_second_there,
            is_second,
            traffic.num_wanted,
            traffic.num_asked,
            group=group,
            async_op=True,
        )
        self._known: tuple[Half, Half] | None = None

    def wait(self) -> tuple[Half, Half]:
        """Return the first and the second half."""
        if self._known is None:
            assert self._work is not None
            self._work.wait()
            here, there, traffic = self._is_second_here, self._is_second_there, self._traffic
            # In one transfer, because it waits for the GPU.
            seconds = count_per_bag(torch.cat([here, there]), traffic.starts).tolist()
            num_ranks = len(traffic.num_asked)
            owned = _halves(here, traffic.num_asked, seconds[:num_ranks])
            needed = _halves(there, traffic.num_wanted, seconds[num_ranks:])
            self._known = Half(*owned[0], *needed[0]), Half(*owned[1], *needed[1])
            self._work = None
        return self._known


def _halves(
    is_second: torch.Tensor, counts: list[int], seconds: list[int]
) -> tuple[tuple[torch.Tensor, list[int]], tuple[torch.Tensor, list[int]]]:
    """Return the positions of the rows in the first and in the second half, and their counts."""
    firsts = [count - second for count, second in zip(counts, seconds, strict=True)]
    first_at, second_at = false_and_true(is_second, sum(seconds))
    return (first_at, firsts), (second_at, seconds)


class RowJourney:
    """Carries a batch's rows in one kernel from their owners, and their gradients back."""

    def __init__(
        self,
        kernel: RowKernel,
        traffic: RowTraffic,
        changed: torch.Tensor,
        wire: RowWire,
        expect: "Callable[[RowJourney], None]",
    ) -> None:
        """Tell the ranks which rows come early.

        Collectives:
            `Halves`'.
        """
        self._kernel, self._traffic, self._wire, self._expect = kernel, traffic, wire, expect
        self._rows = Halves(kernel.is_among(traffic.numbers, changed), traffic, wire.group)
        self._lagging: Halves | None = None
        self.has_begun = False
        """True once the early rows are in flight."""
        self._step: OptimizerStep | None = None
        self._leaving: torch.Tensor | None = None
        self._early: TravellingRows | None = None
        self._late: TravellingRows | None = None
        self._urgent: TravellingRows | None = None
        self._lagging_grads: torch.Tensor | TravellingRows | None = None

    @property
    def numbers(self) -> torch.Tensor:
        """The rows that this rank is asked for."""
        return self._traffic.numbers

    def let_lag(self, needed: torch.Tensor) -> None:
        """Let gradients lag if the next batch doesn't need their rows. Call it before the lookup.

        Collectives:
            `Halves`'.
        """
        is_lagging = 1 - self._kernel.is_among(self.numbers, needed)
        self._lagging = Halves(is_lagging, self._traffic, self._wire.group)

    def send_early(self) -> None:
        """Send the rows that no update will change any more.

        Collectives:
            One all-to-all with rows, not waited for.
        """
        early, _ = self._rows.wait()
        rows = self._kernel.read_rows(self.numbers.index_select(0, early.asked_at))
        self._early = self._wire.start_rows(rows, early.num_asked, early.num_wanted)
        self.has_begun = True

    def send_late(self) -> None:
        """Send the other rows, now that all of them are updated.

        Collectives:
            One all-to-all with rows, not waited for.
        """
        _, late = self._rows.wait()
        rows = self._kernel.read_rows(self.numbers.index_select(0, late.asked_at))
        self._late = self._wire.start_rows(rows, late.num_asked, late.num_wanted)
        # Autograd starts with the newest function. Made before the model's forward, this one waits
        # for gradients only when all others of the backward are in flight. And autograd only calls
        # a function whose input needs a gradient.
        anchor = torch.zeros(1, device=rows.device, requires_grad=True)
        self._leaving = _Leaving.apply(anchor, self)

    def fetch(self) -> Awaitable[torch.Tensor]:
        """Return the batch's rows, owner by owner; their gradient updates the kernel's rows.

        Collectives:
            `send_late`'s, if it hasn't been called, and one all-to-all with gradients in the
            backward.
        """
        if self._late is None:
            self.send_late()
        self._step = self._kernel.step()
        leaving, self._leaving = self._leaving, None
        return _Fetching(self, leaving)

    def arrived(self) -> torch.Tensor:
        """Wait for both halves."""
        assert self._early is not None
        assert self._late is not None
        early, late = self._early.wait(), self._late.wait()
        self._early = self._late = None
        rows = late.new_empty((sum(self._traffic.num_wanted), late.shape[1]))
        for half, values in zip(self._rows.wait(), (early, late), strict=True):
            rows.index_copy_(0, half.wanted_at, values)
        return rows

    def send_gradients(self, grad: torch.Tensor) -> None:
        """Send the gradients that owners need before the next batch, one per row."""
        if self._lagging is None:
            traffic = self._traffic
            self._urgent = self._wire.start_gradients(grad, traffic.num_wanted, traffic.num_asked)
            return
        urgent, lagging = self._lagging.wait()
        self._urgent = self._send(grad.index_select(0, urgent.wanted_at), urgent)
        self._lagging_grads = grad.index_select(0, lagging.wanted_at)
        self._expect(self)

    def receive_gradients(self) -> None:
        """Wait for the urgent gradients, and update their rows."""
        assert self._urgent is not None
        grads = self._divided(self._urgent.wait())
        self._urgent = None
        numbers = self.numbers
        if self._lagging is not None:
            numbers = numbers.index_select(0, self._lagging.wait()[0].asked_at)
        self._update(numbers, grads)

    def send_lagging(self) -> None:
        """Send the other gradients.

        Collectives:
            One all-to-all with gradients, not waited for; nothing before the backward.
        """
        if isinstance(self._lagging_grads, torch.Tensor):
            assert self._lagging is not None
            self._lagging_grads = self._send(self._lagging_grads, self._lagging.wait()[1])

    def finish(self) -> None:
        """Wait for the last gradients and update their rows.

        Collectives:
            `send_lagging`'s, if it hasn't been called.
        """
        self.send_lagging()
        assert isinstance(self._lagging_grads, TravellingRows)
        assert self._lagging is not None
        grads = self._divided(self._lagging_grads.wait())
        self._lagging_grads = None
        lagging_at = self._lagging.wait()[1].asked_at
        self._update(self.numbers.index_select(0, lagging_at), grads)

    def _update(self, numbers: torch.Tensor, grads: torch.Tensor) -> None:
        assert self._step is not None
        self._kernel.update_rows(numbers, grads, self._step)

    def _send(self, grads: torch.Tensor, half: Half) -> TravellingRows:
        return self._wire.start_gradients(grads, half.num_wanted, half.num_asked)

    def _divided(self, grads: torch.Tensor) -> torch.Tensor:
        num_ranks = dist.get_world_size(self._wire.group)
        return grads / num_ranks if get_gradient_division() else grads


class _Fetching(Awaitable[torch.Tensor]):
    def __init__(self, journey: RowJourney, leaving: Any) -> None:
        super().__init__()
        self._journey, self._leaving = journey, leaving

    def _wait_impl(self) -> torch.Tensor:
        rows: torch.Tensor = _Arriving.apply(self._leaving, self._journey)  # pyright: ignore[reportAssignmentType]
        return rows


# Two functions, so that autograd sends all kernels' gradients before it waits for the first one.
class _Leaving(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, journey: RowJourney) -> torch.Tensor:
        ctx.journey = journey
        return anchor.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[None, None]:
        ctx.journey.receive_gradients()
        return None, None


class _Arriving(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, leaving: torch.Tensor, journey: RowJourney) -> torch.Tensor:
        ctx.journey = journey
        return journey.arrived()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.journey.send_gradients(grads[0])
        return grads[0].new_empty(0), None
