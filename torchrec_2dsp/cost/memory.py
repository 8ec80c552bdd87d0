"""What a table takes of the memory of a group's ranks. Pure."""

import numpy as np
from torchrec.distributed.types import ShardingType

from torchrec_2dsp.cost.loads import LOADS, Ranks
from torchrec_2dsp.cost.model import Setting
from torchrec_2dsp.cost.placed import FLOAT_BYTES, Placed

_GRADIENT_COPIES = 2
"""Of a data-parallel table's dense gradient: its own, and that in a bucket that is reduced."""


def table_bytes(table: Placed, num_ranks: int) -> Ranks:
    """Weights, optimizer state and hot copies of a table, on each rank.

    Example:
        A quarter of a million numbers, and one moment for each of a thousand rows.

        >>> from torchrec.distributed.types import ShardingType
        >>> import torchrec_2dsp as tdsp
        >>> from torchrec_2dsp.cost.memory import table_bytes
        >>> from torchrec_2dsp.cost.placed import Placed, Shards
        >>> work = tdsp.TableWork(name="t", num_rows=1_000, dim=256, ids_per_sample=1.0)
        >>> table = Placed(work, ShardingType.TABLE_WISE, shards=Shards.of([(1, 1_000, 256)]))
        >>> table_bytes(table, num_ranks=2).tolist()
        [0.0, 1028000.0]
    """
    work = table.work
    found = np.zeros(num_ranks)
    if table.kind is ShardingType.DATA_PARALLEL:
        found += work.num_rows * (table.row_bytes + _state_bytes(table, work.dim))
        return found + _GRADIENT_COPIES * work.num_rows * work.dim * FLOAT_BYTES
    ranks, rows, columns = table.shards
    np.add.at(found, ranks, rows * (columns * work.element_bytes + _state_bytes(table, columns)))
    return found + table.num_hot * (table.row_bytes + _state_bytes(table, work.dim))


def buffer_weights(setting: Setting) -> Ranks:
    """How many bytes of buffers a rank has for each unit of `LOADS`.

    What is sent and what is received exist at the same time, and a pipeline has the ids of two
    batches; one that lets rows travel beside computing has those of three, and rows of two.
    """
    num_ranks = setting.group.num_ranks
    batches = 2 if setting.workload.is_pipelined else 1
    batches += setting.workload.prefetches_rows
    per_unit = {
        "ids_to": 2 * batches * num_ranks,
        "pooled_from": 2 * num_ranks,
        "pooled_to": 2 * num_ranks,
        "rows_from": 2 * num_ranks,
        "rows_to": 2 * num_ranks,
        "early_from": 2 * num_ranks,
        "lagging_to": 2 * num_ranks,
        "scattered": 1,
        "gathered": num_ranks,
        "host_scattered": 1,
        "across_from": 2,
        "across_to": 2,
        "moved_bytes": 1,
        "added_bytes": 1,
        "hot_id_bytes": 1,
        "hot_bytes_of_all": 2,
        "peer_bytes_of_all": 2,
    }
    return np.array([float(per_unit.get(name, 0)) for name in LOADS])


def _state_bytes(table: Placed, columns: float | Ranks) -> float | Ranks:
    """Of one row of a shard; a moment for a whole row is there for each part of it."""
    state = table.work.state_bytes_per_row
    return state if state <= FLOAT_BYTES else state * columns / table.work.dim
