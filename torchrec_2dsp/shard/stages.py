"""What is known of one batch on its way through a sharded module, in one typed place."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torchrec.distributed.embedding import EmbeddingCollectionContext
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionContext
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from torchrec_2dsp._compat.torchrec import EmbeddingShardingContext
from torchrec_2dsp.comms.alarm import Check
from torchrec_2dsp.errors import InputError
from torchrec_2dsp.shard.hot_sets import HotBatch
from torchrec_2dsp.shard.variable_batch_sizes import BagsOfSamples


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


Output = KeyedTensor | Mapping[str, JaggedTensor]
"""What a sharded module returns: a `KeyedTensor` of bags, or a `JaggedTensor` for each sequence."""


class Stage:
    """A stage that does nothing; subclasses override some of the hooks."""

    needs_keyed_jagged = False
    """Whether the stage can't do its work on batches that aren't a `KeyedJaggedTensor`."""

    def before_ids_travel(
        self, notes: BatchNotes, features: KeyedJaggedTensor
    ) -> KeyedJaggedTensor:
        """The batch as the next stage, and TorchRec after the last one, will see it.

        Args:
            notes: of the batch; the stage writes into its own fields.
            features: the batch, left as it is.
        """
        return features

    def before_lookup(self, notes: BatchNotes) -> None:
        """Do what has to be done before the rows of a batch are read."""

    def before_accumulating(self) -> None:
        """Do what needs a complete state, before backwards wait for others of their step."""

    def while_rows_travel(self, notes: BatchNotes) -> None:
        """Do what can be done on this rank while TorchRec's output exchange runs."""

    def on_output(self, notes: BatchNotes, output: Output) -> Output:
        """The module's output, as the previous stage, or the user, will see it."""
        return output

    def before_backward(self, notes: BatchNotes) -> None:
        """Do what has to be done before the gradients of a batch reach any kernel."""

    def before_use(self) -> None:
        """Put rows where lookups and updates find them; the state may have been read or loaded."""

    def before_read(self) -> None:
        """Bring weights and optimizer state up to date, before they are read or written."""

    def after_write(self) -> None:
        """Take note that weights or optimizer state were written by hand, or from a checkpoint."""
