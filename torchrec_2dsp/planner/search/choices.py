"""`Choice` and `Candidate`: the ways to shard a table from which the search chooses."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import numpy as np
import torch
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.distributed.sharding_plan import calculate_shard_sizes_and_offsets
from torchrec.distributed.types import ShardingType

from torchrec_2dsp.access.table_access import HotSet
from torchrec_2dsp.codecs.rows import Transport
from torchrec_2dsp.cost.placed import Placed, Shards
from torchrec_2dsp.cost.span import Span
from torchrec_2dsp.cost.step_cost import StepCost
from torchrec_2dsp.cost.table_loads import message_type
from torchrec_2dsp.cost.workload import TableWork
from torchrec_2dsp.plan.parameter_sharding import ROW_EXCHANGES, Exchange, RowOwners

Family = tuple[ShardingType, Exchange, Transport]
"""Tables of one family share lookups and messages, so the first one costs more than the others."""


@dataclass(frozen=True)
class Choice:
    """One way to shard a table inside a group."""

    kind: ShardingType
    exchange: Exchange = Exchange.POOLED

    column_shards: int = 1
    """Into how many parts its columns are split."""

    num_hot: int = 0
    """How many of its hottest rows are on every rank besides."""

    transport: Transport = Transport.FP32
    """How its rows or vectors look on the wire."""

    @property
    def family(self) -> Family:
        """The tables with which a table of this choice shares messages."""
        return self.kind, self.exchange, self.transport

    @cached_property
    def message_type(self) -> str:
        """The name of its messages in `Loads.types`; empty without any."""
        return message_type(*self.family)

    @property
    def is_free(self) -> bool:
        """Whether ranks must be found for its shards."""
        return self.kind not in (ShardingType.DATA_PARALLEL, ShardingType.ROW_WISE)

    @property
    def is_on_host(self) -> bool:
        """Whether these ranks are all those of a host."""
        return self.kind is ShardingType.TABLE_ROW_WISE

    def suits(self, group: Span, *, is_even: bool) -> bool:
        """Whether groups can have it, and it is another one than the others there.

        Args:
            group: of the sharding groups.
            is_even: whether a group has as many ranks on each of its hosts.
        """
        two_levels = group.crosses_hosts and group.ranks_per_host > 1
        if self.exchange is Exchange.ROW_PER_HOST or self.kind is ShardingType.TABLE_ROW_WISE:
            return two_levels and is_even
        if self.kind is ShardingType.TABLE_WISE and self.exchange is Exchange.POOLED:
            return True
        return self.kind is ShardingType.DATA_PARALLEL or group.num_ranks > 1

    def works(self, *, is_even: bool) -> bool:
        """Whether groups can have it at all."""
        return is_even or not self.is_on_host


_DOUBT = 0.07
"""The share of the tables' time by which each further type of messages must shorten a step. That
messages of several types follow one another takes longer than is predicted, and a few percent
can't be told from nothing."""


def rated(cost: StepCost, types: Collection[str]) -> float:
    """Seconds by which the search compares steps, with more of them for each further type.

    Args:
        cost: of a step.
        types: of its messages; the empty one is that of data-parallel tables, whose gradients are
            reduced.

    Example:
        >>> from torchrec_2dsp.cost.step_cost import StepCost
        >>> from torchrec_2dsp.planner.search.choices import rated
        >>> cost = StepCost(dense_s=100.0, forward_exchange_s=200.0)
        >>> rated(cost, {"row_exchange"}), rated(cost, {"row_exchange", "table_wise"})
        (300.0, 314.0)
    """
    return cost.total_s + _DOUBT * max(0, len(types) - 1) * cost.tables_s


def rated_beside(cost: StepCost, types: Collection[str], in_world: Collection[str]) -> float:
    """Seconds by which steps are compared if some tables, whose messages go apart, have one copy.

    Args:
        cost: of a step with all tables.
        types: of the messages of tables in every group.
        in_world: of the messages of tables in the world.
    """
    return rated(cost, {*types, *(f"{message_type}, in the world" for message_type in in_world)})


@dataclass(frozen=True)
class Candidate:
    """A table that is to be sharded, and the ways that are allowed."""

    path: str
    """The path of the table's module in the model."""

    weight: torch.Tensor
    """The table's parameter, for its shape and type; its numbers aren't read."""

    work: TableWork
    choices: Sequence[Choice]

    kernels: dict[ShardingType, str]
    """The kernel that runs each type."""

    constraint: ParameterConstraints | None = None
    """The user's demands; what isn't about the search goes into the plan."""

    can_be_hot: bool = True
    """Whether its rows may have replicas, and the user doesn't say how many."""

    _busiest: dict[int, float] = field(default_factory=dict, repr=False, compare=False)
    """The share of the busiest block of rows, times as many blocks as there are."""

    @property
    def name(self) -> str:
        """The name of the table."""
        return self.work.name

    @property
    def num_groups(self) -> int | Literal["each"] | None:
        """How many copies the user demands, one in each group or a number of them; `None` without
        a demand."""
        return getattr(self.constraint, "num_groups", None)

    def placed(self, choice: Choice, ranks: Sequence[int], group: Span) -> Placed:
        """The table as a choice shards it.

        Args:
            choice: how.
            ranks: of its shards, where the choice leaves them free: of table- and column-wise
                shards one each, of a table-row-wise table those of its host.
            group: of the sharding groups.
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
        )

    def _shards(self, choice: Choice, ranks: Sequence[int]) -> Shards:
        if choice.kind is ShardingType.DATA_PARALLEL:
            return Shards.of([])
        num_parts = 1 if choice.kind in _WHOLE_ROWS else len(ranks)
        rows = np.resize(_blocks(self.work.num_rows, num_parts), len(ranks))
        columns = np.full(len(ranks), self.work.dim / choice.column_shards)
        return Shards(np.array(ranks), rows, columns)

    def may_be_hot(self, choice: Choice) -> bool:
        """Whether replicas of rows would save anything: a stock exchange ships every bag."""
        ships_all = choice.exchange is Exchange.POOLED and not self.work.is_sequence
        return self.can_be_hot and choice.kind is not ShardingType.DATA_PARALLEL and not ships_all

    def somewhere(self, choice: Choice, group: Span) -> Placed:
        """The table on the first ranks of a group, where the choice leaves ranks free."""
        return self.placed(choice, first_ranks(choice, group), group)

    def shapes(self, choice: Choice, group: Span) -> tuple[list[list[int]], list[list[int]]]:
        """Sizes and offsets of its shards, as TorchRec deals them."""
        num_shards = choice.column_shards
        if choice.is_on_host:
            num_shards = group.ranks_per_host
        elif not choice.is_free:
            num_shards = group.num_ranks
        return calculate_shard_sizes_and_offsets(
            self.weight,
            num_shards,
            group.ranks_per_host,
            choice.kind.value,
            self.work.dim // choice.column_shards,
        )

    def hot_set(self, choice: Choice) -> HotSet | None:
        """The hottest rows; the first ones without statistics, as in tables sorted by use."""
        if not choice.num_hot:
            return None
        access = self.work.access
        hottest = range(self.work.num_rows) if access is None else access.rows.tolist()
        return HotSet.of(hottest[: choice.num_hot])

    def owners(self, choice: Choice, group: Span) -> RowOwners:
        """Hashed where blocks of rows are used unevenly."""
        access = self.work.access
        if choice.exchange not in ROW_EXCHANGES or access is None or not access.num_lookups:
            return RowOwners.BLOCK
        if group.num_ranks not in self._busiest:
            shares = access.share_by_block(group.num_ranks)
            self._busiest[group.num_ranks] = float(shares.max()) * group.num_ranks
        is_even = self._busiest[group.num_ranks] <= _EVEN_ENOUGH
        return RowOwners.BLOCK if is_even else RowOwners.HASH


_WHOLE_ROWS = (ShardingType.TABLE_WISE, ShardingType.COLUMN_WISE)
_EVEN_ENOUGH = 1.05
"""How much more than the mean one the busiest block of rows may be used."""


def first_ranks(choice: Choice, group: Span) -> Sequence[int]:
    """The first ranks of a group, as many as a choice needs."""
    if choice.kind is ShardingType.TABLE_ROW_WISE:
        return range(group.ranks_per_host)
    return [part % group.num_ranks for part in range(choice.column_shards)]


def _blocks(num_rows: int, num_parts: int) -> np.ndarray:
    """Rows of each part: as many as fit, and the rest in the last ones, as TorchRec deals them."""
    size = -(-num_rows // num_parts)
    remaining = num_rows - np.arange(num_parts, dtype=np.float64) * size
    return np.minimum(np.maximum(remaining, 0.0), size)
