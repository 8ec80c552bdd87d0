"""How well a model ranks items: the place of each true item, and recall and NDCG of places.

The *place* of a target is 1 plus the number of other items that score at least as high. Ties count
against the model, and so do scores that aren't numbers: one that knows nothing ends last, not
first. A place of 0 means that a sample has no target.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol, Self

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
    """The place of each sample's target, from 1 on.

    Example:
        >>> import torch
        >>> from torchrec_2dsp.programs.models.ranking import places_of
        >>> places_of(torch.tensor([2.0, 2.0]), torch.tensor([[1.0, 3.0], [2.0, 1.0]]))
        tensor([2, 2])
    """
    # Not >=, of which no number that isn't one would be true.
    ahead = ~(scores < targets.unsqueeze(1))
    return 1 + (ahead if counts is None else ahead & counts).sum(dim=1)


@dataclass(frozen=True)
class RankingQuality:
    """Where the targets of samples ended, as counts; counts of ranks can be added up.

    Example:
        >>> import torch
        >>> from torchrec_2dsp.programs.models.ranking import RankingQuality
        >>> quality = RankingQuality.of(torch.tensor([1, 3, 12]), up_to=10)
        >>> quality.recall(1), quality.recall(10), quality.ndcg(3)
        (0.3333333333333333, 0.6666666666666666, 0.5)
    """

    num_targets: int
    """How many samples have a target."""

    counts: tuple[int, ...]
    """How many targets are at place 1, at place 2, and so on, up to the last place that matters."""

    @classmethod
    def of(cls, places: torch.Tensor, up_to: int) -> "RankingQuality":
        """The quality of these places; those after ``up_to`` are one."""
        return cls.over_ranks(places, up_to, group=None)

    @classmethod
    def over_ranks(
        cls, places: torch.Tensor, up_to: int, group: dist.ProcessGroup | None
    ) -> "RankingQuality":
        """The quality of the places of all ranks of a group; of one rank without a group.

        Collectives:
            One all-reduce of ``up_to + 1`` counts.
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
        """The share of the targets at the first ``k`` places; `nan` without targets."""
        return self._mean(1.0 for _ in self._until(k))

    def ndcg(self, k: int) -> float:
        """The mean of ``1 / log2(place + 1)`` over the targets, 0 after ``k`` places.

        Each sample has one true item, so that the best sum of gains is 1.
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
    """The samples of a batch, as a model ranks items for them."""

    vectors: torch.Tensor
    """What items are multiplied with, ``[batch, dim]``."""

    scores: torch.Tensor
    """The scores of the true items, ``[batch]``."""

    targets: torch.Tensor
    """The true items, ``[batch]``; -1 for a sample without."""

    seen: torch.Tensor
    """Items that the sample has had before, ``[batch, any number]``, with -1 for none."""

    @classmethod
    def of(
        cls,
        vectors: torch.Tensor,
        target_vectors: torch.Tensor,
        targets: torch.Tensor,
        seen: torch.Tensor,
    ) -> "Queries":
        """The queries whose scores are dot products."""
        return cls(vectors, (vectors * target_vectors).sum(dim=1), targets, seen)


class ItemChunk(NamedTuple):
    """The vectors of some neighbouring items."""

    first: int
    """The first item."""

    vectors: torch.Tensor
    """The vectors of this item and the next ones, ``[num_items, dim]``."""


class RanksItems(Protocol):
    """A model that ranks all items for a sample by dot products."""

    def queries(self, batch: Batch) -> Queries:
        """The samples of a batch."""
        ...

    def item_chunks(self, chunk_size: int, device: torch.device) -> Iterator[ItemChunk]:
        """The vectors of all items, in their order, some at a time; their ids are on a device."""
        ...


def rank_all_items(
    model: RanksItems,
    batches: Iterable[Batch],
    *,
    chunk_size: int = 4_096,
    exclude_seen: bool = False,
) -> torch.Tensor:
    """The place of each sample's true item among all items.

    The samples' vectors stay in memory; items are looked up once for all of them, a chunk at a
    time, through the model's own lookup. So a table may be of any size and sharded in any way.

    Collectives:
        Those of a lookup for each batch, and of one for each chunk of items.
    """
    queries = [model.queries(batch) for batch in batches]
    if not queries:
        return torch.empty(0, dtype=torch.int64)
    ahead = [torch.zeros_like(query.targets) for query in queries]
    for chunk in model.item_chunks(chunk_size, queries[0].vectors.device):
        items = chunk.first + torch.arange(len(chunk.vectors), device=chunk.vectors.device)
        for query, num_ahead in zip(queries, ahead, strict=True):
            counts = items != query.targets.unsqueeze(1)
            if exclude_seen:
                counts &= ~_among(query.seen - chunk.first, len(items))
            scores = query.vectors @ chunk.vectors.t()
            num_ahead += places_of(query.scores, scores, counts) - 1
    places = [
        (1 + num_ahead).where(query.targets >= 0, 0)
        for query, num_ahead in zip(queries, ahead, strict=True)
    ]
    return torch.cat(places)


def _among(places: torch.Tensor, num_items: int) -> torch.Tensor:
    """Which of ``num_items`` items are among these, for each sample."""
    outside = (places < 0) | (places >= num_items)
    marks = torch.zeros(len(places), num_items + 1, dtype=torch.bool, device=places.device)
    return marks.scatter_(1, places.where(~outside, num_items), True)[:, :num_items]


class RankingConfig(Section):
    """How held-out items are ranked.

    Example:
        >>> from torchrec_2dsp.programs.models.ranking import RankingConfig
        >>> RankingConfig(k=(10, 50)).names
        ('recall@10', 'ndcg@10', 'recall@50', 'ndcg@50')
    """

    among: Literal["all", "sampled", "none"] = "all"
    """The items among which a true one is ranked: all of its table; those that come with the batch,
    which are negatives or the other samples' items; or none, for no ranking."""

    k: tuple[int, ...] = Field(default=(10,), min_length=1)
    """The places up to which recall and NDCG look."""

    exclude_seen: bool = False
    """Whether items that a sequence has already are left out, if it is ranked among "all"."""

    chunk_size: int = Field(default=4_096, ge=1)
    """How many items are looked up together, to rank among "all"."""

    @model_validator(mode="after")
    def _check_among(self) -> Self:
        if self.among != "all":
            self.refuse_unread(
                ["exclude_seen", "chunk_size"], "is for among='all'; set it, or leave it out"
            )
        return self

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the metrics."""
        return tuple(name for k in self.k for name in (f"recall@{k}", f"ndcg@{k}"))


def ranking_metrics(
    model: nn.Module,
    batches: Iterable[Batch],
    ranking: RankingConfig,
    group: dist.ProcessGroup | None,
) -> dict[str, float]:
    """Recall and NDCG of the held-out items of all ranks, by name; equal on all of them.

    Collectives:
        Those of `rank_all_items`, or of a lookup for each batch; then one all-reduce of counts.
    """
    if ranking.among == "none":
        return {}
    was_training = model.training
    model.eval()
    with torch.no_grad():
        if ranking.among == "all":
            ranks_items: Any = model
            places = rank_all_items(
                ranks_items,
                batches,
                chunk_size=ranking.chunk_size,
                exclude_seen=ranking.exclude_seen,
            )
        else:
            scores = [model(batch)[1][1] for batch in batches]
            places = torch.cat(scores) if scores else torch.empty(0, dtype=torch.int64)
    model.train(was_training)
    quality = RankingQuality.over_ranks(places, max(ranking.k), group)
    values = [value for k in ranking.k for value in (quality.recall(k), quality.ndcg(k))]
    return dict(zip(ranking.names, values, strict=True))
