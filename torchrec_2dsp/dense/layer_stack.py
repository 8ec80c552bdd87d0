"""`LayerStack`: layers that run one after the other, and the loss of what comes out of them."""

from collections.abc import Callable, Iterable

import torch
from torch import nn

from torchrec_2dsp.errors import ConfigError


class LayerStack(nn.Module):
    """A dense part that can be cut between any two of its layers.

    Each layer takes the tensor that the layer before it gives; the first dimension is the batch
    everywhere. The loss is part of it, so that whoever runs the layers may begin with the backward
    of some samples before the forward of others. `PipelinedDense` does.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> import torchrec_2dsp as tdsp
        >>> class SquaredError(nn.Module):
        ...     def forward(self, outputs, targets):
        ...         return (outputs - targets).square().sum(dim=1)
        >>> stack = tdsp.LayerStack([nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)], SquaredError())
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
        self._run: Callable[..., torch.Tensor] | None = None

    def forward(self, inputs: torch.Tensor, *targets: torch.Tensor) -> torch.Tensor:
        """The losses of the samples; without targets, what comes out of the last layer.

        Args:
            inputs: of the first layer.
            targets: what the loss is given beside the outputs; they may need gradients, such as
                the vectors of items to choose from.
        """
        if self._run is not None:
            return self._run(inputs, *targets)
        outputs = inputs
        for layer in self.layers:
            outputs = layer(outputs)
        return self.loss(outputs, *targets) if targets else outputs

    def keep_layers(
        self, numbers: Iterable[int], *, keeps_loss: bool, run: Callable[..., torch.Tensor]
    ) -> None:
        """Drop the layers that other ranks hold; those that stay keep their names.

        Args:
            numbers: of the layers to keep.
            keeps_loss: whether the loss stays.
            run: what `forward` calls from now on, with the inputs and targets.
        """
        if self._run is not None:
            raise ConfigError("this LayerStack is cut already; make another one for each model")
        kept_numbers = set(numbers)
        for number in range(len(self.layers)):
            if number not in kept_numbers:
                self.layers[number] = LayerElsewhere()
        if not keeps_loss:
            self.loss = LayerElsewhere()
        self._run = run


class LayerElsewhere(nn.Module):
    """A layer that another rank holds; it keeps the place, so that others keep their names."""

    def forward(self, *_: torch.Tensor) -> torch.Tensor:
        """Raise an error: the layer can't run here."""
        raise ConfigError(
            "this layer of a LayerStack is on another rank; call the LayerStack, not its layers"
        )
