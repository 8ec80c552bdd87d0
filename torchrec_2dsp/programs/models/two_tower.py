"""A two-tower recommender: user and item vectors from towers that never see each other."""

from collections.abc import Sequence
from typing import Literal, Self

import torch
from pydantic import Field, PositiveInt, model_validator
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits, normalize
from torchrec.datasets.utils import Batch
from torchrec.modules.mlp import MLP
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from torchrec_2dsp.errors import UnsupportedError
from torchrec_2dsp.programs.config.section import Seed
from torchrec_2dsp.programs.config.sections import TablesSection
from torchrec_2dsp.programs.data.dataset import DatasetFeature
from torchrec_2dsp.programs.data.negatives import feature_of
from torchrec_2dsp.programs.models.model import Output, PlannedSection, bags_of
from torchrec_2dsp.programs.models.ranking import Queries, RankingConfig, places_of


class TwoTowerConfig(PlannedSection, TablesSection):
    """Two perceptrons, over user features and item features, and their dot product."""

    kind: Literal["two_tower"] = "two_tower"
    """The kind of model."""

    user_features: tuple[str, ...] = Field(min_length=1)
    """The users' sparse features; the dense ones are theirs as well."""

    item_features: tuple[str, ...] = Field(min_length=1)
    """The items' sparse features."""

    dim: int = Field(default=32, ge=4, multiple_of=4)
    """The embedding dimension of all tables."""

    layers: tuple[PositiveInt, ...] = (64,)
    """Sizes of each tower's hidden layers; a last one of size `out_dim` is added."""

    out_dim: int = Field(default=32, ge=1)
    """The size of user and item vectors."""

    loss: Literal["bce", "in_batch"] = "bce"
    """The objective: the labels, by the logistic loss; or a softmax that tells each clicked item
    from the other items in the rank's batch."""

    temperature: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    """The divisor of dot products."""

    normalized: bool = False
    """True if vectors have unit length, so that dot products are cosines."""

    ranking: RankingConfig = RankingConfig(among="none")
    """The ranking of held-out clicks' items."""

    seed: Seed = 0
    """The seed of the initial weights."""

    @model_validator(mode="after")
    def _check_features_and_ranking(self) -> Self:
        names = [*self.user_features, *self.item_features]
        repeated = sorted({name for name in names if names.count(name) > 1})
        if repeated:
            raise ValueError(
                f"the feature {repeated[0]!r} is named twice; a feature belongs to one tower, once"
            )
        if self.ranking.among == "all" and len(self.item_features) > 1:
            raise ValueError(
                "ranking.among='all' lists all items from one table, and item_features names "
                f"{len(self.item_features)}; use loss='in_batch' with ranking.among='sampled'"
            )
        if self.ranking.among == "sampled" and self.loss != "in_batch":
            raise ValueError(
                "ranking.among='sampled' ranks the items of a batch, for which loss='in_batch' is; "
                "set it, or rank among 'all' or 'none'"
            )
        return self


class Tower(nn.Module):
    """A perceptron with a linear last layer, over concatenated vectors.

    Its output is scaled so that a dot product of two is divided by the temperature.
    """

    def __init__(self, in_dim: int, config: TwoTowerConfig) -> None:
        super().__init__()
        self.hidden = MLP(in_dim, list(config.layers)) if config.layers else nn.Identity()
        self.out = nn.Linear([in_dim, *config.layers][-1], config.out_dim)
        self._is_normalized, self._scale = config.normalized, config.temperature**-0.5

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return one vector per row."""
        vectors = self.out(self.hidden(inputs)).float()
        return self._scale * (normalize(vectors, dim=1) if self._is_normalized else vectors)


class TwoTowerModel(nn.Module):
    """Scores a user and an item by the dot product of the towers' vectors."""

    def __init__(
        self,
        config: TwoTowerConfig,
        features: Sequence[DatasetFeature],
        num_dense: int,
        tables_device: str = "cpu",
    ) -> None:
        super().__init__()
        self._config = config
        used = [
            feature_of(features, name) for name in (*config.user_features, *config.item_features)
        ]
        self.num_items = feature_of(features, config.item_features[0]).num_rows
        self.embeddings = bags_of(used, config.dim, tables_device, config.data_type)
        # Drawing the tables depends on their device, so the stream starts over.
        torch.manual_seed(config.seed + 1)
        self.user_tower = Tower(len(config.user_features) * config.dim + num_dense, config)
        self.item_tower = Tower(len(config.item_features) * config.dim, config)
        self.user_inputs = _Joined(config.user_features)
        self.item_inputs = _Joined(config.item_features)
        is_in_batch = config.loss == "in_batch"
        self.head = _InBatchSoftmax(config.item_features) if is_in_batch else _Clicks()

    def forward(self, batch: Batch) -> Output:
        """Return the loss, and what `DLRMTrain` returns besides it: detached loss, scores, labels.

        A score is the logit; with "in_batch" and in evaluation, it is the place of the sample's
        item among the batch's, 0 for a sample without a click.
        """
        users, items = self.vectors(batch.sparse_features, batch.dense_features)
        loss, scores = self.head(users, items, batch.labels, batch.sparse_features)
        return loss, (loss.detach(), scores.detach(), batch.labels.detach())

    def vectors(
        self, features: KeyedJaggedTensor, dense: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the samples' user and item vectors.

        Collectives:
            A lookup's.
        """
        pooled = self.embeddings(features)
        users = self.user_tower(self.user_inputs(pooled, dense))
        return users, self.item_tower(self.item_inputs(pooled))

    def queries(self, batch: Batch) -> Queries:
        """Return the batch's users as queries; a click's item is its target.

        Collectives:
            A lookup's, for the batch.
        """
        item_feature, *others = self._config.item_features
        if others:
            raise UnsupportedError(
                f"items with the features {', '.join(self._config.item_features)} can't be listed "
                "from one table; all items are ranked where item_features has one name"
            )
        users, items = self.vectors(batch.sparse_features, batch.dense_features)
        ids = batch.sparse_features[item_feature]
        if not bool((ids.lengths() == 1).all()):
            raise UnsupportedError(
                f"samples have between {int(ids.lengths().min())} and {int(ids.lengths().max())} "
                f"ids of {item_feature!r}; to rank all items, give each sample one"
            )
        targets = ids.values().long().where(batch.labels > 0, -1)
        # Samples don't have users' earlier items.
        seen = targets.new_empty(len(targets), 0)
        return Queries(users, (users * items).sum(dim=1), targets, seen)

    def item_vectors(self, items: torch.Tensor) -> torch.Tensor:
        """Return the vectors of items that have one feature, looked up by all ranks together.

        Collectives:
            A lookup's.
        """
        names = [*self._config.user_features, *self._config.item_features]
        lengths = torch.zeros(len(names), items.numel(), device=items.device, dtype=torch.int32)
        lengths[-1] = 1
        features = KeyedJaggedTensor(keys=names, values=items, lengths=lengths.flatten())
        return self.item_tower(self.item_inputs(self.embeddings(features)))


class _Joined(nn.Module):
    """Concatenates pooled vectors, and any other inputs."""

    def __init__(self, features: Sequence[str]) -> None:
        super().__init__()
        self._features = features

    def forward(self, pooled: KeyedTensor, *others: torch.Tensor) -> torch.Tensor:
        return torch.cat([*(pooled[name] for name in self._features), *others], dim=1)


class _Clicks(nn.Module):
    """The labels' logistic loss."""

    def forward(
        self,
        users: torch.Tensor,
        items: torch.Tensor,
        labels: torch.Tensor,
        features: KeyedJaggedTensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logits = (users * items).sum(dim=1)
        return binary_cross_entropy_with_logits(logits, labels.to(logits)), logits


class _InBatchSoftmax(nn.Module):
    """The softmax of each clicked item among the batch's distinct items."""

    def __init__(self, features: Sequence[str]) -> None:
        super().__init__()
        self._features = features

    def forward(
        self,
        users: torch.Tensor,
        items: torch.Tensor,
        labels: torch.Tensor,
        features: KeyedJaggedTensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        # The softmax is computed in float32, also where products are computed in less.
        logits = (users @ items.t()).float()
        numbers = _numbers_of_items([features[name] for name in self._features])
        own = torch.eye(len(numbers), dtype=torch.bool, device=logits.device)
        order = torch.arange(len(numbers), device=numbers.device)
        first = order.clone().scatter_reduce_(0, numbers, order, "amin", include_self=False)
        # Each other item once, and the sample's own item as itself.
        counts = (first[numbers] == order) & (numbers.unsqueeze(1) != numbers)
        entropy = logits.masked_fill(~(counts | own), -torch.inf).logsumexp(dim=1)
        weights = (labels > 0) / (labels > 0).sum().clamp(min=1)
        loss = (weights * (entropy - logits.diagonal())).sum()
        if self.training:
            return loss, logits.diagonal()
        return loss, places_of(logits.diagonal(), logits, counts).where(labels > 0, 0)


def _numbers_of_items(bags: Sequence[JaggedTensor]) -> torch.Tensor:
    """Return a number per sample's item, equal where all features' ids are equal."""
    padded = [ids.to_padded_dense(padding_value=-1).sort(dim=1).values for ids in bags]
    # At least one column, also where no item has an id.
    padded.append(padded[0].new_zeros(len(padded[0]), 1))
    return torch.cat(padded, dim=1).unique(dim=0, return_inverse=True)[1]
