"""`SyncedShard`: a table shard whose copies are averaged."""

from dataclasses import dataclass

import torch

from torchrec_2dsp.replicas.state_rules import StateRule
from torchrec_2dsp.replicas.touched import TouchedRows


@dataclass(frozen=True)
class SyncedShard:
    """What an average needs to know of a table shard."""

    table: str
    """The table's name."""

    touched: TouchedRows
    """Its tensors, and which rows have changed."""

    rules: tuple[StateRule, ...]
    """One for each tensor."""

    sent_as: tuple[torch.dtype, ...]
    """The type in which each tensor's rows travel; in a shorter one, their change travels."""
