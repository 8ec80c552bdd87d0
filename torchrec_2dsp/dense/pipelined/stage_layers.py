"""Which layers of a `LayerStack` belong to which stage, and how these are split."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor.parallel import ParallelStyle

from torchrec_2dsp.comms.alarm import agreeing
from torchrec_2dsp.dense.pipelined.layer_stack import LayerStack, measure_layers
from torchrec_2dsp.errors import ConfigError
from torchrec_2dsp.plan.dense_plan import check_cuts, cut_layers, even_cuts


@dataclass(frozen=True, kw_only=True, eq=False)
class MeasuredCuts:
    """Cuts that let the slowest stage take the least time, by what layers take on these ranks.

    Each rank measures each layer once, when the model is wrapped, and the means of all ranks count.
    """

    inputs: torch.Tensor
    """The inputs of a micro-batch, such as random numbers."""

    targets: Sequence[torch.Tensor]
    """The targets of a micro-batch."""

    seconds_per_byte: float = 0.0
    """What a byte takes from one stage to the next."""

    num_repeats: int = 5
    """How often each layer is measured; the shortest time counts."""


@dataclass(frozen=True)
class StageLayers:
    """The layers of a stage."""

    name: str
    """The name, for errors."""

    numbers: range
    """The numbers of the layers in their `LayerStack`."""


def agreed_cuts(
    cuts: Sequence[int] | MeasuredCuts | Literal["even"],
    stacks: Mapping[str, LayerStack],
    num_stages: int,
    group: dist.ProcessGroup,
) -> dict[str, tuple[int, ...]]:
    """The first layer of each stage but the first, of each stack, equal on all ranks.

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
    seconds = torch.tensor([layer.seconds for layer in times], dtype=torch.float64, device=device)
    dist.all_reduce(seconds, group=group)
    mean = (seconds / dist.get_world_size(group)).tolist()
    sizes = [layer.output_bytes for layer in times]
    with agreeing(group):
        return cut_layers(mean, sizes, num_stages, cuts.seconds_per_byte)


def layers_of_stages(
    name: str, stack: LayerStack, cuts: Sequence[int], model: nn.Module
) -> list[StageLayers]:
    """The layers of each stage, if no parameter is in two of them, or in one and elsewhere.

    Args:
        name: of the stack in the model.
        stack: not cut yet.
        cuts: the first layer of each stage but the first.
        model: the stack is in it.
    """
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


def planned_modules(
    plan: Mapping[str, ParallelStyle], stacks: Mapping[str, LayerStack]
) -> dict[str, dict[str, ParallelStyle]]:
    """How the modules of each stack are split, by their names in it.

    Args:
        plan: styles, by names of modules in the model, with `*` for any part of a name.
        stacks: by their names in the model.
    """
    plans: dict[str, dict[str, ParallelStyle]] = {name: {} for name in stacks}
    for pattern, style in plan.items():
        modules = [
            (stack_name, name)
            for stack_name, stack in stacks.items()
            for name, _ in stack.named_modules()
            if name and fnmatchcase(f"{stack_name}.{name}", pattern)
        ]
        if not modules:
            raise ConfigError(
                f"PipelinedDense: no module of a LayerStack is called {pattern!r}; the model has "
                f"the stacks {', '.join(stacks)}"
            )
        for stack_name, name in modules:
            plans[stack_name][name] = style
    return plans
