"""`RankingConfig` and `ranking_metrics`: how rankings are evaluated, and what comes out."""

from collections.abc import Iterable
from typing import Any, Literal

import torch
import torch.distributed as dist
from pydantic import Field
from torch import nn
from torchrec.datasets.utils import Batch

from torchrec_2dsp.programs.config.section import Section
from torchrec_2dsp.programs.models.ranking import RankingQuality, rank_all_items


class RankingConfig(Section):
    """How held-out items are ranked.

    Example:
        >>> from torchrec_2dsp.programs.models.ranking_metrics import RankingConfig
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

    Args:
        model: without its wrapper, which a `ModelParallel2D` gives as ``module``, and detached from
            a pipeline.
        batches: of this rank; all ranks give as many.
        ranking: among which items, and what is computed.
        group: all ranks; `None` for one process.

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
