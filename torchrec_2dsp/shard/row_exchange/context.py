"""What row exchange knows of a batch, beside what TorchRec keeps."""

from dataclasses import dataclass, field

import torch

from torchrec_2dsp._compat.shardings import widened
from torchrec_2dsp._compat.torchrec import EmbeddingShardingContext, SequenceShardingContext
from torchrec_2dsp.shard.prefetch.journey import RowJourney
from torchrec_2dsp.shard.row_exchange.requests import Requested


@dataclass(kw_only=True)
class RowContext(EmbeddingShardingContext):
    """TorchRec's context of a batch in one sharding of bags, with the rows that it needs."""

    requested: Requested
    """What the owners have been asked for."""
    journeys: list[RowJourney] = field(default_factory=list)
    """How rows come, block by block, if some come early."""
    before: list[RowJourney] = field(default_factory=list)
    """The journeys of the batch before, whose gradients may lag behind the lookup of this one."""

    def record_stream(self, stream: torch.Stream) -> None:
        """Keep the tensors alive for ``stream``."""
        super().record_stream(stream)
        self.requested.record_stream(stream)


@dataclass(kw_only=True)
class SequenceRowContext(SequenceShardingContext):
    """TorchRec's context of a batch in one sharding of sequences, with the rows that it needs."""

    requested: Requested
    """What the owners have been asked for."""
    journeys: list[RowJourney] = field(default_factory=list)
    """How rows come, block by block, if some come early."""
    before: list[RowJourney] = field(default_factory=list)
    """The journeys of the batch before, whose gradients may lag behind the lookup of this one."""

    def record_stream(self, stream: torch.Stream) -> None:
        """Keep the tensors alive for ``stream``."""
        super().record_stream(stream)
        self.requested.record_stream(stream)


def with_rows(
    context: EmbeddingShardingContext, requested: Requested
) -> RowContext | SequenceRowContext:
    """TorchRec's context of a batch, with what has been asked for it.

    Args:
        context: TorchRec's, left as it is.
        requested: what the batch needs.
    """
    if isinstance(context, SequenceShardingContext):
        return widened(context, SequenceRowContext, {"requested": requested})
    return widened(context, RowContext, {"requested": requested})
