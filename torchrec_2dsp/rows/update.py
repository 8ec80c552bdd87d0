"""`RowUpdater`: apply row gradients once, through the TBE's own fused optimizer."""

from typing import NamedTuple

import torch

from torchrec_2dsp._compat.fbgemm import (
    SplitTableBatchedEmbeddingBagsCodegen,
    tbe_shape,
    updating_as_of,
)
from torchrec_2dsp.rows.blocks import blocks_of
from torchrec_2dsp.rows.gradients import RowGradients

_MAX_PADDING = 4
"""The most bags per row with which rows are looked up as bags, whose kernel is faster per row."""


class RowUpdater:
    """Applies `RowGradients` to a TBE, as its fused backward would have.

    A forward over the distinct rows, one row per bag, and a backward with each row's gradient equal
    the fused update bit for bit, for every optimizer that sees a row's summed gradient (FBGEMM's
    exact optimizers). Each feature has as many bags as the one with the most rows; where most bags
    would be empty, rows are looked up as a sequence instead, whose kernel rounds differently.
    """

    def __init__(self, tbe: SplitTableBatchedEmbeddingBagsCodegen) -> None:
        self._tbe = tbe
        self._shape = tbe_shape(tbe)
        self._blocks = blocks_of(self._shape)

    @property
    def num_tables(self) -> int:
        """How many tables the kernel holds."""
        return self._shape.num_tables

    def apply(self, gradients: RowGradients) -> None:
        """Run one fused update with ``gradients``, as of the step of their lookup."""
        if gradients.num_rows == 0:
            return
        features = self._by_feature(gradients)
        ids = torch.cat([feature.rows for feature in features])
        num_bags = max(feature.rows.numel() for feature in features) * len(features)
        as_sequence = self._shape.is_sequence or (
            len(self._blocks) == 1 and num_bags > _MAX_PADDING * gradients.num_rows
        )
        if as_sequence:
            (block,) = gradients.blocks
            offsets, grad_output = _as_sequence(features), block.grads
        else:
            offsets, grad_output = _as_bags(features)
        with (
            updating_as_of(self._tbe, gradients.step, as_sequence=as_sequence),
            torch.enable_grad(),
        ):
            self._tbe(ids, offsets.to(ids.device)).backward(grad_output)

    def _by_feature(self, gradients: RowGradients) -> list["_FeatureRows"]:
        """The rows of each feature: the first one of a table has all its rows, the others none."""
        carried: dict[int, _FeatureRows] = {}
        for block, block_gradients in zip(self._blocks, gradients.blocks, strict=True):
            rows = block.rows_of(block_gradients.keys)
            grads = block_gradients.grads.split([part.numel() for part in rows])
            for table, *parts in zip(block.tables, rows, grads, strict=True):
                carried[self._shape.features_of(table)[0]] = _FeatureRows(*parts)
        empty = {
            feature: carried[self._shape.features_of(table)[0]].without_rows()
            for feature, table in enumerate(self._shape.feature_tables)
        }
        return [carried.get(feature, empty[feature]) for feature in sorted(empty)]


class _FeatureRows(NamedTuple):
    """The rows that one feature looks up to update them, and their gradients."""

    rows: torch.Tensor
    grads: torch.Tensor

    def without_rows(self) -> "_FeatureRows":
        return _FeatureRows(self.rows[:0], self.grads[:0])


def _as_sequence(features: list[_FeatureRows]) -> torch.Tensor:
    """Offsets with one bag per feature: a sequence has one output row per id."""
    return torch.tensor([0, *(feature.rows.numel() for feature in features)]).cumsum(0)


def _as_bags(features: list[_FeatureRows]) -> tuple[torch.Tensor, torch.Tensor]:
    """Offsets with one row per bag and empty bags at the end, and the gradient of the bags."""
    sizes = torch.tensor([feature.rows.numel() for feature in features])
    batch_size = int(sizes.max())
    ends = torch.arange(1, batch_size + 1).minimum(sizes[:, None])
    ends += (sizes.cumsum(0) - sizes)[:, None]
    offsets = torch.cat([ends.new_zeros(1), ends.view(-1)])
    dims = [feature.grads.shape[1] for feature in features]
    grad_output = features[0].grads.new_zeros((batch_size, sum(dims)))
    for feature, column in zip(features, grad_output.split(dims, dim=1), strict=True):
        column[: feature.grads.shape[0]] = feature.grads
    return offsets, grad_output
