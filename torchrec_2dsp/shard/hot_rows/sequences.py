"""Sequences of which some rows are hot: back to the order of the batch."""

from collections.abc import Mapping

import torch
from torchrec.sparse.jagged_tensor import JaggedTensor

from torchrec_2dsp.shard.hot_rows.split import HotBatch


def join_sequences(
    cold: Mapping[str, JaggedTensor], hot: Mapping[str, torch.Tensor], batch: HotBatch
) -> dict[str, JaggedTensor]:
    """Every id's row, in the order of the batch.

    Args:
        cold: what TorchRec has looked up, by embedding name.
        hot: what the replicas have given, by feature.
        batch: which ids were hot.
    """
    joined = {}
    for name, rows in cold.items():
        feature = name.split("@")[0]
        joined[name] = rows
        if feature not in hot:
            continue
        found = batch.features[feature]
        order = _order(found.is_hot)
        ids = rows.weights_or_none()  # Where the module is asked for indices.
        if ids is not None:
            hot_ids = batch.ids.by_feature[feature][found.slots].to(ids.dtype)
            ids = torch.cat([ids, hot_ids])[order]
        joined[name] = JaggedTensor(
            values=torch.cat([rows.values(), hot[feature]])[order],
            lengths=rows.lengths() + found.lengths.to(rows.lengths().dtype),
            weights=ids,
        )
    return joined


def _order(is_hot: torch.Tensor) -> torch.Tensor:
    """For each id, where its row stands in the cold ones followed by the hot ones."""
    return torch.cat([(~is_hot).nonzero(), is_hot.nonzero()]).squeeze(1).argsort()
