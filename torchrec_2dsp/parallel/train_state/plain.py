"""Nested Python values as JSON and tensors, without a pickle."""

import json
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from torchrec_2dsp.errors import CheckpointError

_JSON = (str, bool, int, float, type(None))
_MARK = "$"
"""The beginning of the single key of a dict that stands for a value of another type."""


def to_plain(value: Any, prefix: str) -> dict[str, torch.Tensor]:
    """A nested value as flat tensors; `from_plain` gives it back.

    Values may be dicts with any plain keys, lists, tuples, texts, numbers, bytes, tensors, arrays
    and counters.

    Args:
        value: the value to store.
        prefix: the beginning of all names.

    Returns:
        Tensors by name. The one called ``<prefix>header`` holds JSON, as bytes.

    Example:
        >>> import torch
        >>> from torchrec_2dsp.parallel.train_state.plain import from_plain, to_plain
        >>> tensors = to_plain({"steps": (3, 4), "counts": torch.ones(2)}, "rank0.")
        >>> sorted(tensors)
        ['rank0.counts', 'rank0.header']
        >>> from_plain(tensors, "rank0.")
        {'steps': (3, 4), 'counts': tensor([1., 1.])}
    """
    tensors: dict[str, torch.Tensor] = {}
    text = json.dumps(_encode(value, "", prefix, tensors))
    tensors[f"{prefix}header"] = _bytes_tensor(text.encode())
    return tensors


def from_plain(tensors: Mapping[str, torch.Tensor], prefix: str) -> Any:
    """The value that `to_plain` turned into tensors; a `CheckpointError` for any other tensors."""
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
    """Bytes, a tensor or an array, as a tensor beside the JSON; empty ones fit into it."""
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
    if not tensor.numel():
        return {"$empty": [list(tensor.shape), str(tensor.dtype).removeprefix("torch.")]}
    # A copy: a save may go on while the run does.
    tensors[prefix + name] = tensor.to("cpu", copy=True).contiguous()
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
