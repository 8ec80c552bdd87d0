"""`RowCapture`: a TBE lookup whose backward collects row gradients instead of applying them."""

import math
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import torch
from torch.profiler import record_function

from torchrec_2dsp._compat.fbgemm import (
    Tbe,
    iteration_of,
    last_lookup,
    learning_rate_of,
    max_gradient,
    set_iteration,
    tbe_shape,
)
from torchrec_2dsp._compat.tensors import running_backward
from torchrec_2dsp._compat.torchrec import get_gradient_division
from torchrec_2dsp.codecs.rows import EXACT, RowCodec
from torchrec_2dsp.comms.groups import Peers
from torchrec_2dsp.errors import NotFiniteError
from torchrec_2dsp.replicas.exchange import (
    Announcement,
    GradientExchange,
    PendingGradients,
    TrackedLookup,
)
from torchrec_2dsp.rows.gradients import (
    Block,
    BlockGradients,
    Lookup,
    LookupRows,
    added_up,
    blocks_of,
)
from torchrec_2dsp.rows.update import read_rows, runs_of

_LABEL = "## capture rows ##"


class RowCapture:
    """Captures one TBE's row gradients, one entry per backward, until they are taken.

    Peers learn immediately how many rows a lookup touches. Gradients travel after the backward:
    during it, they would delay the dense gradients, which are on the critical path.

    ``learning_rate`` returns NaN if this rank doesn't know the rate; by default it reads the
    kernel's.
    """

    def __init__(
        self,
        tbe: Tbe,
        tables: Sequence[str],
        learning_rate: Callable[[], float] | None = None,
        peers: Peers | None = None,
        codec: RowCodec = EXACT,
        *,
        may_send_tables: bool = False,
    ) -> None:
        self.tbe = tbe
        """The kernel, whose fused update is held back."""
        self._tables = tuple(tables)
        self._shape = tbe_shape(tbe)
        self._blocks = blocks_of(self._shape)
        self.exchange = GradientExchange(
            self._blocks, tbe.current_device, peers, codec, may_send_tables=may_send_tables
        )
        """Sums the gradients over the peers."""
        self._learning_rate = learning_rate or (lambda: learning_rate_of(tbe))
        self._pending: dict[int, list[PendingGradients]] = {}
        """The lookups' gradients, by backward."""
        self._is_accumulating, self._num_steps = False, 0
        # Autograd only runs a function's backward if an input needs a gradient.
        self._anchor = torch.zeros(1, requires_grad=True)

    def accumulate(self) -> None:
        """Merge all backwards until the next `take`, which then announces them to the peers."""
        self._is_accumulating, self._num_steps = True, iteration_of(self.tbe)

    def lookup(self, run: Callable[[], torch.Tensor], weights: torch.Tensor | None) -> torch.Tensor:
        """Run a forward whose backward is captured, and return its output.

        Collectives:
            A small all-gather over the peers, which isn't waited for before the backward.
        """
        return _CapturedLookup.apply(self._anchor, self, run, weights)

    def tracked(self, weights: torch.Tensor | None) -> TrackedLookup:
        """Announce the kernel's latest lookup to the peers, and return what its backward needs."""
        with record_function(_LABEL):
            lookup = Lookup(*last_lookup(self.tbe), weights)
            rows = LookupRows(self._shape, self._blocks, lookup)
            announcement = None
            if not self._is_accumulating:
                announcement = self._announce([row_sum.keys for row_sum in rows.sums])
            return TrackedLookup(rows, iteration_of(self.tbe), announcement)

    def record(self, lookup: TrackedLookup, grad_output: torch.Tensor) -> None:
        """Keep one backward's row gradients."""
        with record_function(_LABEL):
            bound = max_gradient(self.tbe)
            if bound is not None:
                # A single group clips after dividing by its size; here the merge divides later.
                bound *= self._divisor
            gradients = lookup.rows.gradients(grad_output, bound)
            pending = PendingGradients(gradients, lookup, self._divisor)
            self._pending.setdefault(running_backward(), []).append(pending)

    def weight_gradients(self, lookup: TrackedLookup, grad_output: torch.Tensor) -> torch.Tensor:
        """Return the gradients of a lookup's per-sample weights; its rows haven't changed since."""
        tables = [(weight.detach(),) for weight in self.tbe.split_embedding_weights()]

        def read(block: Block, keys: torch.Tensor) -> torch.Tensor:
            return read_rows(runs_of(block, tables), keys).float()

        with record_function(_LABEL):
            return lookup.rows.weight_gradients(grad_output, read)

    def take(self) -> list[PendingGradients]:
        """Send all captured backwards' gradients, and return them in order.

        Collectives:
            After `accumulate`, or several lookups in a backward, a small all-gather over the peers.
            Per backward and block, two all-to-alls over the peers, waited for by
            `PendingGradients.gradients`.
        """
        by_backward, self._pending = list(self._pending.values()), {}
        if self._is_accumulating:
            together = list(chain.from_iterable(by_backward))
            pending = [self._added_up(together)] if together else []
            self._is_accumulating = False
            if not together:
                set_iteration(self.tbe, self._num_steps)
        else:
            pending = [
                self._added_up(lookups) if lookups[1:] else lookups[0] for lookups in by_backward
            ]
        captured = [part.blocks for part in pending]
        for part in pending:
            self.exchange.send(part)
        for blocks in captured:
            self._check_finite(blocks)
        return pending

    def _added_up(self, pending: Sequence[PendingGradients]) -> PendingGradients:
        """Sum several lookups' gradients into one step of the kernel."""
        # One forward's backwards come in reverse order.
        lookup = min((part.lookup for part in pending), key=lambda lookup: lookup.iteration)
        iteration = lookup.iteration
        if self._is_accumulating:
            # Earlier lookups of the step may have no backward.
            iteration = min(iteration, self._num_steps + 1)
        set_iteration(self.tbe, iteration)
        parts = zip(*(part.blocks for part in pending), strict=True)
        blocks = [added_up(of_block) for of_block in parts]
        announcement = self._announce([block.keys for block in blocks])
        lookup = TrackedLookup(lookup.rows, iteration, announcement)
        return PendingGradients(blocks, lookup, self._divisor)

    def _announce(self, keys: Sequence[torch.Tensor]) -> Announcement:
        return self.exchange.announce(keys, self._learning_rate())

    def _check_finite(self, gradients: Sequence[BlockGradients]) -> None:
        for block, captured in zip(self._blocks, gradients, strict=True):
            # A sum is finite only if all of its terms are.
            if math.isfinite(captured.grads.sum().item()):
                continue
            is_bad = ~captured.grads.isfinite().all(dim=1)
            if not bool(is_bad.any()):
                continue  # Only their sum is too large for its type.
            rows = dict(zip(block.tables, block.rows_of(captured.keys[is_bad]), strict=True))
            table, row = next((table, row) for table, part in rows.items() for row in part.tolist())
            raise NotFiniteError(
                f"table {self._tables[table]!r} has a gradient for its row {row} (of this rank's "
                "shard) that is not finite; no row was updated. Lower the learning rate, or clip "
                "gradients"
            )

    @property
    def _divisor(self) -> int:
        """The divisor of the sum over ranks, by TorchRec's current switch."""
        return self.exchange.num_ranks if get_gradient_division() else 1


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
        ctx.lookup = capture.tracked(weights)
        return output

    @staticmethod
    def backward(
        ctx: Any, *grad_outputs: torch.Tensor
    ) -> tuple[None, None, None, torch.Tensor | None]:
        ctx.capture.record(ctx.lookup, grad_outputs[0])
        if not ctx.needs_input_grad[3]:
            return None, None, None, None
        return None, None, None, ctx.capture.weight_gradients(ctx.lookup, grad_outputs[0])
