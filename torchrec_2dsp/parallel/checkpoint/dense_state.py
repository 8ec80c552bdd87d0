"""State of dense optimizers, which most of them create at their first step."""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim import Optimizer
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizer

from torchrec_2dsp._compat.torchrec import wrapped_optimizer
from torchrec_2dsp.errors import CheckpointError
from torchrec_2dsp.parallel.checkpoint.fit import Entries
from torchrec_2dsp.parallel.checkpoint.parts import DENSE, dense_params


@contextmanager
def dense_state_made(
    model: DistributedModelParallel, optimizer: KeyedOptimizer | None, saved: Entries
) -> Iterator[None]:
    """A context in which optimizers have created the state that is saved of them.

    They do so by a step with gradients of zero, after which the weights are put back. If the block
    raises an error, the optimizers are put back as well, as if there had been no step.

    Collectives:
        Those of a sync, if a backward is pending and ``optimizer`` contains the fused one.
    """
    missing = {} if optimizer is None else _params_without_state(model, optimizer, saved)
    if optimizer is None or not missing:
        yield
        return
    dense = dense_params(model, optimizer)
    steppers = [member for member in _members(optimizer) if _has_one_of(member, missing)]
    fused = model.fused_optimizer
    before = [_Snapshot(stepped) for member in steppers for stepped in _tree(member, fused)]
    try:
        with _weights_kept(list(dense.values())):
            for key, param in dense.items():
                param.grad = torch.zeros_like(param) if key in missing else None
            for member in steppers:
                _step(member)
        yield
    except BaseException:
        for snapshot in before:
            snapshot.restore()
        raise


def _params_without_state(
    model: DistributedModelParallel, optimizer: KeyedOptimizer, saved: Entries
) -> dict[str, Any]:
    """The dense parameters of which the checkpoint has state that the optimizer lacks."""
    existing = optimizer.state
    saved_entries: dict[str, set[str]] = defaultdict(set)
    for name in saved:
        key, _, entry = name.removeprefix(f"{DENSE}.state.").rpartition(".")
        saved_entries[key].add(entry)
    return {
        key: param
        for key, param in dense_params(model, optimizer).items()
        if saved_entries[key] - existing.get(param, {}).keys()
    }


def _members(optimizer: KeyedOptimizer) -> list[KeyedOptimizer]:
    """The optimizers that a combined one steps one after the other."""
    if not isinstance(optimizer, CombinedOptimizer):
        return [optimizer]
    return [leaf for _, member in optimizer.optimizers for leaf in _members(member)]


def _has_one_of(optimizer: KeyedOptimizer, params: dict[str, Any]) -> bool:
    ids = {id(param) for param in params.values()}
    return any(id(param) in ids for param in optimizer.params.values())


def _tree(optimizer: Optimizer, fused: Optimizer) -> Iterator[Optimizer]:
    """An optimizer and all optimizers that it steps, except for the fused one."""
    if optimizer is fused:
        return
    yield optimizer
    for inner in _inside(optimizer):
        yield from _tree(inner, fused)


def _inside(optimizer: Optimizer) -> list[Optimizer]:
    if isinstance(optimizer, CombinedOptimizer):
        return [member for _, member in optimizer.optimizers]
    inner = wrapped_optimizer(optimizer)
    return [] if inner is None else [inner]


def _step(optimizer: KeyedOptimizer) -> None:
    try:
        optimizer.step()
    except Exception as error:  # whatever a user's optimizer can raise
        raise CheckpointError(
            f"{type(optimizer).__name__} can't make the state that is saved of it, which takes a "
            f"step ({type(error).__name__}: {error}); let it make a step before the load, or pass "
            "no optimizer to load all the rest"
        ) from error


@contextmanager
def _weights_kept(params: list[torch.Tensor]) -> Iterator[None]:
    before = [(param, param.detach().clone(), param.grad) for param in params]
    try:
        yield
    finally:
        with torch.no_grad():
            for param, value, grad in before:
                param.copy_(value)
                param.grad = grad


class _Snapshot:
    """What a step may change in an optimizer."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._attributes = dict(vars(optimizer))
        self._groups: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._states: list[tuple[Any, dict[str, Any], dict[str, Any]]] = []
        # State and groups of a wrapper are those of the optimizer that it wraps.
        self._is_leaf = not _inside(optimizer)
        if self._is_leaf:
            self._groups = [(group, dict(group)) for group in optimizer.param_groups]
            self._states = [(param, state, dict(state)) for param, state in optimizer.state.items()]
        self._values = [
            (value, value.clone())
            for _, state, _ in self._states
            for value in state.values()
            if isinstance(value, torch.Tensor)
        ]

    @torch.no_grad()
    def restore(self) -> None:
        """Put the optimizer back to what it was."""
        vars(self._optimizer).clear()
        vars(self._optimizer).update(self._attributes)
        if not self._is_leaf:
            return
        self._optimizer.state.clear()
        for param, state, entries in self._states:
            state.clear()
            state.update(entries)
            self._optimizer.state[param] = state
        for group, entries in self._groups:
            group.clear()
            group.update(entries)
        for value, before in self._values:
            value.copy_(before)
