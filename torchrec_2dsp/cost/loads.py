"""`Loads`: each rank's work and messages in a sharding group; `Placed`: a table on its ranks.

Pure.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast, overload

import numpy as np
from numpy.typing import NDArray
from torchrec.distributed.types import ShardingType

from torchrec_2dsp._compat.torchrec import EmbeddingComputeKernel
from torchrec_2dsp.codecs.ids import num_id_bytes
from torchrec_2dsp.codecs.rows import Transport
from torchrec_2dsp.cost.calibration import KernelCost
from torchrec_2dsp.cost.workload import TableWork, Workload
from torchrec_2dsp.plan.parameter_sharding import (
    Exchange,
    ParameterSharding2D,
    RowOwners,
    base_type,
)

Floats = NDArray[np.float64]
Ranks = NDArray[np.float64]
"""A number for each of a sharding group's ranks, in rank order."""

_WHOLE_ID_BYTES = 8
LENGTH_BYTES = 4
KEY_BYTES = 4
"""The bytes of a row's number on the wire, unless a model has more than 2**31 rows."""
FLOAT_BYTES = 4


class Load:
    """A row of `Loads.values`, accessed by name."""

    def __set_name__(self, owner: type, name: str) -> None:
        names = [name for name, member in vars(owner).items() if isinstance(member, Load)]
        self._row = names.index(name)

    @overload
    def __get__(self, loads: None, owner: type) -> "Load": ...
    @overload
    def __get__(self, loads: "Loads", owner: type) -> Ranks: ...
    def __get__(self, loads: "Loads | None", owner: type) -> "Load | Ranks":
        return self if loads is None else loads.values[self._row]

    def __set__(self, loads: "Loads", value: Ranks | float) -> None:
        loads.values[self._row] = value


@dataclass(eq=False)
class Loads:
    """A plan's work and messages, summed over its tables.

    Messages count a rank's bytes for each of the others: a rank sends ``..._from`` to
    all, and all send ``..._to`` to it. Merged rows count the bytes that
    one rank has, a host's ranks have, and all have.
    """

    num_ranks: int

    lookup_ids = Load()
    """Rows read from tables for bags and updated, counted per id."""
    lookup_bytes = Load()
    """Bytes of these rows, counted per id."""
    lookup_row_bytes = Load()
    """Bytes of these rows, each row counted once."""
    lookup_vector_bytes = Load()
    """Bytes of the bag vectors from these rows."""
    owned_ids = Load()
    """Rows looked up and updated for other ranks, by row exchange."""
    owned_bytes = Load()
    """Bytes of the rows looked up and updated for other ranks."""
    bus_rows = Load()
    """Rows that a GPU reads from host memory, to look them up and to update them."""
    bus_bytes = Load()
    """Bytes of these rows and of their optimizer state."""
    found_ids = Load()
    """Ids among which the distinct ones are searched."""
    moved_rows = Load()
    """Rows copied to their places."""
    moved_bytes = Load()
    """Bytes of the copied rows."""
    encoding_s = Load()
    """Seconds of encoding and decoding, forward and backward."""
    added_rows = Load()
    """Rows that are summed."""
    added_bytes = Load()
    """Bytes of the summed rows."""
    given_bytes = Load()
    """Bytes of the vectors that the model receives."""
    dense_bytes = Load()
    """Bytes of tables that are updated as a whole."""
    all_reduced_bytes = Load()
    """Bytes of these tables' gradients, which are all-reduced over the world."""
    ids_to = Load()
    """Ids and bag lengths."""
    whole_ids_to = Load()
    """Ids and bag lengths in memory, where ids have eight bytes."""
    pooled_from = Load()
    """Looked-up vectors."""
    pooled_to = Load()
    """Gradients of looked-up vectors."""
    rows_from = Load()
    """Distinct rows, or vectors of non-empty bags, in exchanges that TorchRec doesn't have."""
    rows_to = Load()
    """Gradients of these rows and vectors."""
    early_from = Load()
    """The part of all rows that may travel while the previous step computes."""
    lagging_to = Load()
    """The part of all row gradients that may travel while the next step computes."""
    beside_ids = Load()
    """Ids that an owner looks for in adjacent batches, to know which rows may travel early."""
    early_bytes = Load()
    """Bytes of rows that travel in a separate half, and must be joined once more."""
    lagging_bytes = Load()
    """Bytes of gradients that leave in a separate half."""
    scattered = Load()
    """A rank's input to a reduce-scatter over the group."""
    gathered = Load()
    """A rank's input to the all-gather over the group, in the backward."""
    host_scattered = Load()
    """A rank's input to a reduce-scatter inside its host."""
    host_gathered = Load()
    """A rank's input to the all-gather inside its host, in the backward."""
    host_rows_from = Load()
    """Distinct rows that a rank hands on to each rank on its host."""
    host_rows_to = Load()
    """Gradients of the rows handed on."""
    across_from = Load()
    """A rank's message to each rank with its place on another host."""
    across_to = Load()
    """Gradients that a rank sends back to these ranks."""
    hot_ids = Load()
    """Lookups of hot rows."""
    hot_id_bytes = Load()
    """Bytes of looked-up hot rows, counted per id."""
    hot_rows = Load()
    """Hot rows touched by the world."""
    hot_bytes_of_rank = Load()
    """Gradients of the hot rows touched by a rank, with row numbers."""
    hot_bytes_of_host = Load()
    """Gradients of the hot rows touched by a host's ranks, with row numbers."""
    hot_bytes_of_all = Load()
    """Gradients of the hot rows touched by the world, with row numbers."""
    peer_rows = Load()
    """Rows touched by any replica peer, which all peers update."""
    peer_row_bytes = Load()
    """Bytes of these rows' gradients when applied."""
    peer_bytes_of_rank = Load()
    """Gradients of the rows touched by a peer, on the wire, with row numbers."""
    peer_bytes_of_host = Load()
    """Gradients of the rows touched by a host's peers, on the wire."""
    peer_bytes_of_all = Load()
    """Gradients of the rows touched by all peers, on the wire."""
    averaged_rows = Load()
    """Rows that a rank has touched between two averages of weights."""
    averaged_bytes = Load()
    """Bytes of these rows, with row numbers."""
    averaged_whole_bytes = Load()
    """Bytes of the whole shards with these rows."""
    moment_rows = Load()
    """Rows whose moments are averaged, if at other steps than weights."""
    moment_bytes = Load()
    """Bytes of these rows' moments, with row numbers."""
    moment_whole_bytes = Load()
    """Bytes of all moments in the shards with these rows."""

    types: set[str] = field(default_factory=set)
    """The message types, each exchanged separately."""

    codecs: Mapping[Transport, KernelCost] = field(default_factory=dict)
    """The costs of encoding and decoding rows; not counted if empty."""

    prefetches_rows: bool = False
    """True if other batches' rows may travel during computation."""

    is_even: bool = False
    """True if all ranks are known to have equal loads."""

    def __post_init__(self) -> None:
        self.values: NDArray[np.float64] = np.zeros((len(LOADS), self.num_ranks))
        """All loads, with a row for each of `LOADS` and a column for each rank."""

    @classmethod
    def even(cls, of_rank: Ranks, types: set[str]) -> "Loads":
        """Give every rank the same loads, which are then numbers instead of arrays."""
        loads = cls(1, types=types, is_even=True)
        # Python's own numbers are ten times as fast as small arrays.
        loads.values = cast(Any, of_rank.tolist())
        return loads

    def evened(self) -> "Loads":
        """Share all work evenly among the ranks."""
        if self.is_even:
            return self
        return self.even(self.values.mean(axis=1), self.types)

    def drop_updates(self) -> None:
        """Drop gradients, updates and syncs, and rows that would travel before a step."""
        for name in _OF_UPDATES:
            setattr(self, name, 0.0)
        self.encoding_s = self.encoding_s / 2

    def look_up(
        self,
        ids: float | Ranks,
        row_bytes: float | Ranks,
        *,
        distinct: float | Ranks,
        vector_bytes: float | Ranks,
    ) -> None:
        """Add rows read for bags and updated: per id, and distinct ones once."""
        self.lookup_ids += ids
        self.lookup_bytes += ids * row_bytes
        self.lookup_row_bytes += distinct * row_bytes
        self.lookup_vector_bytes += vector_bytes

    def send_ids(
        self, ids: float | Ranks, id_bytes: float | Ranks, lengths: float | Ranks = 0.0
    ) -> None:
        """Add ids and bag lengths that a rank sends to each other rank."""
        self.ids_to += lengths * LENGTH_BYTES + ids * id_bytes
        self.whole_ids_to += lengths * LENGTH_BYTES + ids * _WHOLE_ID_BYTES

    def move_and_add(self, rows: float | Ranks, num_bytes: float | Ranks) -> None:
        """Add rows that are copied to their places, and whose gradients are summed."""
        self.moved_rows += rows
        self.moved_bytes += num_bytes
        self.added_rows += rows
        self.added_bytes += num_bytes


LOADS = tuple(name for name, member in vars(Loads).items() if isinstance(member, Load))
"""The names of all loads, in the order of `Loads.values`."""


_OF_UPDATES = (
    *("added_rows", "added_bytes", "dense_bytes", "all_reduced_bytes", "pooled_to", "rows_to"),
    *("early_from", "early_bytes", "lagging_to", "lagging_bytes", "beside_ids"),
    *("gathered", "host_gathered", "host_rows_to", "across_to"),
    *(name for name in LOADS if name.startswith(("hot_rows", "hot_bytes", "peer_", "averaged_"))),
    *(name for name in LOADS if name.startswith("moment_")),
)
"""The loads that a step without a backward lacks; it also has half of `Loads.encoding_s`."""


def load_weights(**per_unit: float) -> Ranks:
    """Return a number for each of `LOADS`, zero for those not named."""
    return np.array([float(per_unit.get(name, 0.0)) for name in LOADS])


class Shards(NamedTuple):
    """Parts of a table, with a number for each."""

    ranks: NDArray[np.int64]
    """Positions in the group."""

    rows: Ranks
    columns: Ranks

    @classmethod
    def of(cls, shards: Sequence[tuple[int, int, int]]) -> "Shards":
        """Build shards from tuples: rank, rows, columns."""
        ranks, rows, columns = np.array(shards, dtype=np.float64).reshape(-1, 3).T
        return cls(ranks.astype(np.int64), rows, columns)


def sum_by_rank(ranks: NDArray[np.int64], numbers: Ranks, num_ranks: int) -> Ranks:
    """Sum the numbers of each rank's shards, which are the last axis."""
    sums = np.zeros((*numbers.shape[:-1], num_ranks))
    np.add.at(sums.T, ranks, numbers.T)
    return sums


@dataclass(frozen=True)
class Placed:
    """A table on a group's ranks."""

    work: TableWork

    kind: ShardingType
    """TorchRec's sharding type inside the group."""

    shards: Shards
    """The table's parts; none for a data-parallel table."""

    exchange: Exchange = Exchange.POOLED
    owners: RowOwners = RowOwners.BLOCK

    num_hot: int = 0
    """The number of hottest rows, which every rank also holds."""

    transport: Transport = Transport.FP32
    """The wire format of rows and vectors; the workload's if it is fp32."""

    in_host_memory: bool = False
    """True if a GPU's kernels read and update its rows in host memory."""

    is_stock: bool = False
    """True for TorchRec's own shardings, whose ids travel in eight bytes."""

    @classmethod
    def of(cls, work: TableWork, sharding: ParameterSharding2D, device: str = "cpu") -> "Placed":
        """Return a table as placed by a plan; CPUs have only one memory."""
        spec = getattr(sharding.sharding_spec, "shards", None) or ()
        return cls(
            work=work,
            kind=ShardingType(base_type(sharding.sharding_type)),
            exchange=sharding.exchange,
            owners=sharding.owners,
            shards=Shards.of(
                [
                    (shard.placement.rank(), shard.shard_sizes[0], shard.shard_sizes[1])
                    for shard in spec
                ]
            ),
            num_hot=0 if sharding.hot_set is None else len(sharding.hot_set),
            transport=sharding.transport,
            in_host_memory=device == "cuda"
            and sharding.compute_kernel == EmbeddingComputeKernel.FUSED_UVM.value,
            is_stock=sharding.sharding_type == base_type(sharding.sharding_type),
        )

    @property
    def id_bytes(self) -> float:
        """An id's bytes on the wire, if the exchange has no larger table."""
        return _WHOLE_ID_BYTES if self.is_stock else num_id_bytes(self.work.num_rows)

    def forward_bytes(self, workload: Workload) -> float:
        """Return the bytes per number in the forward, including its share of a scale."""
        return self._bytes_per_number(workload.forward_wire_bytes)

    def backward_bytes(self, workload: Workload) -> float:
        """Return the bytes per number in the backward."""
        return self._bytes_per_number(workload.backward_wire_bytes)

    def _bytes_per_number(self, by_workload: float) -> float:
        if self.transport is Transport.FP32:
            return by_workload
        return self.transport.codec.num_bytes(self.work.dim) / self.work.dim

    @property
    def row_bytes(self) -> float:
        """A whole row's bytes."""
        return float(self.work.dim * self.work.element_bytes)

    def owner_shares(self, num_ranks: int) -> Ranks:
        """Return each row owner's share of the lookups."""
        if self.owners is RowOwners.HASH:
            return np.full(num_ranks, 1 / num_ranks)
        return self.work.share_by_block(num_ranks, num_hot=self.num_hot)

    def distinct_by_owner(self, num_lookups: float, num_ranks: int) -> Ranks:
        """Return the distinct cold rows that ``num_lookups`` lookups touch at each owner."""
        if self.owners is RowOwners.HASH:
            distinct = self.work.expected_distinct(num_lookups, num_hot=self.num_hot)
            return distinct / num_ranks * np.ones(num_ranks)
        return self.work.distinct_by_block(num_lookups, num_ranks, num_hot=self.num_hot)


def has_single_row(num_rows: int, num_parts: int) -> bool:
    """Return whether some of these parts, but not all, would have only one row."""
    block = -(-num_rows // num_parts)
    return num_rows % block == 1 if block > 1 else num_rows < num_parts


def blocks_of_rows(num_rows: int, num_parts: int) -> Floats:
    """Deal rows as TorchRec does: equally many to each part as long as they last."""
    size = -(-num_rows // num_parts)
    remaining = num_rows - np.arange(num_parts, dtype=np.float64) * size
    return np.minimum(np.maximum(remaining, 0.0), size)
