"""Dense parts that FSDP2 shards or torch splits: which ones are allowed, and who calls them.

A part is sharded unit by unit: a unit's weights are gathered when it is called, and freed after it.

    part:   first   block 0   block 1   last      a call of the part gathers first and last,
                    [ unit ]  [ unit ]            a block's call that block

A `JointBatch` runs a split part on several ranks' batches at once:

    rank 0: rows 0 to 5   --gather-->  rows 0 to 9   --part-->  rows 0 to 9  --> rows 0 to 5
    rank 1: rows 6 to 9   ---------->  rows 0 to 9   -------->  rows 0 to 9  --> rows 6 to 9

Each rank gives its own rows and gets its own back, so the rest of the model, the tables and the
loss are independent of the others.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence, Set
from contextlib import ExitStack
from copy import copy
from dataclasses import dataclass, field, fields, is_dataclass
from functools import partial
from typing import Any, cast
from zlib import crc32

import torch
import torch.distributed as dist
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
from torchrec.distributed.types import LazyAwaitable
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from torchrec_2dsp._compat.tensors import running_backward
from torchrec_2dsp.dense.dense_parts import (
    check_called_alike,
    check_unhooked,
    differentiable_once,
    draw_seed,
    drawing_from,
    has_forward,
    in_words,
    state_in_words,
)
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


class JointBatch:
    """Gathers a module's inputs over a group's ranks, and takes this rank's rows back.

    Parameter gradients are the mean, over the group's ranks, of the gradients of each rank's loss;
    input gradients are those of this rank's loss. In training, random numbers inside the module,
    such as dropout's, are the same on all of them.
    """

    def __init__(self, name: str, module: nn.Module, group: dist.ProcessGroup) -> None:
        self._name, self._group = name, group
        self._rank, self._num_ranks = dist.get_rank(group), dist.get_world_size(group)
        self._calls: list[tuple[list[int], ExitStack]] = []
        """The ranks' numbers of samples, and the context that ends with the module's call."""
        # Before existing hooks, which see what the module sees.
        module.register_forward_pre_hook(self._before, with_kwargs=True, prepend=True)
        module.register_forward_hook(self._after, always_call=True)

    def _before(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Gather all arguments.

        Raises:
            TwoDError: on all ranks, if calls differ, or an argument can't be joined.

        Collectives:
            An all-gather of sizes and a seed, waited for, or two if there are many tensors; then
            one all-gather per tensor.
        """
        # TorchRec's tables may not have waited for their outputs yet.
        args, kwargs = _mapped(
            (args, kwargs), lambda lazy: lazy.wait(), lambda given: isinstance(given, LazyAwaitable)
        )
        device, trains = next(module.parameters()).device, torch.is_grad_enabled()
        leaves, call = self._described({**dict(enumerate(args)), **kwargs}, device)
        parts = [tensor for leaf in leaves for tensor in _tensors_of(leaf)]
        sizes = [part.shape[0] for part in parts]
        # Its length doesn't depend on the arguments.
        digest, seed = crc32(str(call).encode()), draw_seed() if trains else 0
        message = [digest, seed, *sizes, *[0] * _NUM_SIZES][: 2 + _NUM_SIZES]
        digests, seeds, *by_part = self._of_ranks(message, device)
        if len({*digests}) > 1 or isinstance(call, UnsupportedError):
            calls = [call] * self._num_ranks
            dist.all_gather_object(calls, call, group=self._group)
            check_called_alike(repr(self._name), calls, self._group, "tensor-parallel group")
        by_part += self._of_ranks(sizes[_NUM_SIZES:], device)
        by_part = by_part[: len(parts)]
        gathered = iter(
            [
                cast(torch.Tensor, _Gathered.apply(part, of_part, self._rank, self._group))
                for part, of_part in zip(parts, by_part, strict=True)
            ]
        )
        context = ExitStack()
        if trains:
            context.enter_context(drawing_from(seeds[0], device))
        # A jagged tensor's lengths count samples, and come after its values.
        self._calls.append((by_part[isinstance(leaves[0], JaggedTensor)], context))
        return _mapped((args, kwargs), lambda leaf: _with_tensors(leaf, gathered))

    def _described(
        self, given: Mapping[Any, Any], device: torch.device
    ) -> tuple[list[Any], str | UnsupportedError]:
        """Return the leaves to join, and a text of what must be equal on all ranks, or an error."""
        leaves, words = [], []
        for name, leaf in _leaves(given):
            if _is_leaf(leaf):
                leaves.append(leaf)
                words.append(f"{name}: {_leaf_in_words(leaf)}")
            elif _is_unknown(leaf):
                return [], UnsupportedError(
                    f"{self._name!r} is given a {_kind_of(leaf)}, which can't be joined with "
                    "other ranks'; give tensors whose first dimension is the batch, KeyedTensors, "
                    "JaggedTensors, or lists, dicts or dataclasses of them"
                )
        if not leaves:
            return [], UnsupportedError(
                f"{self._name!r} is called without tensors, so it has no batch"
            )
        return leaves, f"{', '.join(words)} {state_in_words(device.type)}"

    def _of_ranks(self, numbers: Sequence[int], device: torch.device) -> list[list[int]]:
        """Gather equally many numbers from each rank, by place."""
        if not numbers:
            return []
        own = torch.tensor(numbers, device=device)
        of_ranks = own.new_empty(self._num_ranks * own.numel())
        dist.all_gather_single(of_ranks, own, group=self._group)
        return of_ranks.view(self._num_ranks, -1).t().tolist()

    def _after(self, _: nn.Module, __: tuple[Any, ...], output: Any) -> Any:
        """Take this rank's rows; in the backward, gather their gradients."""
        if not self._calls:
            # The call failed before the module's forward.
            return None
        sizes, call = self._calls.pop()
        call.close()

        def own_rows(rows: Any) -> torch.Tensor:
            if not isinstance(rows, torch.Tensor) or rows.shape[:1] != (sum(sizes),):
                raise UnsupportedError(
                    f"{self._name!r} gives a {_kind_of(rows)} for {sum(sizes)} samples; give "
                    "tensors whose first dimension is the batch, or lists, dicts or dataclasses of "
                    "them"
                )
            return cast(torch.Tensor, _OwnRows.apply(rows, sizes, self._rank, self._group))

        return _mapped(output, own_rows, is_leaf=_is_result)


_NUM_SIZES = 30
"""The number of sizes in the first message."""

_JOINED = "a module that TensorParallelDense has split"


class _Gathered(torch.autograd.Function):
    """All ranks' rows. Each rank has the whole gradient of the mean of their losses."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, sizes: list[int], rank: int, group: dist.ProcessGroup
    ) -> torch.Tensor:
        ctx.sizes, ctx.rank = sizes, rank
        return _gather(rows, sizes, group)

    @staticmethod
    @differentiable_once(_JOINED)
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        own = grads[0].split(ctx.sizes)[ctx.rank]
        return own * len(ctx.sizes), None, None, None


class _OwnRows(torch.autograd.Function):
    """This rank's rows, whose loss is a share of the group's mean."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, sizes: list[int], rank: int, group: dist.ProcessGroup
    ) -> torch.Tensor:
        ctx.sizes, ctx.group = sizes, group
        return rows.split(sizes)[rank].clone()

    @staticmethod
    @differentiable_once(_JOINED)
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return _gather(grads[0], ctx.sizes, ctx.group) / len(ctx.sizes), None, None, None


def _gather(rows: torch.Tensor, sizes: Sequence[int], group: dist.ProcessGroup) -> torch.Tensor:
    """Gather all ranks' rows, one rank after another."""
    largest = max(sizes)
    own = rows.contiguous()
    if own.shape[0] < largest:
        padding = own.new_zeros(largest - own.shape[0], *own.shape[1:])
        own = torch.cat([own, padding])
    gathered = own.new_empty(len(sizes) * largest, *own.shape[1:])
    dist.all_gather_single(gathered, own, group=group)
    if min(sizes) == largest:
        return gathered
    parts = gathered.split(largest)
    return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])


def _is_leaf(given: Any) -> bool:
    return isinstance(given, KeyedTensor | JaggedTensor) or (
        isinstance(given, torch.Tensor) and given.dim() > 0
    )


def _leaves(given: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield everything in lists, tuples, dicts and dataclasses, or given outside them, by name."""
    contents = None if _is_leaf(given) else _contents(given)
    if contents is None:
        yield name, given
        return
    for key, part in contents:
        yield from _leaves(part, f"{name}.{key}" if name else str(key))


def _contents(given: Any) -> list[tuple[Any, Any]] | None:
    """Return a container's parts by key, place or field; `None` for anything else."""
    if isinstance(given, MutableMapping):
        return list(given.items())
    if isinstance(given, list | tuple):
        return list(enumerate(given))
    if is_dataclass(given) and not isinstance(given, type):
        names = [part.name for part in fields(given)]
        return [(name, getattr(given, name)) for name in names if hasattr(given, name)]
    return None


def _is_unknown(given: Any) -> bool:
    """Return whether an object that is no container holds values of a rank's samples."""
    if isinstance(given, torch.Tensor):
        return given.is_floating_point()
    if isinstance(given, Iterator | KeyedJaggedTensor):
        return True
    if isinstance(given, Mapping | Set | deque):
        held = list(given.values() if isinstance(given, Mapping) else given)
    elif callable(given) or not hasattr(given, "__dict__"):
        return False
    else:
        held = list(vars(given).values())
    return any(_is_leaf(part) or isinstance(part, torch.Tensor) for _, part in _leaves(held))


def _kind_of(given: Any) -> str:
    shape = f" {tuple(given.shape)}" if isinstance(given, torch.Tensor) else ""
    return f"{type(given).__name__}{shape}"


def _is_result(given: Any) -> bool:
    if isinstance(given, torch.Tensor | KeyedTensor | JaggedTensor):
        return True
    return _contents(given) is None and _is_unknown(given)


def _mapped(
    given: Any, function: Callable[[Any], Any], is_leaf: Callable[[Any], bool] = _is_leaf
) -> Any:
    """Copy lists, tuples, dicts and dataclasses with mapped leaves; return anything else itself.

    A caller may get results through these objects.
    """
    if is_leaf(given):
        return function(given)
    contents = _contents(given)
    if contents is None:
        return given
    parts = {key: _mapped(part, function, is_leaf) for key, part in contents}
    if all(parts[key] is part for key, part in contents):
        return given
    if isinstance(given, list | tuple):
        values = parts.values()
        return type(given)(*values) if hasattr(given, "_fields") else type(given)(values)
    mapped = copy(given)
    for key, part in parts.items():
        if isinstance(mapped, MutableMapping):
            mapped[key] = part
        else:
            # As a frozen dataclass's own `__init__` does.
            object.__setattr__(mapped, key, part)
    return mapped


def _tensors_of(leaf: Any) -> list[torch.Tensor]:
    """Return a leaf's tensors, which have a row per sample, or per value."""
    if isinstance(leaf, torch.Tensor):
        return [leaf]
    if isinstance(leaf, KeyedTensor):
        return [leaf.values()]
    weights = leaf.weights_or_none()
    return [leaf.values(), leaf.lengths(), *([] if weights is None else [weights])]


def _leaf_in_words(leaf: Any) -> str:
    words = [in_words(tensor) for tensor in _tensors_of(leaf)]
    if isinstance(leaf, KeyedTensor):
        words.append(str(dict(zip(leaf.keys(), leaf.length_per_key(), strict=True))))
    joined = ", ".join(words)
    return joined if isinstance(leaf, torch.Tensor) else f"{type(leaf).__name__}({joined})"


def _with_tensors(leaf: Any, tensors: Iterator[torch.Tensor]) -> Any:
    """Rebuild a leaf with other tensors in place of `_tensors_of`'s."""
    if isinstance(leaf, torch.Tensor):
        return next(tensors)
    if isinstance(leaf, KeyedTensor):
        return KeyedTensor(leaf.keys(), leaf.length_per_key(), next(tensors))
    values, lengths = next(tensors), next(tensors)
    weights = None if leaf.weights_or_none() is None else next(tensors)
    return JaggedTensor(values, weights=weights, lengths=lengths)
