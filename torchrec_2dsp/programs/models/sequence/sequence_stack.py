"""`SequenceStack`: layers over sequences, which fill up no farther than some sequences need."""

from collections.abc import Iterable

import torch
from torch import nn

from torchrec_2dsp.dense.layer_stack import LayerStack


class SequenceStack(LayerStack):
    """A `LayerStack` that trains the sequences of a batch in chunks of about equal lengths.

    Each chunk is filled up to its own longest sequence, so a batch takes about as long as it has
    items, and not as long as if all sequences were the longest.

        padded to one length          in two chunks
        a a a a a a a a               a a a a a a a a
        b b . . . . . .               d d d d d d d .
        c . . . . . . .               b b
        d d d d d d d .               c .
    """

    def __init__(self, layers: Iterable[nn.Module], loss: nn.Module, *, num_chunks: int) -> None:
        """
        Args:
            layers: called one after the other, with sequences filled up at their ends.
            loss: see `SampledSoftmax`.
            num_chunks: how many chunks a batch is cut into; 1 leaves it as it is.
        """
        super().__init__(layers, loss)
        self.num_chunks = num_chunks
        """How many chunks a batch is cut into."""

    def forward(self, inputs: torch.Tensor, *targets: torch.Tensor) -> torch.Tensor:
        """The losses of the samples; without targets, what comes out of the last layer.

        Args:
            inputs: of the first layer.
            targets: those of `SampledSoftmax`, after the outputs.
        """
        # The ranks of a pipeline need sequences of one length.
        if not targets or self.num_chunks == 1 or self._run is not None:
            return super().forward(inputs, *targets)
        positives, negatives, weights, positive_ids, negative_ids = targets
        lengths = (weights > 0).sum(dim=1)
        order = lengths.argsort(stable=True)
        losses = []
        # As many chunks for each batch, since DDP takes the graph to be that of the first step.
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
