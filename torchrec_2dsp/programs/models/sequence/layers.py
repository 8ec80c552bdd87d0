"""The layers of the transformer: positions, blocks, and the last norm.

Sequences begin at position 0 and are filled up at their ends. A position sees itself and what is
before it, so no real one ever sees what fills up.
"""

from collections.abc import Mapping

import torch
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel
from torch.nn.functional import scaled_dot_product_attention


class Positions(nn.Module):
    """Adds a learned vector for each position."""

    def __init__(self, max_length: int, dim: int, dropout: float = 0.0) -> None:
        """
        Args:
            max_length: the most positions.
            dim: of vectors.
            dropout: the share of numbers that training leaves out.
        """
        super().__init__()
        self.vectors = nn.Parameter(torch.empty(max_length, dim))
        nn.init.normal_(self.vectors, std=0.02)
        self.scale = dim**0.5
        self.dropout = nn.Dropout(dropout)

    def forward(self, items: torch.Tensor) -> torch.Tensor:
        """Items with their positions, both of ``[batch, length, dim]``."""
        return self.dropout(items * self.scale + self.vectors[: items.shape[1]])


class CausalAttention(nn.Module):
    """Attention of each position to itself and those before it."""

    def __init__(self, dim: int, num_heads: int, dropout: float = 0.0) -> None:
        """
        Args:
            dim: of vectors.
            num_heads: into how many parts vectors are split.
            dropout: the share of attention that training leaves out.
        """
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(dim, dim) for _ in range(4))
        self.head_dim, self.dropout = dim // num_heads, dropout

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """What each position takes from the others."""
        attended = scaled_dot_product_attention(
            *(self._heads(layer(inputs)) for layer in (self.query, self.key, self.value)),
            is_causal=True,
            dropout_p=self.dropout if self.training else 0.0,
        )
        return self.out(attended.transpose(1, 2).flatten(2))

    def _heads(self, vectors: torch.Tensor) -> torch.Tensor:
        # As many heads as there are: where layers are split over ranks, each has some of them.
        return vectors.unflatten(2, (-1, self.head_dim)).transpose(1, 2)


class TransformerBlock(nn.Module):
    """Attention, then two feed-forward layers, each after a norm and added to what came in."""

    def __init__(self, dim: int, num_heads: int, hidden: int, dropout: float = 0.0) -> None:
        """
        Args:
            dim: of vectors.
            num_heads: of the attention.
            hidden: the size between the feed-forward layers.
            dropout: the share of numbers that training leaves out.
        """
        super().__init__()
        self.attention_norm, self.feed_forward_norm = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attention = CausalAttention(dim, num_heads, dropout)
        self.up, self.down = nn.Linear(dim, hidden), nn.Linear(hidden, dim)
        self.activation, self.dropout = nn.GELU(), nn.Dropout(dropout)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """The block's output, of the shape of its input."""
        attended = inputs + self.dropout(self.attention(self.attention_norm(inputs)))
        hidden = self.activation(self.up(self.feed_forward_norm(attended)))
        return attended + self.dropout(self.down(hidden))


SEQUENCE_TENSOR_PLAN: Mapping[str, ParallelStyle] = {
    **{f"*.attention.{name}": ColwiseParallel() for name in ("query", "key", "value")},
    "*.attention.out": RowwiseParallel(),
    "*.up": ColwiseParallel(),
    "*.down": RowwiseParallel(),
}
"""The blocks' layers split over ranks: ``TensorParallelDense(SEQUENCE_TENSOR_PLAN, tp=2)``."""
