"""`RowJourney`: a batch's rows in flight, some early and some late, and their gradients."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torchrec.distributed.types import Awaitable
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_2dsp._compat.fbgemm import OptimizerStep
from torchrec_2dsp._compat.torchrec import get_gradient_division
from torchrec_2dsp.comms.row_wire import RowWire, TravellingRows
from torchrec_2dsp.rows.gradients import repeated
from torchrec_2dsp.shard.row_exchange.lookup import RowKernel


@dataclass(frozen=True)
class Half:
    """Half a batch's rows, as both ends see them."""

    asked_at: torch.Tensor
    """The positions in the rows that this rank is asked for, rank by rank."""
    num_asked: list[int]
    wanted_at: torch.Tensor
    """The positions in the rows that this rank wants, owner by owner."""
    num_wanted: list[int]


class Halves:
    """Splits the traffic between each two ranks into two halves."""

    def __init__(
        self,
        is_second: torch.Tensor,
        num_asked: Sequence[int],
        num_wanted: Sequence[int],
        group: dist.ProcessGroup,
    ) -> None:
        """Tell each row's other end which half it is in.

        Collectives:
            One all-to-all with a byte for each row, not waited for.
        """
        self._is_second_here = is_second
        self._num_asked, self._num_wanted = list(num_asked), list(num_wanted)
        self._is_second_there = is_second.new_empty(sum(num_wanted), dtype=torch.uint8)
        self._told = is_second.to(torch.uint8)
        self._work = dist.all_to_all_single(
            self._is_second_there,
            self._told,
            self._num_wanted,
            self._num_asked,
            group=group,
            async_op=True,
        )
        self._known: tuple[Half, Half] | None = None

    def wait(self) -> tuple[Half, Half]:
        """Return the first and the second half."""
        if self._known is None:
            assert self._work is not None
            self._work.wait()
            here, there = self._is_second_here, self._is_second_there.bool()
            num_asked, num_wanted = _counts((here, self._num_asked), (there, self._num_wanted))
            first = Half(_positions(~here), num_asked[0], _positions(~there), num_wanted[0])
            self._known = (
                first,
                Half(_positions(here), num_asked[1], _positions(there), num_wanted[1]),
            )
            self._work, self._told = None, here
        return self._known


def _positions(flags: torch.Tensor) -> torch.Tensor:
    return flags.nonzero().view(-1)


def _counts(*ends: tuple[torch.Tensor, list[int]]) -> list[tuple[list[int], list[int]]]:
    """Count each end's rows in the first half and in the second, by rank."""
    # All at once: on a GPU this waits for the device.
    sums = torch.stack(
        [torch.stack([part.sum() for part in flags.split(sizes)]) for flags, sizes in ends]
    ).tolist()
    return [
        ([count - second for count, second in zip(of, seconds, strict=True)], seconds)
        for (_, of), seconds in zip(ends, sums, strict=True)
    ]


@dataclass(frozen=True)
class AskedRows:
    """A kernel's rows that ranks want for a batch."""

    numbers: torch.Tensor
    """Row numbers in the kernel, rank by rank."""
    order: torch.Tensor
    """Their positions in the kernel's lookup, which is sorted by table."""
    counts: list[int]

    @classmethod
    def of(cls, kernel: RowKernel, ids: KeyedJaggedTensor) -> "AskedRows":
        """Return what a kernel is asked for: a key per table, a bag per rank."""
        lengths = ids.lengths().view(len(ids.keys()), -1)
        num_tables, num_ranks = lengths.shape
        ranks = torch.arange(num_ranks, device=lengths.device).repeat(num_tables)
        by_rank = repeated(ranks, lengths.reshape(-1), ids.values().numel())
        order = by_rank.argsort(stable=True)
        return cls(kernel.row_numbers(ids)[order], order, lengths.sum(dim=0).tolist())


class RowJourney:
    """Carries a batch's rows in one kernel from their owners, and the gradients back."""

    def __init__(
        self,
        kernel: RowKernel,
        asked_rows: AskedRows,
        changed: torch.Tensor,
        num_wanted: Sequence[int],
        wire: RowWire,
        expect: "Callable[[RowJourney], None]",
    ) -> None:
        """Tell the ranks which rows come early.

        Collectives:
            As in `Halves`.
        """
        self._kernel, self._asked, self._wire = kernel, asked_rows, wire
        self._num_wanted, self._expect = list(num_wanted), expect
        is_late = kernel.is_among(asked_rows.numbers, changed)
        self._rows = Halves(is_late, asked_rows.counts, self._num_wanted, wire.group)
        self._lagging: Halves | None = None
        self.has_begun = False
        """True once the early rows have set out."""
        self._step: OptimizerStep | None = None
        self._leaving: torch.Tensor | None = None
        self._early: TravellingRows | None = None
        self._late: TravellingRows | None = None
        self._urgent: TravellingRows | None = None
        self._lagging_grads: torch.Tensor | TravellingRows | None = None

    @property
    def numbers(self) -> torch.Tensor:
        """The rows that this rank is asked for."""
        return self._asked.numbers

    def let_lag(self, needed: torch.Tensor) -> None:
        """Let gradients lag whose rows the next batch doesn't need. Call it before the lookup.

        Collectives:
            As in `Halves`.
        """
        is_lagging = ~self._kernel.is_among(self._asked.numbers, needed)
        self._lagging = Halves(is_lagging, self._asked.counts, self._num_wanted, self._wire.group)

    @property
    def updates_by_row(self) -> bool:
        """True if gradients update rows apart from the kernel's own backward."""
        return self._kernel.updates_by_row or self._lagging is not None

    def send_early(self) -> None:
        """Send the rows that no update changes any more.

        Collectives:
            One all-to-all with rows, not waited for.
        """
        early, _ = self._rows.wait()
        rows = self._kernel.read_rows(self._asked.numbers[early.asked_at])
        self._early = self._wire.start_rows(rows, early.num_asked, early.num_wanted)
        self.has_begun = True

    def send_late(self) -> None:
        """Send the other rows, now that all are updated.

        Collectives:
            One all-to-all with rows, not waited for.
        """
        _, late = self._rows.wait()
        rows = self._kernel.read_rows(self._asked.numbers[late.asked_at])
        self._late = self._wire.start_rows(rows, late.num_asked, late.num_wanted)
        # Autograd begins with what was made last. So made before the model's forward, this waits
        # for gradients when all others of the backward are on their way, too. And it only calls a
        # function whose input needs a gradient.
        anchor = torch.zeros(1, device=rows.device, requires_grad=True)
        self._leaving = _Leaving.apply(anchor, self)

    def fetch(self, owned: torch.Tensor) -> Awaitable[torch.Tensor]:
        """Return the batch's rows, owner by owner; their gradient updates the kernels.

        Collectives:
            As in `send_late`, if it hasn't been called, and one all-to-all with gradients in the
            backward.
        """
        if self._late is None:
            self.send_late()
        self._step = self._kernel.step()
        leaving, self._leaving = self._leaving, None
        return _Fetching(self, leaving if self.updates_by_row else _Leaving.apply(owned, self))

    def arrived(self) -> torch.Tensor:
        """Wait for both halves."""
        assert self._early is not None
        assert self._late is not None
        early, late = self._early.wait(), self._late.wait()
        self._early = self._late = None
        rows = late.new_empty((sum(self._num_wanted), late.shape[1]))
        for half, values in zip(self._rows.wait(), (early, late), strict=True):
            rows.index_copy_(0, half.wanted_at, values)
        return rows

    def send_gradients(self, grad: torch.Tensor) -> None:
        """Send the gradients that owners need before the next batch, one per row."""
        if self._lagging is None:
            self._urgent = self._wire.start_gradients(grad, self._num_wanted, self._asked.counts)
            return
        urgent, lagging = self._lagging.wait()
        self._urgent = self._send(grad[urgent.wanted_at], urgent)
        self._lagging_grads = grad[lagging.wanted_at]
        self._expect(self)

    def receive_gradients(self) -> torch.Tensor | None:
        """Wait for gradients, and update the kernel, or return them for its own backward."""
        assert self._urgent is not None
        grads = self._divided(self._urgent.wait())
        self._urgent = None
        if not self.updates_by_row:
            return torch.empty_like(grads).index_copy_(0, self._asked.order, grads)
        asked_at = slice(None) if self._lagging is None else self._lagging.wait()[0].asked_at
        self._update(asked_at, grads)
        return None

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
            As in `send_lagging`, if it hasn't been called.
        """
        self.send_lagging()
        assert isinstance(self._lagging_grads, TravellingRows)
        assert self._lagging is not None
        grads = self._divided(self._lagging_grads.wait())
        self._lagging_grads = None
        self._update(self._lagging.wait()[1].asked_at, grads)

    def _update(self, asked_at: torch.Tensor | slice, grads: torch.Tensor) -> None:
        assert self._step is not None
        self._kernel.update_rows(self._asked.numbers[asked_at], grads, self._step)

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


# Two functions, so that autograd sends the gradients of all kernels before it waits for the first.
class _Leaving(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, updated: torch.Tensor, journey: RowJourney) -> torch.Tensor:
        ctx.journey = journey
        return updated.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, None]:
        return ctx.journey.receive_gradients(), None


class _Arriving(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, leaving: torch.Tensor, journey: RowJourney) -> torch.Tensor:
        ctx.journey = journey
        return journey.arrived()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.journey.send_gradients(grads[0])
        return grads[0].new_empty(0), None
