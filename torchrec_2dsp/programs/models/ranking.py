"""Ranking quality: each true item's place, and recall and NDCG over places.

A target's *place* is 1 plus the number of other items that score at least as high. Ties count
against the model, and so do NaN scores: a model that knows nothing ends last, not first. Place 0
means that a sample has no target.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple, Protocol, Self

import torch
import torch.distributed as dist
from pydantic import Field, model_validator
from torch import nn
from torchrec.datasets.utils import Batch

from torchrec_2dsp.errors import ConfigError
from torchrec_2dsp.programs.config.section import Section


def places_of(
    targets: torch.Tensor, scores: torch.Tensor, counts: torch.Tensor | None = None
) -> torch.Tensor:
    """Rank each sample's target, from 1 on.

    Example:
        >>> import torch
        >>> from torchrec_2dsp.programs.models.ranking import places_of
        >>> places_of(torch.tensor([2.0, 2.0]), torch.tensor([[1.0, 3.0], [2.0, 1.0]]))
        tensor([2, 2])
    """
    # Not >=, which is always false for NaN.
    ahead = ~(scores < targets.unsqueeze(1))
    return 1 + (ahead if counts is None else ahead & counts).sum(dim=1)


@dataclass(frozen=True)
class RankingQuality:
    """The targets' places as counts, which add up over ranks.

    Example:
        >>> import torch
        >>> from torchrec_2dsp.programs.models.ranking import RankingQuality
        >>> quality = RankingQuality.of(torch.tensor([1, 3, 12]), up_to=10)
        >>> quality.recall(1), quality.recall(10), quality.ndcg(3)
        (0.3333333333333333, 0.6666666666666666, 0.5)
    """

    num_targets: int
    """Samples with a target."""

    counts: tuple[int, ...]
    """Targets at place 1, at place 2, and so on, up to the last place that counts."""

    @classmethod
    def of(
        cls, places: torch.Tensor, up_to: int, group: dist.ProcessGroup | None = None
    ) -> "RankingQuality":
        """Count places up to ``up_to``, on all ranks of a group; on this rank without one.

        Collectives:
            One all-reduce with ``up_to + 1`` counts.
        """
        if up_to < 1:
            raise ConfigError(f"up_to={up_to} is no place; use 1 or more")
        real = places[places > 0].long()
        counts = torch.bincount(real.clamp(max=up_to + 1), minlength=up_to + 2)
        counts[0] = real.numel()
        counts = counts[: up_to + 1].contiguous()
        if group is not None:
            dist.all_reduce(counts, group=group)
        num_targets, *by_place = counts.tolist()
        return cls(num_targets, tuple(by_place))

    def recall(self, k: int) -> float:
        """Return the target share in the first ``k`` places; NaN without targets."""
        return self._mean(1.0 for _ in self._until(k))

    def ndcg(self, k: int) -> float:
        """Return the mean of ``1 / log2(place + 1)`` over the targets, 0 after ``k`` places.

        Each sample has one true item, so the best sum of gains is 1.
        """
        return self._mean(1.0 / math.log2(place + 1) for place in self._until(k))

    def _until(self, k: int) -> range:
        if not 1 <= k <= len(self.counts):
            raise ConfigError(f"k={k} is not in 1..{len(self.counts)}, the places that are counted")
        return range(1, k + 1)

    def _mean(self, gains: Iterable[float]) -> float:
        total = math.fsum(
            gain * count for gain, count in zip(gains, self.counts, strict=False) if count
        )
        return total / self.num_targets if self.num_targets else math.nan


class Queries(NamedTuple):
    """A batch's samples, ready to rank items for them."""

    vectors: torch.Tensor
    """The vectors that items are multiplied with, ``[batch, dim]``."""

    scores: torch.Tensor
    """The true items' scores, ``[batch]``."""

    targets: torch.Tensor
    """The true items, ``[batch]``; -1 for a sample without."""

    seen: torch.Tensor
    """Earlier items of each sample, ``[batch, any number]``, with -1 for none."""


class RanksItems(Protocol):
    """A model that ranks all items for a sample by dot products."""

    num_items: int
    """Items 0 to ``num_items - 1`` are ranked."""

    def queries(self, batch: Batch) -> Queries:
        """Return a batch's queries."""
        ...

    def item_vectors(self, items: torch.Tensor) -> torch.Tensor:
        """Look up the vectors of items, ``[num_items, dim]``, on all ranks together."""
        ...


@torch.no_grad()
def rank_all_items(
    model: RanksItems,
    batches: Iterable[Batch],
    *,
    chunk_size: int = 4_096,
    exclude_seen: bool = False,
) -> torch.Tensor:
    """Rank each sample's true item among all items.

    Sample vectors stay in memory; items are looked up once for all of them, chunk by chunk, through
    the model's own lookup. So a table may have any size and sharding. The model must be in
    evaluation mode, detached from pipelines; all ranks give equally many batches.

    Collectives:
        A lookup's, per batch and per chunk of items.
    """
    queries = [model.queries(batch) for batch in batches]
    if not queries:
        return torch.empty(0, dtype=torch.int64)
    ahead = [torch.zeros_like(query.targets) for query in queries]
    for first in range(0, model.num_items, chunk_size):
        last = min(first + chunk_size, model.num_items)
        items = torch.arange(first, last, device=queries[0].vectors.device)
        vectors = model.item_vectors(items)
        for query, num_ahead in zip(queries, ahead, strict=True):
            counts = items != query.targets.unsqueeze(1)
            if exclude_seen:
                counts &= ~_among(query.seen - first, len(items))
            scores = query.vectors @ vectors.t()
            num_ahead += places_of(query.scores, scores, counts) - 1
    places = [
        (1 + num_ahead).where(query.targets >= 0, 0)
        for query, num_ahead in zip(queries, ahead, strict=True)
    ]
    return torch.cat(places)


def _among(places: torch.Tensor, num_items: int) -> torch.Tensor:
    """Mark which of ``num_items`` items each sample's places name."""
    outside = (places < 0) | (places >= num_items)
    marks = torch.zeros(len(places), num_items + 1, dtype=torch.bool, device=places.device)
    return marks.scatter_(1, places.where(~outside, num_items), True)[:, :num_items]


class RankingConfig(Section):
    """The ranking of held-out items.

    Example:
        >>> from torchrec_2dsp.programs.models.ranking import RankingConfig
        >>> RankingConfig(k=(10, 50)).names
        ('recall@10', 'ndcg@10', 'recall@50', 'ndcg@50')
    """

    among: Literal["all", "sampled", "none"] = "all"
    """The competitors of a true item: all items in its table; "sampled" ones that come with the
    batch, which are negatives or the other samples' items; or "none", for no ranking."""

    k: tuple[Annotated[int, Field(ge=1)], ...] = Field(default=(10,), min_length=1)
    """The numbers of places for recall and NDCG."""

    exclude_seen: bool = False
    """True if a sequence's earlier items are left out, among "all"."""

    chunk_size: int = Field(default=4_096, ge=1)
    """Items looked up together, among "all"."""

    @model_validator(mode="after")
    def _check_among(self) -> Self:
        if self.among != "all":
            self.refuse_unread(
                ["exclude_seen", "chunk_size"], "is for among='all'; set it, or leave it out"
            )
        return self

    @property
    def names(self) -> tuple[str, ...]:
        """The metrics' names."""
        return tuple(name for k in self.k for name in (f"recall@{k}", f"ndcg@{k}"))


def ranking_metrics(
    model: nn.Module,
    batches: Iterable[Batch],
    ranking: RankingConfig,
    group: dist.ProcessGroup | None,
) -> dict[str, float]:
    """Compute recall and NDCG of all ranks' held-out items, by name; equal on all of them.

    The model must be in evaluation mode.

    Collectives:
        As in `rank_all_items`, or a lookup's per batch; then one all-reduce.
    """
    if ranking.among == "none":
        return {}
    if ranking.among == "all":
        ranks_items: Any = model
        places = rank_all_items(
            ranks_items,
            batches,
            chunk_size=ranking.chunk_size,
            exclude_seen=ranking.exclude_seen,
        )
    else:
        with torch.no_grad():
            scores = [model(batch)[1][1] for batch in batches]
        places = torch.cat(scores) if scores else torch.empty(0, dtype=torch.int64)
    quality = RankingQuality.of(places, max(ranking.k), group)
    values = [value for k in ranking.k for value in (quality.recall(k), quality.ndcg(k))]
    return dict(zip(ranking.names, values, strict=True))
