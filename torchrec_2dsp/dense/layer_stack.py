"""`LayerStack`: layers that run one after the other, and the loss of what comes out of them."""

from collections.abc import Iterable

import torch
from torch import nn


class LayerStack(nn.Module):
    """A dense part that can be cut between any two of its layers.

    Each layer takes the tensor that the layer before it gives; the first dimension is the batch
    everywhere. The loss is part of it, so that whoever runs the layers may begin with the backward
    of some samples before the forward of others.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from torchrec_2dsp.dense.layer_stack import LayerStack
        >>> class SquaredError(nn.Module):
        ...     def forward(self, outputs, targets):
        ...         return (outputs - targets).square().sum(dim=1)
        >>> stack = LayerStack([nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)], SquaredError())
        >>> stack(torch.ones(3, 4), torch.ones(3, 2)).shape
        torch.Size([3])
        >>> stack(torch.ones(3, 4)).shape
        torch.Size([3, 2])
    """

    def __init__(self, layers: Iterable[nn.Module], loss: nn.Module) -> None:
        """
        Args:
            layers: called one after the other, with one tensor each.
            loss: called with the last layer's output and the targets; it gives one number for each
                sample.
        """
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.loss = loss

    def forward(self, inputs: torch.Tensor, *targets: torch.Tensor) -> torch.Tensor:
        """The losses of the samples; without targets, what comes out of the last layer.

        Args:
            inputs: of the first layer.
            targets: what the loss is given beside the outputs; they may need gradients, such as
                the vectors of items to choose from.
        """
        outputs = inputs
        for layer in self.layers:
            outputs = layer(outputs)
        return self.loss(outputs, *targets) if targets else outputs
