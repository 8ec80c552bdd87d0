"""A sequence recommender: a causal transformer over a user's items, which predicts the next one.

    item ids and negative ids  --one lookup in one table-->  vectors
    item vectors               --transformer-->  a query at each position
    queries  x  vectors of the true next items and of the negatives  -->  sampled softmax

The lookup is an `EmbeddingCollection`'s; everything after it is a `LayerStack`.
"""

import math
from collections.abc import Mapping
from functools import partial
from typing import Literal, NamedTuple, Self

import torch
from pydantic import Field, model_validator
from torch import nn
from torchrec.datasets.utils import Batch
from torchrec.modules.embedding_configs import EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingCollection
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from torchrec_2dsp.errors import InputError
from torchrec_2dsp.programs.config.section import Seed
from torchrec_2dsp.programs.config.sections import TablesSection
from torchrec_2dsp.programs.data.negatives import NegativeItems, NegativeKind, negatives_name
from torchrec_2dsp.programs.models.model import Output, PlannedSection, table_name
from torchrec_2dsp.programs.models.ranking import Queries, RankingConfig, places_of
from torchrec_2dsp.programs.models.sequence_layers import (
    Positions,
    SampledSoftmax,
    SequenceStack,
    TransformerBlock,
)


class SequenceModelConfig(PlannedSection, TablesSection):
    """A transformer that predicts each next item of a sequence."""

    kind: Literal["sequence"] = "sequence"
    """The kind of model."""

    feature: str = "item"
    """The sparse feature that holds a user's items, oldest first."""

    dim: int = Field(default=32, ge=4, multiple_of=4)
    """The embedding dimension, which is the transformer's as well."""

    max_length: int = Field(default=50, ge=2)
    """The number of a user's last items to use, the one to predict included."""

    num_blocks: int = Field(default=2, ge=1)
    """The number of attention and feed-forward blocks."""

    num_heads: int = Field(default=2, ge=1)
    """The number of attention heads."""

    hidden_factor: int = Field(default=4, ge=1)
    """The size of the feed-forward layers, as a multiple of `dim`."""

    dropout: float = Field(default=0.0, ge=0, lt=1)
    """The dropout rate. Above 0, each rank draws its own mask: runs differ between meshes, and
    layers can't be split by tensor parallelism."""

    num_negatives: int = Field(default=64, ge=1)
    """The number of negatives per sequence in training."""

    eval_negatives: int = Field(default=0, ge=0)
    """The number of negatives per held-out sequence, if ``ranking.among`` is "sampled"; 0 for
    `num_negatives`."""

    negatives: NegativeKind = NegativeKind.UNIFORM
    """The distribution of negatives: uniform, or log_uniform where ids are numbered by frequency.
    The loss corrects for it."""

    loss_mean: Literal["tokens", "samples"] = "tokens"
    """The unit over which the loss is a mean: the predicted items in the rank's batch, or the
    sequences, which then count alike, whichever rank has them."""

    length_chunks: int = Field(default=1, ge=1)
    """The number of chunks with about equal lengths into which a rank's sequences are cut in
    training, each padded to its own longest. With 1 all are padded to `max_length`, and a step's
    time doesn't depend on their lengths."""

    ranking: RankingConfig = RankingConfig()
    """The ranking of held-out next items."""

    seed: Seed = 0
    """The seed of the initial weights and of the negatives."""

    @model_validator(mode="after")
    def _check_heads(self) -> Self:
        if self.dim % self.num_heads:
            raise ValueError(
                f"num_heads={self.num_heads} does not divide dim={self.dim}; use another of the two"
            )
        return self


class Examples(NamedTuple):
    """A batch of sequences, padded at their ends; the batch is the first dimension."""

    inputs: torch.Tensor
    """The vectors of all items but the last, ``[batch, length, dim]``."""

    positives: torch.Tensor
    """The next items' vectors, ``[batch, length, dim]``."""

    negatives: torch.Tensor
    """The negatives' vectors, ``[batch, num_negatives, dim]``."""

    weights: torch.Tensor
    """Each position's weight in the loss, 0 for padding, ``[batch, length]``."""

    positive_ids: torch.Tensor
    """The next items, 0 for padding, ``[batch, length]``."""

    negative_ids: torch.Tensor
    """The negatives, ``[batch, num_negatives]``."""


class NextItemExamples(nn.Module):
    """Arranges looked-up sequences; it has no parameters."""

    def __init__(
        self,
        feature: str,
        *,
        max_length: int,
        loss_mean: Literal["tokens", "samples"],
    ) -> None:
        super().__init__()
        self._feature, self._negatives = feature, negatives_name(feature)
        self._num_positions = max_length - 1
        self._is_by_token = loss_mean == "tokens"

    def forward(self, vectors: Mapping[str, JaggedTensor], features: KeyedJaggedTensor) -> Examples:
        """Build a batch's examples."""
        ids, negative_ids = features[self._feature], features[self._negatives].values()
        places, is_item = self._places(ids)
        padded_vectors = _with_last(vectors[self._feature].values())
        padded_ids = _with_last(ids.values())
        num_samples = ids.lengths().numel()
        shape = (num_samples, negative_ids.numel() // max(1, num_samples))
        if negative_ids.numel() != math.prod(shape):
            raise InputError(
                f"the batch has {negative_ids.numel()} negatives for {num_samples} samples; give "
                "each sample as many"
            )
        return Examples(
            inputs=_rows(padded_vectors, places[:, :-1].where(is_item[:, 1:], -1)),
            positives=_rows(padded_vectors, places[:, 1:]),
            negatives=vectors[self._negatives].values().unflatten(0, shape),
            weights=self._weights(is_item[:, 1:]),
            positive_ids=_rows(padded_ids, places[:, 1:]),
            negative_ids=negative_ids.unflatten(0, shape),
        )

    def _places(self, ids: JaggedTensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Locate each sample's last items among all values; -1 for none."""
        ends, lengths = ids.offsets()[1:].long(), ids.lengths().long()
        lengths = lengths.clamp(max=self._num_positions + 1)
        steps = torch.arange(self._num_positions + 1, device=lengths.device)
        is_item = steps < lengths.unsqueeze(1)
        return ((ends - lengths).unsqueeze(1) + steps).where(is_item, -1), is_item

    def _weights(self, has_next: torch.Tensor) -> torch.Tensor:
        if self._is_by_token:
            return has_next / has_next.sum().clamp(min=1)
        return has_next / has_next.sum(dim=1, keepdim=True).clamp(min=1) / len(has_next)


def last_positions(examples: Examples) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the samples' numbers, their last positions, and whether a next item follows."""
    num_positions = (examples.weights > 0).sum(dim=1)
    samples = torch.arange(num_positions.numel(), device=num_positions.device)
    return samples, (num_positions - 1).clamp(min=0), num_positions > 0


def _with_last(values: torch.Tensor) -> torch.Tensor:
    """Append a zero, which -1 selects."""
    return torch.cat([values, values.new_zeros(1, *values.shape[1:])])


def _rows(values: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Take the values at these places; the last one for -1."""
    places = places.where(places >= 0, values.shape[0] - 1)
    return values.index_select(0, places.flatten()).unflatten(0, places.shape)


class NextItemModel(nn.Module):
    """Predicts each next item of a sequence from those before it.

    One table has the vectors for the transformer, the true next items and the negatives. Everything
    after the lookup is a `LayerStack`, which knows nothing of ranks.
    """

    def __init__(
        self, config: SequenceModelConfig, num_items: int, tables_device: str = "cpu"
    ) -> None:
        super().__init__()
        self._feature, self.num_items = config.feature, num_items
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
                    data_type=config.data_type,
                )
            ],
            device=torch.device(tables_device),
        )
        # Drawing the table depends on its device, so the stream starts over.
        torch.manual_seed(config.seed + 1)
        self.examples = NextItemExamples(
            config.feature, max_length=config.max_length, loss_mean=config.loss_mean
        )
        hidden = config.hidden_factor * config.dim
        blocks = [
            TransformerBlock(config.dim, config.num_heads, hidden, config.dropout)
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
        """Return the loss, and what `DLRMTrain` returns besides it: detached loss, scores, labels.

        A training score is the sample's part of the loss. An evaluation score is the last item's
        place among itself and the negatives, 1 for the best, 0 for a sample without a next item.
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
        """Make inputs and targets for the dense part, with real sizes and random numbers."""
        length, dim = self._max_length - 1, self._dim
        vectors = torch.rand(num_samples, 2 * length + self._num_negatives, dim)
        ids = torch.randint(self.num_items, (num_samples, length + self._num_negatives))
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

    def queries(self, batch: Batch) -> Queries:
        """Return each sample's query for its last item, which is the target.

        Collectives:
            A lookup's, for the batch.
        """
        examples = self._examples_of(batch)
        rows, last, has_next = last_positions(examples)
        ids = batch.sparse_features[self._feature]
        vectors = self.dense(examples.inputs)[rows, last]
        return Queries(
            vectors,
            (vectors * examples.positives[rows, last]).sum(dim=1),
            examples.positive_ids[rows, last].where(has_next, -1),
            seen=ids.to_padded_dense(padding_value=-1).long(),
        )

    def item_vectors(self, items: torch.Tensor) -> torch.Tensor:
        """Look up the vectors of items, on all ranks together.

        Collectives:
            A lookup's.
        """
        lengths = torch.tensor([items.numel(), 0], device=items.device, dtype=torch.int32)
        features = KeyedJaggedTensor(
            keys=[self._feature, negatives_name(self._feature)], values=items, lengths=lengths
        )
        return self.embeddings(features)[self._feature].values()


def _places_among_negatives(outputs: torch.Tensor, examples: Examples) -> torch.Tensor:
    """Return each last item's place among itself and the negatives."""
    rows, last, has_next = last_positions(examples)
    queries, targets = outputs[rows, last], examples.positive_ids[rows, last]
    return places_of(
        (queries * examples.positives[rows, last]).sum(dim=1),
        (examples.negatives @ queries.unsqueeze(2)).squeeze(2),
        counts=examples.negative_ids != targets.unsqueeze(1),
    ).where(has_next, 0)
