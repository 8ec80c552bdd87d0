"""Calls that all ranks make together, outside of their training steps."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from torch import nn

from torchrec_2dsp.comms.alarm import Signal
from torchrec_2dsp.comms.mesh_groups import MeshGroups
from torchrec_2dsp.comms.notice_board import naming_faults
from torchrec_2dsp.shard.parted import groups_of

P = ParamSpec("P")
T = TypeVar("T")


@contextmanager
def calling_together(groups: MeshGroups | None, name: str) -> Iterator[None]:
    """A context for what all ranks must do; all of them raise if some train on instead.

    Args:
        groups: the groups of the model; without them nothing is checked.
        name: the name of the call.

    Collectives:
        An all-reduce of 8 bytes, waited for.
    """
    if groups is None:
        yield
        return
    with naming_faults(groups.board, name):
        groups.alarm.check(signal=Signal.OUTSIDE).wait()
        yield


def called_by_all(name: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Let a function, whose second argument is a model, run inside of `calling_together`."""

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> T:
            model: Any = kwargs["model"] if "model" in kwargs else args[1]
            groups = groups_of(model) if isinstance(model, nn.Module) else None
            with calling_together(groups, name):
                return function(*args, **kwargs)

        return call

    return decorate
