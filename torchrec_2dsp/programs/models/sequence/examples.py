"""`NextItemExamples`: from looked up sequences to what a transformer is given and must predict."""

import math
from collections.abc import Mapping
from typing import Literal, NamedTuple

import torch
from torch import nn
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from torchrec_2dsp.errors import InputError
from torchrec_2dsp.programs.data.negatives import negatives_name


class Examples(NamedTuple):
    """A batch of sequences, filled up at their ends; the first dimension of all is the batch."""

    inputs: torch.Tensor
    """The vectors of all items but the last, ``[batch, length, dim]``."""

    positives: torch.Tensor
    """The vectors of the items after them, ``[batch, length, dim]``."""

    negatives: torch.Tensor
    """The vectors of the negatives, ``[batch, num_negatives, dim]``."""

    weights: torch.Tensor
    """The weights of the positions in the loss, 0 behind the end, ``[batch, length]``."""

    positive_ids: torch.Tensor
    """The items after each position, 0 behind the end, ``[batch, length]``."""

    negative_ids: torch.Tensor
    """The negatives, ``[batch, num_negatives]``."""


class NextItemExamples(nn.Module):
    """Arranges looked up sequences; it has no parameters."""

    def __init__(
        self,
        feature: str,
        *,
        max_length: int,
        loss_mean: Literal["tokens", "samples"],
    ) -> None:
        """
        Args:
            feature: the feature that holds the items.
            max_length: how many last items are used.
            loss_mean: what the weights make the loss the mean over.
        """
        super().__init__()
        self._feature, self._negatives = feature, negatives_name(feature)
        self._num_positions = max_length - 1
        self._is_by_token = loss_mean == "tokens"

    def forward(self, vectors: Mapping[str, JaggedTensor], features: KeyedJaggedTensor) -> Examples:
        """The examples of a batch.

        Args:
            vectors: what the lookup gave, by feature.
            features: the ids of the batch.
        """
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
        """Where the last items of each sample are among all values, -1 for none."""
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
    """The last positions that have a next item.

    Returns:
        The number of each sample, its last position, and whether it has one.
    """
    num_positions = (examples.weights > 0).sum(dim=1)
    samples = torch.arange(num_positions.numel(), device=num_positions.device)
    return samples, (num_positions - 1).clamp(min=0), num_positions > 0


def _with_last(values: torch.Tensor) -> torch.Tensor:
    """The values and a zero, which -1 stands for."""
    return torch.cat([values, values.new_zeros(1, *values.shape[1:])])


def _rows(values: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """The values at these places; the last one for -1."""
    places = places.where(places >= 0, values.shape[0] - 1)
    return values.index_select(0, places.flatten()).unflatten(0, places.shape)
