"""`RowCapture`: a TBE lookup whose backward collects row gradients instead of applying them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.profiler import record_function

from torchrec_2dsp._compat.fbgemm import (
    OptimizerStep,
    SplitTableBatchedEmbeddingBagsCodegen,
    iteration_of,
    last_lookup,
    learning_rate_of,
    max_gradient,
    tbe_shape,
)
from torchrec_2dsp._compat.torchrec import get_gradient_division
from torchrec_2dsp.comms.peers import Peers
from torchrec_2dsp.errors import SyncError, UnsupportedError
from torchrec_2dsp.replicas.exchange import Announcement, GradientExchange
from torchrec_2dsp.replicas.in_flight import InFlight
from torchrec_2dsp.rows.blocks import blocks_of
from torchrec_2dsp.rows.gradients import BlockGradients, Lookup, LookupRows, RowGradients

_LABEL = "## capture rows ##"
"""In profiles."""


@dataclass(frozen=True)
class _Captured:
    """One lookup, until its backward."""

    rows: LookupRows
    iteration: int
    announced: Announcement


@dataclass(frozen=True)
class _Unsent:
    """One backward, until its row gradients are sent."""

    gradients: list[BlockGradients]
    captured: _Captured
    divisor: int


@dataclass(frozen=True)
class Backward:
    """One captured backward, whose row gradients are on their way to the peers."""

    in_flight: InFlight
    iteration: int

    def gradients(self) -> RowGradients:
        """Wait for the peers' gradients; the sum of all."""
        step = OptimizerStep(self.in_flight.learning_rate, self.iteration)
        return RowGradients(self.in_flight.collect(), step)


class RowCapture:
    """Captures the row gradients of one TBE, one entry per backward, until they are taken.

    How many rows a lookup touches is told to the peers at once. Gradients are sent when the
    backward is over: in it, they would keep the dense gradients waiting, which nothing hides.
    """

    def __init__(
        self,
        tbe: SplitTableBatchedEmbeddingBagsCodegen,
        tables: Sequence[str],
        learning_rate: Callable[[], float] | None = None,
        peers: Peers | None = None,
        transport: torch.dtype = torch.float32,
    ) -> None:
        """
        Args:
            tbe: the kernel.
            tables: the names of its tables.
            learning_rate: where its learning rate comes from, the kernel itself by default; NaN
                where this rank doesn't know it.
            peers: the ranks whose gradients are merged with these, by default none.
            transport: the type in which gradients travel.
        """
        self.tbe = tbe
        """The kernel whose fused update is held back."""
        self._tables = tuple(tables)
        self._shape = tbe_shape(tbe)
        self._blocks = blocks_of(self._shape)
        self._exchange = GradientExchange(self._blocks, tbe.current_device, peers, transport)
        self._learning_rate = learning_rate or (lambda: learning_rate_of(tbe))
        self._unsent: list[_Unsent] = []
        self._sent: list[Backward] = []
        # Autograd only calls a function whose input needs a gradient.
        self._anchor = torch.zeros(1, requires_grad=True)

    @property
    def by_owner(self) -> bool:
        """Whether the next gradients go by owners, see `GradientExchange.by_owner`."""
        return self._exchange.by_owner

    @by_owner.setter
    def by_owner(self, value: bool) -> None:
        self._exchange.by_owner = value

    def lookup(self, run: Callable[[], torch.Tensor], weights: torch.Tensor | None) -> torch.Tensor:
        """The output of ``run``, a forward of the TBE, with a capturing backward.

        Collectives:
            A small all-gather over the peers, which nobody waits for before the backward.
        """
        if weights is not None and weights.requires_grad:
            raise UnsupportedError(
                "per-sample weights that need a gradient (feature processors) can't be "
                "trained with GradientSync or hot rows; detach the weights or use WeightSync"
            )
        return _CapturedLookup.apply(self._anchor, self, run, weights)

    def captured(self, weights: torch.Tensor | None) -> _Captured:
        """What the kernel has just looked up."""
        with record_function(_LABEL):
            lookup = Lookup(*last_lookup(self.tbe), weights)
            rows = LookupRows(self._shape, self._blocks, lookup)
            keys = [one.keys for one in rows.sums]
            announced = self._exchange.announce(keys, self._learning_rate())
            return _Captured(rows, iteration_of(self.tbe), announced)

    def record(self, captured: _Captured, grad_output: torch.Tensor) -> None:
        """Keep the row gradients of one backward."""
        with record_function(_LABEL):
            bound = max_gradient(self.tbe)
            if bound is not None:
                # One group on all ranks would clip after the division that the merge has to do.
                bound *= self._divisor
            gradients = captured.rows.gradients(grad_output, bound)
            self._unsent.append(_Unsent(gradients, captured, self._divisor))

    def send(self) -> None:
        """Send what backwards have left.

        Collectives:
            Per backward and block two all-to-alls over the peers, waited for by
            `Backward.gradients`.
        """
        for one in self._unsent:
            in_flight = self._exchange.send(one.gradients, one.captured.announced, one.divisor)
            self._sent.append(Backward(in_flight, one.captured.iteration))
        unsent, self._unsent = self._unsent, []
        for one in unsent:
            self._check_finite(one.gradients)

    def take(self) -> list[Backward]:
        """The captured backwards in their order, sent, and forgotten here.

        Collectives:
            Those of `send`, for what isn't sent yet.
        """
        self.send()
        taken, self._sent = self._sent, []
        return taken

    def _check_finite(self, gradients: Sequence[BlockGradients]) -> None:
        for block, found in zip(self._blocks, gradients, strict=True):
            # A sum is finite only if all that it adds up is.
            if found.grads.sum().isfinite():
                continue
            is_bad = ~found.grads.isfinite().all(dim=1)
            rows = dict(zip(block.tables, block.rows_of(found.keys[is_bad]), strict=True))
            table, row = next((table, row) for table, part in rows.items() for row in part.tolist())
            raise SyncError(
                f"table {self._tables[table]!r} has a gradient for its row {row} (of this rank's "
                "shard) that is not finite; no row was updated. Lower the learning rate, or clip "
                "gradients"
            )

    @property
    def _divisor(self) -> int:
        """What the sum over ranks is divided by, by TorchRec's switch as it stands."""
        return self._exchange.num_ranks if get_gradient_division() else 1


class _CapturedLookup(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        anchor: torch.Tensor,
        capture: RowCapture,
        run: Callable[[], torch.Tensor],
        weights: torch.Tensor | None,
    ) -> torch.Tensor:
        output = run()
        ctx.capture = capture
        ctx.captured = capture.captured(weights)
        return output

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[None, None, None, None]:
        ctx.capture.record(ctx.captured, grad_outputs[0])
        return None, None, None, None
