"""Serve each kind of model: scores, and next items for sequences.

A sequence model answers a history with a vector for what comes next, whose dot products with the
vectors of all items, a chunk at a time, rank the items.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torchrec.datasets.utils import Batch
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_2dsp.errors import TwoDError, UnsupportedError
from torchrec_2dsp.programs.config.sections import ModelConfig
from torchrec_2dsp.programs.data.dataset import Dataset
from torchrec_2dsp.programs.export.served import (
    Answer,
    CheckedRequests,
    Request,
    RequestCheck,
    ServedFeature,
    is_integer,
    request_of,
    script_of,
    traced_script,
)
from torchrec_2dsp.programs.models.kinds import ModelSection
from torchrec_2dsp.programs.models.model import tables_of
from torchrec_2dsp.programs.models.own_model import OwnModelConfig
from torchrec_2dsp.programs.models.sequence import NextItemModel, SequenceModelConfig

Scores = Callable[[nn.Module, torch.Tensor, KeyedJaggedTensor], Answer]
"""Scores samples with a model, from their dense features and ids."""


class ServedScores:
    """A trained model whose answers have a tensor ``scores``.

    Its tables may be quantised in place at any time.
    """

    functions: tuple[str, ...] = ()
    """The file's functions besides the call that answers requests: none."""

    def __init__(
        self,
        model: nn.Module,
        scores: Scores,
        features: Sequence[ServedFeature],
        num_dense: int,
    ) -> None:
        self.features, self.num_dense = tuple(features), num_dense
        self._names = [feature.name for feature in features]
        self._answers = _Answers(model, scores, self._names).eval()

    def module(self) -> nn.Module:
        """Return a module that answers requests with the current tables."""
        return self._answers

    def script(self) -> torch.jit.ScriptModule:
        """Script the module for the file, with a check of requests; the weights are shared."""
        check = RequestCheck(self.features, self.num_dense)
        return script_of(CheckedRequests(check, traced_script(self._answers)))

    def request(self, batch: Batch) -> Request:
        """Return the request for held-out samples."""
        return request_of(batch.dense_features, batch.sparse_features, self._names)

    def scores(self, answers: Callable[..., Answer], batch: Batch) -> torch.Tensor:
        """Score a batch's samples."""
        scores, num_samples = answers(*self.request(batch))["scores"], len(batch.labels)
        if scores.numel() != num_samples:
            raise UnsupportedError(
                f"the model gives {scores.numel()} scores for {num_samples} samples; return one "
                "for each sample"
            )
        return scores


def _features_of_tables(model: nn.Module) -> list[ServedFeature]:
    """List the features for a model's tables, table by table."""
    return [
        ServedFeature(
            name=name, table=table.name, num_rows=table.num_embeddings, dim=table.embedding_dim
        )
        for table in tables_of(model)
        for name in table.feature_names
    ]


class _Answers(nn.Module):
    """Answers requests with a model that takes their ids together."""

    def __init__(self, model: nn.Module, scores: Scores, features: list[str]) -> None:
        super().__init__()
        self.model = model
        self._scores, self._features = scores, features

    def forward(self, dense: torch.Tensor, values: torch.Tensor, lengths: torch.Tensor) -> Answer:
        # FBGEMM's int8 lookup on CPUs assumes contiguous tensors.
        values, lengths = values.contiguous(), lengths.contiguous()
        ids = KeyedJaggedTensor(keys=self._features, values=values, lengths=lengths)
        return self._scores(self.model, dense, ids)


def _click_scores(model: nn.Module, dense: torch.Tensor, ids: KeyedJaggedTensor) -> Answer:
    """Score clicks by a DLRM or a DCN: logits and probabilities."""
    return _logits_and_probabilities(model(dense, ids))


def _tower_scores(model: Any, dense: torch.Tensor, ids: KeyedJaggedTensor) -> Answer:
    """Score pairs by two towers: dot products and the multiplied vectors."""
    users, items = model.vectors(ids, dense)
    return {"scores": (users * items).sum(dim=1), "user_vectors": users, "item_vectors": items}


def _batch_scores(model: nn.Module, dense: torch.Tensor, ids: KeyedJaggedTensor) -> Answer:
    """Score with a model that takes batches and returns the logits besides its loss."""
    # A request has no labels, and nobody asks for the loss.
    _, (_, logits, _) = model(Batch(dense, ids, dense.new_zeros(dense.size(0))))
    return _logits_and_probabilities(logits)


def _logits_and_probabilities(logits: torch.Tensor) -> Answer:
    scores = logits.reshape(-1)
    return {"scores": scores, "probabilities": torch.sigmoid(scores)}


_COLLECTIONS = (EmbeddingBagCollection, EmbeddingCollection)


def served_own_model(model: nn.Module, data: Dataset, factory: str) -> ServedScores:
    """Serve a factory's model, which returns click logits and probabilities.

    A request has all the data's features, as a batch does, since the model may use any of them.
    """
    _check_collections(model, factory)
    tables = {name: table for table in tables_of(model) for name in table.feature_names}
    features = [
        ServedFeature(
            name=feature.name,
            table=tables[feature.name].name if feature.name in tables else "",
            # A model may change ids before it looks them up, so its tables may have other rows.
            num_rows=feature.num_rows,
            dim=tables[feature.name].embedding_dim if feature.name in tables else 0,
        )
        for feature in data.features
    ]
    return ServedScores(model, _batch_scores, features, data.num_dense)


@contextmanager
def saying_what_stops(factory: str) -> Iterator[None]:
    """Raise an error that names the factory, if its model can't be quantised or scripted."""
    try:
        yield
    except TwoDError:
        raise
    # Recording a user's model may raise anything, and so may TorchScript.
    except Exception as error:
        if not factory:
            raise
        raise UnsupportedError(
            f"the model of factory={factory!r} can't be exported: {type(error).__name__}: "
            f"{str(error).strip()}\nThe forward is recorded without a batch, and has to be the "
            "same for all of them: let it call torch's functions and modules, and let no number "
            "of a batch decide what it does"
        ) from error


def _check_collections(model: nn.Module, factory: str) -> None:
    collections = [
        (name, module) for name, module in model.named_modules() if isinstance(module, _COLLECTIONS)
    ]
    if not collections:
        raise UnsupportedError(
            f"the model of factory={factory!r} can't be exported: it has no "
            "EmbeddingBagCollection and no EmbeddingCollection to quantise"
        )
    for name, module in collections:
        if type(module) not in _COLLECTIONS or not name:
            raise UnsupportedError(
                f"the model of factory={factory!r} can't be exported: {name or 'it'} is a "
                f"{type(module).__name__}, which TorchRec doesn't quantise; use an "
                "EmbeddingBagCollection or an EmbeddingCollection"
            )


class ServedNextItems:
    """A trained model whose samples are histories of items, oldest first.

    Its tables may be quantised in place at any time.
    """

    functions: tuple[str, ...] = ("item_vectors", "next_items")
    """The file's functions besides the call."""

    num_dense: int = 0
    """The number of dense features: none, even if the data has some."""

    def __init__(self, model: NextItemModel, config: SequenceModelConfig) -> None:
        self._model, self._chunk_size = model, config.ranking.chunk_size
        # A held-out sample's last item is the one to predict.
        self._max_items = config.max_length - 1
        items, negatives = _features_of_tables(model)
        self._names = [items.name, negatives.name]
        self.features = (items,)
        """The one feature, which holds the items."""

    def module(self) -> nn.Module:
        """Return a module that answers requests with the current table."""
        return self._answers(self._lookup(), self._layers())

    def script(self) -> torch.jit.ScriptModule:
        """Script the module, with a check of requests."""
        lookup, layers = traced_script(self._lookup()), traced_script(self._layers())
        return script_of(self._answers(lookup, layers))

    def request(self, batch: Batch) -> Request | None:
        """Return held-out histories without their last items; none if all are empty."""
        request, _ = self._held_out(batch)
        return request

    def scores(self, answers: Any, batch: Batch) -> torch.Tensor:
        """Score the last items in held-out samples that have a history before."""
        request, targets = self._held_out(batch)
        if request is None:
            return torch.empty(0)
        vectors = answers(*request)["next_vectors"]
        return (vectors * answers.item_vectors(targets)).sum(dim=1)

    def _held_out(self, batch: Batch) -> tuple[Request | None, torch.Tensor]:
        """Return held-out samples as a request for histories, and their next items."""
        ids = batch.sparse_features[self.features[0].name]
        lengths, ends = ids.lengths().long(), ids.offsets().long()[1:]
        has_history = lengths > 1
        if not bool(has_history.any()):
            return None, ids.values()[:0]
        is_kept = torch.repeat_interleave(has_history, lengths)
        is_kept[ends[has_history] - 1] = False
        counts = lengths[has_history] - 1
        request = torch.empty(len(counts), 0), ids.values()[is_kept], counts
        return request, ids.values()[ends[has_history] - 1]

    def _answers(self, lookup: nn.Module, layers: nn.Module) -> "_NextItems":
        check = RequestCheck(self.features, self.num_dense)
        num_items = self.features[0].num_rows
        return _NextItems(check, lookup, layers, num_items, self._max_items, self._chunk_size)

    def _lookup(self) -> nn.Module:
        return _ItemLookup(self._model.embeddings, self._names).eval()

    def _layers(self) -> nn.Module:
        return nn.Sequential(*self._model.dense.layers).eval()


class _ItemLookup(nn.Module):
    """Looks up items in a collection that has a feature for negatives as well."""

    def __init__(self, embeddings: nn.Module, names: list[str]) -> None:
        super().__init__()
        self.embeddings = embeddings
        self._names = names

    def forward(self, ids: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        features = KeyedJaggedTensor(keys=self._names, values=ids.contiguous(), lengths=lengths)
        return self.embeddings(features)[self._names[0]].values()


class _NextItems(nn.Module):
    """Predicts the next items after histories; written for TorchScript."""

    def __init__(
        self,
        check: RequestCheck,
        lookup: nn.Module,
        layers: nn.Module,
        num_items: int,
        max_items: int,
        chunk_size: int,
    ) -> None:
        super().__init__()
        self.check, self.lookup, self.layers = check, lookup, layers
        self.num_items, self.max_items, self.chunk_size = num_items, max_items, chunk_size

    def forward(
        self, dense: torch.Tensor, values: torch.Tensor, lengths: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        """Return a vector for each history; an item's score is the dot product with its own."""
        self.check(dense, values, lengths)
        if bool((lengths == 0).any()):
            raise ValueError(
                "a history is empty, and training never predicts a first item; give each sample "
                "one item at least"
            )
        lengths = lengths.long()
        num_used = lengths.clamp(max=self.max_items)
        steps = torch.arange(int(num_used.max()))
        is_item = steps < num_used.unsqueeze(1)
        # A sequence begins at position 0 and is filled up at its end, as in training.
        places = (lengths.cumsum(0) - num_used).unsqueeze(1) + steps
        vectors = self.lookup(values.long(), torch.tensor([values.numel(), 0]))
        inputs = vectors[places.where(is_item, 0)].where(is_item.unsqueeze(2), 0.0)
        outputs = self.layers(inputs)
        return {"next_vectors": outputs[torch.arange(len(num_used)), num_used - 1]}

    @torch.jit.export
    def item_vectors(self, ids: torch.Tensor) -> torch.Tensor:
        """Return items' vectors, such as all items' for a nearest-neighbour index."""
        if ids.dim() != 1 or not is_integer(ids):
            raise ValueError("ids isn't one row of int64 or int32 numbers; give items of the table")
        if bool(((ids < 0) | (ids >= self.num_items)).any()):
            raise ValueError(f"an id is not in 0..{self.num_items - 1}, the items of the table")
        return self.lookup(ids.long(), torch.tensor([ids.numel(), 0]))

    @torch.jit.export
    def next_items(
        self,
        dense: torch.Tensor,
        values: torch.Tensor,
        lengths: torch.Tensor,
        count: int,
        exclude_seen: bool = False,
    ) -> dict[str, torch.Tensor]:
        """Return the ``count`` items with the highest scores for each history, the best first.

        With ``exclude_seen`` a history's own items are left out; where too few others are left, the
        last items are -1.
        """
        if count < 1 or count > self.num_items:
            raise ValueError(f"count={count} is not in 1..{self.num_items}, the number of items")
        vectors = self.forward(dense, values, lengths)["next_vectors"]
        num_samples = vectors.size(0)
        sample_of_value = torch.repeat_interleave(torch.arange(num_samples), lengths.long())
        items = torch.empty(num_samples, 0, dtype=torch.int64)
        scores = torch.empty(num_samples, 0)
        for first in range(0, self.num_items, self.chunk_size):
            ids = torch.arange(first, min(first + self.chunk_size, self.num_items))
            of_chunk = vectors @ self.item_vectors(ids).t()
            if exclude_seen:
                is_inside = (values >= first) & (values < first + ids.numel())
                seen = values[is_inside].long() - first
                of_chunk[sample_of_value[is_inside], seen] = -torch.inf
            scores = torch.cat([scores, of_chunk], dim=1)
            items = torch.cat([items, ids.expand(num_samples, -1)], dim=1)
            scores, places = torch.topk(scores, min(count, scores.size(1)), dim=1)
            items = items.gather(1, places)
        return {"items": items.masked_fill(scores == -torch.inf, -1), "scores": scores}


ServedModel = ServedScores | ServedNextItems
"""A trained model that answers requests."""


def served_model(model: nn.Module, section: ModelSection, data: Dataset) -> ServedModel:
    """Serve a trained model by its kind."""
    built: Any = model
    if isinstance(section, OwnModelConfig):
        return served_own_model(model, data, section.factory)
    if isinstance(section, SequenceModelConfig):
        return ServedNextItems(built, section)
    features = _features_of_tables(model)
    if isinstance(section, ModelConfig):
        return ServedScores(built.model, _click_scores, features, data.num_dense)
    return ServedScores(model, _tower_scores, features, data.num_dense)
