"""Users' values as JSON and tensors: members, and random numbers."""

import hashlib
import json
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.tensor import DTensor

from torchrec_2dsp.errors import CheckpointError, ConfigError

_JSON = (str, bool, int, float, type(None))
_MARK = "$"
"""The prefix of the single key in a dict that stands for a value of another type."""


def to_plain(value: Any, prefix: str) -> dict[str, torch.Tensor]:
    """Encode a nested value as flat tensors; `from_plain` decodes it.

    Values may be dicts with any plain keys, lists, tuples, texts, numbers, bytes, tensors, arrays
    and counters. The tensor called ``<prefix>header`` holds JSON, as bytes.
    """
    tensors: dict[str, torch.Tensor] = {}
    text = json.dumps(_encode(value, "", prefix, tensors))
    tensors[f"{prefix}header"] = _bytes_tensor(text.encode())
    return tensors


def from_plain(tensors: Mapping[str, torch.Tensor], prefix: str) -> Any:
    """Decode what `to_plain` encoded, or raise a `CheckpointError`."""
    try:
        text = tensors[f"{prefix}header"].numpy().tobytes().decode()
        return _decode(json.loads(text), prefix, tensors)
    except (KeyError, ValueError, TypeError, RecursionError, AttributeError) as error:
        raise CheckpointError(
            f"the train state's part {prefix + 'header'!r} is damaged ({type(error).__name__}: "
            f"{error}); load another checkpoint"
        ) from error


def _encode(value: Any, path: str, prefix: str, tensors: dict[str, torch.Tensor]) -> Any:
    if isinstance(value, np.generic):
        value = value.item()
    if type(value) in _JSON:
        return value
    if isinstance(value, torch.Tensor | bytes | np.ndarray):
        name = path or "value"
        while prefix + name in tensors or name == "header":
            name += "_"
        return _encode_block(value, name, prefix, tensors)

    def encoded(key: object, item: Any) -> Any:
        return _encode(item, f"{path}.{key}" if path else str(key), prefix, tensors)

    if isinstance(value, list | tuple):
        items = [encoded(index, item) for index, item in enumerate(value)]
        return items if isinstance(value, list) else {"$tuple": items}
    if isinstance(value, Mapping):
        is_plain = all(isinstance(key, str) and key[:1] != _MARK for key in value)
        if is_plain and not isinstance(value, Counter):
            return {key: encoded(key, item) for key, item in value.items()}
        pairs = [[encoded("key", key), encoded(key, item)] for key, item in value.items()]
        return {"$counter" if isinstance(value, Counter) else "$pairs": pairs}
    raise CheckpointError(
        f"{path or 'the value'} is a {type(value).__name__}, which a train state can't hold "
        "without a pickle; use dicts, lists, texts, numbers, bytes and tensors"
    )


def _encode_block(
    value: torch.Tensor | np.ndarray | bytes,
    name: str,
    prefix: str,
    tensors: dict[str, torch.Tensor],
) -> dict[str, Any]:
    """Encode bytes, a tensor or an array as a tensor beside the JSON, unless it is empty."""
    if isinstance(value, bytes):
        if value:
            tensors[prefix + name] = _bytes_tensor(value)
        return {"$bytes": name if value else ""}
    if isinstance(value, np.ndarray):
        if value.dtype.kind not in "biufc":
            raise CheckpointError(
                f"{name} is an array of {value.dtype}, which a train state can't hold without a "
                "pickle; use numbers"
            )
        place = _encode_block(value.tobytes(), name, prefix, tensors)["$bytes"]
        return {"$array": [place, value.dtype.str, list(value.shape)]}
    tensor = value.detach()
    if isinstance(tensor, DTensor | ShardedTensor):
        raise CheckpointError(
            f"{name} is a {type(tensor).__name__}, of which each rank has a part; let state_dict() "
            "give the whole, a DTensor's full_tensor() on all ranks"
        )
    if tensor.layout is not torch.strided:
        raise CheckpointError(
            f"{name} is a tensor of layout {tensor.layout}, which a train state can't hold; store "
            "its indices and values"
        )
    if not tensor.numel():
        return {"$empty": [list(tensor.shape), str(tensor.dtype).removeprefix("torch.")]}
    # A copy, because a save may continue while the run does.
    tensors[prefix + name] = tensor.to("cpu").clone(memory_format=torch.contiguous_format)
    return {"$tensor": name}


def _decode(value: Any, prefix: str, tensors: Mapping[str, torch.Tensor]) -> Any:
    if isinstance(value, list):
        return [_decode(item, prefix, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    if len(value) != 1 or next(iter(value))[:1] != _MARK:
        return {key: _decode(item, prefix, tensors) for key, item in value.items()}
    ((kind, content),) = value.items()
    match kind:
        case "$tensor":
            return tensors[prefix + content]
        case "$bytes":
            return tensors[prefix + content].numpy().tobytes() if content else b""
        case "$array":
            place, dtype, shape = content
            data = tensors[prefix + place].numpy().tobytes() if place else b""
            return np.frombuffer(bytearray(data), dtype=np.dtype(dtype)).reshape(shape)
        case "$empty":
            shape, dtype = content
            return torch.empty(shape, dtype=getattr(torch, dtype))
        case "$tuple":
            return tuple(_decode(item, prefix, tensors) for item in content)
        case "$pairs" | "$counter":
            pairs = [[_decode(part, prefix, tensors) for part in pair] for pair in content]
            return Counter(dict(pairs)) if kind == "$counter" else dict(pairs)
        case _:
            raise ValueError(f"unknown kind {kind!r}")


def _bytes_tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def random_state(device: torch.device) -> dict[str, Any]:
    """Return the state of this process's random number generators.

    Args:
        device: this rank's device; its generator is included if it is a GPU.
    """
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "numpy": np.random.get_state(),
        "python": random.getstate(),
    }
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def restore_random_state(state: dict[str, Any], device: torch.device) -> None:
    """Restore the state of this process's random number generators."""
    torch.set_rng_state(state["torch"])
    np.random.set_state(state["numpy"])
    random.setstate(state["python"])
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)


@runtime_checkable
class Stateful(Protocol):
    """An object whose state can be read and written, such as torch's schedulers."""

    def state_dict(self) -> Any:
        """Return the state."""
        ...

    def load_state_dict(self, state_dict: Any, /) -> object:
        """Restore a state."""
        ...


@runtime_checkable
class Summable(Protocol):
    """An object that can take over several ranks' states, such as a `RowCounter`."""

    def load_rank_states(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Restore the sum of these states."""
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
    """Encode a member's state as flat tensors, whose names begin with the member's."""
    state = member if isinstance(member, dict) else member.state_dict()
    try:
        return to_plain(state, f"{name}.")
    except CheckpointError as error:
        raise CheckpointError(f"{name} can't be stored: {error}") from error


def digest(tensors: Mapping[str, torch.Tensor]) -> str:
    """Digest tensors with their names, types and shapes."""
    sha256 = hashlib.sha256()
    for name in sorted(tensors):
        flat = tensors[name].reshape(-1).view(torch.uint8)
        sha256.update(f"{name} {tensors[name].dtype} {tuple(tensors[name].shape)} ".encode())
        sha256.update(flat.numpy().tobytes())
    return sha256.hexdigest()


def check_states(name: str, member: Member, states: Sequence[Mapping[str, Any]]) -> None:
    """Raise if a member can tell that these states don't fit it."""
    check = getattr(member, "check_state_dict", None)
    for state in states:
        if check is not None:
            try:
                check(state)
            except ConfigError as error:
                raise CheckpointError(
                    f"{name!r} in the train state can't be loaded: {error}"
                ) from error


def kind_of_wrapper(wrapper: object) -> str:
    """Return the name of the wrapper whose states this one takes over; empty if there is none."""
    owners = (kind for kind in type(wrapper).__mro__ if "load_state_dict" in vars(kind))
    return getattr(wrapper, "state_kind", next((kind.__name__ for kind in owners), ""))


def check_left_out(states: Sequence[Mapping[str, Any]], kind: str | None = None) -> None:
    """Raise if the model would lose a wrapper's dense gradients because nothing takes them over.

    Older checkpoints lack ``kind``, the wrapper's name.
    """
    if any(_holds_gradients(state.get("residuals", state)) for state in states):
        raise CheckpointError(
            "the train state holds dense gradients that weren't sent before the save, and this "
            f"model has no wrapper that sends them; make it with {kind or 'the wrapper'} as "
            "data_parallel_wrapper, as at the save, or save after a step that follows the "
            "wrapper's flush(), if it has one; without train_state, they are left out"
        )


def _holds_gradients(state: Mapping[str, Any]) -> bool:
    """Return whether a wrapper's state has nonzero tensors."""
    return any(
        _holds_gradients(value)
        if isinstance(value, Mapping)
        else isinstance(value, torch.Tensor) and bool(value.any())
        for value in state.values()
    )


def load_states(name: str, member: Member, states: Sequence[dict[str, Any]]) -> None:
    """Let a member restore stored states; several states come from several ranks."""
    if isinstance(member, dict):
        (state,) = states
        _written_into(member, state)
    elif isinstance(member, Summable):
        member.load_rank_states(states)
    else:
        (state,) = states
        try:
            member.load_state_dict(state)
        except Exception as error:  # a user's object can raise anything
            raise CheckpointError(
                f"{name} ({type(member).__name__}) refused its state ({type(error).__name__}: "
                f"{error}), and the run is restored in part; make the object as it was made"
            ) from error


def _written_into(old: Any, new: Any) -> Any:
    """Return a new value, written into the old one if possible, as others may hold that, too."""
    if isinstance(old, dict) and isinstance(new, dict):
        items = {key: _written_into(old.get(key), value) for key, value in new.items()}
        old.clear()
        old.update(items)
        return old
    if isinstance(old, list) and isinstance(new, list):
        old[:] = [_written_into(*pair) for pair in zip_longest(old[: len(new)], new)]
        return old
    kind = torch.Tensor if isinstance(old, torch.Tensor) else np.ndarray
    array: Any = old if isinstance(old, kind) and isinstance(new, kind) else None
    if array is None or array.shape != new.shape or array.dtype != new.dtype:
        return new
    with torch.no_grad():
        array[...] = new
    return array
