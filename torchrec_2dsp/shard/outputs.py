"""How hot rows join what TorchRec has looked up: the one thing in which bags and sequences differ.

Of bags the sums are added, and averages are made where TorchRec can't make them. Of sequences the
rows go back to the places of their ids.
"""

from collections.abc import Mapping
from typing import cast

import torch
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from torchrec_2dsp.shard.batch.notes import BatchNotes
from torchrec_2dsp.shard.hot_rows.split import HotFeature
from torchrec_2dsp.shard.stages import Output, Stage


class JoinBags(Stage):
    """Adds the hot rows to the sums of TorchRec, then averages what is left to this package."""

    def __init__(self, averaged_outputs: Mapping[str, str]) -> None:
        """
        Args:
            averaged_outputs: the feature of each output that is averaged here, by the output's
                name.
        """
        self._averaged_outputs = dict(averaged_outputs)
        self.needs_keyed_jagged = bool(averaged_outputs)

    def before_ids_travel(
        self, notes: BatchNotes, features: KeyedJaggedTensor
    ) -> KeyedJaggedTensor:
        """Note how many ids the bags have that are averaged here, hot ids included."""
        if self._averaged_outputs:
            lengths = features.lengths().view(len(features.keys()), features.stride())
            by_feature = dict(zip(features.keys(), lengths, strict=True))
            notes.bag_lengths = {
                output: by_feature[feature] for output, feature in self._averaged_outputs.items()
            }
        return features

    def on_output(self, notes: BatchNotes, output: Output) -> Output:
        """The complete bags."""
        if not (notes.hot_output or notes.bag_lengths):
            return output
        hot_output, notes.hot_output = notes.hot_output, {}
        cold = cast(KeyedTensor, output)
        dims = cold.length_per_key()
        bags = []
        for name, sums in zip(cold.keys(), cold.values().split(dims, dim=1), strict=True):
            feature = feature_of(name)
            if feature in hot_output:
                sums = sums + hot_output[feature]
            if name in notes.bag_lengths:
                num_ids = notes.bag_lengths[name].clamp(min=1).to(sums.dtype)
                sums = sums / num_ids[:, None]
            bags.append(sums)
        return KeyedTensor(
            keys=cold.keys(), length_per_key=dims, values=torch.cat(bags, dim=1), key_dim=1
        )


class JoinSequences(Stage):
    """Puts hot rows and cold rows in the order of the batch's ids."""

    def on_output(self, notes: BatchNotes, output: Output) -> Output:
        """The complete sequences."""
        if notes.hot is None:
            return output
        hot_output, notes.hot_output = notes.hot_output, {}
        joined = {}
        for name, rows in cast(Mapping[str, JaggedTensor], output).items():
            feature = feature_of(name)
            joined[name] = rows
            if feature in hot_output:
                joined[name] = _joined(
                    rows,
                    hot_output[feature],
                    notes.hot.features[feature],
                    notes.hot.ids.by_feature[feature],
                )
        return joined


def feature_of(output_name: str) -> str:
    """The feature of an output; one that looks up several tables carries a table's name in each.

    Example:
        >>> from torchrec_2dsp.shard.outputs import feature_of
        >>> feature_of("item"), feature_of("item@t_long")
        ('item', 'item')
    """
    return output_name.split("@")[0]


def _joined(
    cold: JaggedTensor, hot_rows: torch.Tensor, hot: HotFeature, hot_ids: torch.Tensor
) -> JaggedTensor:
    """The rows of all ids of a feature.

    Args:
        cold: the rows of the cold ids, as TorchRec looked them up.
        hot_rows: the rows of the hot ids, as the replicas gave them.
        hot: which of the feature's ids are hot.
        hot_ids: the row id of each slot of the hot set.
    """
    order = _order(hot.is_hot)
    ids = cold.weights_or_none()  # Where the module is asked for indices.
    if ids is not None:
        ids = torch.cat([ids, hot_ids[hot.slots].to(ids.dtype)])[order]
    return JaggedTensor(
        values=torch.cat([cold.values(), hot_rows])[order],
        lengths=cold.lengths() + hot.lengths.to(cold.lengths().dtype),
        weights=ids,
    )


def _order(is_hot: torch.Tensor) -> torch.Tensor:
    """For each id, where its row stands in the cold ones followed by the hot ones."""
    return torch.cat([(~is_hot).nonzero(), is_hot.nonzero()]).squeeze(1).argsort()
