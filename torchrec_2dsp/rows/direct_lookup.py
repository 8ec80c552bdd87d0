"""`DirectLookup`: a TBE lookup whose backward pass updates the rows with tensor operations."""

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
    """Runs a kernel's forward, and updates its rows by a `Rule` in the backward pass.

    On a CPU, the backward pass of FBGEMM's sequence kernel takes six times as long.
    """

    def __init__(self, tbe: SplitTableBatchedEmbeddingBagsCodegen, rule: Rule) -> None:
        """
        Args:
            tbe: the kernel.
            rule: the update rule of the kernel's optimizer.
        """
        self._tbe = tbe
        self._shape = tbe_shape(tbe)
        self._blocks = blocks_of(self._shape)
        self._updater = DirectUpdater(tbe, rule)
        # Autograd only runs the backward of a function with an input that needs a gradient.
        self._anchor = torch.zeros(1, requires_grad=True)

    def lookup(self, run: Callable[[], torch.Tensor]) -> torch.Tensor:
        """The output of ``run``, an unweighted forward of the kernel; its backward pass updates."""
        output: torch.Tensor = _DirectLookup.apply(self._anchor, self, run)  # pyright: ignore[reportAssignmentType]
        return output

    def step(self) -> OptimizerStep:
        """The kernel's current learning rate and iteration."""
        return OptimizerStep(learning_rate_of(self._tbe), iteration_of(self._tbe))

    def latest(self) -> tuple[Lookup, OptimizerStep]:
        """The inputs of the kernel's latest forward, with the learning rate and iteration."""
        return Lookup(*last_lookup(self._tbe), None), self.step()

    def update(self, lookup: Lookup, step: OptimizerStep, grad_output: torch.Tensor) -> None:
        """Update the rows of ``lookup`` with the gradient of its output."""
        rows = LookupRows(self._shape, self._blocks, lookup)
        gradients = rows.gradients(grad_output, max_gradient(self._tbe))
        self._updater.apply(RowGradients(tuple(gradients), step))

    def update_rows(self, keys: torch.Tensor, grads: torch.Tensor, step: OptimizerStep) -> None:
        """Update rows of a kernel with one block.

        Args:
            keys: the row of each gradient; a row's gradients are added in this order.
            grads: `[gradients, dim]`, not yet clipped.
            step: the learning rate and iteration at the lookup.
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
        # Where `update_rows` is called instead, there is no gradient, and zeros would update, too.
        ctx.set_materialize_grads(False)
        ctx.direct, ctx.latest = direct, direct.latest()
        return output

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor | None) -> tuple[None, None, None]:
        if grad_outputs[0] is not None:
            ctx.direct.update(*ctx.latest, grad_outputs[0])
        return None, None, None
