"""Dense parts: modules without tables, their ranks, equal weights, and meshes with copies."""

import functools
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ParallelStyle
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakTensorKeyDictionary
from torchrec.distributed.types import ShardedModule, ShardingEnv
from torchrec.optim.clipping import GradientClippingOptimizer
from torchrec.optim.keyed import CombinedOptimizer
from torchrec.optim.optimizers import in_backward_optimizer_filter

from torchrec_2dsp._compat.ddp import (
    DataParallelWrapper,
    DefaultDataParallelWrapper,
    DistributedModelParallel,
    FrozenDense,
    check_embeddings,
    data_parallel_module,
    data_parallel_wrapper,
    ddp_params,
    refuse_unreduced,
    wrapped_module,
)
from torchrec_2dsp._compat.tensors import (
    Place,
    full_name,
    has_gradient_hooks,
    held_weakly,
    own_params,
    put_in_later,
    unknown_params,
)
from torchrec_2dsp._compat.torchrec import clipped_as_whole, in_backward_optimizers
from torchrec_2dsp.comms.alarm import agreeing
from torchrec_2dsp.comms.collectives import broadcast_first
from torchrec_2dsp.comms.groups import own_mesh
from torchrec_2dsp.errors import ConfigError, InputError, TwoDError, UnsupportedError
from torchrec_2dsp.mesh import divisors

Backward = TypeVar("Backward", bound=Callable[..., Any])


def dense_parts(
    model: nn.Module, wrapper: str, name: str = "", *, apart: tuple[type[nn.Module], ...] = ()
) -> Iterator[tuple[str, nn.Module]]:
    """Yield the largest modules that hold parameters and no tables, by name.

    For a container without a forward, such as a `ModuleList`, these are its children.

    Raises:
        ConfigError: a module that contains tables, or one of ``apart``, holds a parameter itself;
            a sharded module trains position weights; or `check_stepped_later` raises.
    """
    if not name:
        check_stepped_later(model, wrapper)
        _check_named(model, wrapper)
    is_part = isinstance(model, apart)
    holds_params = any(True for _ in model.parameters(recurse=False))
    if not any(isinstance(part, (ShardedModule, *apart)) for part in model.modules()):
        is_part = has_forward(model) or holds_params
    if is_part:
        if any(True for _ in model.parameters()):
            yield name, model
        return
    if isinstance(model, ShardedModule):
        for param, weight in in_backward_optimizer_filter(model.named_parameters()):
            if weight.requires_grad:
                raise ConfigError(
                    f"module {name!r} trains {param!r} beside its tables, which {wrapper} can't; "
                    "run the dense part in DDP, which is the default"
                )
        return
    for param, _ in model.named_parameters(recurse=False):
        beside = " or ".join(["tables", *(f"a {kind.__name__}" for kind in apart)])
        raise ConfigError(
            f"{f'module {name!r}' if name else 'the model'} holds the parameter {param!r} beside "
            f"{beside}, which {wrapper} can't shard; put it into a module of its own"
        )
    for child_name, child in model.named_children():
        child_path = f"{name}.{child_name}" if name else child_name
        yield from dense_parts(child, wrapper, child_path, apart=apart)


def _check_named(model: nn.Module, wrapper: str) -> None:
    """Refuse a child with the name that TorchRec, for DDP, takes off the names in state dicts."""
    if isinstance(getattr(model, "module", None), nn.Module):
        raise ConfigError(
            f"the model's part 'module' has DDP's name for it, which {wrapper} doesn't use, and "
            "TorchRec leaves out of state dicts; rename it"
        )


def has_forward(module: nn.Module) -> bool:
    """Return whether a module can be called, unlike a `ModuleList` or `ParameterList`."""
    return getattr(module.forward, "__func__", None) is not nn.Module.forward


def check_stepped_later(model: nn.Module, wrapper: str) -> None:
    """Refuse dense parameters with optimizers in the backward, which a wrapper doesn't run."""
    for name, param in model.named_parameters():
        if in_backward_optimizers(param) is not None:
            raise ConfigError(
                f"{name!r} has an optimizer in the backward, which {wrapper} doesn't run; leave "
                "apply_optimizer_in_backward to tables, and give it to the dense optimizer"
            )


def check_untied(parts: Mapping[str, nn.Module], wrapper: str) -> None:
    """Refuse a parameter in two parts, which would be sharded as two."""
    owners: dict[nn.Parameter, str] = {}
    for name, part in parts.items():
        for param in part.parameters():
            if owners.setdefault(param, name) != name:
                raise ConfigError(
                    f"{owners[param]!r} and {name!r} share a parameter, which {wrapper} would "
                    "shard as two; put them into one module that holds no tables, or untie them"
                )


def check_unhooked(params: Iterable[tuple[str, nn.Parameter]], wrapper: str) -> None:
    """Refuse named parameters with hooks on their gradients, which wouldn't run on a shard."""
    for name, param in params:
        if has_gradient_hooks(param):
            raise ConfigError(
                f"{name!r} has a hook on its gradient, which {wrapper} doesn't run on the batch's "
                "whole gradient; change it after the backward, before the optimizer's step"
            )


def refuse_later_changes(model: nn.Module, wrapper: str, apart: Iterable[nn.Module] = ()) -> None:
    """Raise before a forward with weights that FSDP2 doesn't have, or with hooks it doesn't run.

    They have been put into the sharded model later. All but the modules ``apart`` is FSDP2's; hooks
    that run after a gradient is accumulated see the whole gradient.
    """
    apart, places = list(apart), dict[int, Place]()

    def check(*_: object) -> None:
        trains = torch.is_grad_enabled()
        if unknown_params(model, places, apart):
            # FSDP2 gathers a weight for the first time, or a checkpoint has assigned new shards.
            units = [unit for unit in model.modules() if isinstance(unit, FSDPModule)]
            places.clear()
            places.update((id(place[-1]), place) for unit in units for place in own_params(unit))
            holders = {module for module, _, _ in places.values()}
            for place in unknown_params(model, places, apart):
                # In FSDP2's modules its own weights replace others, including frozen ones.
                if place[0] in holders or (trains and place[-1].requires_grad):
                    result = f"{wrapper} neither gathers it nor adds its gradients up"
                    raise put_in_later(place, model, result)
        for place in places.values() if trains else ():
            if has_gradient_hooks(place[-1], or_after=False):
                check_unhooked([(full_name(place, model), place[-1])], wrapper)

    # Before FSDP2's own hook, in case the whole model is a unit.
    model.register_forward_pre_hook(cast(Any, torch.compiler.disable)(check), prepend=True)


def refuse_replaced(before: Mapping[str, nn.Parameter], model: nn.Module, wrapper: str) -> None:
    """Raise in a backward or an optimizer's step with parameters from before the sharding.

    A loss may have collected them then, for a penalty, or an optimizer; it would train nothing.
    """
    own_ids = {id(param) for param in model.parameters()}

    def refuse(name: str, _: torch.Tensor) -> None:
        raise UnsupportedError(
            f"{name!r} got a gradient as it was before {wrapper} sharded the model, and nothing "
            "trains that parameter now; collect parameters, such as a penalty's, from the sharded "
            "model"
        )

    for name, param in before.items():
        if param.requires_grad and id(param) not in own_ids:
            param.register_post_accumulate_grad_hook(functools.partial(refuse, name))
            _REPLACED[param] = name, wrapper
    _watch_steps()


_REPLACED = WeakTensorKeyDictionary()
"""Each parameter that was replaced and is still held somewhere: its name, and by which wrapper."""


@functools.cache
def _watch_steps() -> None:
    """Check all optimizers of the process before each step, from now on."""

    def check(optimizer: Optimizer, *_: object) -> None:
        # Usually nothing holds any.
        groups = optimizer.param_groups if _REPLACED else ()
        for param in (param for group in groups for param in group["params"]):
            if param in _REPLACED:
                name, wrapper = _REPLACED[param]
                raise UnsupportedError(
                    f"an optimizer has {name!r} as it was before {wrapper} sharded the model, and "
                    "would train nothing; build it of the sharded model's dense_parameters()"
                )

    register_optimizer_step_pre_hook(cast(Any, torch.compiler.disable)(check))


def group_of(env: ShardingEnv) -> dist.ProcessGroup:
    """Return the ranks over which a wrapper runs the dense part."""
    if env.process_group is None:
        raise ConfigError("the model has no process group; give its environment one")
    return env.process_group


def broadcast_weights(part: nn.Module, group: dist.ProcessGroup) -> None:
    """Give all ranks the first rank's weights.

    Shards of different weights would form a model that nobody has initialised.

    Collectives:
        A broadcast per parameter and buffer.
    """
    for tensor in (*part.parameters(), *part.buffers()):
        broadcast_first(tensor, group)


def draw_seed() -> int:
    """Draw a seed from this rank's generator, for `drawing_from` on a group's ranks."""
    return int(torch.randint(2**62, ()))


@contextmanager
def drawing_from(seed: int, device: torch.device) -> Iterator[None]:
    """Draw random numbers from a seed that a group's ranks share; then restore the generators."""
    with torch.random.fork_rng([] if device.type == "cpu" else [device]):
        torch.manual_seed(seed)
        yield


def in_words(tensor: torch.Tensor) -> str:
    """Return a tensor's type, and its shape except for the number of samples."""
    dims = ", ".join(["batch", *map(str, tensor.shape[1:])])
    return f"{tensor.dtype}[{dims}]".removeprefix("torch.")


def state_in_words(device_type: str) -> str:
    """Return the caller's state, which determines activations' types and what is kept."""
    gradients = "with gradients" if torch.is_grad_enabled() else "without gradients"
    if not torch.is_autocast_enabled(device_type):
        return gradients
    dtype = str(torch.get_autocast_dtype(device_type)).removeprefix("torch.")
    return f"{gradients}, under autocast to {dtype}"


def check_called_alike(
    module: str, calls: Sequence[str | TwoDError], group: dist.ProcessGroup, group_name: str
) -> None:
    """Raise if a group's ranks call a module differently, in words, or one of them can't."""
    ranks = dist.get_process_group_ranks(group)
    for rank, call in zip(ranks, calls, strict=True):
        if isinstance(call, TwoDError):
            raise type(call)(f"{call} (found on rank {rank})")
        if call != calls[0]:
            raise InputError(
                f"rank {rank} calls {module} with {call}, but rank {ranks[0]} of its {group_name} "
                f"with {calls[0]}; give all ranks of a {group_name} tensors of one type and shape, "
                "but for the number of samples, and call it on all of them alike"
            )


class HookedDDP(DataParallelWrapper):
    """Runs one model's dense part in DDP, with a hook that sends gradients in another way.

    Subclasses add `hook_into`, and describe the ``settings`` that must be equal on all ranks.
    """

    def __init__(self, settings: str, **of_ddp: Any) -> None:
        self._settings = settings
        self._wrapper = DefaultDataParallelWrapper(**of_ddp)
        self._has_model = False

    def wrap(self, dmp: DistributedModelParallel, env: ShardingEnv, device: torch.device) -> None:
        """Wrap the dense part; TorchRec calls it.

        Collectives:
            An agreement on the settings, DDP's parameter broadcast, and `hook_into`'s.
        """
        group, name = group_of(env), type(self).__name__
        with agreeing(group) as facts:
            self.check_free()
            check_stepped_later(wrapped_module(dmp), name)
            check_embeddings(wrapped_module(dmp), name)
            facts[f"the settings of {name}"] = self._settings
        self._has_model = True
        self._wrapper.wrap(dmp, env, device)
        ddp = data_parallel_module(dmp)
        if ddp is not None:
            self.hook_into(ddp, group, device)
        # For models of TorchRec's own class; this package's class does so anyway.
        refuse_unreduced(dmp)

    @abstractmethod
    def hook_into(
        self, ddp: DistributedDataParallel, group: dist.ProcessGroup, device: torch.device
    ) -> None:
        """Register a hook for all gradients."""

    def check_free(self) -> None:
        """Raise if this wrapper already has a model."""
        if self._has_model:
            raise ConfigError(
                f"this {type(self).__name__} has a model already; make another one, because it "
                "keeps that model's gradients"
            )


def fitting_wrapper(
    wrapper: DataParallelWrapper, model: DistributedModelParallel, group: dist.ProcessGroup
) -> DataParallelWrapper:
    """Return the model's wrapper, or `FrozenDense` instead of DDP if only tables are trained.

    Collectives:
        With DDP, an agreement.
    """
    if not isinstance(wrapper, DefaultDataParallelWrapper | HookedDDP):
        return wrapper
    with agreeing(group) as facts:
        is_frozen = FrozenDense.fits(model)
        facts["whether all dense layers are frozen"] = str(is_frozen)
    return FrozenDense() if is_frozen else wrapper


def at_backwards(ddp: DistributedDataParallel, method: Callable[[bool], None]) -> None:
    """Call a method once in a batch's backward, before any gradient is accumulated.

    Until then a loop may call ``zero_grad()``. The method's argument tells whether DDP reduces the
    batch's gradients.
    """
    begin, pending = held_weakly(method), list[bool]()

    def note(module: nn.Module, _: object) -> None:
        if torch.is_grad_enabled():
            pending[:] = [ddp.require_backward_grad_sync]

    def start(_: torch.Tensor) -> None:
        if pending:
            begin(pending.pop())

    ddp.register_forward_pre_hook(note)
    for param in ddp_params(ddp).values():
        param.register_hook(start)


def have_gradients(params: Iterable[torch.Tensor]) -> bool:
    """Return whether any parameter has a nonzero gradient."""
    return any(param.grad is not None and bool(param.grad.any()) for param in params)


def styles_by_part(
    plan: Mapping[str, ParallelStyle],
    parts: Mapping[str, nn.Module],
    unknown: str,
    *,
    inside: bool = False,
) -> dict[str, dict[str, ParallelStyle]]:
    """Sort styles by part, with module names relative to it; patterns name modules in the model.

    With ``inside``, a pattern can't match a part itself.

    Raises:
        ConfigError: a pattern matches nothing; ``unknown`` is the message, with a place for it.
    """
    styles: dict[str, dict[str, ParallelStyle]] = {}
    for pattern, style in plan.items():
        modules = [
            (part_name, name)
            for part_name, part in parts.items()
            for name, _ in part.named_modules()
            if (name or not inside)
            and fnmatchcase(f"{part_name}.{name}" if name else part_name, pattern)
        ]
        if not modules:
            raise ConfigError(unknown.replace("{}", repr(pattern), 1))
        for part_name, name in modules:
            styles.setdefault(part_name, {})[name] = style
    return styles


def check_copies_fit(wrapper: str, num_copies: int, num_units: int, units: str) -> None:
    """Refuse a number of copies that doesn't divide the ranks, or groups of them."""
    if num_units % num_copies:
        counts = ", ".join(map(str, divisors(num_units)))
        raise ConfigError(
            f"{wrapper}(num_copies={num_copies}) doesn't divide {num_units} {units}; use one of "
            f"{counts}"
        )


def copies_mesh(ranks: torch.Tensor, device_type: str, axes: tuple[str, ...] = ()) -> DeviceMesh:
    """Build a mesh of copies, each sharded over its ranks: ``ranks[copy, shard, *axes]``.

    two copies on four ranks:   rank 0: first half    rank 1: second half    inside a copy: gathers
                                rank 2: first half    rank 3: second half    between: gradients

    Collectives:
        Creates process groups, on all the world's ranks.
    """
    if len(ranks) == 1:
        return own_mesh(ranks[0], device_type, ("shard", *axes))
    return own_mesh(ranks, device_type, ("replicate", "shard", *axes))


def differentiable_once(what: str) -> Callable[[Backward], Backward]:
    """Decorate a function's backward that has no graph, to refuse a backward through it.

    torch's `once_differentiable` can't name ``what``, and only checks whether the incoming gradient
    has a graph, which a `DTensor` may have lost on the way.
    """

    def decorate(backward: Backward) -> Backward:
        @functools.wraps(backward)
        def run(ctx: Any, *gradients: Any) -> Any:
            with torch.no_grad():
                results = backward(ctx, *gradients)
            if not torch.is_grad_enabled():
                return results
            parts = results if isinstance(results, tuple) else (results,)
            return tuple(None if part is None else _undifferentiable(part, what) for part in parts)

        return cast(Backward, run)

    return decorate


def _undifferentiable(gradient: torch.Tensor, what: str) -> Any:
    return _Undifferentiable.apply(gradient.detach().requires_grad_(), what)


class _Undifferentiable(torch.autograd.Function):
    """A gradient that can't be differentiated."""

    @staticmethod
    def forward(ctx: Any, gradient: torch.Tensor, what: str) -> torch.Tensor:
        ctx.what = what
        # The receiver may write into it, which torch refuses for a view.
        return gradient.clone()

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> Any:
        raise UnsupportedError(
            f"a second derivative (create_graph=True) through {ctx.what} isn't computed; "
            "leave terms that need it, such as gradient penalties, out of the loss"
        )


def wrapped_optimizers(optimizer: Optimizer) -> list[Optimizer]:
    """Return the optimizers that this one holds and calls."""
    if isinstance(optimizer, CombinedOptimizer):
        return [part for _, part in optimizer.optimizers]
    return [value for value in vars(optimizer).values() if isinstance(value, Optimizer)]


def check_clipping(model: DistributedModelParallel, optimizer: Optimizer) -> None:
    """Refuse TorchRec's clipping by norm where ranks have parts of the dense gradients."""
    tables = {id(param) for param in model.fused_optimizer.params.values()}
    is_staged = hasattr(data_parallel_wrapper(model), "clip_grad_norm_")
    is_clipping = isinstance(optimizer, GradientClippingOptimizer)
    clipped = clipped_as_whole(optimizer) if is_clipping else []
    dense = [param for param in clipped if id(param) not in tables]
    if any(is_staged or isinstance(param, DTensor) for param in dense):
        remedy = "PipelinedDense.clip_grad_norm_" if is_staged else "torch.nn.utils.clip_grad_norm_"
        raise ConfigError(
            "TorchRec's GradientClippingOptimizer wouldn't clip the dense gradients by their norm, "
            f"because each rank has a part of them; call {remedy} before each step, or clip by "
            "value"
        )
    for part in wrapped_optimizers(optimizer):
        check_clipping(model, part)
