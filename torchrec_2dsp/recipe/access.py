"""Which rows a synthetic log uses how often."""

import numpy as np

from torchrec_2dsp.access.stats import AccessStats
from torchrec_2dsp.access.table_access import TableAccess
from torchrec_2dsp.data.synthetic import SyntheticConfig
from torchrec_2dsp.recipe.model import table_name

_LOG_LENGTH = 1e9
"""Lookups of a log so long that it has every row as often as its probability says."""


def true_access(data: SyntheticConfig, max_rows: int = 2_000_000) -> AccessStats:
    """Which rows the synthetic log uses how often, by its own probabilities.

    Args:
        data: the log.
        max_rows: of a table that has more, so many are known, and the others are its tail.
    """
    tables: dict[str, TableAccess] = {}
    for feature in data.features:
        zipf = data.distribution(feature)
        ranks = np.arange(1, min(feature.num_rows, max_rows) + 1)
        counts = zipf.probability(ranks) * _LOG_LENGTH
        tail_rows = feature.num_rows - len(ranks)
        tables[table_name(feature.name)] = TableAccess.of_rows(
            feature.num_rows,
            _LOG_LENGTH / feature.mean_ids,
            zipf.row_of_rank(ranks),
            counts,
            tail_rows=tail_rows,
            tail_lookups=_LOG_LENGTH - float(counts.sum()) if tail_rows else 0.0,
        )
    return AccessStats(tables)
