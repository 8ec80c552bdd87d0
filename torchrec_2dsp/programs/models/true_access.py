"""The access statistics of a synthetic log."""

import numpy as np

from torchrec_2dsp.access.stats import AccessStats
from torchrec_2dsp.access.table_access import TableAccess
from torchrec_2dsp.programs.data.synthetic import SparseFeature, SyntheticConfig
from torchrec_2dsp.programs.models.model import table_name

_LOG_LENGTH = 1e9
"""Lookups of a log so long that it has every row as often as its probability says."""


def true_access(data: SyntheticConfig, max_rows: int = 2_000_000) -> AccessStats:
    """The access statistics of the synthetic log, by its own probabilities.

    Args:
        data: the log.
        max_rows: of a table that has more, so many are known, and the others are its tail.
    """
    # Of features that are alike, one speaks for all: with all their rows they would fill a memory.
    alike: dict[tuple[float, ...], TableAccess] = {}
    tables: dict[str, TableAccess] = {}
    for feature in data.features:
        key = feature.num_rows, feature.skew, feature.mean_ids
        if key not in alike:
            alike[key] = _of_feature(data, feature, max_rows)
        tables[table_name(feature.name)] = alike[key]
    return AccessStats(tables)


def _of_feature(data: SyntheticConfig, feature: SparseFeature, max_rows: int) -> TableAccess:
    zipf = data.distribution(feature)
    ranks = np.arange(1, min(feature.num_rows, max_rows) + 1)
    counts = zipf.probability(ranks) * _LOG_LENGTH
    tail_rows = feature.num_rows - len(ranks)
    return TableAccess.of_rows(
        feature.num_rows,
        _LOG_LENGTH / feature.mean_ids,
        zipf.row_of_rank(ranks),
        counts,
        tail_rows=tail_rows,
        tail_lookups=_LOG_LENGTH - float(counts.sum()) if tail_rows else 0.0,
    )
