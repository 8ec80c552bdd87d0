"""`RowUpdater`: apply row gradients once, through the TBE's own fused optimizer."""

import torch

from torchrec_2dsp._compat.fbgemm import (
    SplitTableBatchedEmbeddingBagsCodegen,
    tbe_shape,
    updating_as_of,
)
from torchrec_2dsp.rows.gradients import RowGradients


class RowUpdater:
    """Applies `RowGradients` to a TBE, as its fused backward would have.

    A forward over the distinct rows with one row per bag, and a backward with each row's
    gradient, is the fused update of those rows for every optimizer that sees a row's summed
    gradient (FBGEMM's exact optimizers), bit for bit.
    """

    def __init__(self, tbe: SplitTableBatchedEmbeddingBagsCodegen) -> None:
        self._tbe = tbe
        self._shape = tbe_shape(tbe)
        # The first feature of a table carries its rows; further ones get empty bags.
        self._table_of_feature = [
            table if feature == self._shape.features_of(table)[0] else None
            for feature, table in enumerate(self._shape.feature_tables)
        ]

    def apply(self, gradients: RowGradients) -> None:
        """One fused update with ``gradients``, at the schedule's point where they were captured."""
        batch_size = max(table.rows.numel() for table in gradients.tables)
        if batch_size == 0:
            return
        ids, lengths, output_grads = [], [], []
        for feature, table_index in enumerate(self._table_of_feature):
            table = gradients.tables[self._shape.feature_tables[feature]]
            length = torch.zeros(batch_size, dtype=torch.int64, device=table.rows.device)
            grads = table.grads[:0]
            if table_index is not None:
                ids.append(table.rows)
                length[: table.rows.numel()] = 1
                grads = table.grads
            lengths.append(length)
            output_grads.append(grads if self._shape.is_sequence else _padded(grads, batch_size))
        offsets = torch.cat(lengths).cumsum(0)
        grad_output = torch.cat(output_grads, dim=0 if self._shape.is_sequence else 1)
        with updating_as_of(self._tbe, gradients.step), torch.enable_grad():
            output = self._tbe(torch.cat(ids), torch.cat([offsets.new_zeros(1), offsets]))
            output.backward(grad_output.to(output.dtype))


def _padded(grads: torch.Tensor, num_rows: int) -> torch.Tensor:
    if grads.shape[0] == num_rows:
        return grads
    padded = grads.new_zeros((num_rows, grads.shape[1]))
    padded[: grads.shape[0]] = grads
    return padded
