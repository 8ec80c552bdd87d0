"""Batches whose features have batch sizes of their own (TorchRec's VBE).

Such a batch has distinct bags for each feature, and says which of them each sample has. TorchRec
passes the sizes on to every exchange and every kernel, which few of its sharding types survive.
Here the batch becomes an ordinary one of distinct bags before anything sees it: features with
fewer bags than others get empty ones at their end. At the output each sample takes its bags, and in
the backward a bag gets the gradients of all its samples. So the sizes may differ from rank to
rank and from batch to batch, and ordinary batches may come in between.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from torchrec_2dsp.errors import InputError


@dataclass(frozen=True, eq=False)
class BagsOfSamples:
    """Maps samples to each feature's bags."""

    rows: Mapping[str, int]
    """Each feature's row in ``indices``."""
    indices: torch.Tensor
    """Numbers of bags, `[features, samples]`."""

    def record_stream(self, stream: torch.Stream) -> None:
        """Keep the tensors alive for ``stream``."""
        self.indices.record_stream(stream)  # pyright: ignore[reportArgumentType]

    def pooled(self, bags: KeyedTensor) -> KeyedTensor:
        """Return each sample's bags, side by side."""
        dims = bags.length_per_key()
        columns = bags.values().split(dims, dim=1)
        samples = [
            part.index_select(0, self._of(name))
            for name, part in zip(bags.keys(), columns, strict=True)
        ]
        return KeyedTensor(
            keys=bags.keys(), length_per_key=dims, values=torch.cat(samples, dim=1), key_dim=1
        )

    def sequences(self, bags: Mapping[str, JaggedTensor]) -> dict[str, JaggedTensor]:
        """Return each sample's sequences."""
        return {name: _select(rows, self._of(name)) for name, rows in bags.items()}

    def _of(self, name: str) -> torch.Tensor:
        # A feature that looks up several tables carries a table's name in each of its outputs.
        return self.indices[self.rows[name.split("@")[0]]]


@dataclass(frozen=True, eq=False)
class DistinctBags:
    """A batch with one batch size for all features."""

    features: KeyedJaggedTensor
    """The bags; none where the batch can't be right."""
    of_samples: BagsOfSamples | None
    """Each sample's bags; `None` in ordinary batches."""
    error: InputError | None = None


@torch.no_grad()
def distinct_bags(features: KeyedJaggedTensor, needed: Iterable[str]) -> DistinctBags:
    """Return a batch's bags, and the samples' bag numbers; an ordinary batch is returned itself.

    Example:
        >>> import torch
        >>> from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
        >>> from torchrec_2dsp.shard.variable_batch_sizes import distinct_bags
        >>> features = KeyedJaggedTensor(
        ...     ["user", "item"],
        ...     torch.tensor([7, 8, 1, 2, 3]),
        ...     lengths=torch.tensor([2, 1, 1, 1]),  # One user, three items.
        ...     stride_per_key_per_rank=[[1], [3]],
        ...     inverse_indices=(["user", "item"], torch.tensor([[0, 0, 0], [2, 0, 1]])),
        ... )
        >>> bags = distinct_bags(features, ["user", "item"])
        >>> bags.features.lengths().view(2, 3).tolist()
        [[2, 0, 0], [1, 1, 1]]
        >>> bags.of_samples.indices.tolist()
        [[0, 0, 0], [2, 0, 1]]
    """
    if not features.variable_stride_per_key():
        return DistinctBags(features, None)
    sizes = features.stride_per_key()
    lengths, weights = features.lengths(), features.weights_or_none()
    error = _error(features, needed)
    if error is not None:
        nothing = KeyedJaggedTensor(
            keys=features.keys(),
            values=features.values()[:0],
            weights=None if weights is None else weights[:0],
            lengths=lengths[:0],
            stride=0,
        )
        return DistinctBags(nothing, None, error)
    largest = max(sizes, default=0)
    numbers = torch.arange(largest, device=lengths.device)
    is_there = numbers < torch.tensor(sizes, device=lengths.device).unsqueeze(1)
    padded = lengths.new_zeros(is_there.shape).masked_scatter_(is_there, lengths)
    bags = KeyedJaggedTensor(
        keys=features.keys(),
        values=features.values(),
        weights=weights,
        lengths=padded.view(-1),
        stride=largest,
    )
    names, indices = features.inverse_indices()
    rows = {name: row for row, name in enumerate(names)}
    return DistinctBags(bags, BagsOfSamples(rows, indices.long()))


def _error(features: KeyedJaggedTensor, needed: Iterable[str]) -> InputError | None:
    """Return what is wrong with a batch's sizes, or with its samples' bags."""
    sizes = dict(zip(features.keys(), features.stride_per_key(), strict=True))
    num_lengths = features.lengths().numel()
    if sum(sizes.values()) != num_lengths:
        return InputError(
            f"the batch sizes of the features are {sizes}, together {sum(sizes.values())}, but "
            f"there are {num_lengths} lengths; correct stride_per_key_per_rank"
        )
    names_and_indices = features.inverse_indices_or_none()
    if names_and_indices is None:
        return InputError(
            "a batch with a batch size for each feature (stride_per_key_per_rank) must say which "
            "bag each sample has; pass inverse_indices to the KeyedJaggedTensor"
        )
    names, indices = names_and_indices
    if indices.dim() != 2 or len(names) != len(indices):
        return InputError(
            f"inverse_indices name {len(names)} features, but their tensor has the shape "
            f"{list(indices.shape)}; it must have a row for each name and a column for each sample"
        )
    looked_up = [feature for feature in needed if feature in sizes]
    lacking = [feature for feature in looked_up if feature not in names]
    if lacking:
        return InputError(
            f"inverse_indices lack the feature {lacking[0]!r}; they must have a row for each "
            "feature that is looked up"
        )
    rows = [row for row, name in enumerate(names) if name in looked_up]
    limits = torch.tensor([sizes[names[row]] for row in rows], device=indices.device)
    bags = indices[rows]
    is_bad = (bags < 0) | (bags >= limits.unsqueeze(1))
    if not bool(is_bad.any()):
        return None
    index, sample = is_bad.nonzero()[0].tolist()
    row = rows[index]
    return InputError(
        f"inverse_indices give sample {sample} the bag {int(indices[row, sample])} of feature "
        f"{names[row]!r}, which has {sizes[names[row]]} bags; correct inverse_indices or "
        "stride_per_key_per_rank"
    )


def _select(rows: JaggedTensor, bags: torch.Tensor) -> JaggedTensor:
    """Return the sequences with these numbers, one after another."""
    ends = rows.lengths().cumsum(0)
    starts = (ends - rows.lengths()).index_select(0, bags)
    lengths = rows.lengths().index_select(0, bags)
    # What has to be added to a place in the output for the place that its row comes from.
    shifts = starts - (lengths.cumsum(0) - lengths)
    shifts = shifts.repeat_interleave(lengths)
    places = torch.arange(shifts.numel(), device=shifts.device) + shifts
    ids = rows.weights_or_none()  # Where the module is asked for indices.
    return JaggedTensor(
        values=rows.values().index_select(0, places),
        lengths=lengths,
        weights=None if ids is None else ids.index_select(0, places),
    )
