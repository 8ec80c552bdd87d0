"""Adapters to torch's internals for tensors, their memory and running backwards, and parameters."""

from collections.abc import Callable, Container, Iterable, Iterator
from typing import Any, TypeVar, cast
from weakref import WeakMethod

import torch
from torch import Tensor, nn
from torch._C import _current_graph_task_id, _will_engine_execute_node
from torch._C._autograd import _top_saved_tensors_default_hooks
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint
from torchrec.distributed.types import ShardedModule

from torchrec_2dsp.errors import UnsupportedError

T = TypeVar("T")

Place = tuple[nn.Module, str, nn.Parameter]
"""A module, and one of its parameters by name."""


def tensor_without_storage(
    kind: type[Tensor], shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> Any:
    """Return a tensor of this subclass, which provides its numbers in `__torch_dispatch__`."""
    return Tensor._make_wrapper_subclass(kind, shape, dtype=dtype, device=device)  # type: ignore[attr-defined]


class Unwritten(TorchFunctionMode):
    """Leaves the first ``num_zeros`` zeros that are created inside the context unwritten.

    FBGEMM creates a kernel's weights first. A host only allocates written memory, so weights that
    are replaced before they are written cost none there.
    """

    _num_zeros = 0

    def __init__(self, num_zeros: int) -> None:
        super().__init__()
        self._num_zeros = num_zeros

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.zeros and args[:1] == (self._num_zeros,):
            func, self._num_zeros = torch.empty, 0
        return func(*args, **(kwargs or {}))


def held_weakly(method: Callable[[T], None]) -> Callable[[T], None]:
    """Return a hook that calls a method while its object lives.

    Objects held by a parameter's hooks may live as long as the process, process groups included.
    """
    reference = WeakMethod(method)

    def call(value: T) -> None:
        if (alive := reference()) is not None:
            alive(value)

    return call


def has_gradient(leaf: Tensor) -> bool:
    """Return whether a leaf has its own gradient; its class may show another tensor's."""
    own: Any = Tensor.grad
    return own.__get__(leaf) is not None


def take_gradient(leaf: Tensor) -> Tensor | None:
    """Return a leaf's own gradient, and clear it; its class may show another tensor's."""
    own: Any = Tensor.grad
    gradient = own.__get__(leaf)
    own.__set__(leaf, None)
    return gradient


def without_base(tensor: Tensor) -> Tensor:
    """Return a tensor on the same memory that isn't a view: a view's hooks end if it is changed.

    If a program writes to a view in place, autograd leaves its former node out of the graph.
    """
    return cast(Tensor, _Alias.apply(tensor)) if tensor._is_view() else tensor


class _Alias(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


def tied(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return tensors on the same memory of which each gets a gradient, or zeros, if one does."""
    return list(cast(Iterable[Tensor], _Tied.apply(*tensors)))


class _Tied(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(tensor.detach() for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        return grads


def has_gradient_hooks(leaf: Tensor, *, or_after: bool = True) -> bool:
    """Return whether others' code runs on a leaf's gradient, or after it is accumulated."""
    return bool(leaf._backward_hooks or (or_after and leaf._post_accumulate_grad_hooks))


def is_checkpointed() -> bool:
    """Return whether `torch.utils.checkpoint` will recompute what a graph here would save."""
    hooks = _top_saved_tensors_default_hooks(False)
    return hooks is not None and hooks[0].__module__ == checkpoint.__module__


def running_backward() -> int:
    """Return the number of the backward running on this thread, which is unique.

    It is negative outside a backward.
    """
    return _current_graph_task_id()


class Upstream:
    """The graph nodes before a tensor, without the tensor."""

    def __init__(self, tensor: Tensor) -> None:
        node = tensor.grad_fn
        self._nodes = [] if node is None else [before for before, _ in node.next_functions]

    def is_reached(self) -> bool:
        """Return whether the running backward continues there; `torch.autograd.grad` may not."""
        return any(node is not None and _will_engine_execute_node(node) for node in self._nodes)


def unknown_params(
    model: nn.Module, known_ids: Container[int], apart: Iterable[nn.Module] = ()
) -> list[Place]:
    """Find parameters whose `id` isn't known, in the few microseconds that a step can spare.

    Parameters of sharded tables, and of the modules ``apart``, are left out.
    """
    unknown, modules = list[Place](), [model]
    visited: set[nn.Module | None] = {None, *apart}
    for module in modules:
        if module in visited or isinstance(module, ShardedModule):
            continue
        visited.add(module)
        params, children = _contents_of(module)
        modules += children
        for name, param in params:
            if id(param) not in known_ids and param is not None:
                unknown.append((module, name, param))
    return unknown


def _contents_of(module: nn.Module) -> tuple[Iterable[Any], Iterable[Any]]:
    return module._parameters.items(), module._modules.values()


def full_name(place: Place, model: nn.Module) -> str:
    """Return a parameter's name in the model."""
    path = next((path for path, module in model.named_modules() if module is place[0]), "")
    return f"{path}.{place[1]}" if path else place[1]


def put_in_later(place: Place, model: nn.Module, result: str) -> UnsupportedError:
    """Return the error about a parameter that was put into a sharded model."""
    return UnsupportedError(
        f"{full_name(place, model)!r} was put into the model after it was sharded, so {result}; "
        "change layers before, write into weights in place (copy_ under no_grad()), or freeze what "
        "isn't trained"
    )


def own_params(unit: FSDPModule) -> Iterator[Place]:
    """Yield the parameters that FSDP2 has for a unit: each one's shard, and its gathered weight."""
    state: FSDPState = unit._get_fsdp_state()
    for group in state._fsdp_param_groups:
        for param in group.fsdp_params:
            yield from _forms(param)


def _forms(param: FSDPParam) -> Iterator[Place]:
    module, name = param._module_info.module, param._module_info.param_name
    # The last two come and go.
    for form in ("sharded_param", "_unsharded_param", "_sharded_post_forward_param"):
        own: nn.Parameter | None = getattr(param, form, None)
        if own is not None:
            yield module, name, own
