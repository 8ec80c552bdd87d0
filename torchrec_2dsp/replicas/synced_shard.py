"""`SyncedShard`: a table shard whose copies are averaged."""

import math
from dataclasses import dataclass

from torchrec_2dsp.codecs.rows import RowCodec
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

    codecs: tuple[RowCodec | None, ...]
    """How changes of each tensor's rows travel; `None` for a tensor whose numbers travel as they
    are."""

    @property
    def dims(self) -> list[int]:
        """How many numbers a row of each tensor has."""
        return [math.prod(tensor.shape[1:]) for tensor in self.touched.tensors]
