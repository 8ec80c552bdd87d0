"""What row exchange keeps of a batch, beside what TorchRec keeps."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from torchrec_2dsp._compat.torchrec import EmbeddingShardingContext, SequenceShardingContext
from torchrec_2dsp.shard.prefetch.journey import RowJourney
from torchrec_2dsp.shard.row_exchange.requests import Requested, RowRequests


@dataclass(kw_only=True)
class _NeedsRows:
    """What both contexts below add to TorchRec's."""

    requested: Requested
    """What the owners have been asked for."""
    journeys: list[RowJourney] = field(default_factory=list)
    """How rows come, block by block, if some come early."""
    before: list[RowJourney] = field(default_factory=list)
    """Those of the batch before, whose gradients may lag behind the lookup of this one."""

    def record_stream(self: Any, stream: torch.Stream) -> None:
        """Keep the tensors alive for ``stream``."""
        super().record_stream(stream)  # type: ignore[misc]
        self.requested.record_stream(stream)


@dataclass(kw_only=True)
class RowContext(_NeedsRows, EmbeddingShardingContext):
    """TorchRec's context of a batch in one sharding, with the rows that it needs."""


@dataclass(kw_only=True)
class SequenceRowContext(_NeedsRows, SequenceShardingContext):
    """The same for sequences."""


def keep_needed_rows(contexts: list[Any], input_dists: Sequence[nn.Module]) -> None:
    """Put what the last batch needs into its contexts, sharding by sharding."""
    for index, requests in enumerate(input_dists):
        if isinstance(requests, RowRequests):
            stock = contexts[index]
            is_sequence = isinstance(stock, SequenceShardingContext)
            made = SequenceRowContext if is_sequence else RowContext
            contexts[index] = made(**vars(stock), requested=requests.take())
