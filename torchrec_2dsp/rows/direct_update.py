"""`DirectUpdater`: apply row gradients with tensor operations instead of FBGEMM's kernels."""

from collections.abc import Callable

import torch

from torchrec_2dsp._compat.fbgemm import (
    EmbOptimType,
    SplitTableBatchedEmbeddingBagsCodegen,
    eps_of,
    optimizer_states,
    tbe_shape,
)
from torchrec_2dsp.optim import adagrad_step, row_wise_adagrad_step, sgd_step
from torchrec_2dsp.rows.blocks import blocks_of
from torchrec_2dsp.rows.gradients import RowGradients
from torchrec_2dsp.rows.runs import runs_of

Rule = Callable[..., torch.Tensor]
"""An update rule: ``rule(grad, *states, lr=..., eps=...)`` changes the states in place and returns
what to subtract from the rows."""

RULES: dict[EmbOptimType, Rule] = {
    EmbOptimType.EXACT_SGD: sgd_step,
    EmbOptimType.EXACT_ADAGRAD: adagrad_step,
    EmbOptimType.EXACT_ROWWISE_ADAGRAD: row_wise_adagrad_step,
}
"""The rules of FBGEMM's fused kernels, up to the order of additions. On a CPU they take a third of
the kernels' time, because a kernel sorts once more and looks every row up first."""


def rule_for(tbe: SplitTableBatchedEmbeddingBagsCodegen) -> Rule | None:
    """The rule that can replace a kernel's own update; `None` where none can.

    GPU kernels are fast already, quantised rows aren't floating-point numbers, and an optimizer
    with more states than the rule takes computes something else.
    """
    is_on_cpu = torch.device(tbe.current_device).type == "cpu"
    is_float = all(weight.is_floating_point() for weight in tbe.split_embedding_weights())
    rule = RULES.get(tbe.optimizer)
    if rule is None or not is_on_cpu or not is_float:
        return None
    return rule if all(set(states) <= {"sum"} for states in optimizer_states(tbe)) else None


class DirectUpdater:
    """Applies `RowGradients` to the weights and the optimizer state of a TBE.

    Nothing else may change these rows meanwhile, and they may not be cached elsewhere.
    """

    def __init__(self, tbe: SplitTableBatchedEmbeddingBagsCodegen, rule: Rule) -> None:
        """
        Args:
            tbe: the kernel, whose optimizer has the states that the rule needs.
            rule: the update rule.
        """
        self._tbe = tbe
        self._rule = rule
        tables = [
            (weight, *states.values())
            for weight, states in zip(
                tbe.split_embedding_weights(), optimizer_states(tbe), strict=True
            )
        ]
        self.num_tables = len(tables)
        """How many tables the kernel holds."""
        self._runs = [runs_of(block, tables) for block in blocks_of(tbe_shape(tbe))]

    @torch.no_grad()
    def apply(self, gradients: RowGradients) -> None:
        """Update once with ``gradients``, at the learning rate of their lookup."""
        lr, eps = gradients.step.learning_rate, eps_of(self._tbe)
        for runs, block in zip(self._runs, gradients.blocks, strict=True):
            keys = block.keys.long()
            bounds = keys.new_tensor([run.first_key for run in runs[1:]])
            ends = torch.searchsorted(keys, bounds).tolist()
            parts = keys.tensor_split(ends), block.grads.tensor_split(ends)
            for run, run_keys, grad in zip(runs, *parts, strict=True):
                rows = run_keys - run.first_key
                weights, *states = run.tensors
                row_states = [state.index_select(0, rows) for state in states]
                step = self._rule(grad, *row_states, lr=lr, eps=eps)
                for state, row_state in zip(states, row_states, strict=True):
                    state.index_copy_(0, rows, row_state)
                _subtract(weights, rows, step)


def _subtract(weights: torch.Tensor, rows: torch.Tensor, step: torch.Tensor) -> None:
    """Subtract ``step`` from these rows of ``weights``; no row may occur twice."""
    if weights.dtype == step.dtype:
        # With ``alpha=-1`` instead of the negated step, torch takes three times as long.
        weights.index_add_(0, rows, step.neg_())
    else:
        # A step in the weights' own type would be rounded before the difference is.
        weights.index_copy_(0, rows, (weights.index_select(0, rows) - step).to(weights.dtype))
