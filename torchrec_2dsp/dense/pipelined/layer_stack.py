"""`LayerStack`: layers in sequence with their loss, their times, and their cuts into stages."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from torch import nn

from torchrec_2dsp.comms.alarm import agreeing
from torchrec_2dsp.errors import ConfigError, UnsupportedError
from torchrec_2dsp.plan.dense_plan import check_cuts, cut_layers, even_cuts


class LayerStack(nn.Module):
    """A dense part that can be cut between any two of its layers.

    Each layer takes the previous layer's tensor; the first dim is the batch everywhere. The
    loss is part of the stack, so that a runner such as `PipelinedDense` can begin some samples'
    backward before other samples' forward.

    Args:
        layers: called in sequence, with one tensor each.
        loss: called with the last layer's output and the targets; returns one number per sample.

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
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.loss = loss
        self._run: Callable[..., torch.Tensor] | None = None

    def forward(self, inputs: torch.Tensor, *targets: torch.Tensor) -> torch.Tensor:
        """Return the samples' losses; without targets, the last layer's output.

        Args:
            inputs: the first layer's input.
            targets: the loss's other arguments; they may need gradients, such as the vectors of
                candidate items.
        """
        if self._run is not None:
            return self._run(inputs, *targets)
        outputs = inputs
        for layer in self.layers:
            outputs = layer(outputs)
        return self.loss(outputs, *targets) if targets else outputs

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse copies and pickles of a stack that is cut: they would run the stack itself."""
        if self._run is not None:
            raise UnsupportedError(
                "a LayerStack that ranks have cut can't be copied or pickled, as by AveragedModel; "
                "average or save weights by their names in named_parameters(), or copy the stack "
                "before the model is sharded"
            )
        return super().__reduce_ex__(protocol)

    def keep_layers(
        self, numbers: Iterable[int], *, keeps_loss: bool, run: Callable[..., torch.Tensor]
    ) -> None:
        """Drop the layers that other ranks hold; the remaining ones keep their names.

        Args:
            numbers: the layers to keep.
            keeps_loss: True to keep the loss.
            run: called by `forward` from now on, with the inputs and targets.
        """
        if self._run is not None:
            raise ConfigError("this LayerStack is cut already; make another one for each model")
        kept_numbers = set(numbers)
        for number in range(len(self.layers)):
            if number not in kept_numbers:
                self.layers[number] = LayerElsewhere()
        if not keeps_loss:
            self.loss = LayerElsewhere()
        self._run = cast(Any, torch.compiler.disable)(run, reason="other ranks run layers as well")


class LayerElsewhere(nn.Module):
    """A placeholder for a layer on another rank, so that other layers keep their names."""

    def forward(self, *_: torch.Tensor) -> torch.Tensor:
        """Raise an error: the layer can't run here."""
        raise ConfigError(
            "this layer of a LayerStack is on another rank; call the LayerStack, not its layers"
        )


@dataclass(frozen=True)
class LayerTime:
    """One layer's times for a micro-batch."""

    forward_seconds: float
    """The forward's time, with the loss for the last layer."""

    backward_seconds: float
    """The backward's time, with the weight gradients."""

    output_bytes: int


def measure_layers(
    stack: LayerStack,
    inputs: torch.Tensor,
    targets: Sequence[torch.Tensor],
    *,
    num_repeats: int = 5,
) -> tuple[LayerTime, ...]:
    """Measure each layer of an uncut stack, forward and backward, on a micro-batch.

    The shortest of several times counts, after a warm-up. Parameter gradients, buffers and random
    number generators stay unchanged.
    """
    if num_repeats < 1:
        raise ConfigError(f"num_repeats={num_repeats} measures nothing; use 1 or more")
    devices = [inputs.device] if inputs.is_cuda else []
    with torch.random.fork_rng(devices), _restored_buffers(stack):
        return tuple(_layer_times(stack, inputs.detach(), targets, num_repeats))


@contextmanager
def _restored_buffers(stack: LayerStack) -> Iterator[None]:
    """Give modules their buffers back afterwards, with the values that they have now."""
    originals = [
        (module, name, buffer, buffer.clone())
        for module in stack.modules()
        for name, buffer in module.named_buffers(recurse=False)
    ]
    try:
        yield
    finally:
        for module, name, buffer, value in originals:
            setattr(module, name, buffer.copy_(value))


def _layer_times(
    stack: LayerStack, given: torch.Tensor, targets: Sequence[torch.Tensor], num_repeats: int
) -> Iterator[LayerTime]:
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
        yield LayerTime(forward_seconds, backward_seconds, num_bytes)
        given = output


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
    """Return the shortest forward and the shortest backward."""
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


@dataclass(frozen=True, kw_only=True, eq=False)
class MeasuredCuts:
    """Cuts that minimise the slowest stage's time, by each layer's time on these ranks.

    Each rank measures each layer once, when the model is wrapped; the means over all ranks count.
    """

    inputs: torch.Tensor
    """A micro-batch's inputs, such as random numbers."""

    targets: Sequence[torch.Tensor]
    """A micro-batch's targets."""

    seconds_per_byte: float = 0.0
    """A byte's time from one stage to the next."""

    num_repeats: int = 5
    """The number of measurements per layer; the shortest time counts."""


@dataclass(frozen=True)
class StageLayers:
    """A stage's layers."""

    name: str
    """The name used in error texts."""

    numbers: range
    """The layers' numbers in their `LayerStack`."""


def agreed_cuts(
    cuts: Sequence[int] | MeasuredCuts | Literal["even"],
    stacks: Mapping[str, LayerStack],
    num_stages: int,
    group: dist.ProcessGroup,
) -> dict[str, tuple[int, ...]]:
    """Return each stack's cuts, equal on all ranks.

    Collectives:
        An agreement; for `MeasuredCuts` also an all-reduce of the times.
    """
    if isinstance(cuts, MeasuredCuts):
        return {
            name: _measured_cuts(cuts, stack, num_stages, group) for name, stack in stacks.items()
        }
    with agreeing(group):
        return {
            name: even_cuts(len(stack.layers), num_stages)
            if isinstance(cuts, str)
            else check_cuts(cuts, len(stack.layers), num_stages)
            for name, stack in stacks.items()
        }


def _measured_cuts(
    cuts: MeasuredCuts, stack: LayerStack, num_stages: int, group: dist.ProcessGroup
) -> tuple[int, ...]:
    with agreeing(group):
        device = next(stack.parameters()).device
        times = measure_layers(
            stack,
            cuts.inputs.to(device),
            [target.to(device) for target in cuts.targets],
            num_repeats=cuts.num_repeats,
        )
    own = [layer.forward_seconds + layer.backward_seconds for layer in times]
    seconds = torch.tensor(own, dtype=torch.float64, device=device)
    dist.all_reduce(seconds, group=group)
    mean = (seconds / dist.get_world_size(group)).tolist()
    sizes = [layer.output_bytes for layer in times]
    with agreeing(group):
        return cut_layers(mean, sizes, num_stages, cuts.seconds_per_byte)


def layers_of_stages(
    name: str, stack: LayerStack, cuts: Sequence[int], model: nn.Module
) -> list[StageLayers]:
    """Return each stage's layers; refuse a parameter in two stages, or in one and elsewhere."""
    starts, ends = (0, *cuts), (*cuts, len(stack.layers))
    stages = [
        StageLayers(
            f"stage {number} of {name!r} (layers {first} to {last - 1})", range(first, last)
        )
        for number, (first, last) in enumerate(zip(starts, ends, strict=True))
    ]
    places: dict[int, str] = {}
    inside = {id(module) for module in stack.modules()}
    for module_name, module in model.named_modules():
        if id(module) not in inside:
            for param_name, param in module.named_parameters(recurse=False):
                places[id(param)] = f"{module_name}.{param_name}"
    for stage in stages:
        modules = [stack.layers[number] for number in stage.numbers]
        own = {id(param) for module in modules for param in module.parameters()}
        if stage is stages[-1]:
            own |= {id(param) for param in stack.loss.parameters()}
        for param in own & places.keys():
            raise ConfigError(
                f"{stage.name} shares a parameter with {places[param]}, which another rank may "
                "hold; give both a parameter of their own, or choose cuts that keep them together"
            )
        places.update(dict.fromkeys(own, stage.name))
    return stages
