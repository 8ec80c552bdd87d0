"""What is known of one batch on its way through a sharded module, in one typed place."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torchrec.distributed.embedding import EmbeddingCollectionContext
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionContext

from torchrec_2dsp._compat.torchrec import EmbeddingShardingContext
from torchrec_2dsp.comms.alarm import Check
from torchrec_2dsp.errors import InputError
from torchrec_2dsp.shard.batch.variable_batch_sizes import BagsOfSamples
from torchrec_2dsp.shard.hot_rows.split import HotBatch


@dataclass
class PrefetchNotes:
    """What the prefetch of a batch's rows depends on."""

    loads_seen: int = 0
    """How often weights had been written by hand when the batch was announced."""
    due: int = 0
    """The number of the module's lookup that the batch has to be; rows that came early are right
    for that lookup only."""
    follower: "BatchNotes | None" = None
    """The batch whose early rows are sent behind this one's rows."""


@dataclass
class BatchNotes:
    """What the stages of a module note of a batch; each stage has a field of its own."""

    is_training: bool = False
    """Whether the lookup will have a backward that trains."""
    error: InputError | None = None
    """What is wrong with the batch of this rank."""
    check: Check | None = None
    """Whether the batches of all ranks are right, on its way."""
    bags_of_samples: BagsOfSamples | None = None
    """Which bags each sample has, where features have batch sizes of their own."""
    bag_lengths: dict[str, torch.Tensor] = field(default_factory=dict)
    """The ids per bag of each output that this package averages, not TorchRec."""
    hot: HotBatch | None = None
    """The hot ids, `None` without hot rows."""
    hot_output: dict[str, torch.Tensor] = field(default_factory=dict)
    """The rows of the hot ids, by feature, as the replicas gave them."""
    prefetch: PrefetchNotes = field(default_factory=PrefetchNotes)
    """What the prefetch of rows depends on."""
    shardings: list[EmbeddingShardingContext | None] = field(default_factory=list)
    """TorchRec's contexts, one for each sharding of the module; row exchange and non-empty bags
    have contexts of their own, which know what will come."""
    asked: Any = None
    """The input exchange of the batch, until its lookup."""

    def record_stream(self, stream: torch.Stream) -> None:
        """Keep the tensors alive for ``stream``, to which a pipeline hands the batch."""
        if self.hot is not None:
            self.hot.record_stream(stream)
        for lengths in self.bag_lengths.values():
            lengths.record_stream(stream)  # pyright: ignore[reportArgumentType]
        if self.bags_of_samples is not None:
            self.bags_of_samples.record_stream(stream)


@dataclass
class BagContext(EmbeddingBagCollectionContext):
    """TorchRec's context of a batch in an `EmbeddingBagCollection`, with this package's notes."""

    notes: BatchNotes = field(default_factory=BatchNotes)
    """What the stages note."""

    def record_stream(self, stream: torch.Stream) -> None:
        """Keep the tensors alive for ``stream``."""
        super().record_stream(stream)
        self.notes.record_stream(stream)


@dataclass
class SequenceContext(EmbeddingCollectionContext):
    """TorchRec's context of a batch in an `EmbeddingCollection`, with this package's notes."""

    notes: BatchNotes = field(default_factory=BatchNotes)
    """What the stages note."""

    def record_stream(self, stream: torch.Stream) -> None:
        """Keep the tensors alive for ``stream``."""
        super().record_stream(stream)
        self.notes.record_stream(stream)
