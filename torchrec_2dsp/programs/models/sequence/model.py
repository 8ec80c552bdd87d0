"""`NextItemModel`: an embedding collection of items under a transformer that predicts the next."""

from collections.abc import Iterator
from functools import partial

import torch
from torch import nn
from torchrec.datasets.utils import Batch
from torchrec.modules.embedding_configs import EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_2dsp.errors import InputError
from torchrec_2dsp.programs.data.negatives import NegativeItems, negatives_name
from torchrec_2dsp.programs.models.model import table_name
from torchrec_2dsp.programs.models.ranking import ItemChunk, Queries, places_of
from torchrec_2dsp.programs.models.sequence.config import SequenceModelConfig
from torchrec_2dsp.programs.models.sequence.examples import (
    Examples,
    NextItemExamples,
    last_positions,
)
from torchrec_2dsp.programs.models.sequence.layers import Positions, TransformerBlock
from torchrec_2dsp.programs.models.sequence.sampled_softmax import SampledSoftmax
from torchrec_2dsp.programs.models.sequence.sequence_stack import SequenceStack

Output = tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]


class NextItemModel(nn.Module):
    """Predicts each next item of a sequence from those before it.

    One table has the vectors that go into the transformer, those of the true next items, and those
    of the negatives. All that comes after the lookup is a `LayerStack` without a word about ranks.
    """

    def __init__(
        self, config: SequenceModelConfig, num_items: int, tables_device: str = "cpu"
    ) -> None:
        """
        Args:
            config: sizes, and the feature of the items.
            num_items: the rows of the table.
            tables_device: of the table; "meta" leaves it without weights.
        """
        super().__init__()
        self._feature, self._num_items = config.feature, num_items
        self._items = NegativeItems(num_items, config.negatives)
        self._max_length, self._dim = config.max_length, config.dim
        self._num_negatives = config.num_negatives
        self.embeddings = EmbeddingCollection(
            tables=[
                EmbeddingConfig(
                    name=table_name(config.feature),
                    num_embeddings=num_items,
                    embedding_dim=config.dim,
                    feature_names=[config.feature, negatives_name(config.feature)],
                    init_fn=partial(nn.init.normal_, std=0.02),
                )
            ],
            device=torch.device(tables_device),
        )
        # Not what the table's weights left of the stream: their device must not matter.
        torch.manual_seed(config.seed + 1)
        self.examples = NextItemExamples(
            config.feature, max_length=config.max_length, loss_mean=config.loss_mean
        )
        blocks = [
            TransformerBlock(config.dim, config.num_heads, config.hidden, config.dropout)
            for _ in range(config.num_blocks)
        ]
        self.dense = SequenceStack(
            [
                Positions(config.max_length - 1, config.dim, config.dropout),
                *blocks,
                nn.LayerNorm(config.dim),
            ],
            SampledSoftmax(self._items),
            num_chunks=config.length_chunks,
        )

    def forward(self, batch: Batch) -> Output:
        """The loss, and what there is to look at, as TorchRec's `DLRMTrain` gives them.

        Returns:
            The loss; and with it the loss without its graph, a score of each sample, and its
            label. In training the score is the sample's part of the loss. In evaluation it is the
            place of the last item among itself and the negatives, 1 for the best, 0 for a sample
            without a next item.
        """
        examples = self._examples_of(batch)
        if self.training:
            losses = scores = self.dense(
                examples.inputs,
                examples.positives,
                examples.negatives,
                examples.weights,
                examples.positive_ids,
                examples.negative_ids,
            )
        else:
            outputs = self.dense(examples.inputs)
            # The stack's own may be on another rank; it has no parameters.
            losses = SampledSoftmax(self._items)(outputs, *examples[1:])
            scores = _places_among_negatives(outputs, examples)
        loss = losses.sum()
        return loss, (loss.detach(), scores.detach(), batch.labels.detach())

    def random_examples(self, num_samples: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Inputs and targets of the dense part, with the sizes of real ones and random numbers."""
        length, dim = self._max_length - 1, self._dim
        vectors = torch.rand(num_samples, 2 * length + self._num_negatives, dim)
        ids = torch.randint(self._num_items, (num_samples, length + self._num_negatives))
        inputs, positives, negatives = vectors.split((length, length, self._num_negatives), dim=1)
        positive_ids, negative_ids = ids.split((length, self._num_negatives), dim=1)
        weights = torch.ones(num_samples, length)
        return inputs, [positives, negatives, weights, positive_ids, negative_ids]

    def _examples_of(self, batch: Batch) -> Examples:
        features = batch.sparse_features
        self._check_negatives(features)
        return self.examples(self.embeddings(features), features)

    def _check_negatives(self, features: object) -> None:
        # A pipeline that traces this model has no batch yet.
        name = negatives_name(self._feature)
        if isinstance(features, KeyedJaggedTensor) and name not in list(features.keys()):
            raise InputError(
                f"the batch has no feature {name!r}; give the model the batches of "
                f"WithNegatives(dataset, {self._feature!r}, ...)"
            )

    @torch.no_grad()
    def queries(self, batch: Batch) -> Queries:
        """What comes next after all items of each sample but the last, which is the target.

        Collectives:
            Those of a lookup of the batch.
        """
        examples = self._examples_of(batch)
        rows, last, has_next = last_positions(examples)
        ids = batch.sparse_features[self._feature]
        return Queries.of(
            self.dense(examples.inputs)[rows, last],
            examples.positives[rows, last],
            examples.positive_ids[rows, last].where(has_next, -1),
            seen=ids.to_padded_dense(padding_value=-1).long(),
        )

    @torch.no_grad()
    def item_chunks(self, chunk_size: int, device: torch.device) -> Iterator[ItemChunk]:
        """The vectors of all items, some at a time, looked up by all ranks together.

        Args:
            chunk_size: how many items are looked up together.
            device: of their ids.

        Collectives:
            Those of a lookup for each chunk.
        """
        for start in range(0, self._num_items, chunk_size):
            ids = torch.arange(start, min(start + chunk_size, self._num_items), device=device)
            features = KeyedJaggedTensor(
                keys=[self._feature, negatives_name(self._feature)],
                values=ids,
                lengths=torch.tensor([ids.numel(), 0], device=device, dtype=torch.int32),
            )
            yield ItemChunk(start, self.embeddings(features)[self._feature].values())


def _places_among_negatives(outputs: torch.Tensor, examples: Examples) -> torch.Tensor:
    """The place of each sample's last item among itself and the negatives."""
    rows, last, has_next = last_positions(examples)
    queries, targets = outputs[rows, last], examples.positive_ids[rows, last]
    return places_of(
        (queries * examples.positives[rows, last]).sum(dim=1),
        (examples.negatives @ queries.unsqueeze(2)).squeeze(2),
        counts=examples.negative_ids != targets.unsqueeze(1),
    ).where(has_next, 0)
