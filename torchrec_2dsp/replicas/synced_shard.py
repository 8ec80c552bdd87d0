"""`SyncedShard`: a table shard whose copies are averaged."""

from dataclasses import dataclass

import torch

from torchrec_2dsp.replicas.state_rules import StateRule
from torchrec_2dsp.replicas.touched import TouchedRows


@dataclass(frozen=True)
class SyncedShard:
    """A table shard, and how its tensors are averaged."""

    table: str
    """The table's name."""

    touched: TouchedRows
    """The shard's tensors, and which of their rows have changed."""

    rules: tuple[StateRule, ...]
    """The rule for each tensor."""

    sent_as: tuple[torch.dtype, ...]
    """The type in which each tensor's rows are sent; a type shorter than theirs means changes."""
