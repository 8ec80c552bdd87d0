"""`DirectLookup`: a TBE lookup whose backward applies the update itself, at once."""

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
from torchrec_2dsp.rows.blocks import blocks_of
from torchrec_2dsp.rows.direct_update import DirectUpdater, Rule
from torchrec_2dsp.rows.gradients import (
    BlockGradients,
    Lookup,
    LookupRows,
    RowGradients,
    RowSum,
)


class DirectLookup:
    """Looks up as the kernel does, and updates by a rule on tensors.

    On a CPU the backward of FBGEMM's sequence kernel takes six times as long.
    """

    def __init__(self, tbe: SplitTableBatchedEmbeddingBagsCodegen, rule: Rule) -> None:
        """
        Args:
            tbe: the kernel.
            rule: its optimizer's.
        """
        self._tbe = tbe
        self._shape = tbe_shape(tbe)
        self._blocks = blocks_of(self._shape)
        self._updater = DirectUpdater(tbe, rule)
        # Autograd only calls a function whose input needs a gradient.
        self._anchor = torch.zeros(1, requires_grad=True)

    def lookup(self, run: Callable[[], torch.Tensor]) -> torch.Tensor:
        """The output of ``run``, a forward of the kernel, unweighted."""
        output: torch.Tensor = _DirectLookup.apply(self._anchor, self, run)  # pyright: ignore[reportAssignmentType]
        return output

    def step(self) -> OptimizerStep:
        """Where the kernel's schedule stands."""
        return OptimizerStep(learning_rate_of(self._tbe), iteration_of(self._tbe))

    def found(self) -> tuple[Lookup, OptimizerStep]:
        """What the kernel has just looked up, and where its schedule stood."""
        return Lookup(*last_lookup(self._tbe), None), self.step()

    def update(self, lookup: Lookup, step: OptimizerStep, grad_output: torch.Tensor) -> None:
        """Apply the gradient of a lookup's output."""
        rows = LookupRows(self._shape, self._blocks, lookup)
        gradients = rows.gradients(grad_output, max_gradient(self._tbe))
        self._updater.apply(RowGradients(tuple(gradients), step))

    def update_rows(self, keys: torch.Tensor, grads: torch.Tensor, step: OptimizerStep) -> None:
        """Apply gradients of rows of a kernel with one block.

        Args:
            keys: the row of each gradient; those of a row are added in this order.
            grads: as of a lookup's output, `[gradients, dim]`.
            step: where the schedule stood at the lookup.
        """
        bound, grads = max_gradient(self._tbe), grads.float()
        rows = RowSum(keys)
        summed = rows.of(grads if bound is None else grads.clamp(-bound, bound))
        self._updater.apply(RowGradients((BlockGradients(rows.keys, summed),), step))


class _DirectLookup(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, anchor: torch.Tensor, direct: DirectLookup, run: Callable[[], torch.Tensor]
    ) -> torch.Tensor:
        output = run()
        # Rows that others update have no gradient here, and zeros would be one.
        ctx.set_materialize_grads(False)
        ctx.direct, ctx.found = direct, direct.found()
        return output

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor | None) -> tuple[None, None, None]:
        if grad_outputs[0] is not None:
            ctx.direct.update(*ctx.found, grad_outputs[0])
        return None, None, None
