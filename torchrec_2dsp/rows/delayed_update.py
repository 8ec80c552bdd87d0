"""`DelayedMomentUpdater`: apply row gradients by a rule that FBGEMM has no kernel for."""

import torch

from torchrec_2dsp._compat.fbgemm import (
    SplitTableBatchedEmbeddingBagsCodegen,
    eps_of,
    optimizer_states,
    tbe_shape,
)
from torchrec_2dsp.optim.reference import delayed_row_wise_adagrad_
from torchrec_2dsp.rows.blocks import blocks_of
from torchrec_2dsp.rows.gradients import RowGradients


class DelayedMomentUpdater:
    """Applies `RowGradients` to a TBE of row-wise AdaGrad, by `DelayedMomentRowWiseAdaGrad`.

    Weights and moments are those of the TBE, so its state is saved and loaded as ever.
    """

    def __init__(self, tbe: SplitTableBatchedEmbeddingBagsCodegen) -> None:
        self._tbe = tbe
        self._blocks = blocks_of(tbe_shape(tbe))
        self._weights = tbe.split_embedding_weights()
        self._moments = [state["sum"] for state in optimizer_states(tbe)]

    @property
    def num_tables(self) -> int:
        """How many tables the kernel holds."""
        return len(self._weights)

    @torch.no_grad()
    def apply(self, gradients: RowGradients) -> None:
        """One update with ``gradients``, at the schedule's point of their lookup."""
        lr, eps = gradients.step.learning_rate, eps_of(self._tbe)
        for block, found in zip(self._blocks, gradients.blocks, strict=True):
            rows = block.rows_of(found.keys.long())
            grads = found.grads.split([part.numel() for part in rows])
            for table, ids, grad in zip(block.tables, rows, grads, strict=True):
                weight = self._weights[table].index_select(0, ids)
                moment = self._moments[table].index_select(0, ids)
                delayed_row_wise_adagrad_(weight, grad, moment, lr=lr, eps=eps)
                self._weights[table].index_copy_(0, ids, weight)
                self._moments[table].index_copy_(0, ids, moment)
