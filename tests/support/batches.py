"""Batches with one batch size per feature (VBE).

`written_out` turns a variable batch into the ordinary one that it stands for, bag by bag and
without tensor tricks: the oracle trains on that one.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from tests.support.models import ModelSpec, make_batch


def make_variable_batch(
    spec: ModelSpec, seed: int, batch_size: int = 6, max_length: int = 4, *, plain_every: int = 5
) -> KeyedJaggedTensor:
    """Draw a batch with distinct bags per feature, and each sample's bags.

    Features have between one bag and one for each sample; some bags are unused, and
    ``inverse_indices`` list features in another order. Every ``plain_every``-th seed gives an
    ordinary batch instead, as some ranks' loaders might.
    """
    if plain_every and seed % plain_every == 0:
        return make_batch(spec, seed, batch_size, max_length)
    generator = torch.Generator().manual_seed(seed)
    keys = [feature for feature, _ in spec.features]
    sizes = [
        int(torch.randint(1, batch_size + 1, (), generator=generator)) if batch_size else 0
        for _ in keys
    ]
    whole = make_batch(spec, seed, batch_size, max_length)
    order = torch.randperm(len(keys), generator=generator).tolist()
    inverse = [torch.randint(max(size, 1), (batch_size,), generator=generator) for size in sizes]
    return first_bags(whole, sizes, {keys[index]: inverse[index] for index in order})


def first_bags(
    batch: KeyedJaggedTensor, sizes: Sequence[int], inverse: Mapping[str, torch.Tensor]
) -> KeyedJaggedTensor:
    """Keep each feature's first bags from an ordinary batch, and map samples to bags."""
    features = [batch[key] for key in batch.keys()]  # noqa: SIM118
    lengths = [feature.lengths()[:size] for feature, size in zip(features, sizes, strict=True)]
    parts = [(feature, int(kept.sum())) for feature, kept in zip(features, lengths, strict=True)]
    is_weighted = batch.weights_or_none() is not None
    return KeyedJaggedTensor(
        batch.keys(),
        torch.cat([feature.values()[:num_ids] for feature, num_ids in parts]),
        lengths=torch.cat(lengths),
        weights=torch.cat([feature.weights()[:num_ids] for feature, num_ids in parts])
        if is_weighted
        else None,
        stride_per_key_per_rank=[[size] for size in sizes],
        inverse_indices=(list(inverse), torch.stack(list(inverse.values()))),
    )


def written_out(batch: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """Return the ordinary batch that ``batch`` stands for: each sample has its own bag."""
    if not batch.variable_stride_per_key():
        return batch
    names, inverse = batch.inverse_indices()
    ids, lengths, weights = [], [], []
    for key in batch.keys():  # noqa: SIM118
        feature = batch[key]
        for bag in inverse[names.index(key)].tolist():
            start, end = feature.offsets()[bag : bag + 2].tolist()
            ids.append(feature.values()[start:end])
            lengths.append(end - start)
            if feature.weights_or_none() is not None:
                weights.append(feature.weights()[start:end])
    return KeyedJaggedTensor(
        keys=batch.keys(),
        values=torch.cat([batch.values()[:0], *ids]),
        lengths=torch.tensor(lengths, dtype=batch.lengths().dtype),
        weights=torch.cat([batch.weights()[:0], *weights])
        if batch.weights_or_none() is not None
        else None,
        stride=inverse.shape[1],
    )


def changed(batch: KeyedJaggedTensor, **options: Any) -> KeyedJaggedTensor:
    """Return the same batch with some fields replaced, such as ``inverse_indices``."""
    return KeyedJaggedTensor(
        batch.keys(),
        batch.values(),
        lengths=batch.lengths(),
        stride_per_key_per_rank=batch.stride_per_key_per_rank(),
        **options,
    )
