"""`Choice` and `Candidate`: the ways to shard a table, from which the search chooses."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.distributed.sharding_plan import calculate_shard_sizes_and_offsets
from torchrec.distributed.types import ShardingType

from torchrec_2dsp._compat.torchrec import EmbeddingComputeKernel
from torchrec_2dsp.access.table_access import HotSet
from torchrec_2dsp.codecs.rows import Transport
from torchrec_2dsp.cost.collectives import Span
from torchrec_2dsp.cost.loads import Placed, Shards, blocks_of_rows, has_single_row
from torchrec_2dsp.cost.table_loads import message_type
from torchrec_2dsp.cost.workload import TableWork
from torchrec_2dsp.plan.parameter_sharding import (
    ROW_EXCHANGES,
    Exchange,
    RowOwners,
    RowStorage,
)

Family = tuple[ShardingType, Exchange, Transport]
"""Tables in one family share lookups and messages, so the first costs more than the others."""

FUSED = EmbeddingComputeKernel.FUSED.value
IN_HOST_MEMORY = EmbeddingComputeKernel.FUSED_UVM.value
_ON_HOST = (
    ShardingType.TABLE_ROW_WISE,
    ShardingType.TABLE_COLUMN_WISE,
    ShardingType.GRID_SHARD,
)
_ALL_ROWS = (
    ShardingType.TABLE_WISE,
    ShardingType.COLUMN_WISE,
    ShardingType.TABLE_COLUMN_WISE,
)
"""Types whose shards have all rows."""
_EVEN_ENOUGH = 1.05
"""The most accesses that the busiest block of rows may have, relative to the mean block."""


@dataclass(frozen=True)
class Choice:
    """One way to shard a table inside a group."""

    kind: ShardingType
    exchange: Exchange = Exchange.POOLED
    column_shards: int = 1
    num_hot: int = 0
    """The number of its hottest rows that every rank also holds."""
    transport: Transport = Transport.FP32
    kernel: str = FUSED
    """The kernel that runs it."""

    @property
    def in_host_memory(self) -> bool:
        """True if a GPU reads its rows in host memory."""
        return self.kernel == IN_HOST_MEMORY

    @property
    def family(self) -> Family:
        """The family of tables with which a table of this choice shares messages."""
        return self.kind, self.exchange, self.transport

    @cached_property
    def message_type(self) -> str:
        """The name of its messages in `Loads.types`; empty if it sends none."""
        return message_type(*self.family)

    @property
    def is_free(self) -> bool:
        """True if the search picks ranks for its shards."""
        return self.kind not in (ShardingType.DATA_PARALLEL, ShardingType.ROW_WISE)

    @property
    def is_on_host(self) -> bool:
        """True if each of its parts is on one host's ranks."""
        return self.kind in _ON_HOST

    @property
    def num_parts(self) -> int:
        """The number of parts that the search deals to ranks, or to hosts."""
        return 1 if self.kind is ShardingType.TABLE_COLUMN_WISE else self.column_shards

    def ranks_on_host(self, host: int, busy: NDArray[np.float64]) -> list[int]:
        """Return a part's ranks on a host, whose ranks are ``busy`` with other tables."""
        first = host * len(busy)
        if self.kind is not ShardingType.TABLE_COLUMN_WISE:
            return list(range(first, first + len(busy)))
        order = first + np.argsort(busy, kind="stable")
        return order[np.arange(self.column_shards) % len(busy)].tolist()

    def suits(self, group: Span, *, is_even: bool) -> bool:
        """Tell whether groups can run it, and it differs there from the other choices.

        Even groups have equally many ranks on each of their hosts.
        """
        if self.exchange is Exchange.ROW_PER_HOST or self.is_on_host:
            return group.crosses_hosts and group.ranks_per_host > 1 and is_even
        if self.kind is ShardingType.TABLE_WISE and self.exchange is Exchange.POOLED:
            return True
        return self.kind is ShardingType.DATA_PARALLEL or group.num_ranks > 1

    def works(self, *, is_even: bool) -> bool:
        """Tell whether groups can run it at all."""
        return is_even or not self.is_on_host


@dataclass(frozen=True)
class Candidate:
    """A table to shard, and the allowed ways."""

    path: str
    """The path of the table's module in the model."""

    weight: torch.Tensor
    """The table's parameter, used only for its shape and type."""

    work: TableWork
    choices: Sequence[Choice]

    constraint: ParameterConstraints | None = None
    """The user's constraint; the parts that don't concern the search go into the plan."""

    can_be_hot: bool = True
    """True if rows may have replicas, and the user leaves their number open."""

    num_groups: int | Literal["each"] | None = None
    """The number of copies, as in `ParameterConstraints2D`; 1 if several can't be kept equal."""

    keeps_rows_together: bool = False
    """True if no shard may have one row beside others, for an optimizer's sake."""

    _busiest: dict[int, float] = field(default_factory=dict, repr=False, compare=False)
    """The busiest block's accesses relative to the mean block, by the number of blocks."""

    @property
    def name(self) -> str:
        """The table's name."""
        return self.work.name

    @property
    def stored_as(self) -> RowStorage:
        """The demanded format of rows in memory."""
        return getattr(self.constraint, "stored_as", RowStorage.PLAIN)

    def suiting(self, group: Span, *, is_even: bool) -> Sequence[Choice]:
        """Return the choices that suit a group; if none does, those that it can run."""
        running = [choice for choice in self.choices if choice.works(is_even=is_even)]
        unsaved = self.unsaved_types(group)
        running = [choice for choice in running if choice.kind not in unsaved] or running
        return [choice for choice in running if choice.suits(group, is_even=is_even)] or running

    def unsaved_types(self, group: Span) -> Sequence[ShardingType]:
        """Return the types whose one-row shards TorchRec can't save with the optimizer."""
        if not self.keeps_rows_together:
            return ()
        parts = {
            ShardingType.ROW_WISE: group.num_ranks,
            ShardingType.TABLE_ROW_WISE: group.ranks_per_host,
            ShardingType.GRID_SHARD: group.ranks_per_host,
        }
        return [
            kind for kind, number in parts.items() if has_single_row(self.work.num_rows, number)
        ]

    def placed(self, choice: Choice, ranks: Sequence[int], group: Span) -> Placed:
        """Return the table as a choice shards it.

        If the choice leaves ranks free, ``ranks`` has one for each table- or column-wise shard, and
        all of a host's for each part with rows on all of them.
        """
        if choice.kind is ShardingType.ROW_WISE:
            ranks = range(group.num_ranks)
        return Placed(
            self.work,
            choice.kind,
            self._shards(choice, ranks),
            choice.exchange,
            self.owners(choice, group),
            choice.num_hot,
            choice.transport,
            choice.in_host_memory,
        )

    def _shards(self, choice: Choice, ranks: Sequence[int]) -> Shards:
        if choice.kind is ShardingType.DATA_PARALLEL:
            return Shards.of([])
        num_parts = 1 if choice.kind in _ALL_ROWS else len(ranks) // choice.column_shards
        blocks = blocks_of_rows(self.work.num_rows, num_parts)
        rows = blocks[..., np.arange(len(ranks)) % num_parts]
        columns = np.full(len(ranks), self.work.dim / choice.column_shards)
        return Shards(np.array(ranks), rows, columns)

    def somewhere(self, choice: Choice, group: Span) -> Placed:
        """Return the table on a group's first ranks, if the choice leaves ranks free."""
        ranks: Sequence[int] = [part % group.num_ranks for part in range(choice.column_shards)]
        if choice.is_on_host:
            idle = np.zeros(group.ranks_per_host)
            hosts = (part % group.num_hosts for part in range(choice.num_parts))
            ranks = [rank for host in hosts for rank in choice.ranks_on_host(host, idle)]
        return self.placed(choice, ranks, group)

    def may_be_hot(self, choice: Choice) -> bool:
        """Tell whether row replicas would save anything: a stock exchange sends every bag.

        Replicas of rows in host memory are in the GPU's, which is faster.
        """
        ships_all = choice.exchange is Exchange.POOLED and not self.work.is_sequence
        return (
            self.can_be_hot
            and choice.kind is not ShardingType.DATA_PARALLEL
            and (choice.in_host_memory or not ships_all)
        )

    def shapes(self, choice: Choice, group: Span) -> tuple[list[list[int]], list[list[int]]]:
        """Return shard sizes and offsets as dealt by TorchRec."""
        return calculate_shard_sizes_and_offsets(
            self.weight,
            group.num_ranks,
            group.ranks_per_host,
            choice.kind.value,
            self.work.dim // choice.column_shards,
        )

    def additions(self, choice: Choice, group: Span) -> dict[str, Any]:
        """Return a choice's values for the fields that TorchRec's sharding lacks.

        Without statistics the first rows are hot, as in tables sorted by use.
        """
        access, num_hot = self.work.access, choice.num_hot
        hottest = range(num_hot) if access is None else access.rows[:num_hot].tolist()
        return {
            "exchange": choice.exchange,
            "owners": self.owners(choice, group),
            "hot_set": HotSet.of(hottest) if num_hot else None,
            "transport": choice.transport,
            "stored_as": self.stored_as,
        }

    def owners(self, choice: Choice, group: Span) -> RowOwners:
        """Return the row owners: hashed if blocks of rows are used unevenly."""
        access = self.work.access
        if choice.exchange not in ROW_EXCHANGES or self.stored_as is RowStorage.INT8:
            return RowOwners.BLOCK
        if access is None or not access.num_lookups:
            # Tables are often sorted by use; it isn't known whether this one is.
            return RowOwners.HASH if self.work.skew else RowOwners.BLOCK
        if group.num_ranks not in self._busiest:
            shares = access.share_by_block(group.num_ranks)
            self._busiest[group.num_ranks] = float(shares.max()) * group.num_ranks
        is_even = self._busiest[group.num_ranks] <= _EVEN_ENOUGH
        return RowOwners.BLOCK if is_even else RowOwners.HASH
