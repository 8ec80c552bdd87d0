"""`Choice` and `Candidate`: the ways to shard each table, from which the search chooses."""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product
from typing import Any, Literal, cast

import numpy as np
import torch
from torch import nn
from torchrec.distributed.planner.types import ParameterConstraints, ShardingOption
from torchrec.distributed.sharding_plan import calculate_shard_sizes_and_offsets
from torchrec.distributed.types import ModuleSharder, ShardingType
from torchrec.modules.mc_embedding_modules import BaseManagedCollisionEmbeddingCollection

from torchrec_2dsp._compat.torchrec import EmbeddingComputeKernel
from torchrec_2dsp._compat.wrapped_collections import collection_inside, id_maps_of
from torchrec_2dsp.access.table_access import HotSet
from torchrec_2dsp.codecs.rows import Transport
from torchrec_2dsp.cost.collectives import Span
from torchrec_2dsp.cost.loads import Floats, Placed, Shards
from torchrec_2dsp.cost.step_cost import StepCost
from torchrec_2dsp.cost.table_loads import message_type
from torchrec_2dsp.cost.workload import TableWork, Workload, optimizer_of, state_bytes_per_row
from torchrec_2dsp.errors import ConfigError, PlanError
from torchrec_2dsp.plan.fits_module import configs_of, is_left_whole
from torchrec_2dsp.plan.parameter_sharding import (
    IN_8_BITS,
    ROW_EXCHANGES,
    Exchange,
    RowOwners,
    RowStorage,
    base_type,
    can_be_data_parallel,
    kinds_of,
)

Family = tuple[ShardingType, Exchange, Transport]
"""Tables in one family share lookups and messages, so the first costs more than the others."""

_BY_DEFAULT = (
    ShardingType.DATA_PARALLEL,
    ShardingType.TABLE_WISE,
    ShardingType.ROW_WISE,
    ShardingType.TABLE_ROW_WISE,
)
"""Types that train as the unsharded model does. Column-wise shards keep a moment for each part of a
row, so users must ask for them."""
_KNOWN = (*_BY_DEFAULT, ShardingType.COLUMN_WISE)
_DENSE = EmbeddingComputeKernel.DENSE.value
_FUSED = EmbeddingComputeKernel.FUSED.value
_IN_HOST_MEMORY = EmbeddingComputeKernel.FUSED_UVM.value
ON_DEVICE = _DENSE, _FUSED
"""Kernels whose tables are in the memory of the device."""
ANYWHERE = *ON_DEVICE, _IN_HOST_MEMORY
"""All kernels that are searched; the last reads tables in the host's memory from a GPU."""
_WHOLE_ROWS = (ShardingType.TABLE_WISE, ShardingType.COLUMN_WISE)
_MIN_COLUMNS = 32
"""The fewest columns in a column-wise shard, as in TorchRec."""
_DOUBT = 0.07
"""Each further message type must shorten the step by this share of its table time. Messages of
several types in a row take longer than predicted, and a few percent can't be told from nothing."""
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
    kernel: str = _FUSED
    """The kernel that runs it."""

    @property
    def in_host_memory(self) -> bool:
        """True if a GPU reads its rows in the host's memory."""
        return self.kernel == _IN_HOST_MEMORY

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
        """True if the search picks ranks for its shards."""
        return self.kind not in (ShardingType.DATA_PARALLEL, ShardingType.ROW_WISE)

    @property
    def is_on_host(self) -> bool:
        """True if its ranks are one host's."""
        return self.kind is ShardingType.TABLE_ROW_WISE

    def suits(self, group: Span, *, is_even: bool) -> bool:
        """Tell whether groups can run it, and it differs there from the other choices.

        Groups that are even have equally many ranks on each of their hosts.
        """
        if self.exchange is Exchange.ROW_PER_HOST or self.is_on_host:
            return group.crosses_hosts and group.ranks_per_host > 1 and is_even
        if self.kind is ShardingType.TABLE_WISE and self.exchange is Exchange.POOLED:
            return True
        return self.kind is ShardingType.DATA_PARALLEL or group.num_ranks > 1

    def works(self, *, is_even: bool) -> bool:
        """Tell whether groups can run it at all."""
        return is_even or not self.is_on_host


def rated(cost: StepCost, types: Collection[str], in_world: Collection[str] = ()) -> float:
    """Return the seconds by which the search compares steps: more for each further message type.

    The empty type stands for data-parallel tables, whose gradients are reduced. Tables with one
    copy ``in_world`` send messages of their own.
    """
    num_types = len(types) + len(in_world)
    return cost.total_s + _DOUBT * max(0, num_types - 1) * cost.tables_s


@dataclass(frozen=True)
class Candidate:
    """A table to shard, and the ways that are allowed."""

    path: str
    """The path of the table's module in the model."""

    weight: torch.Tensor
    """The table's parameter, read for its shape and type only."""

    work: TableWork
    choices: Sequence[Choice]

    constraint: ParameterConstraints | None = None
    """The user's constraint; the parts that aren't about the search go into the plan."""

    can_be_hot: bool = True
    """Whether rows may have replicas, and the user leaves their number open."""

    _busiest: dict[int, float] = field(default_factory=dict, repr=False, compare=False)
    """The busiest block's accesses relative to the mean block, by the number of blocks."""

    @property
    def name(self) -> str:
        """The name of the table."""
        return self.work.name

    @property
    def num_groups(self) -> int | Literal["each"] | None:
        """The demanded number of copies, as `ParameterConstraints2D` has it."""
        return getattr(self.constraint, "num_groups", None)

    @property
    def stored_as(self) -> RowStorage:
        """The demanded format of rows in memory."""
        return getattr(self.constraint, "stored_as", RowStorage.PLAIN)

    def placed(self, choice: Choice, ranks: Sequence[int], group: Span) -> Placed:
        """Return the table as a choice shards it.

        Where the choice leaves ranks free, they are one for each table- or column-wise shard, and
        all of a host's for a table-row-wise table.
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
        num_parts = 1 if choice.kind in _WHOLE_ROWS else len(ranks)
        blocks = _blocks(self.work.num_rows, num_parts)
        rows = blocks[..., np.arange(len(ranks)) % num_parts]
        columns = np.full(len(ranks), self.work.dim / choice.column_shards)
        return Shards(np.array(ranks), rows, columns)

    def somewhere(self, choice: Choice, group: Span) -> Placed:
        """Return the table on a group's first ranks, where the choice leaves ranks free."""
        if choice.is_on_host:
            return self.placed(choice, range(group.ranks_per_host), group)
        ranks = [part % group.num_ranks for part in range(choice.column_shards)]
        return self.placed(choice, ranks, group)

    def may_be_hot(self, choice: Choice) -> bool:
        """Tell whether row replicas would save anything: a stock exchange ships every bag.

        Replicas of rows in the host's memory are in the GPU's, which is faster.
        """
        ships_all = choice.exchange is Exchange.POOLED and not self.work.is_sequence
        return (
            self.can_be_hot
            and choice.kind is not ShardingType.DATA_PARALLEL
            and (choice.in_host_memory or not ships_all)
        )

    def shapes(self, choice: Choice, group: Span) -> tuple[list[list[int]], list[list[int]]]:
        """Return shard sizes and offsets as TorchRec deals them."""
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
        """Return the hottest rows: without statistics the first, as in tables sorted by use."""
        if not choice.num_hot:
            return None
        access = self.work.access
        hottest = range(self.work.num_rows) if access is None else access.rows.tolist()
        return HotSet.of(hottest[: choice.num_hot])

    def owners(self, choice: Choice, group: Span) -> RowOwners:
        """Return the row owners: hashed where blocks of rows are used unevenly."""
        access = self.work.access
        if choice.exchange not in ROW_EXCHANGES or self.stored_as is RowStorage.INT8:
            return RowOwners.BLOCK
        if access is None or not access.num_lookups:
            # Tables are often sorted by use; nobody knows whether this one is.
            return RowOwners.HASH if self.work.skew else RowOwners.BLOCK
        if group.num_ranks not in self._busiest:
            shares = access.share_by_block(group.num_ranks)
            self._busiest[group.num_ranks] = float(shares.max()) * group.num_ranks
        is_even = self._busiest[group.num_ranks] <= _EVEN_ENOUGH
        return RowOwners.BLOCK if is_even else RowOwners.HASH


def _blocks(num_rows: int, num_parts: int) -> Floats:
    """Deal rows as TorchRec does: as many as fit to each part, the rest to the last."""
    size = -(-num_rows // num_parts)
    remaining = num_rows - np.arange(num_parts, dtype=np.float64) * size
    return np.minimum(np.maximum(remaining, 0.0), size)


def candidates_of(
    module: nn.Module,
    sharders: Sequence[ModuleSharder[nn.Module]],
    constraints: Mapping[str, ParameterConstraints] | None,
    workload: Workload,
    device: str,
    transports: Sequence[Transport] = (Transport.FP32,),
    exchanges: Sequence[Exchange] = (),
    kernels: Sequence[str] = ON_DEVICE,
) -> list[Candidate]:
    """Return a candidate for every table in every module that has a sharder.

    ``transports``, ``exchanges`` and ``kernels`` are allowed where the constraints don't name any.
    A table that can have none of these ``exchanges`` may have any.
    """
    sharder_of = {sharder.module_type: sharder for sharder in sharders}
    tables = _Tables(constraints or {}, workload, device, transports, exchanges, kernels)
    for path, part, sharder in sharded_parts(module, sharder_of):
        params = cast(Any, sharder).fused_params or {}
        available = {
            (kind, kernel)
            for kind in sharder.sharding_types(device)
            for kernel in sharder.compute_kernels(kind, device)
        }
        for name, weight in sharder.shardable_parameters(part).items():
            tables.add(name, (path, part), weight, params, available, f"a {type(sharder).__name__}")
    return list(tables.candidates.values())


def candidates_of_options(
    options: Sequence[ShardingOption],
    fused_params: Mapping[str, Mapping[str, Any]],
    constraints: Mapping[str, ParameterConstraints] | None,
    workload: Workload,
    device: str,
) -> list[Candidate]:
    """Return a candidate for every table for which a TorchRec enumerator lists options.

    ``fused_params`` are the sharders', by TorchRec's key for a module type.
    """
    by_table: dict[str, list[ShardingOption]] = {}
    for option in options:
        by_table.setdefault(option.fqn, []).append(option)
    tables = _Tables(constraints or {}, workload, device)
    for first, *others in by_table.values():
        available = {
            (base_type(option.sharding_type), option.compute_kernel) for option in (first, *others)
        }
        params = fused_params.get(first.module_type_key, {})
        tables.add(first.name, first.module, first.tensor, params, available, "what was enumerated")
    return list(tables.candidates.values())


@dataclass(frozen=True)
class _Tables:
    """Candidates so far, and the ingredients for more."""

    constraints: Mapping[str, ParameterConstraints]
    workload: Workload
    device: str
    transports: Sequence[Transport] = (Transport.FP32,)
    exchanges: Sequence[Exchange] = ()
    kernels: Sequence[str] = ON_DEVICE
    candidates: dict[str, Candidate] = field(default_factory=dict)
    _cold: dict[int, set[str]] = field(default_factory=dict)
    """The tables that can't have hot rows, by their module's id."""

    def __post_init__(self) -> None:
        if unknown := sorted(self.constraints.keys() - self.workload.tables.keys()):
            raise ConfigError(
                f"constraints name {unknown}, and the tables are {list(self.workload.tables)}; use "
                "these names, which aren't those of features or modules"
            )

    def add(
        self,
        name: str,
        module: tuple[str, nn.Module],
        weight: Any,
        fused_params: Mapping[str, Any],
        available: Set[tuple[str, str]],
        sharded_by: str,
    ) -> None:
        """Add a table that may have the ``available`` pairs of type and kernel.

        Raises:
            PlanError: none of them is allowed, or another table has the name.
        """
        path, part = module
        if name in self.candidates:
            raise PlanError(
                f"modules {self.candidates[name].path!r} and {path!r} both have a table {name!r}; "
                "the search tells tables apart by their names: rename one"
            )
        constraint = self.constraints.get(name)
        is_in_8_bits = getattr(constraint, "stored_as", None) is RowStorage.INT8
        optimizer = optimizer_of(weight, fused_params)
        work = self.workload.table(name)
        state = 0 if work.is_frozen else state_bytes_per_row(optimizer, weight.shape[1])
        work = replace(work, state_bytes_per_row=float(state))
        ways = [
            (kind, kernel)
            for kind, kernel in _allowed_ways(constraint, self.kernels)
            if (kind.value, kernel) in available
            and (kind is not ShardingType.DATA_PARALLEL or can_be_data_parallel(optimizer))
            and (not is_in_8_bits or (kind in IN_8_BITS and kernel != _IN_HOST_MEMORY))
        ]
        choices = _choices_of(ways, constraint, work, self.transports, self.exchanges)
        if not choices:
            raise PlanError(_nothing_text(name, constraint, sharded_by, self.device))
        if id(part) not in self._cold:
            self._cold[id(part)] = _always_cold(part)
        can_be_hot = (
            getattr(constraint, "hot_rows", None) is None and name not in self._cold[id(part)]
        )
        self.candidates[name] = Candidate(path, weight, work, choices, constraint, can_be_hot)


def sharded_parts(
    module: nn.Module, sharders: Mapping[type, ModuleSharder[nn.Module]], path: str = ""
) -> Iterator[tuple[str, nn.Module, ModuleSharder[nn.Module]]]:
    """Yield modules with a sharder, which takes all that is below them, but none left whole."""
    if is_left_whole(module):
        return
    sharder = sharders.get(type(module))
    if sharder is not None:
        yield path, module, sharder
        return
    for name, child in module.named_children():
        yield from sharded_parts(child, sharders, f"{path}.{name}" if path else name)


def _always_cold(part: nn.Module) -> set[str]:
    """Return the tables without hot rows: of shared features, or behind maps, which name ids."""
    if isinstance(part, BaseManagedCollisionEmbeddingCollection):
        return set(id_maps_of(part))
    configs = configs_of(collection_inside(part))
    users = Counter(feature for config in configs for feature in config.feature_names)
    return {
        config.name
        for config in configs
        if any(users[feature] > 1 for feature in config.feature_names)
    }


def _allowed_ways(
    constraint: ParameterConstraints | None, by_default: Sequence[str]
) -> Iterator[tuple[ShardingType, str]]:
    """Yield the types that may be searched, each with its kernels."""
    demanded = None if constraint is None else constraint.sharding_types
    type_names = [kind.value for kind in _BY_DEFAULT] if demanded is None else demanded
    types = {base_type(kind) for kind in type_names}
    kernels = (None if constraint is None else constraint.compute_kernels) or by_default
    for kind, kernel in product(_KNOWN, ANYWHERE):
        is_dense = kind is ShardingType.DATA_PARALLEL
        if kind.value in types and kernel in kernels and is_dense == (kernel == _DENSE):
            yield kind, kernel


def _choices_of(
    ways: Iterable[tuple[ShardingType, str]],
    constraint: ParameterConstraints | None,
    work: TableWork,
    transports: Sequence[Transport],
    exchanges: Sequence[Exchange],
) -> list[Choice]:
    """Return every allowed choice; of equal costs, the search takes what comes first."""
    exact = [
        replace(choice, kernel=kernel)
        for kind, kernel in ways
        for choice in _exact_choices(kind, constraint, work)
    ]
    if getattr(constraint, "exchange", None) is None:
        among = [choice for choice in exact if choice.message_type and choice.exchange in exchanges]
        exact = among or exact
    demanded = getattr(constraint, "transport", None) or transports
    choices = [
        replace(choice, transport=transport)
        for choice in exact
        for transport in (demanded if choice.message_type else (Transport.FP32,))
    ]
    order, formats = list(Exchange), list(Transport)
    return sorted(
        choices,
        key=lambda choice: (order.index(choice.exchange), formats.index(choice.transport)),
    )


def _exact_choices(
    kind: ShardingType, constraint: ParameterConstraints | None, work: TableWork
) -> Iterator[Choice]:
    allowed = getattr(constraint, "exchange", None)
    num_hot = getattr(constraint, "hot_rows", None) or 0
    most_hot = work.num_rows if work.access is None else len(work.access.rows)
    if kind is ShardingType.DATA_PARALLEL:
        if not num_hot and not allowed:
            yield Choice(kind)
        return
    for exchange in Exchange:
        is_allowed = allowed is None or exchange in allowed
        if not is_allowed or kind.value not in kinds_of(exchange):
            continue
        if exchange is Exchange.NONEMPTY and work.is_sequence:
            continue
        for column_shards in _column_shards(kind, constraint, work):
            yield Choice(kind, exchange, column_shards, min(num_hot, most_hot))


def _column_shards(
    kind: ShardingType, constraint: ParameterConstraints | None, work: TableWork
) -> list[int]:
    if kind is not ShardingType.COLUMN_WISE:
        return [1]
    least = (constraint.min_partition if constraint else None) or _MIN_COLUMNS
    fitting = [
        parts
        for parts in range(2, work.dim // 4 + 1)
        if work.dim % (4 * parts) == 0 and work.dim // parts >= least
    ]
    return fitting or [1]


def _nothing_text(
    name: str, constraint: ParameterConstraints | None, sharded_by: str, device: str
) -> str:
    kinds, kernels = ", ".join(kind.value for kind in _KNOWN), ", ".join(ANYWHERE)
    demanded = [
        f"{argument}={getattr(constraint, argument)}"
        for argument in ("sharding_types", "compute_kernels", "exchange", "transport", "hot_rows")
        if getattr(constraint, argument, None) not in (None, 0)
    ]
    return (
        f"nothing is allowed for table {name!r}: {', '.join(demanded) or 'no constraint'}, with "
        f"{sharded_by} on {device}. The search knows {kinds} with {kernels}; loosen "
        "the constraints, or use TorchRec's planner with Enumerator2D"
    )
