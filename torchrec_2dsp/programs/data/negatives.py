"""`WithNegatives`: a dataset whose samples come with negative items.

Negatives are drawn before a batch reaches the model, so their ids travel with the batch's own in
any pipeline. They depend on a sample's number among all of the run's samples: they are the same for
every number of ranks, but differ between epochs.
"""

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

import numpy as np
import torch
from numpy.typing import NDArray
from torchrec.datasets.utils import Batch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_2dsp.errors import ConfigError
from torchrec_2dsp.programs.data.dataset import Batches, Dataset, DatasetFeature, Share, Split
from torchrec_2dsp.programs.data.draws import uniforms

_SEED_OFFSET = 0x4E65_6761
"""A seed offset that keeps negatives independent of the run's other draws."""


def negatives_name(feature: str) -> str:
    """Return the name of the feature that holds another feature's negatives."""
    return f"{feature}_negatives"


class NegativeKind(enum.Enum):
    """A negative sampling distribution."""

    UNIFORM = "uniform"
    """All items alike."""

    LOG_UNIFORM = "log_uniform"
    """Item ``k`` in proportion to ``log((k + 2) / (k + 1))``, which approximates lookup frequencies
    if items are numbered by frequency."""


@dataclass(frozen=True)
class NegativeItems:
    """A table's negative sampling distribution.

    Example:
        >>> import torch
        >>> from torchrec_2dsp.programs.data.negatives import NegativeItems, NegativeKind
        >>> items = NegativeItems(num_items=9, kind=NegativeKind.LOG_UNIFORM)
        >>> round(items.log_probability(torch.arange(9)).exp().sum().item(), 5)
        1.0
    """

    num_items: int
    """Items are ``0..num_items - 1``."""

    kind: NegativeKind = NegativeKind.UNIFORM

    def draw(self, draws: NDArray[np.float64]) -> NDArray[np.int64]:
        """Map each number between 0 and 1 to an item."""
        if self.kind is NegativeKind.UNIFORM:
            items = draws * self.num_items
        else:
            items = np.exp(draws * math.log1p(self.num_items)) - 1.0
        return np.minimum(items.astype(np.int64), self.num_items - 1)

    def log_probability(self, items: torch.Tensor) -> torch.Tensor:
        """Return each item's log-probability, in float32."""
        if self.kind is NegativeKind.UNIFORM:
            return torch.full(items.shape, -math.log(self.num_items), device=items.device)
        # Not log((k + 2) / (k + 1)), which is log(1) in float32 for large k.
        share = torch.log1p(1.0 / (items.double() + 1.0)) / math.log1p(self.num_items)
        return share.log().float()


class WithNegatives(Dataset):
    """A `Dataset` whose batches have one more feature: each sample's negatives.

    Example:
        >>> from torchrec_2dsp.programs.data.dataset import Split
        >>> from torchrec_2dsp.programs.data.negatives import WithNegatives
        >>> from torchrec_2dsp.programs.data.synthetic_sequences import SyntheticSequencesConfig
        >>> data = WithNegatives(
        ...     SyntheticSequencesConfig(num_items=100).dataset(), "item", num_negatives=3, seed=0
        ... )
        >>> batches = data.batches(Split.TRAIN, global_batch_size=4, rank=0, world_size=2)
        >>> next(batches).sparse_features["item_negatives"].lengths()
        tensor([3, 3], dtype=torch.int32)
    """

    def __init__(
        self,
        dataset: Dataset,
        feature: str,
        *,
        num_negatives: int,
        eval_negatives: int = 0,
        kind: NegativeKind = NegativeKind.UNIFORM,
        seed: int,
    ) -> None:
        """Draw negatives for each sample.

        Args:
            dataset: the samples.
            feature: the feature whose ids are drawn.
            num_negatives: how many per sample; an item may be drawn more than once.
            eval_negatives: how many per held-out sample; 0 for the same.
            kind: the sampling distribution.
            seed: seeds the negatives.
        """
        if num_negatives < 1:
            raise ConfigError(f"num_negatives={num_negatives} isn't a count; use 1 or more")
        self._dataset, self._feature = dataset, feature
        self._counts = {Split.TRAIN: num_negatives, Split.EVAL: eval_negatives or num_negatives}
        self._items = NegativeItems(feature_of(dataset.features, feature).num_rows, kind)
        self._seed = seed
        self.features, self.num_dense = dataset.features, dataset.num_dense
        """The sparse features with their own tables, which exclude the negatives."""
        self.fingerprint = dataset.fingerprint

    def num_train_batches(self, global_batch_size: int) -> int | None:
        """Return how many global batches all epochs have; see `Dataset`."""
        return self._dataset.num_train_batches(global_batch_size)

    def read(self, split: Split, share: Share, start: int) -> Batches:
        """Read a share of the global batches, with negatives, from number ``start`` on."""
        size = share.global_batch_size
        first = share.rank * (size // share.world_size)
        batches = self._dataset.read(split, share, start)
        for number, batch in zip(count(start), batches, strict=False):
            yield self.with_negatives(batch, split, number * size + first)

    def with_negatives(self, batch: Batch, split: Split, first_sample: int) -> Batch:
        """Return a batch with the negatives of its samples, numbered from ``first_sample`` on."""
        sparse = batch.sparse_features
        samples, num_negatives = first_sample + np.arange(sparse.stride()), self._counts[split]
        seed = (self._seed + _SEED_OFFSET) * len(Split) + split.value
        draws = uniforms(seed, samples[:, None], np.arange(num_negatives))
        negatives = KeyedJaggedTensor(
            keys=[negatives_name(self._feature)],
            values=torch.from_numpy(self._items.draw(draws).ravel()).to(sparse.values()),
            lengths=torch.full((samples.size,), num_negatives).to(sparse.lengths()),
        )
        both = KeyedJaggedTensor.concat([sparse, negatives])
        return Batch(batch.dense_features, both, batch.labels)


def feature_of(features: Sequence[DatasetFeature], name: str) -> DatasetFeature:
    """Return the feature with this name.

    Raises:
        ConfigError: the data has none.
    """
    for feature in features:
        if feature.name == name:
            return feature
    names = ", ".join(feature.name for feature in features) or "none"
    raise ConfigError(f"the data has no sparse feature {name!r}; the model may use {names}")
