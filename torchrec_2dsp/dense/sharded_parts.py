"""Dense parts that FSDP2 shards or torch splits: which ones are allowed, and who calls them.

A part is sharded unit by unit: a unit's weights are gathered when it is called, and freed after it.

    part:   first   block 0   block 1   last      a call of the part gathers first and last,
                    [ unit ]  [ unit ]            a block's call that block
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from numbers import Number
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor.parallel import (
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
)
from torch.nn.utils.parametrize import ParametrizationList

from torchrec_2dsp._compat.tensors import running_backward
from torchrec_2dsp.dense.dense_parts import (
    check_unhooked,
    has_forward,
)
from torchrec_2dsp.dense.joint_batch import leaves_of
from torchrec_2dsp.errors import ConfigError, UnsupportedError


@dataclass(frozen=True)
class Unit:
    """A module whose weights are gathered together."""

    name: str
    module: nn.Module

    members: dict[str, nn.Module] = field(default_factory=dict)
    """The unit's modules, itself included, by name in the model; without those of other units."""

    @property
    def params(self) -> list[nn.Parameter]:
        """The unit's parameters."""
        return [
            param for module in self.members.values() for param in module.parameters(recurse=False)
        ]


def units_of(name: str, part: nn.Module, kinds: tuple[type[nn.Module], ...] = ()) -> list[Unit]:
    """Return a part's units of these kinds, inner ones first, and the part itself last."""
    units: dict[nn.Module, Unit] = {}

    def visit(path: str, module: nn.Module, unit: Unit | None) -> None:
        if module in units:
            return
        if unit is None or isinstance(module, kinds):
            unit = units[module] = Unit(path, module)
        unit.members[path] = module
        for child_name, child in module.named_children():
            visit(f"{path}.{child_name}" if path else child_name, child, unit)

    visit(name, part, None)
    return list(reversed(units.values()))


def check_units(units: Sequence[Unit], wrapper: str, separate: str) -> None:
    """Refuse units that FSDP2 can't shard; ``separate`` as in `check_shareable`."""
    owners: dict[nn.Parameter, str] = {}
    check_callable(units, wrapper)
    for unit in units:
        check_shareable(repr(unit.name), unit.params, wrapper, separate)
        for param in unit.params:
            if owners.setdefault(param, unit.name) != unit.name:
                raise ConfigError(
                    f"{unit.name!r} and {owners[param]!r} share a parameter, which {wrapper} would "
                    "shard as two; choose units that keep them together, or untie them"
                )


def check_callable(units: Iterable[Unit], wrapper: str) -> None:
    """Refuse units that can't be called, and parameters whose hooks would be dropped."""
    for unit in units:
        if not has_forward(unit.module):
            raise ConfigError(
                f"{unit.name!r} is a {type(unit.module).__name__} without a forward, at which "
                f"{wrapper} would run it; put its parameters into a module that the model calls"
            )
        check_unhooked(unit.module.named_parameters(unit.name), wrapper)


def check_shareable(name: str, params: Iterable[nn.Parameter], wrapper: str, separate: str) -> None:
    """Refuse parameters that FSDP2 can't shard together; ``separate`` tells how to part them."""
    params = list(params)
    types = sorted({str(param.dtype) for param in params if param.requires_grad})
    if len(types) > 1:
        raise ConfigError(
            f"{name} trains parameters of {' and '.join(types)}, which {wrapper} can't gather "
            f"together; choose one type, or {separate}"
        )
    if any(not (param.dim() and param.numel() and param.is_contiguous()) for param in params):
        raise ConfigError(
            f"{name} has a parameter without a dimension or elements, or one that isn't "
            f"contiguous, which {wrapper} can't cut; give it a dimension and elements, or store it "
            "contiguously"
        )


def check_splittable(
    name: str, part: nn.Module, styles: Mapping[str, ParallelStyle], wrapper: str
) -> None:
    """Refuse a parametrization, or a tied parameter, in a layer that is to be split."""
    hooks_only = (PrepareModuleInput, PrepareModuleOutput, PrepareModuleInputOutput)
    layers = {
        path: part.get_submodule(path)
        for path, style in styles.items()
        if not isinstance(style, hooks_only)
    }
    for path, layer in layers.items():
        if any(isinstance(module, ParametrizationList) for module in layer.modules()):
            raise ConfigError(
                f"{f'{name}.{path}'!r} has a parametrized weight (weight_norm, spectral_norm, "
                f"orthogonal), which {wrapper} can't split; leave it out of the plan, or remove "
                "the parametrization"
            )
    split = {param for layer in layers.values() for param in layer.parameters()}
    places: dict[nn.Parameter, str] = {}
    for path, module in part.named_modules():
        for param_name, param in module.named_parameters(recurse=False, remove_duplicate=False):
            place = ".".join(filter(None, (name, path, param_name)))
            if places.setdefault(param, place) != place and param in split:
                raise ConfigError(
                    f"{places[param]!r} and {place!r} are one parameter, which {wrapper} would "
                    "split as two; leave their modules out of the plan, or untie them"
                )


class OwnCalls:
    """Refuses calls of a unit's layers outside a call of the unit itself.

    A recomputation in the backward, as in activation checkpoints, is part of the unit's call.

    Args:
        unit: the unit; its members that hold parameters are its layers.
        purpose: what happens to a layer's weights or inputs only in the unit's own call.
    """

    def __init__(self, unit: Unit, purpose: str) -> None:
        self._name, self._purpose = unit.name, purpose
        self._num_open = 0
        unit.module.register_forward_pre_hook(self._begin, prepend=True)
        unit.module.register_forward_hook(self._end, always_call=True)
        for path, layer in unit.members.items():
            is_layer = any(True for _ in layer.parameters(recurse=False))
            # Reading a parametrized weight is itself a call, wherever it happens.
            if is_layer and layer is not unit.module and not isinstance(layer, ParametrizationList):
                layer.register_forward_pre_hook(partial(self._check, path), prepend=True)

    def _begin(self, *_: Any) -> None:
        self._num_open += 1

    def _end(self, *_: Any) -> None:
        self._num_open -= 1

    def _check(self, path: str, *_: Any) -> None:
        if not self._num_open and running_backward() < 0:
            raise UnsupportedError(
                f"{path!r} is called outside a call of {self._name!r}, in which {self._purpose}; "
                f"call {self._name!r} itself, whose forward may call its layers"
            )


def shard_units(units: Sequence[Unit], mesh: DeviceMesh, wrapper: str, **options: Any) -> None:
    """Shard units by FSDP2, and refuse calls past them; ``options`` are FSDP2's."""
    for unit in units:
        shard_module(unit.module, mesh, **options)
        OwnCalls(unit, f"{wrapper} gathers its weights")
        if options.get("reshard_after_forward"):
            check = partial(_check_result, unit.name, wrapper)
            unit.module.register_forward_hook(cast(Any, torch.compiler.disable)(check))


def _check_result(name: str, wrapper: str, unit: nn.Module, _: Any, result: Any) -> None:
    """Refuse results in which FSDP2 finds nothing whose backward gathers the weights again."""
    trains = torch.is_grad_enabled() and any(param.requires_grad for param in unit.parameters())
    leaves = [leaf for _, leaf in leaves_of(result)] if trains else []
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    hides = any(not isinstance(leaf, torch.Tensor | Number | str | None) for leaf in leaves)
    if any(tensor.requires_grad for tensor in tensors) or not leaves or (tensors and not hides):
        return
    raise UnsupportedError(
        f"{name!r} returns a {type(result).__name__} without a tensor in which {wrapper} could "
        "see the backward begin, and gather the weights again; return tensors, or lists, dicts or "
        "dataclasses of them, or set reshard_after_forward=False"
    )


def shard_module(module: nn.Module, mesh: DeviceMesh, **options: Any) -> None:
    """Shard a module by FSDP2; ``options`` are FSDP2's.

    FSDP2 keeps an outermost module's weights gathered from a forward to its backward. Without a
    backward, the next forward would miss all changes, and an optimizer would get gathered copies.
    """
    unit = fully_shard(module, mesh=mesh, **options)
    # Ranks that use different layers would send different gradients, which FSDP2 would sum.
    unit.set_reduce_scatter_unused_params(True, recurse=False)
    uncompiled = cast(Any, torch.compiler.disable)
    module.register_forward_pre_hook(uncompiled(_gather_anew), prepend=True)
    module.register_forward_hook(uncompiled(_free_after_evaluation))


def _gather_anew(unit: FSDPModule, *_: Any) -> None:
    """Free weights from a forward without a backward, unless a backward recomputes this one."""
    if running_backward() < 0:
        unit.reshard()


def _free_after_evaluation(unit: Any, *_: Any) -> None:
    if not (unit.training and torch.is_grad_enabled()):
        unit.reshard()
