"""The order in which DDP adds gradients up over the ranks: private to torch, and part of the bits.

DDP puts gradients into buckets, and where a number stands in its bucket decides in which order the
ranks' numbers are added. The first steps of a run go by the order of the parameters; then DDP goes
by the order in which gradients came. A run that goes on has to begin with the latter.
"""

from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

__all__ = ["gradient_order", "start_in_order"]

_STARTED_IN: "WeakKeyDictionary[DistributedDataParallel, list[str]]" = WeakKeyDictionary()
"""What `start_in_order` was given, because DDP numbers parameters by it afterwards."""

_BUILTIN_HOOK = "BuiltinCommHookType."


def gradient_order(ddp: DistributedDataParallel) -> list[str] | None:
    """The names of DDP's parameters in the order of its buckets.

    `None` while DDP hasn't settled on one, which takes it three steps.
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
    """Let DDP go on in this order, or begin anew for `None`; call it on all ranks, between steps.

    Returns:
        Whether it does. It doesn't if it has other parameters, or a precision of its own.

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
    # What DDP does when it is unpickled.
    debug_names = ddp._build_debug_param_to_name_mapping(params)
    ddp._ddp_init_helper(params, is_sparse, debug_names, ddp.static_graph)
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
    if order is not None:
        _settle(ddp.reducer)
        _STARTED_IN[ddp] = list(order)
    return True


def _make_static(reducer: dist.Reducer, logger: dist.Logger) -> None:
    reducer._set_static_graph()
    logger._set_static_graph()


def _settle(reducer: dist.Reducer) -> None:
    """Keep the order of the parameters that the reducer was made with."""
    reducer._push_all_rebuilt_params()
    reducer._rebuild_buckets()


def _names(ddp: DistributedDataParallel) -> dict[int, str]:
    return {id(param): name for name, param in ddp.module.named_parameters()}
