"""What users put into a `TrainState` by name: objects with a state, and dicts of plain values."""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch

from torchrec_2dsp.errors import CheckpointError, ConfigError
from torchrec_2dsp.parallel.train_state.plain import from_plain, to_plain


@runtime_checkable
class Stateful(Protocol):
    """An object whose state can be read and written, as torch's schedulers are."""

    def state_dict(self) -> Any:
        """The state."""
        ...

    def load_state_dict(self, state_dict: Any, /) -> object:
        """Take over a state."""
        ...


@runtime_checkable
class Summable(Protocol):
    """An object that can take over the states of several ranks, such as a `RowCounter`."""

    def load_rank_states(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Take over the sum of these states."""
        ...


Member = Stateful | dict[str, Any]

DENSE_GRADIENTS = "dense_gradients"
"""The name of the state of the model's data-parallel wrapper, if it has one."""


def check_member(name: str, member: object) -> None:
    """Raise unless ``member`` can be stored under ``name``."""
    if not name.isidentifier():
        raise ConfigError(f"{name!r} is no name; use letters, digits and underscores")
    if not isinstance(member, Stateful | dict):
        raise ConfigError(
            f"{name}={member!r} has no state_dict() and load_state_dict(), and is no dict of plain "
            "values; give one of the two"
        )


def stored_member(name: str, member: Member) -> dict[str, torch.Tensor]:
    """A member's state as flat tensors."""
    state = member if isinstance(member, dict) else member.state_dict()
    try:
        return to_plain(state, f"{name}.")
    except CheckpointError as error:
        raise CheckpointError(f"{name} can't be stored: {error}") from error


def digest(tensors: Mapping[str, torch.Tensor]) -> str:
    """A text that is equal for equal tensors."""
    sha256 = hashlib.sha256()
    for name in sorted(tensors):
        flat = tensors[name].reshape(-1).view(torch.uint8)
        sha256.update(f"{name} {tensors[name].dtype} {tuple(tensors[name].shape)} ".encode())
        sha256.update(flat.numpy().tobytes())
    return sha256.hexdigest()


def check_states(name: str, member: Member, states: Sequence[Mapping[str, Any]]) -> None:
    """Raise if a member can tell that it can't take over these states."""
    check = getattr(member, "check_state_dict", None)
    for state in states:
        if check is not None:
            try:
                check(state)
            except ConfigError as error:
                raise CheckpointError(f"{name} doesn't fit: {error}") from error


def check_left_out(states: Sequence[Mapping[str, Any]]) -> None:
    """Raise if dense gradients would be lost in a model that takes over none."""
    if any(_holds_gradients(state) for state in states):
        raise CheckpointError(
            "the train state holds dense gradients that weren't sent before the save, and this "
            "model has no wrapper that sends them; make it with the data_parallel_wrapper of the "
            "save, or save after a step that follows flush()"
        )


def _holds_gradients(state: Mapping[str, Any]) -> bool:
    """Whether a wrapper's state has more than settings and counts: numbers that aren't zero."""
    return any(
        _holds_gradients(value)
        if isinstance(value, Mapping)
        else isinstance(value, torch.Tensor) and bool(value.any())
        for value in state.values()
    )


def load_states(name: str, member: Member, states: Sequence[dict[str, Any]]) -> None:
    """Let a member take over stored states; several states come from several ranks."""
    if isinstance(member, dict):
        (state,) = states
        member.clear()
        member.update(state)
    elif isinstance(member, Summable):
        member.load_rank_states(states)
    else:
        (state,) = states
        try:
            member.load_state_dict(state)
        except Exception as error:  # whatever an object of the user's can raise
            raise CheckpointError(
                f"{name} ({type(member).__name__}) refused its state ({type(error).__name__}: "
                f"{error}), and the run is restored in part; make the object as it was made"
            ) from error


def read_member(name: str, tensors: Mapping[str, torch.Tensor], prefix: str) -> dict[str, Any]:
    """The state that `stored_member` made into tensors."""
    return from_plain(tensors, f"{prefix}{name}.")
