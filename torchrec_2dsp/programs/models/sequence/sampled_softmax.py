"""`SampledSoftmax`: the loss of telling each next item from a sample of all items."""

import torch
from torch import nn

from torchrec_2dsp.programs.data.negatives import NegativeItems


class SampledSoftmax(nn.Module):
    """Cross-entropy of the true item among itself and the negatives of its sequence.

    A logit is the dot product of what comes next with the item's vector, less the logarithm of the
    probability with which the item is drawn: so the loss is, in expectation, that of a softmax over
    all items, whatever they are drawn by. A negative that is the true item itself doesn't count.

    Reference: S. Jean et al., On using very large target vocabulary for neural machine
    translation, ACL 2015.
    """

    def __init__(self, items: NegativeItems) -> None:
        """
        Args:
            items: what negatives are drawn from.
        """
        super().__init__()
        self._items = items

    def forward(
        self,
        outputs: torch.Tensor,
        positives: torch.Tensor,
        negatives: torch.Tensor,
        weights: torch.Tensor,
        positive_ids: torch.Tensor,
        negative_ids: torch.Tensor,
    ) -> torch.Tensor:
        """The loss of each sample: the sum over its positions, by their weights.

        Args:
            outputs: what comes next, ``[batch, length, dim]``.
            positives: the vectors of the true next items, of the same shape.
            negatives: the vectors of the negatives, ``[batch, num_negatives, dim]``.
            weights: of the positions, ``[batch, length]``; 0 where there is no next item.
            positive_ids: the true next items, ``[batch, length]``.
            negative_ids: the negatives, ``[batch, num_negatives]``.
        """
        true = (outputs * positives).sum(dim=2) - self._items.log_probability(positive_ids)
        others = outputs @ negatives.transpose(1, 2)
        others = others - self._items.log_probability(negative_ids).unsqueeze(1)
        is_true = positive_ids.unsqueeze(2) == negative_ids.unsqueeze(1)
        others = others.masked_fill(is_true, -torch.inf)
        every = torch.cat([true.unsqueeze(2), others], dim=2)
        return (weights * (every.logsumexp(dim=2) - true)).sum(dim=1)
