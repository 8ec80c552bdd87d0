"""The ``extra`` values that a user stores beside the model: JSON, as one tensor of bytes."""

import json
from collections.abc import Mapping
from typing import Any

import torch

from torchrec_2dsp.errors import CheckpointError
from torchrec_2dsp.parallel.checkpoint.parts import EXTRA
from torchrec_2dsp.parallel.checkpoint.stored import StoredCheckpoint


def encoded(extra: Mapping[str, Any]) -> str:
    """The JSON of ``extra``, if reading it gives ``extra`` again."""
    text = json.dumps(extra, default=repr)
    if json.loads(text) != extra:
        raise CheckpointError(
            f"extra={extra!r} isn't the same after a round trip through JSON; use dicts with "
            "text keys, lists, texts and numbers"
        )
    return text


def as_tensor(text: str) -> torch.Tensor:
    """The bytes of ``text`` as a tensor, because DCP pickles everything else."""
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)


def stored_extra(stored: StoredCheckpoint) -> dict[str, Any]:
    """What was saved as ``extra``; empty if another program wrote the checkpoint."""
    if EXTRA not in stored.entries:
        return {}
    try:
        extra = json.loads(stored.tensor(EXTRA).numpy().tobytes())
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{EXTRA!r} isn't JSON in the checkpoint {stored.folder} ({error}); load another one"
        ) from error
    if not isinstance(extra, dict):
        raise CheckpointError(
            f"{EXTRA!r} is a {type(extra).__name__} instead of a dict in the checkpoint "
            f"{stored.folder}; load another one"
        )
    return extra
