"""`ServedNextItems`: a sequence model, which says what comes next after the items of a history.

```text
 items of a history --lookup--> vectors --transformer--> a vector for what comes next
                                                                     x
          all items of the table --lookup, a chunk at a time--> their vectors --> the best items
```
"""

from typing import Any, NamedTuple

import torch
from torch import nn
from torchrec.datasets.utils import Batch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_2dsp.programs.export.checked import RequestCheck
from torchrec_2dsp.programs.export.served import Request, ServedFeature
from torchrec_2dsp.programs.export.serving import script_of, traced_script
from torchrec_2dsp.programs.models.model import tables_of
from torchrec_2dsp.programs.models.sequence import NextItemModel, SequenceModelConfig


class ServedNextItems:
    """A `ServedModel` whose samples are histories of items, oldest first."""

    functions: tuple[str, ...] = ("item_vectors", "next_items")
    """The functions that the file has beside the call."""

    num_dense: int = 0
    """There are no dense features, whatever the data has."""

    def __init__(self, model: NextItemModel, config: SequenceModelConfig) -> None:
        """
        Args:
            model: the trained model.
            config: its section of the config.
        """
        self._model = model
        (table,) = tables_of(model)
        self._names, self._chunk_size = list(table.feature_names), config.ranking.chunk_size
        # The last item of a held-out sample is the one to predict.
        self._max_items = config.max_length - 1
        self.features = (
            ServedFeature(
                name=config.feature,
                table=table.name,
                num_rows=table.num_embeddings,
                dim=table.embedding_dim,
            ),
        )
        """The one feature, which holds the items."""

    def module(self) -> nn.Module:
        """A module that answers requests, by the table as it is now."""
        return self._answers(self._lookup(), self._layers())

    def script(self) -> torch.jit.ScriptModule:
        """The module as a script, which also checks requests."""
        lookup, layers = traced_script(self._lookup()), traced_script(self._layers())
        return script_of(self._answers(lookup, layers))

    def request(self, batch: Batch) -> Request | None:
        """The histories of held-out samples without their last items; none if all are empty."""
        return self._held_out(batch).request

    def scores(self, answers: Any, batch: Batch) -> torch.Tensor:
        """The scores of the last items of held-out samples, where a history comes before."""
        held_out = self._held_out(batch)
        if held_out.request is None:
            return torch.empty(0)
        vectors = answers(*held_out.request)["next_vectors"]
        return (vectors * answers.item_vectors(held_out.targets)).sum(dim=1)

    def _held_out(self, batch: Batch) -> "_HeldOut":
        ids = batch.sparse_features[self.features[0].name]
        lengths, ends = ids.lengths().long(), ids.offsets().long()[1:]
        has_history = lengths > 1
        if not bool(has_history.any()):
            return _HeldOut(None, ids.values()[:0])
        is_kept = torch.repeat_interleave(has_history, lengths)
        is_kept[ends[has_history] - 1] = False
        counts = lengths[has_history] - 1
        request = torch.empty(len(counts), 0), ids.values()[is_kept], counts
        return _HeldOut(request, ids.values()[ends[has_history] - 1])

    def _answers(self, lookup: nn.Module, layers: nn.Module) -> "_NextItems":
        check = RequestCheck(self.features, self.num_dense)
        num_items = self.features[0].num_rows
        return _NextItems(check, lookup, layers, num_items, self._max_items, self._chunk_size)

    def _lookup(self) -> nn.Module:
        return _ItemLookup(self._model.embeddings, self._names).eval()

    def _layers(self) -> nn.Module:
        return nn.Sequential(*self._model.dense.layers).eval()


class _HeldOut(NamedTuple):
    """Held-out samples, as a history and what comes next."""

    request: Request | None
    """The histories; none if there are no samples."""

    targets: torch.Tensor
    """The next item of each history."""


class _ItemLookup(nn.Module):
    """The vectors of items, by a collection that has a feature for negatives as well."""

    def __init__(self, embeddings: nn.Module, names: list[str]) -> None:
        super().__init__()
        self.embeddings = embeddings
        self._names = names

    def forward(self, ids: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        features = KeyedJaggedTensor(keys=self._names, values=ids, lengths=lengths)
        return self.embeddings(features)[self._names[0]].values()


class _NextItems(nn.Module):
    """What comes next after histories, written for TorchScript."""

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
        """One vector for each history; an item's score is the dot product with its own."""
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
        """The vectors of some items, such as all of them for an index of nearest neighbours."""
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
        """The items with the highest scores among all of the table, the best one first.

        Args:
            dense: see `forward`.
            values: the items of the histories.
            lengths: how many each history has.
            count: how many items are wanted for each history.
            exclude_seen: leaves out those of the history. Where too few others are left, the last
                items are -1.
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
