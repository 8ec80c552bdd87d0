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
from torchrec_2dsp.optim import reference
from torchrec_2dsp.rows.blocks import blocks_of
from torchrec_2dsp.rows.gradients import RowGradients

Rule = Callable[..., None]
"""Changes weights and states in place: ``rule(weight, grad, *states, lr=..., eps=...)``."""


def _sgd_(weight: torch.Tensor, grad: torch.Tensor, *, lr: float, eps: float) -> None:
    reference.sgd_(weight, grad, lr=lr)


RULES: dict[EmbOptimType, Rule] = {
    EmbOptimType.EXACT_SGD: _sgd_,
    EmbOptimType.EXACT_ADAGRAD: reference.adagrad_,
    EmbOptimType.EXACT_ROWWISE_ADAGRAD: reference.row_wise_adagrad_,
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
        self._blocks = blocks_of(tbe_shape(tbe))
        self._tables = [
            (weight, *states.values())
            for weight, states in zip(
                tbe.split_embedding_weights(), optimizer_states(tbe), strict=True
            )
        ]

    @property
    def num_tables(self) -> int:
        """How many tables the kernel holds."""
        return len(self._tables)

    @torch.no_grad()
    def apply(self, gradients: RowGradients) -> None:
        """One update with ``gradients``, at the schedule's point of their lookup."""
        lr, eps = gradients.step.learning_rate, eps_of(self._tbe)
        for block, found in zip(self._blocks, gradients.blocks, strict=True):
            rows = block.rows_of(found.keys.long())
            grads = found.grads.split([part.numel() for part in rows])
            for table, ids, grad in zip(block.tables, rows, grads, strict=True):
                tensors = self._tables[table]
                weight, *states = (tensor.index_select(0, ids) for tensor in tensors)
                self._rule(weight, grad, *states, lr=lr, eps=eps)
                for tensor, updated in zip(tensors, (weight, *states), strict=True):
                    tensor.index_copy_(0, ids, updated)
