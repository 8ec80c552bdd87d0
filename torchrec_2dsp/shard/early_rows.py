"""Row exchange in two halves: rows that the running batch doesn't change travel while it computes.

A pipeline asks for a batch's rows a step ahead. Each owner knows what the running batch asks it
for, too, and that it will change these rows and no others. So it tells who asks which rows come
*late*, after the update, and sends the others *early*, behind the running batch's own rows. Every
rank computes with the same numbers as if all had come late.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import record_function
from torchrec.distributed.types import Awaitable
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_2dsp._compat.torchrec import get_gradient_division
from torchrec_2dsp.comms.row_wire import ArrivingRows, RowWire
from torchrec_2dsp.shard.row_kernel import RowKernel

_LABEL = "## early rows ##"
"""In profiles."""


@dataclass(frozen=True)
class AskedRows:
    """The rows of a kernel that the ranks want for a batch."""

    keys: torch.Tensor
    """Their numbers in the kernel, rank by rank."""
    order: torch.Tensor
    """Where each stands in the kernel's lookup, which goes table by table."""
    counts: list[int]
    """How many each rank gets."""

    @classmethod
    def of(cls, kernel: RowKernel, asked: KeyedJaggedTensor) -> "AskedRows":
        """What a kernel is asked for: a key for each table, a bag for each rank."""
        lengths = asked.lengths().view(len(asked.keys()), -1)
        num_tables, num_ranks = lengths.shape
        ranks = torch.arange(num_ranks, device=lengths.device).repeat(num_tables)
        by_rank = ranks.repeat_interleave(lengths.reshape(-1), output_size=asked.values().numel())
        order = by_rank.argsort(stable=True)
        return cls(kernel.row_numbers(asked)[order], order, lengths.sum(dim=0).tolist())


class RowJourney:
    """The rows of one kernel and one batch, from their owners to who wants them, in two halves."""

    def __init__(
        self,
        kernel: RowKernel,
        asked: KeyedJaggedTensor,
        running: KeyedJaggedTensor,
        wanted: Sequence[int],
        wire: RowWire,
    ) -> None:
        """
        Args:
            kernel: of this rank as an owner.
            asked: what it is asked for.
            running: what it is asked for by the batch that will be trained first.
            wanted: how many rows this rank wants from each owner.
            wire: between them.

        Collectives:
            One all-to-all with a byte for each row, not waited for.
        """
        self._kernel, self._wire, self._wanted = kernel, wire, list(wanted)
        self._asked = AskedRows.of(kernel, asked)
        self._is_late_here = kernel.is_among(self._asked.keys, kernel.row_numbers(running))
        self._told = self._is_late_here.new_empty(sum(wanted), dtype=torch.uint8)
        self._telling = dist.all_to_all_single(
            self._told,
            self._is_late_here.to(torch.uint8),
            self._wanted,
            self._asked.counts,
            group=wire.group,
            async_op=True,
        )
        self._early: ArrivingRows | None = None
        self._late: ArrivingRows | None = None
        self._gradients: ArrivingRows | None = None

    @property
    def has_begun(self) -> bool:
        """Whether the early rows have set out."""
        return self._early is not None

    def send_early(self) -> None:
        """Let the rows go that the running batch doesn't change.

        Collectives:
            One all-to-all of rows, not waited for.
        """
        assert self._telling is not None
        self._telling.wait()
        is_late = self._told.bool()
        self._places = _positions(is_late)
        self._num_wanted = _counts(is_late, self._wanted)
        self._num_asked = _counts(self._is_late_here, self._asked.counts)
        rows = self._kernel.read_rows(self._asked.keys[~self._is_late_here])
        self._early = self._wire.start_rows(rows, self._num_asked[0], self._num_wanted[0])

    def fetch(self, owned: torch.Tensor) -> Awaitable[torch.Tensor]:
        """Let the other rows go, now that all updates are done.

        Args:
            owned: what the kernel looked up for the batch.

        Returns:
            All rows, owner by owner. Its gradient becomes that of ``owned``.

        Collectives:
            One all-to-all of rows, and one of gradients in the backward.
        """
        late = owned.detach()[self._asked.order[self._is_late_here]]
        self._late = self._wire.start_rows(late, self._num_asked[1], self._num_wanted[1])
        return _Fetching(self, _Leaving.apply(owned, self))

    def arrived(self) -> torch.Tensor:
        """Wait for both halves."""
        assert self._early is not None
        assert self._late is not None
        early, late = self._early.wait(), self._late.wait()
        rows = late.new_empty((sum(self._wanted), late.shape[1]))
        for places, values in zip(self._places, (early, late), strict=True):
            rows.index_copy_(0, places, values)
        return rows

    def send_gradients(self, grad: torch.Tensor) -> None:
        """One for each row that came, to its owner."""
        self._gradients = self._wire.start_gradients(grad, self._wanted, self._asked.counts)

    def gradients(self) -> torch.Tensor:
        """Wait for what all ranks have for this one's rows, in the order of the lookup."""
        assert self._gradients is not None
        by_rank = self._gradients.wait()
        grad = torch.empty_like(by_rank).index_copy_(0, self._asked.order, by_rank)
        if get_gradient_division():
            grad /= dist.get_world_size(self._wire.group)
        return grad


def send_early(journeys: Iterable[RowJourney]) -> None:
    """Let the early rows of a batch go."""
    with record_function(_LABEL):
        for journey in journeys:
            journey.send_early()


class _Fetching(Awaitable[torch.Tensor]):
    def __init__(self, journey: RowJourney, left: Any) -> None:
        super().__init__()
        self._journey, self._left = journey, left

    def _wait_impl(self) -> torch.Tensor:
        rows: torch.Tensor = _Arriving.apply(self._left, self._journey)  # pyright: ignore[reportAssignmentType]
        return rows


# Two functions, so that autograd sends the gradients of all kernels before it waits for the first.
class _Leaving(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, owned: torch.Tensor, journey: RowJourney) -> torch.Tensor:
        ctx.journey = journey
        return owned.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.journey.gradients(), None


class _Arriving(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, left: torch.Tensor, journey: RowJourney) -> torch.Tensor:
        ctx.journey = journey
        return journey.arrived()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.journey.send_gradients(grads[0])
        return grads[0].new_empty(0), None


def _positions(is_late: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of early and of late rows."""
    return (~is_late).nonzero().view(-1), is_late.nonzero().view(-1)


def _counts(is_late: torch.Tensor, counts: Sequence[int]) -> tuple[list[int], list[int]]:
    """How many of each rank's rows are early, and how many late."""
    num_late = [int(part.sum()) for part in is_late.split(list(counts))]
    return [all_ - late for all_, late in zip(counts, num_late, strict=True)], num_late
