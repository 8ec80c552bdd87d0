"""What a user stores beside the model: JSON, as one tensor of bytes."""

import json
from collections.abc import Mapping
from typing import Any

import torch

from torchrec_2dsp.errors import CheckpointError


def encoded(extra: Mapping[str, Any]) -> str:
    """The JSON of ``extra``, which must come back as it is."""
    text = json.dumps(extra, default=repr)
    if json.loads(text) != extra:
        raise CheckpointError(
            f"extra={extra!r} isn't the same after a round trip through JSON; use dicts with "
            "text keys, lists, texts and numbers"
        )
    return text


def as_tensor(text: str) -> torch.Tensor:
    """The bytes of ``text``: a tensor, because DCP pickles everything else."""
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
