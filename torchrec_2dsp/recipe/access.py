"""Which rows a synthetic log uses how often."""

import numpy as np

from torchrec_2dsp.access.stats import AccessStats
from torchrec_2dsp.access.table_access import TableAccess
from torchrec_2dsp.data.synthetic import SyntheticConfig
from torchrec_2dsp.recipe.model import table_name

_LOG_LENGTH = 1e9
"""Lookups of a log so long that it has every row as often as its probability says."""


def true_access(data: SyntheticConfig) -> AccessStats:
    """Which rows the synthetic log uses how often, by its own probabilities."""
    tables: dict[str, TableAccess] = {}
    for feature in data.features:
        zipf = data.distribution(feature)
        ranks = np.arange(1, feature.num_rows + 1)
        tables[table_name(feature.name)] = TableAccess.of_rows(
            feature.num_rows,
            _LOG_LENGTH / feature.mean_ids,
            zipf.row_of_rank(ranks),
            zipf.probability(ranks) * _LOG_LENGTH,
        )
    return AccessStats(tables)
