"""The accesses of one table in several logs, as one."""

from collections.abc import Sequence

import numpy as np

from torchrec_2dsp.access.table_access import TableAccess
from torchrec_2dsp.errors import ConfigError


def merged(table: str, logs: Sequence[TableAccess]) -> TableAccess:
    """Add up.

    A row that is known in one log may be in another's tail. Its count lacks those lookups, which
    stay in the tail; how many rows that has is at most too large.
    """
    num_rows = logs[0].num_rows
    sizes = sorted({log.num_rows for log in logs})
    if len(sizes) > 1:
        raise ConfigError(
            f"table {table!r} had {sizes} rows in different logs; their rows aren't the same, "
            "so count them again"
        )
    rows, places = np.unique(np.concatenate([log.rows for log in logs]), return_inverse=True)
    counts = np.zeros(len(rows))
    np.add.at(counts, places, np.concatenate([log.counts for log in logs]))
    return TableAccess.of_rows(
        num_rows,
        sum(log.num_samples for log in logs),
        rows,
        counts,
        tail_rows=min(sum(log.tail_rows for log in logs), num_rows - len(rows)),
        tail_lookups=sum(log.tail_lookups for log in logs),
        max_error=sum(log.max_error for log in logs),
    )
