"""`measure_layers`: what each layer of a `LayerStack` takes on this machine."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from torchrec_2dsp.dense.layer_stack import LayerStack
from torchrec_2dsp.errors import ConfigError


@dataclass(frozen=True)
class LayerTime:
    """What one layer takes for a micro-batch."""

    forward_seconds: float
    """The time of its forward; of the last layer, with the loss."""

    backward_seconds: float
    """The time of its backward, gradients of weights included."""

    output_bytes: int
    """The size of what comes out."""

    @property
    def seconds(self) -> float:
        """The time of both directions."""
        return self.forward_seconds + self.backward_seconds


def measure_layers(
    stack: LayerStack,
    inputs: torch.Tensor,
    targets: Sequence[torch.Tensor],
    *,
    num_repeats: int = 5,
) -> tuple[LayerTime, ...]:
    """Measure each layer of a stack, forward and backward, on a micro-batch.

    The shortest of several times is taken, after one that warms up. Gradients of parameters are
    left alone; buffers change as they do in training.

    Args:
        stack: not cut yet.
        inputs: of the first layer.
        targets: of the loss.
        num_repeats: how often each layer is measured.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> import torchrec_2dsp as tdsp
        >>> from torchrec_2dsp.dense.pipelined.measure import measure_layers
        >>> class SquaredError(nn.Module):
        ...     def forward(self, outputs, targets):
        ...         return (outputs - targets).square().sum(dim=1)
        >>> stack = tdsp.LayerStack([nn.Linear(4, 4), nn.Linear(4, 2)], SquaredError())
        >>> times = measure_layers(stack, torch.ones(8, 4), [torch.ones(8, 2)])
        >>> [time.output_bytes for time in times]
        [128, 64]
    """
    if num_repeats < 1:
        raise ConfigError(f"num_repeats={num_repeats} measures nothing; use 1 or more")
    times = []
    given = inputs.detach()
    for number, layer in enumerate(stack.layers):
        with torch.no_grad():
            output = layer(given)
        is_last = number == len(stack.layers) - 1
        modules = [layer, stack.loss] if is_last else [layer]
        params = [
            param for module in modules for param in module.parameters() if param.requires_grad
        ]
        run = _with_loss(layer, stack.loss, targets) if is_last else layer
        forward_seconds, backward_seconds = _measured(run, given, params, num_repeats)
        num_bytes = output.numel() * output.element_size()
        times.append(LayerTime(forward_seconds, backward_seconds, num_bytes))
        given = output
    return tuple(times)


def _with_loss(
    layer: nn.Module, loss: nn.Module, targets: Sequence[torch.Tensor]
) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda given: loss(layer(given), *targets)


def _measured(
    run: Callable[[torch.Tensor], torch.Tensor],
    given: torch.Tensor,
    params: list[nn.Parameter],
    num_repeats: int,
) -> tuple[float, float]:
    """The shortest forward and the shortest backward."""
    leaf = given.detach().requires_grad_(given.is_floating_point())
    leaves = [leaf, *params] if leaf.requires_grad else params
    forwards, backwards = [], []
    for _ in range(num_repeats + 1):
        with torch.enable_grad():
            seconds, output = _timed(lambda: run(leaf))
        forwards.append(seconds)
        backwards.append(0.0)
        if leaves and output.requires_grad:
            backwards[-1] = _backward_seconds(output, leaves)
    return min(forwards[1:]), min(backwards[1:])


def _backward_seconds(output: torch.Tensor, leaves: Sequence[torch.Tensor]) -> float:
    gradient = torch.ones_like(output)
    seconds, _ = _timed(
        lambda: torch.autograd.grad(output, tuple(leaves), gradient, allow_unused=True)
    )
    return seconds


def _timed(action: Callable[[], Any]) -> tuple[float, Any]:
    started = time.perf_counter()
    result = action()
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    return time.perf_counter() - started, result
