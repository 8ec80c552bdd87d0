"""Take hot ids out of a batch's features. Pure tensor work."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor


@dataclass(frozen=True)
class HotFeature:
    """The hot ids of one feature in one batch."""

    slots: torch.Tensor
    """Positions in the table's hot set, in the order of the batch."""
    lengths: torch.Tensor
    """Hot ids per bag."""
    weights: torch.Tensor | None
    """Per-sample weights of the hot ids."""
    is_hot: torch.Tensor
    """Whether each id of the batch is hot, in the order of the batch."""


@dataclass(frozen=True, eq=False)
class HotIds:
    """The hot rows of a module at one time; they may be others later."""

    by_table: Mapping[str, torch.Tensor]
    """Row ids, ascending; a row's position is its slot."""
    by_feature: Mapping[str, torch.Tensor]
    """The row ids of the table that each feature looks up."""


@dataclass(frozen=True)
class HotBatch:
    """What a batch looks up in the replicas."""

    features: dict[str, HotFeature]
    """The hot ids of each feature, by its name."""
    ids: HotIds
    """What was hot when the batch was split."""

    def record_stream(self, stream: torch.Stream) -> None:
        """Keep the tensors alive for ``stream`` (pipelines hand batches between streams)."""
        for feature in self.features.values():
            for tensor in (feature.slots, feature.lengths, feature.weights, feature.is_hot):
                if tensor is not None:
                    tensor.record_stream(stream)


@torch.no_grad()
def split_hot_rows(features: KeyedJaggedTensor, ids: HotIds) -> tuple[KeyedJaggedTensor, HotBatch]:
    """Separate hot from cold ids.

    Args:
        features: a batch, left as it is.
        ids: what is hot.

    Returns:
        A batch with the same keys and bags without the hot ids, and the hot ids.
    """
    keys, batch_size = features.keys(), features.stride()
    hot_ids = ids.by_feature
    values, weights = features.values(), features.weights_or_none()
    lengths = features.lengths().view(len(keys), batch_size)
    bounds = features.offset_per_key()
    is_hot = torch.zeros(values.numel(), dtype=torch.bool, device=values.device)
    slots = torch.zeros(values.numel(), dtype=torch.int64, device=values.device)
    for index, key in enumerate(keys):
        if key in hot_ids:
            part = slice(bounds[index], bounds[index + 1])
            slots[part], is_hot[part] = _positions(values[part].long(), hot_ids[key])
    num_hot = count_per_bag(is_hot, features.offsets()).view(len(keys), batch_size)
    batch = HotBatch(
        features={
            key: HotFeature(
                slots=slots[bounds[index] : bounds[index + 1]][mask],
                lengths=num_hot[index],
                weights=None
                if weights is None
                else weights.detach()[bounds[index] : bounds[index + 1]][mask],
                is_hot=mask,
            )
            for index, key in enumerate(keys)
            if key in hot_ids
            for mask in (is_hot[bounds[index] : bounds[index + 1]],)
        },
        ids=ids,
    )
    cold = KeyedJaggedTensor(
        keys=keys,
        values=values[~is_hot],
        lengths=(lengths - num_hot.to(lengths.dtype)).view(-1),
        weights=None if weights is None else weights[~is_hot],
    )
    return cold, batch


def _positions(ids: torch.Tensor, hot: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Where each id stands in the sorted ``hot``, and whether it does."""
    slots = torch.searchsorted(hot, ids).clamp_(max=hot.numel() - 1)
    return slots, hot[slots] == ids


def count_per_bag(flags: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """How many of a bag's ids are flagged."""
    running = torch.cat([flags.new_zeros(1, dtype=torch.int64), flags.cumsum(0)])
    return running[offsets.long()].diff()
