"""Adapters to private parts of torch, torch.distributed and DTensor."""

import logging
import sys
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from os import _exit as exit_at_once
from threading import Thread
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Backend
from torch._ops import OpOverload
from torch.distributed import distributed_c10d as _c10d
from torch.distributed.tensor._collective_utils import MeshTopoInfo
from torch.distributed.tensor._redistribute import (
    _gen_transform_infos,
    clear_redistribute_planner_cache,
)
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.utils import _pytree
from torch.utils._python_dispatch import (
    TorchDispatchMode as TorchDispatchMode,
    _get_current_dispatch_mode,
)

_ABORT_S = 3.0
"""The time within which all groups' aborts should be done."""


def timeout_of(group: dist.ProcessGroup, device_type: str) -> timedelta:
    """Return a group's timeout, which new groups don't inherit."""
    return _timeout(group._get_backend(torch.device(device_type)).options)


def timeout_of_gloo(gloo: dist.ProcessGroupGloo) -> timedelta:
    """Return a gloo group's timeout."""
    return _timeout(gloo.options)  # type: ignore[attr-defined]


def _timeout(options: Backend.Options) -> timedelta:
    return options._timeout


def set_timeout(group: dist.ProcessGroup, timeout: timedelta) -> None:
    """Set an existing group's timeout."""
    # Public since torch 2.14, where the private name warns.
    setter = getattr(dist, "set_timeout", None) or _c10d._set_pg_timeout
    setter(timeout, group)


def store_of_world() -> dist.Store:
    """Return the store through which the world's ranks found each other."""
    return _c10d._get_default_store()


def own_connection(store: dist.Store) -> dist.Store:
    """Return a second connection to ``store``, whose calls don't wait for the first one's."""
    clone: dist.Store = store.clone()  # type: ignore[attr-defined]
    return clone


def nccl_abort(world: dist.ProcessGroup) -> Callable[[], None] | None:
    """Return a function that aborts an NCCL world's collectives from any thread, else `None`."""
    return _abort_nccl if dist.get_backend(world) == dist.Backend.NCCL else None


def _abort_nccl() -> None:
    groups = [group for group in _c10d._world.pg_names if dist.get_backend(group) == "nccl"]
    # Freeing a group's memory waits for all groups' kernels, which only the groups' own aborts end.
    threads = [Thread(target=_of_gpu(group).abort, daemon=True) for group in groups]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + _ABORT_S
    for thread in threads:
        thread.join(max(deadline - time.monotonic(), 0.0))


def end_process(exit_code: int) -> NoReturn:
    """End this process without torch's and CUDA's clean-up."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    exit_at_once(exit_code)


def _of_gpu(group: dist.ProcessGroup) -> Backend:
    return group._get_backend(torch.device("cuda"))


def pass_on_to(group: dist.ProcessGroup, backend: dist.ProcessGroupGloo) -> None:
    """Route to ``backend`` the operations that torch doesn't call on a group in Python."""
    kind = dist.ProcessGroup.BackendType.GLOO
    group._register_backend(torch.device("cpu"), kind, backend)
    group._set_default_backend(kind)


def make_gloo_by(make: Callable[..., dist.ProcessGroup]) -> None:
    """Let torch create its gloo groups by ``make``, which takes `ProcessGroupGloo`'s arguments."""
    _c10d.ProcessGroupGloo = _GlooMaker(make)  # pyright: ignore[reportAttributeAccessIssue]


class _GlooMaker:
    """Replaces a class in torch, which calls it and checks for its instances."""

    def __init__(self, make: Callable[..., dist.ProcessGroup]) -> None:
        self._make = make
        self._made: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()

    def __call__(self, *arguments: Any, **options: Any) -> dist.ProcessGroup:
        group = self._make(*arguments, **options)
        self._made.add(group)
        return group

    def __instancecheck__(self, instance: object) -> bool:
        return isinstance(instance, dist.ProcessGroupGloo) or instance in self._made


def exists(group: dist.ProcessGroup) -> bool:
    """Return whether a group was created and hasn't been destroyed, alone or with its world."""
    return group in _c10d._world.pg_names


def group_named(name: str) -> dist.ProcessGroup:
    """Return the group that functional collectives know by this name."""
    return _c10d._resolve_process_group(name)  # pyright: ignore[reportArgumentType]


def is_dispatch_watched() -> bool:
    """Return whether a `TorchDispatchMode` sees this thread's operators."""
    return _get_current_dispatch_mode() is not None


def operator_name(operator: OpOverload) -> str:
    """Return an operator's name without its namespace, such as ``allreduce_``."""
    return operator._schema.name.split("::")[1]


def argument_names(operator: OpOverload) -> list[str]:
    """Return an operator's argument names in order."""
    return [argument.name for argument in operator._schema.arguments]


def tensors_in(values: Any) -> list[torch.Tensor]:
    """Return all tensors in nested lists, tuples and dicts."""
    return [leaf for leaf in _pytree.tree_leaves(values) if isinstance(leaf, torch.Tensor)]


def forget_meshes() -> None:
    """Make DTensor forget all meshes and their groups.

    DTensor caches results by its arguments' meshes. Meshes with equal ranks and axes are equal
    there, so results for a mesh whose groups are destroyed would send a later mesh's collectives to
    these groups.
    """
    _clear_sharding_prop_cache()
    clear_redistribute_planner_cache()
    _gen_transform_infos.cache_clear()
    MeshTopoInfo.build_from_mesh.cache_clear()
