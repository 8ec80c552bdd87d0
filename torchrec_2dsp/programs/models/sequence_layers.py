"""The transformer's layers, its loss, and the stack that runs them.

Sequences begin at position 0 and are padded at their ends. A position sees itself and those
before it, so no real one ever sees padding.
"""

from collections.abc import Iterable, Mapping

import torch
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel
from torch.nn.functional import scaled_dot_product_attention

from torchrec_2dsp.dense.pipelined.layer_stack import LayerStack
from torchrec_2dsp.programs.data.negatives import NegativeItems


class Positions(nn.Module):
    """Adds a learned vector for each position."""

    def __init__(self, max_length: int, dim: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.vectors = nn.Parameter(torch.empty(max_length, dim))
        nn.init.normal_(self.vectors, std=0.02)
        self.scale = dim**0.5
        self.dropout = nn.Dropout(dropout)

    def forward(self, items: torch.Tensor) -> torch.Tensor:
        """Add positions to items, ``[batch, length, dim]``."""
        return self.dropout(items * self.scale + self.vectors[: items.shape[1]])


class CausalAttention(nn.Module):
    """Each position's attention to itself and those before it."""

    def __init__(self, dim: int, num_heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(dim, dim) for _ in range(4))
        self.head_dim, self.dropout = dim // num_heads, dropout

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Attend."""
        attended = scaled_dot_product_attention(
            *(self._heads(layer(inputs)) for layer in (self.query, self.key, self.value)),
            is_causal=True,
            dropout_p=self.dropout if self.training else 0.0,
        )
        return self.out(attended.transpose(1, 2).flatten(2))

    def _heads(self, vectors: torch.Tensor) -> torch.Tensor:
        # The number of heads is inferred: where ranks share layers, each has only some.
        return vectors.unflatten(2, (-1, self.head_dim)).transpose(1, 2)


class TransformerBlock(nn.Module):
    """Attention, then a feed-forward layer, each pre-normed and residual."""

    def __init__(self, dim: int, num_heads: int, hidden: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.attention_norm, self.feed_forward_norm = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attention = CausalAttention(dim, num_heads, dropout)
        self.up, self.down = nn.Linear(dim, hidden), nn.Linear(hidden, dim)
        self.activation, self.dropout = nn.GELU(), nn.Dropout(dropout)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Run the block; shapes stay."""
        attended = inputs + self.dropout(self.attention(self.attention_norm(inputs)))
        hidden = self.activation(self.up(self.feed_forward_norm(attended)))
        return attended + self.dropout(self.down(hidden))


SEQUENCE_TENSOR_PLAN: Mapping[str, ParallelStyle] = {
    **{f"*.attention.{name}": ColwiseParallel() for name in ("query", "key", "value")},
    "*.attention.out": RowwiseParallel(),
    "*.up": ColwiseParallel(),
    "*.down": RowwiseParallel(),
}
"""Styles for ``TensorParallelDense(SEQUENCE_TENSOR_PLAN, tp=2)``."""


class SampledSoftmax(nn.Module):
    """Cross-entropy of the true item among itself and its sequence's negatives.

    A logit is the dot product of query and item vector, less the logarithm of the item's sampling
    probability: so the loss is, in expectation, a softmax over all items, for any distribution
    of negatives. A negative that equals the true item doesn't count.

    Reference: S. Jean et al., On using very large target vocabulary for neural machine
    translation, ACL 2015.
    """

    def __init__(self, items: NegativeItems) -> None:
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
        """Return each sample's loss: the weighted sum over its positions."""
        true = (outputs * positives).sum(dim=2) - self._items.log_probability(positive_ids)
        others = outputs @ negatives.transpose(1, 2)
        others = others - self._items.log_probability(negative_ids).unsqueeze(1)
        is_true = positive_ids.unsqueeze(2) == negative_ids.unsqueeze(1)
        others = others.masked_fill(is_true, -torch.inf)
        every = torch.cat([true.unsqueeze(2), others], dim=2)
        return (weights * (every.logsumexp(dim=2) - true)).sum(dim=1)


class SequenceStack(LayerStack):
    """A `LayerStack` that trains a batch's sequences in chunks with about equal lengths.

    Each chunk is padded to its own longest sequence, so a batch's time follows its number of items,
    rather than its longest sequence.

        padded to one length          in two chunks
        a a a a a a a a               a a a a a a a a
        b b . . . . . .               d d d d d d d .
        c . . . . . . .               b b
        d d d d d d d .               c .
    """

    def __init__(self, layers: Iterable[nn.Module], loss: nn.Module, *, num_chunks: int) -> None:
        super().__init__(layers, loss)
        self.num_chunks = num_chunks

    def forward(self, inputs: torch.Tensor, *targets: torch.Tensor) -> torch.Tensor:
        """Return the samples' losses; without targets, the last layer's output."""
        # The ranks of a pipeline need sequences of one length.
        if not targets or self.num_chunks == 1 or self._run is not None:
            return super().forward(inputs, *targets)
        positives, negatives, weights, positive_ids, negative_ids = targets
        lengths = (weights > 0).sum(dim=1)
        order = lengths.argsort(stable=True)
        losses = []
        # Equally many chunks for each batch, since DDP assumes the first step's graph.
        for chunk in order.tensor_split(self.num_chunks):
            longest = max(1, int(lengths[chunk].max())) if chunk.numel() else 1
            losses.append(
                super().forward(
                    inputs[chunk, :longest],
                    positives[chunk, :longest],
                    negatives[chunk],
                    weights[chunk, :longest],
                    positive_ids[chunk, :longest],
                    negative_ids[chunk],
                )
            )
        return torch.cat(losses)[order.argsort()]
