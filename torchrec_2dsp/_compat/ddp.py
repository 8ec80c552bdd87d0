"""Adapters to torch's DDP, its first step and its buckets' order.

DDP puts gradients into buckets, and a number's place in its bucket determines the order in which
the ranks' numbers are added. A run's first steps use the parameters' order, later ones the order
in which gradients arrived. A resumed run must start with the latter to compute the same bits.
"""

from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, cast
from weakref import WeakKeyDictionary, WeakSet, ref

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import Variable
from torch.distributed.utils import _sync_module_states
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle
from torchrec.distributed.model_parallel import (
    DataParallelWrapper,
    DefaultDataParallelWrapper as DefaultDataParallelWrapper,
    DistributedModelParallel,
)
from torchrec.distributed.types import ShardedModule, ShardingEnv

from torchrec_2dsp._compat.tensors import put_in_later, running_backward, unknown_params
from torchrec_2dsp.errors import SyncError, TwoDError, UnsupportedError

_STARTED_IN: "WeakKeyDictionary[DistributedDataParallel, list[str]]" = WeakKeyDictionary()
"""The orders given to `start_in_order`, in which DDP numbers its parameters afterwards."""

_FAILED: "WeakSet[nn.Module]" = WeakSet()
"""The DDP modules whose last backward ended in a hook's error."""

_WATCHED: "WeakSet[nn.Module]" = WeakSet()
"""The DDP modules that `refuse_unreduced` has seen."""

_UNNAMED: "WeakKeyDictionary[DistributedDataParallel, list[tuple[int, list[torch.Tensor]]]]" = (
    WeakKeyDictionary()
)
"""The buckets, with their parameters, that the first step after `start_in_order` will reduce."""

_BROADCAST_BYTES = 250 * 2**20
"""Weights that are broadcast at once, as in DDP."""

_BUILTIN_HOOK = "BuiltinCommHookType."

_Hook = Callable[[Any, dist.GradBucket], torch.futures.Future[torch.Tensor]]
"""Reduces a bucket's gradients for DDP."""


def gradient_order(ddp: DistributedDataParallel) -> list[str] | None:
    """Return DDP's parameter names in bucket order.

    Returns `None` until DDP has settled on an order, which takes three steps.
    """
    if ddp in _STARTED_IN:
        return _STARTED_IN[ddp]
    names = _names(ddp)
    params, _ = ddp._build_params_for_reducer()
    if ddp.find_unused_parameters and not ddp.static_graph:
        return [names[id(param)] for param in params]
    order = str(ddp._get_ddp_logging_data().get("rebuilt_per_bucket_param_indices", ""))
    indices = [int(index) for index in order.replace(",", " ").split()]
    return [names[id(params[index])] for index in indices] or None


def start_in_order(ddp: DistributedDataParallel, order: list[str] | None) -> bool:
    """Make DDP use this order from now on, or restart for `None`.

    Call it on all ranks, between steps.

    Returns:
        True if DDP does. It can't with other parameters, mixed precision or a Python reducer.

    Collectives:
        With an order, a broadcast of the buckets.
    """
    params, is_sparse = ddp._build_params_for_reducer()
    names = _names(ddp)
    if ddp.mixed_precision is not None or ddp._use_python_reducer:
        return False
    if order is not None:
        places = {names[id(param)]: place for place, param in enumerate(params)}
        if sorted(order) != sorted(places):
            return False
        params = [params[places[name]] for name in order]
        is_sparse = [is_sparse[places[name]] for name in order]
    hook_name = str(ddp._get_ddp_logging_data().get("comm_hook", ""))
    # DDP builds its reducer in this way when it is unpickled.
    debug_names = ddp._build_debug_param_to_name_mapping(params)
    # Not by the limit shown by `let_compile`.
    shown, ddp.bucket_bytes_cap = ddp.bucket_bytes_cap, ddp._bucket_config.bucket_bytes_cap
    ddp._ddp_init_helper(params, is_sparse, debug_names, ddp.static_graph)
    ddp.bucket_bytes_cap = shown
    if ddp.static_graph:
        ddp._static_graph_delay_allreduce_enqueued = False
        assert ddp.logger is not None
        _make_static(ddp.reducer, ddp.logger)
    hooks, ddp._comm_hooks = ddp._comm_hooks, []
    for hook, state in hooks:
        ddp.register_comm_hook(state, hook)
    if hook_name.startswith(_BUILTIN_HOOK):
        kind = getattr(dist.BuiltinCommHookType, hook_name.removeprefix(_BUILTIN_HOOK))
        ddp._register_builtin_comm_hook(kind)
    _STARTED_IN.pop(ddp, None)
    _UNNAMED.pop(ddp, None)
    _FAILED.discard(ddp)
    if order is not None:
        _settle(ddp.reducer)
        _STARTED_IN[ddp] = list(order)
    if order is not None and ddp.static_graph:
        _UNNAMED[ddp] = _buckets_of(ddp.reducer)
    return True


class NamedBucket:
    """A bucket with the right number and parameters.

    If a static graph's first step has several buckets, as after `start_in_order`, torch gives
    each of them the first one's number and parameters.
    """

    def __init__(self, ddp: DistributedDataParallel, bucket: dist.GradBucket) -> None:
        """Name the next reduced bucket; each must be named once."""
        self._bucket = bucket
        self._number, self._params = bucket.index(), bucket.parameters()
        self._is_last = bucket.is_last()
        if unnamed := _UNNAMED.get(ddp):
            self._number, self._params = unnamed.pop(0)
            self._is_last = not unnamed

    def index(self) -> int:
        """Return the bucket's number."""
        return self._number

    def parameters(self) -> list[torch.Tensor]:
        """Return the bucket's parameters."""
        return self._params

    def is_last(self) -> bool:
        """Return whether this is the step's last bucket."""
        return self._is_last

    def __getattr__(self, name: str) -> Any:
        return getattr(self._bucket, name)


def robust_hook(ddp: DistributedDataParallel, hook: _Hook) -> _Hook:
    """Return a hook that gets `NamedBucket`s, and after whose errors DDP can be used again.

    If a hook raises, on all ranks, the backward ends with buckets that DDP hasn't reduced, and
    DDP would keep waiting for them. The next forward with gradients gives it a new reducer.
    """
    reference = ref(ddp)  # DDP's reducer, which keeps the hook, lives outside Python.

    def reduce(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        running = reference()
        assert running is not None
        try:
            return hook(state, cast(dist.GradBucket, NamedBucket(running, bucket)))
        except TwoDError:
            _FAILED.add(running)
            raise

    def restart(module: nn.Module, _: object) -> None:
        if module in _FAILED and torch.is_grad_enabled():
            assert isinstance(module, DistributedDataParallel)
            start_in_order(module, None)

    ddp.register_forward_pre_hook(restart)
    return reduce


def _make_static(reducer: dist.Reducer, logger: dist.Logger) -> None:
    reducer._set_static_graph()
    logger._set_static_graph()


def _settle(reducer: dist.Reducer) -> None:
    """Make the reducer keep the parameter order that it was created with."""
    reducer._push_all_rebuilt_params()
    _rebuild(reducer)


def _rebuild(reducer: dist.Reducer) -> None:
    """Raise unless the last step is reduced; rebuild the buckets if that is due."""
    reducer._rebuild_buckets()


def _buckets_of(reducer: dist.Reducer) -> list[tuple[int, list[torch.Tensor]]]:
    """Return the number and parameters of each bucket."""
    buckets = reducer._get_zeros_like_grad_buckets()
    return [(bucket.index(), bucket.parameters()) for bucket in buckets]


def _names(ddp: DistributedDataParallel) -> dict[int, str]:
    return {id(param): name for name, param in ddp.module.named_parameters()}


def data_parallel_module(model: DistributedModelParallel) -> DistributedDataParallel | None:
    """Return the DDP module around everything that isn't sharded; `None` if everything is."""
    wrapped = model._dmp_wrapped_module
    return wrapped if isinstance(wrapped, DistributedDataParallel) else None


def wrapped_module(model: DistributedModelParallel) -> nn.Module:
    """Return the model with its sharded tables, without data-parallel wrappers."""
    return model._dmp_wrapped_module


def data_parallel_wrapper(model: nn.Module) -> DataParallelWrapper | None:
    """Return the model's data-parallel wrapper; `None` if TorchRec doesn't wrap it."""
    return getattr(model, "_data_parallel_wrapper", None)


def ddp_params(ddp: DistributedDataParallel) -> dict[str, nn.Parameter]:
    """Return the parameters whose gradients DDP reduces, by name."""
    return {
        name: param
        for name, param in ddp.module.named_parameters()
        if param.requires_grad and name not in ddp.parameters_to_ignore
    }


class FrozenDense(DataParallelWrapper):
    """Runs a dense part that trains nothing, which DDP refuses, with equal weights on all ranks."""

    @staticmethod
    def fits(model: DistributedModelParallel) -> bool:
        """Return whether a model has parameters beside its tables, and trains none of them."""
        in_tables = _names_of_tables(model)
        dense = [param for name, param in model.named_parameters() if name not in in_tables]
        return bool(dense) and not any(param.requires_grad for param in dense)

    def wrap(self, dmp: DistributedModelParallel, env: ShardingEnv, device: torch.device) -> None:
        """Give all ranks the first one's weights; TorchRec calls it.

        Collectives:
            The broadcast with which DDP begins.
        """
        assert env.process_group is not None
        model, in_tables = dmp._dmp_wrapped_module.to(device), _names_of_tables(dmp)
        if env.process_group.size() > 1:
            check_embeddings(model, "DDP")
        _sync_module_states(model, env.process_group, _BROADCAST_BYTES, 0, in_tables, False)
        _refuse_later_params(model, model, in_tables)


def _names_of_tables(model: DistributedModelParallel) -> set[str]:
    return set(DistributedModelParallel._sharded_parameter_names(model._dmp_wrapped_module))


def refuse_unreduced(model: DistributedModelParallel) -> None:
    """Raise if a model's DDP, if it has one, would let ranks diverge silently."""
    ddp = data_parallel_module(model)
    if ddp is not None and ddp not in _WATCHED:
        _WATCHED.add(ddp)
        if dist.get_world_size(ddp.process_group) > 1:
            check_embeddings(ddp.module, "DDP")
        _refuse_later_params(ddp, ddp.module, ddp.parameters_to_ignore)
        _refuse_unseen_loss(ddp)
        _refuse_unreduced_backward(ddp)


def let_compile(model: DistributedModelParallel) -> None:
    """Let `torch.compile` take a model whose DDP has small buckets.

    The compiler cuts graphs at DDP's buckets, and refuses any limit below DDP's first one.
    It sees a higher limit; the buckets stay unchanged.
    """
    ddp = data_parallel_module(model)
    if ddp is not None:
        ddp.bucket_bytes_cap = max(ddp.bucket_bytes_cap, dist._DEFAULT_FIRST_BUCKET_BYTES)


def check_embeddings(model: nn.Module, wrapper: str) -> None:
    """Refuse embeddings in dense parts with sparse gradients, or with rows that a forward scales.

    With gloo, DDP halves, or worse, other layers' gradients; DDP's replacements can't sum
    sparse gradients. Each rank would scale its own batch's rows, or a gathered copy of them.
    """
    in_tables = {
        id(module)
        for tables in model.modules()
        if isinstance(tables, ShardedModule)
        for module in tables.modules()
    }
    for name, module in model.named_modules():
        if not isinstance(module, nn.Embedding | nn.EmbeddingBag) or id(module) in in_tables:
            continue
        if module.max_norm is not None:
            raise UnsupportedError(
                f"{name!r} is an {type(module).__name__} with max_norm={module.max_norm}, by which "
                "each rank would scale other rows; leave max_norm out, or scale rows in the forward"
            )
        if module.sparse and module.weight.requires_grad:
            raise UnsupportedError(
                f"{name!r} is an {type(module).__name__} with sparse=True, whose gradients "
                f"{wrapper} doesn't add up over ranks; leave sparse=True out, or make it a table "
                "of an EmbeddingCollection or EmbeddingBagCollection"
            )


def _refuse_later_params(runner: nn.Module, model: nn.Module, ignored: Container[str]) -> None:
    """Raise before a forward that trains parameters of the model that DDP's buckets don't have."""
    frozen = [
        (name, param)
        for name, param in model.named_parameters()
        if not param.requires_grad and name not in ignored
    ]
    places = {id(place[-1]): place for place in unknown_params(model, {})}

    def check(*_: object) -> None:
        if not torch.is_grad_enabled():
            return
        for name, param in frozen:
            if param.requires_grad:
                raise UnsupportedError(
                    f"{name!r} was frozen when the model was sharded, so DDP doesn't add up its "
                    "gradients; shard the model anew to train it, or shard it with "
                    "requires_grad=True and give it to the optimizer when it is to be trained"
                )
        for place in unknown_params(model, places):
            if place[-1].requires_grad:
                raise put_in_later(place, model, "DDP doesn't add up its gradients")

    # Compiled, it would be recompiled in each step.
    runner.register_forward_pre_hook(cast(Any, torch.compiler.disable)(check))


def _refuse_unseen_loss(ddp: DistributedDataParallel) -> None:
    """Raise at the end of the first backward if DDP hasn't reduced its gradients by then.

    With a static graph DDP reduces when the first step's gradient reaches an output, and it
    only finds outputs in tuples, lists and dicts; or when `torch.autograd.grad` reaches one
    before. Otherwise ranks would diverge. Checkpointed layers have a backward inside that one.
    """
    hooks, reduced_in, is_over = list[RemovableHandle](), list[int](), list[bool]()
    if has_synced(ddp):
        return

    def watch(module: nn.Module, inputs: object, outputs: object) -> None:
        for output in tree_leaves(outputs):
            if isinstance(output, torch.Tensor) and output.requires_grad:
                output.register_hook(note)

    def note(grad: torch.Tensor) -> None:
        if not has_synced(ddp):
            reduced_in[:] = [running_backward()]
            is_over.clear()
            _at_end_of_backward(lambda: is_over.append(True))

    def check(backward: int) -> None:
        if has_synced(ddp) and (reduced_in == [backward] or not is_over):
            for hook in hooks:
                hook.remove()
        elif has_synced(ddp):
            raise UnsupportedError(
                "torch.autograd.grad reached the outputs before the first backward(), and DDP "
                "learned its graph there, so gradients of this step weren't added up: call it from "
                "the second step on, or give data_parallel_wrapper="
                "DefaultDataParallelWrapper(static_graph=False)"
            )
        elif ddp.require_backward_grad_sync:
            raise UnsupportedError(
                "DDP didn't see where the loss comes from, so gradients of this step weren't "
                "added up: let the model return its loss, or what it is computed from, as a "
                "tensor or in tuples, lists and dicts, or give data_parallel_wrapper="
                "DefaultDataParallelWrapper(static_graph=False)"
            )

    def queue(param: torch.Tensor) -> None:
        _at_end_of_backward(partial(check, running_backward()))

    hooks.append(ddp.register_forward_hook(watch))
    for param in ddp_params(ddp).values():
        hooks.append(param.register_post_accumulate_grad_hook(queue))


def _refuse_unreduced_backward(ddp: DistributedDataParallel) -> None:
    """Raise at the end of a backward whose gradients DDP doesn't add up.

    DDP adds up one backward's gradients after each forward, so of two backwards after two forwards
    only the first's. With a static graph, it doesn't end the reduction of a backward that doesn't
    involve all parameters, and only reports it in the next training forward, after ranks have
    stepped by their own gradients; from the third step on, as its forward rebuilds buckets.
    """
    num_forwards, reduced, reached = 0, set[int](), set[int]()
    # What a parameter's hooks hold may live as long as the process.
    owner = ref(ddp)

    def watch(module: nn.Module, inputs: object, outputs: object) -> None:
        nonlocal num_forwards
        if not (torch.is_grad_enabled() and ddp.require_backward_grad_sync):
            return
        reduced.clear()
        reached.clear()
        # An unknown graph, as at first and after `start_in_order`, has no steps yet.
        num_forwards = num_forwards + 1 if has_synced(ddp) else 0
        for output in tree_leaves(outputs):
            if isinstance(output, torch.Tensor) and output.requires_grad:
                output.register_hook(queue)

    def reach(param: torch.Tensor) -> None:
        alive = owner()
        if alive is not None and alive.require_backward_grad_sync:
            reached.add(id(param))

    def queue(grad: torch.Tensor) -> None:
        # After DDP's own end of the backward, which is queued after this.
        _at_end_of_backward(lambda: _at_end_of_backward(check))

    def check() -> None:
        is_second = not reduced.isdisjoint(reached)
        reduced.update(reached)
        reached.clear()
        if is_second:
            raise UnsupportedError(
                "a second backward() came after the last forward, and DDP adds up only the first "
                "one's dense gradients: add the losses and call backward() once, call it before "
                "the next forward, or use accumulate()"
            )
        try:
            if ddp.static_graph and num_forwards > 1:
                # With rebuilt buckets it only checks that everything is reduced.
                _rebuild(ddp.reducer)
        except RuntimeError as error:
            raise UnsupportedError(
                "this backward reached other dense parameters than the first one, so DDP, whose "
                "graph is static, didn't add their gradients up: train the same parameters in each "
                "step, or give data_parallel_wrapper=DefaultDataParallelWrapper("
                "static_graph=False, find_unused_parameters=True)"
            ) from error

    ddp.register_forward_hook(cast(Any, torch.compiler.disable)(watch))
    if dist.get_world_size(ddp.process_group) > 1:
        for param in ddp_params(ddp).values():
            param.register_post_accumulate_grad_hook(reach)


def _at_end_of_backward(call: Callable[[], None]) -> None:
    Variable._execution_engine.queue_callback(call)  # pyright: ignore[reportAttributeAccessIssue]


@contextmanager
def noting_backwards(ddps: Sequence[DistributedDataParallel], noted: set[str]) -> Iterator[None]:
    """Note the dense parameters that backwards reach inside the context."""
    with ExitStack() as hooks:
        for ddp in ddps:
            for name, param in ddp_params(ddp).items():
                note = partial(_note, noted, name)
                hooks.callback(param.register_post_accumulate_grad_hook(note).remove)
        yield


def _note(noted: set[str], name: str, _: torch.Tensor) -> None:
    noted.add(name)


@torch.no_grad()
def reduce_late(ddp: DistributedDataParallel) -> None:
    """Average gradients that were computed under `no_sync`, as the next backward would.

    Collectives:
        An all-reduce of each gradient.
    """
    if ddp._comm_hooks:
        raise SyncError(
            "no backward came for the last batch of accumulate(), whose hook would send the dense "
            "gradients of the step; leave the step out on all ranks: call zero_grad()"
        )
    size = dist.get_world_size(ddp.process_group)
    for param in ddp_params(ddp).values():
        if param.grad is not None:
            param.grad /= size
            dist.all_reduce(param.grad, group=ddp.process_group)


def has_synced(part: DistributedDataParallel) -> bool:
    """Return whether DDP has reduced gradients once, and knows its graph if that is static."""
    return not part.static_graph or part._static_graph_delay_allreduce_enqueued
