"""Count each row's lookups in one pass over a log.

Ranks read different blocks and sum their counts. Counters and statistics are in
``torchrec_2dsp.access``.
"""

from collections.abc import Mapping, Set
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from pydantic import ConfigDict, model_validator
from torchrec.modules.embedding_configs import BaseEmbeddingConfig

from torchrec_2dsp.access.counter import RowCounter
from torchrec_2dsp.access.stats import AccessStats
from torchrec_2dsp.access.table_access import TableAccess
from torchrec_2dsp.comms.alarm import agreeing
from torchrec_2dsp.programs.config.section import Section
from torchrec_2dsp.programs.config.sections import ModelConfig
from torchrec_2dsp.programs.data.dataset import Dataset, Progress, Split, open_together
from torchrec_2dsp.programs.data.logs.ids import MISSING_ROW, collision_rate, values_behind
from torchrec_2dsp.programs.data.logs.sections import LoggedData
from torchrec_2dsp.programs.data.negatives import WithNegatives
from torchrec_2dsp.programs.models.kinds import (
    ModelSection,
    PlannedModelConfig,
    TrainedModelConfig,
    build_any_model,
    dataset_for,
)
from torchrec_2dsp.programs.models.model import bags_of, tables_of


class AccessConfig(Section):
    """The sections ``[data]`` and ``[model]`` of a training config; others are ignored.

    Example:
        >>> from torchrec_2dsp.programs.access import AccessConfig
        >>> from torchrec_2dsp.programs.config.config_file import make_config
        >>> tree = {"data": {"kind": "criteo", "files": ["day_0.gz"]}, "loop": {"steps": 100}}
        >>> make_config(AccessConfig, tree).data.kind
        'criteo'
    """

    model_config = ConfigDict(extra="ignore")

    data: LoggedData
    """The log."""

    model: TrainedModelConfig = PlannedModelConfig()
    """The model, whose tables are counted; a DLRM has one for each feature."""

    @model_validator(mode="before")
    @classmethod
    def _check_logged(cls, tree: Any) -> Any:
        data = tree.get("data") if isinstance(tree, Mapping) else None
        if isinstance(data, Mapping) and not {"kind", "files"} & data.keys():
            raise ValueError(
                "[data] has no kind, so it is synthetic and has no files to count; give a config "
                "with a log"
            )
        return tree


_COUNTED_DIM = 4
"""A dummy embedding dimension; counts don't depend on it."""


@dataclass(frozen=True)
class AccessResult:
    """The counts summed over all ranks."""

    stats: AccessStats
    """The counts by table."""

    num_samples: int
    """The number of log rows that were read; of interactions, the number of users."""

    num_malformed: int
    """The number of malformed lines that were read."""

    collision_rates: Mapping[str, float | None]
    """The expected share of values that share their row with another value, by table in the model's
    order; `None` if ids aren't hashes."""

    are_users: bool = False
    """True if each sample is a user."""


def count_access(
    config: AccessConfig,
    group: dist.ProcessGroup,
    progress: Progress | None = None,
) -> AccessResult:
    """Count a log's training rows once.

    Args:
        config: the log.
        group: all ranks.
        progress: called with this rank's progress.

    Raises:
        TwoDError: a rank can't read its part. All ranks raise it once the others have read theirs.

    Collectives:
        Those in `open_together` and `RowCounter.gather`, and two all-gathers of objects.
    """
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    data = open_together(config.data, group, progress)
    tables, dataset = _tables(config.model, data), dataset_for(config.model, data)
    counter = RowCounter(tables)
    num_rows, num_all = 0, data.num_rows(Split.TRAIN)
    with (
        agreeing(group),
        closing(data.samples_once(Split.TRAIN, rank=rank, world_size=world_size)) as batches,
    ):
        for batch in batches:
            if isinstance(dataset, WithNegatives):
                # Any numbers will do that no other sample has.
                batch = dataset.with_negatives(batch, Split.TRAIN, rank * num_all + num_rows)
            counter.update(batch.sparse_features)
            num_rows += batch.labels.numel()
            if progress is not None:
                progress("counting rows", num_rows, round(num_all / world_size))
    stats = counter.gather(group)
    parts: list[tuple[int, Set[tuple[str, int]]]] = [(0, set())] * world_size
    # Ranks may read the same lines: rank 0 does so when it makes a vocabulary.
    dist.all_gather_object(parts, (num_rows, data.malformed.lines), group=group)
    hashed = _hashed_features(config)
    return AccessResult(
        stats=stats,
        num_samples=sum(rows for rows, _ in parts),
        num_malformed=len(set().union(*(lines for _, lines in parts))),
        collision_rates={
            table.name: None
            if hashed.isdisjoint(table.feature_names)
            else _collision_rate(stats[table.name])
            for table in tables
        },
        are_users=config.data.kind == "interactions",
    )


def _tables(model: ModelSection, data: Dataset) -> list[BaseEmbeddingConfig]:
    """List a model's tables; a DLRM's need no model, and so no dense features."""
    if isinstance(model, ModelConfig):
        return [*bags_of(data.features, _COUNTED_DIM, "meta").embedding_bag_configs()]
    return tables_of(build_any_model(data, model, tables_device="meta"))


def _hashed_features(config: AccessConfig) -> frozenset[str]:
    """Return the features with hashed ids."""
    data = config.data
    if data.kind == "interactions":
        return frozenset()
    table = data if data.kind == "table" else data.table()
    return frozenset(feature.name for feature in table.features if feature.encoding == "hash")


def _collision_rate(access: TableAccess) -> float:
    num_hashed = access.num_rows - 1  # The other one is for missing values.
    num_hit = access.num_used_rows - (MISSING_ROW in access.rows)
    return collision_rate(values_behind(num_hit, num_hashed), num_hashed)
