"""`DirectUpdater`: apply row gradients by a rule on tensors, without a kernel of FBGEMM's."""

from collections.abc import Callable

import torch

from torchrec_2dsp._compat.fbgemm import (
    EmbOptimType,
    SplitTableBatchedEmbeddingBagsCodegen,
    eps_of,
    optimizer_states,
    tbe_shape,
)
from torchrec_2dsp.optim import steps
from torchrec_2dsp.rows.blocks import blocks_of
from torchrec_2dsp.rows.gradients import RowGradients
from torchrec_2dsp.rows.runs import runs_of

Rule = Callable[..., torch.Tensor]
"""What is subtracted from rows: ``rule(grad, *states, lr=..., eps=...)``, which changes states."""

RULES: dict[EmbOptimType, Rule] = {
    EmbOptimType.EXACT_SGD: steps.sgd_step,
    EmbOptimType.EXACT_ADAGRAD: steps.adagrad_step,
    EmbOptimType.EXACT_ROWWISE_ADAGRAD: steps.row_wise_adagrad_step,
}
"""What FBGEMM's fused kernels do, up to the order of additions. On a CPU that takes a third of the
time of these kernels, which sort once more and look every row up first."""


def rule_for(tbe: SplitTableBatchedEmbeddingBagsCodegen) -> Rule | None:
    """The rule that can stand for a kernel, `None` where only the kernel itself will do.

    A GPU's kernels are quick, quantised rows aren't numbers, and an optimizer with more states than
    the rule knows does something else.
    """
    is_on_cpu = torch.device(tbe.current_device).type == "cpu"
    has_numbers = all(weight.is_floating_point() for weight in tbe.split_embedding_weights())
    rule = RULES.get(tbe.optimizer)
    if rule is None or not is_on_cpu or not has_numbers:
        return None
    return rule if all(set(states) <= {"sum"} for states in optimizer_states(tbe)) else None


class DirectUpdater:
    """Applies `RowGradients` to the weights and the state of a TBE.

    Only for rows that nothing else changes meanwhile, and that aren't cached elsewhere.
    """

    def __init__(self, tbe: SplitTableBatchedEmbeddingBagsCodegen, rule: Rule) -> None:
        """
        Args:
            tbe: the kernel, whose optimizer has the states that the rule needs.
            rule: what to do.
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
        """One update with ``gradients``, at the schedule's point of their lookup."""
        lr, eps = gradients.step.learning_rate, eps_of(self._tbe)
        for runs, found in zip(self._runs, gradients.blocks, strict=True):
            keys = found.keys.long()
            bounds = keys.new_tensor([run.first_key for run in runs[1:]])
            ends = torch.searchsorted(keys, bounds).tolist()
            parts = keys.tensor_split(ends), found.grads.tensor_split(ends)
            for run, of_run, grad in zip(runs, *parts, strict=True):
                rows = of_run - run.first_key
                weights, *states = run.tensors
                updated = [state.index_select(0, rows) for state in states]
                step = self._rule(grad, *updated, lr=lr, eps=eps)
                for state, rows_of_state in zip(states, updated, strict=True):
                    state.index_copy_(0, rows, rows_of_state)
                _subtract(weights, rows, step)


def _subtract(weights: torch.Tensor, rows: torch.Tensor, step: torch.Tensor) -> None:
    """From rows, no two of which are the same."""
    if weights.dtype == step.dtype:
        # With a factor for what is added, torch takes three times as long.
        weights.index_add_(0, rows, step.neg_())
    else:
        # Halved before, a step would be rounded twice.
        weights.index_copy_(0, rows, (weights.index_select(0, rows) - step).to(weights.dtype))
