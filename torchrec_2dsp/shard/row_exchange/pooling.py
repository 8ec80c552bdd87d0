"""`pool_rows`: bags, or sequences, of the rows that have come."""

from typing import Any

import torch
import torch.nn.functional as F

from torchrec_2dsp.shard.row_exchange.needed_rows import Bags, NeededRows


def pool_rows(rows: torch.Tensor, needed: NeededRows) -> torch.Tensor:
    """Give every occurrence its row, and sum the bags.

    Args:
        rows: the distinct rows that the batch needs, `[rows, dim]`.
        needed: which occurrence is which row.

    Returns:
        For bags `[batch, features x dim]`, for a sequence `[ids, dim]`. The backward adds up one
        gradient for each row.
    """
    pooled: torch.Tensor = _Pooled.apply(rows, needed)  # pyright: ignore[reportAssignmentType]
    if needed.bags is None:
        return pooled
    return pooled.view(-1, needed.bags.num_features * rows.shape[1])


class _Pooled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, needed: NeededRows) -> torch.Tensor:
        ctx.sums = needed.sums
        if needed.bags is None:
            return rows.index_select(0, needed.places)
        # With a gradient to come, torch would note for it where every row goes.
        return _sum_bags(rows.detach(), needed.places, needed.bags)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.sums.of(grads[0].contiguous()), None


def _sum_bags(rows: torch.Tensor, places: torch.Tensor, bags: Bags) -> torch.Tensor:
    return F.embedding_bag(
        places,
        rows,
        F.pad(bags.lengths.cumsum(0), (1, 0)),
        mode="sum",
        per_sample_weights=bags.weights,
        include_last_offset=True,
    )
