"""The memory that tables take on a group's ranks. Pure."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray
from torchrec.distributed.types import ShardingType

from torchrec_2dsp.cost.loads import LOADS, Loads, Ranks
from torchrec_2dsp.cost.named_parts import NamedParts
from torchrec_2dsp.cost.placed import FLOAT_BYTES, Placed
from torchrec_2dsp.cost.workload import Workload

_GRADIENT_COPIES = 2
"""A data-parallel table's dense gradient exists twice: itself, and in a bucket that is reduced."""

_VECTOR_COPIES = 5
"""How often the vectors that the model gets exist, and their gradients: as they came, in the
model's order, put together."""

_LOOKED_UP_ID_BYTES = 48
"""Bytes that an id takes in FBGEMM's kernels, which sort ids and note where each came from."""


@dataclass(frozen=True, kw_only=True)
class MemoryCost(NamedParts):
    """Bytes that tables take of a rank, beside the dense part of the model.

    Example:
        >>> from torchrec_2dsp.cost.memory import MemoryCost
        >>> cost = MemoryCost(weights_bytes=1e9, batches_bytes=2e6)
        >>> cost.total_bytes
        1002000000.0
        >>> max(cost.parts(), key=lambda part: part[1])
        ('weights', 1000000000.0)
    """

    unit: ClassVar[str] = "bytes"

    weights_bytes: float = 0.0
    """Weights of the tables' shards."""

    optimizer_state_bytes: float = 0.0
    """Optimizer state of the tables' shards."""

    hot_rows_bytes: float = 0.0
    """Copies of hot rows, with moments."""

    dense_gradients_bytes: float = 0.0
    """Gradients of data-parallel tables."""

    batches_bytes: float = 0.0
    """Ids, of all batches that a pipeline has at a time."""

    vectors_bytes: float = 0.0
    """Rows and pooled vectors on their way, and their gradients."""

    copies_bytes: float = 0.0
    """Buffers that keep copies of rows equal: merged gradients, or rows as they were before."""

    @property
    def total_bytes(self) -> float:
        """The sum of all parts."""
        return sum(size for _, size in self.parts())


def memory_cost(tables: Iterable[Placed], loads: Loads, buffers: Mapping[str, Ranks]) -> MemoryCost:
    """The memory of a group's fullest rank.

    Args:
        tables: all of the group.
        loads: what they give it to do.
        buffers: see `buffer_parts`.
    """
    kept_bytes = sum(
        (_kept(table, loads.num_ranks) for table in tables), np.zeros((len(_KEPT), loads.num_ranks))
    )
    parts = dict(zip(_KEPT, kept_bytes, strict=True))
    parts |= {name: weights @ loads.values for name, weights in buffers.items()}
    fullest = int(sum(parts.values(), np.zeros(loads.num_ranks)).argmax())
    return MemoryCost(
        **{f"{name}_bytes": float(by_rank[fullest]) for name, by_rank in parts.items()}
    )


def table_bytes(table: Placed, num_ranks: int) -> Ranks:
    """Weights, optimizer state and hot copies of a table, on each rank.

    Example:
        A quarter of a million numbers, and one moment for each of a thousand rows.

        >>> from torchrec.distributed.types import ShardingType
        >>> from torchrec_2dsp.cost.workload import TableWork
        >>> from torchrec_2dsp.cost.memory import table_bytes
        >>> from torchrec_2dsp.cost.placed import Placed, Shards
        >>> work = TableWork(name="t", num_rows=1_000, dim=256, ids_per_sample=1.0)
        >>> table = Placed(work, ShardingType.TABLE_WISE, shards=Shards.of([(1, 1_000, 256)]))
        >>> table_bytes(table, num_ranks=2).tolist()
        [0.0, 1028000.0]
    """
    return _kept(table, num_ranks).sum(axis=0)


_KEPT = ("weights", "optimizer_state", "hot_rows", "dense_gradients")
"""The parts of `MemoryCost` that are there between steps as well."""


def _kept(table: Placed, num_ranks: int) -> NDArray[np.float64]:
    """The bytes of a table on each rank, with a row for each of `_KEPT`."""
    work = table.work
    kept_bytes = np.zeros((len(_KEPT), num_ranks))
    weights, state, hot_rows, gradients = kept_bytes
    if table.kind is ShardingType.DATA_PARALLEL:
        weights += work.num_rows * table.row_bytes
        state += work.num_rows * _state_bytes(table, work.dim)
        gradients += _GRADIENT_COPIES * work.num_rows * work.dim * FLOAT_BYTES
        return kept_bytes
    ranks, rows, columns = table.shards
    np.add.at(weights, ranks, rows * columns * work.element_bytes)
    np.add.at(state, ranks, rows * _state_bytes(table, columns))
    hot_rows += table.num_hot * (table.row_bytes + _state_bytes(table, work.dim))
    return kept_bytes


def buffer_parts(workload: Workload, num_ranks: int) -> dict[str, Ranks]:
    """The other parts of `MemoryCost`, as bytes of a rank of a group for each unit of `LOADS`.

    What is sent and what is received exist at the same time, and a pipeline has the ids of two
    batches; one that lets rows travel beside computing has those of three, and rows of two. How
    often TorchRec and autograd copy what they hand on is measured: `python -m tests.support.memory`
    says what comes of it.
    """
    batches = 2 if workload.is_pipelined else 1
    batches += workload.prefetches_rows
    return {
        "batches": _weights(ids_to=2 * num_ranks * batches, lookup_ids=_LOOKED_UP_ID_BYTES),
        "vectors": _weights(
            given_bytes=_VECTOR_COPIES,
            pooled_from=2 * num_ranks,
            pooled_to=2 * num_ranks,
            rows_from=num_ranks,
            rows_to=num_ranks,
            early_from=num_ranks,
            lagging_to=num_ranks,
            moved_bytes=1,
            added_bytes=1,
            scattered=1,
            gathered=num_ranks,
            # TorchRec puts them in another order, both ways, before and after they are added up.
            host_scattered=5,
            across_from=2,
            across_to=2,
        ),
        "copies": _weights(
            hot_id_bytes=1,
            hot_bytes_of_all=2,
            peer_bytes_of_all=3,
            averaged_bytes=1,
        ),
    }


def _weights(**per_unit: float) -> Ranks:
    return np.array([float(per_unit.get(name, 0)) for name in LOADS])


def _state_bytes(table: Placed, columns: float | Ranks) -> float | Ranks:
    """Optimizer state of a shard's row; a moment for a whole row is there for each part."""
    state = table.work.state_bytes_per_row
    return state if state <= FLOAT_BYTES else state * columns / table.work.dim
