"""`RowCapture`: a TBE lookup whose backward collects row gradients instead of applying them."""

from collections.abc import Callable
from typing import Any

import torch

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
from torchrec_2dsp.errors import UnsupportedError
from torchrec_2dsp.rows.gradients import Lookup, RowGradients, gradients_of_lookup


class RowCapture:
    """Captures the row gradients of one TBE, one entry per backward, until they are taken."""

    def __init__(
        self,
        tbe: SplitTableBatchedEmbeddingBagsCodegen,
        learning_rate: Callable[[], float] | None = None,
    ) -> None:
        """
        Args:
            tbe: the kernel.
            learning_rate: where its learning rate comes from, the kernel itself by default; NaN
                where this rank doesn't know it.
        """
        self.tbe = tbe
        """The kernel whose fused update is held back."""
        self._shape = tbe_shape(tbe)
        self.num_ranks = 1
        """How many ranks' gradients are merged with these."""
        self._learning_rate = learning_rate or (lambda: learning_rate_of(tbe))
        self._pending: list[RowGradients] = []
        # Autograd only calls a function whose input needs a gradient.
        self._anchor = torch.zeros(1, requires_grad=True)

    def lookup(self, run: Callable[[], torch.Tensor], weights: torch.Tensor | None) -> torch.Tensor:
        """The output of ``run``, a forward of the TBE, with a capturing backward."""
        if weights is not None and weights.requires_grad:
            raise UnsupportedError(
                "per-sample weights that need a gradient (feature processors) can't be "
                "trained with GradientSync or hot rows; detach the weights or use WeightSync"
            )
        return _CapturedLookup.apply(self._anchor, self, run, weights)

    def record(self, lookup: Lookup, grad_output: torch.Tensor) -> None:
        """Keep the row gradients of one backward, with the schedule as it stands now."""
        bound = max_gradient(self.tbe)
        if bound is not None:
            # One group on all ranks would clip after the division that the merge still has to do.
            bound *= self.divisor
        tables = gradients_of_lookup(self._shape, lookup, grad_output, bound)
        step = OptimizerStep(self._learning_rate(), lookup.iteration)
        self._pending.append(RowGradients(tables, step))

    @property
    def divisor(self) -> int:
        """What the sum over ranks is divided by, by TorchRec's switch as it stands."""
        return self.num_ranks if get_gradient_division() else 1

    @property
    def num_pending(self) -> int:
        """How many backwards wait to be applied."""
        return len(self._pending)

    def take(self) -> list[RowGradients]:
        """The captured gradients in the order of their backwards, forgotten here."""
        taken, self._pending = self._pending, []
        return taken


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
        ctx.lookup = Lookup(*last_lookup(capture.tbe), weights, iteration_of(capture.tbe))
        return output

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[None, None, None, None]:
        ctx.capture.record(ctx.lookup, grad_outputs[0])
        return None, None, None, None
