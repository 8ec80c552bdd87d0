"""A model's candidates: its tables, each with the choices that its user allows."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any, cast

from torch import nn
from torchrec.distributed.planner.types import ParameterConstraints, ShardingOption
from torchrec.distributed.types import ModuleSharder, ShardingType
from torchrec.modules.mc_embedding_modules import BaseManagedCollisionEmbeddingCollection

from torchrec_2dsp._compat.fbgemm import EmbOptimType
from torchrec_2dsp._compat.torchrec import EmbeddingComputeKernel
from torchrec_2dsp._compat.wrapped_collections import collection_inside, id_maps_of
from torchrec_2dsp.codecs.rows import Transport
from torchrec_2dsp.cost.workload import TableWork, Workload, optimizer_of, state_bytes_per_row
from torchrec_2dsp.errors import ConfigError, PlanError
from torchrec_2dsp.plan.fits_module import configs_of, sharded_parts
from torchrec_2dsp.plan.parameter_sharding import (
    FROM_ROW_GRADIENTS,
    IN_8_BITS,
    WITH_ROW_WISE_MOMENT,
    Exchange,
    RowStorage,
    base_type,
    can_have_copies,
    fused_kind,
    kinds_of,
)
from torchrec_2dsp.plan.sync import EXACT_SYNC, SyncConfig
from torchrec_2dsp.planner.search.choices import FUSED, IN_HOST_MEMORY, Candidate, Choice

_BY_DEFAULT = (
    ShardingType.DATA_PARALLEL,
    ShardingType.TABLE_WISE,
    ShardingType.ROW_WISE,
    ShardingType.TABLE_ROW_WISE,
)
"""Types that train as the unsharded model does. Shards with some columns keep a moment for each
part of a row, so users must ask for them."""
_BY_COLUMNS = (
    ShardingType.COLUMN_WISE,
    ShardingType.TABLE_COLUMN_WISE,
    ShardingType.GRID_SHARD,
)
_KNOWN = *_BY_DEFAULT, *_BY_COLUMNS
_DENSE = EmbeddingComputeKernel.DENSE.value
ON_DEVICE = _DENSE, FUSED
"""Kernels whose tables are in device memory."""
ANYWHERE = *ON_DEVICE, IN_HOST_MEMORY
"""All kernels in the search; with the last one, a GPU reads tables in host memory."""
_MIN_COLUMNS = 32
"""The fewest columns in a shard with some of the columns, as in TorchRec."""


def candidates_of(
    module: nn.Module,
    sharders: Sequence[ModuleSharder[nn.Module]],
    constraints: Mapping[str, ParameterConstraints] | None,
    workload: Workload,
    device: str,
    transports: Sequence[Transport] = (Transport.FP32,),
    exchanges: Sequence[Exchange] = (),
    kernels: Sequence[str] = ON_DEVICE,
    sync: SyncConfig = EXACT_SYNC,
) -> list[Candidate]:
    """Return a candidate for every table in every module that has a sharder.

    ``transports``, ``exchanges`` and ``kernels`` are allowed where the constraints don't name any.
    A table that supports none of these ``exchanges`` may have any.
    """
    sharder_of = {sharder.module_type: sharder for sharder in sharders}
    tables = _Tables(constraints or {}, workload, device, transports, exchanges, kernels, sync)
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
    """The candidates so far, and the data for adding more."""

    constraints: Mapping[str, ParameterConstraints]
    workload: Workload
    device: str
    transports: Sequence[Transport] = (Transport.FP32,)
    exchanges: Sequence[Exchange] = ()
    kernels: Sequence[str] = ON_DEVICE
    sync: SyncConfig = EXACT_SYNC
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
        """Add a table with the ``available`` pairs of type and kernel.

        Raises:
            PlanError: none of them is allowed, or another table has this name.
        """
        path, part = module
        if name in self.candidates:
            raise PlanError(
                f"modules {self.candidates[name].path!r} and {path!r} both have a table {name!r}; "
                "the search tells tables apart by their names: rename one"
            )
        constraint = self.constraints.get(name)
        is_in_8_bits = getattr(constraint, "stored_as", None) is RowStorage.INT8
        work = self.workload.table(name)
        # Frozen tables have an optimizer without state.
        optimizer = EmbOptimType.EXACT_SGD if work.is_frozen else optimizer_of(weight, fused_params)
        kind_of_update = fused_kind(optimizer)
        is_from_gradients = kind_of_update in FROM_ROW_GRADIENTS
        state = state_bytes_per_row(optimizer, weight.shape[1])
        work = replace(work, state_bytes_per_row=float(state))
        ways = [
            (kind, kernel)
            for kind, kernel in _allowed_ways(constraint, self.kernels)
            if (kind.value, kernel) in available
            and (kind is not ShardingType.DATA_PARALLEL or is_from_gradients)
            and (not is_in_8_bits or (kind in IN_8_BITS and kernel != IN_HOST_MEMORY))
        ]
        choices = _choices_of(ways, constraint, work, self.transports, self.exchanges)
        if not choices:
            offered = {kind for kind, _ in available}
            kinds = ", ".join(kind.value for kind in _KNOWN if kind.value in offered)
            raise PlanError(_nothing_text(name, constraint, sharded_by, self.device, kinds))
        if id(part) not in self._cold:
            self._cold[id(part)] = _always_cold(part)
        can_be_hot = (
            getattr(constraint, "hot_rows", None) is None
            and name not in self._cold[id(part)]
            and is_from_gradients
        )
        num_groups = getattr(constraint, "num_groups", None)
        if not can_have_copies(optimizer, self.sync, is_in_8_bits):
            num_groups = num_groups or 1
        keeps_rows_together = kind_of_update in WITH_ROW_WISE_MOMENT
        self.candidates[name] = Candidate(
            *(path, weight, work, choices, constraint, can_be_hot, num_groups, keeps_rows_together)
        )


def _always_cold(part: nn.Module) -> set[str]:
    """Return tables without hot rows: with shared features, or behind maps, which name ids."""
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
    """Yield the types that may be searched, with their kernels."""
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
    """Return every allowed choice; among equal costs, the search takes the first."""
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
    if kind not in _BY_COLUMNS:
        return [1]
    least = (constraint.min_partition if constraint else None) or _MIN_COLUMNS
    fitting = [
        parts
        for parts in range(2, work.dim // 4 + 1)
        if work.dim % (4 * parts) == 0 and work.dim // parts >= least
    ]
    # Sequences in one lookup have the same width; a collection's sequences all have one dim.
    return (fitting[:1] if work.is_sequence else fitting) or [1]


def _nothing_text(
    name: str,
    constraint: ParameterConstraints | None,
    sharded_by: str,
    device: str,
    kinds: str,
) -> str:
    demanded = [
        f"{argument}={getattr(constraint, argument)}"
        for argument in ("sharding_types", "compute_kernels", "exchange", "transport", "hot_rows")
        if getattr(constraint, argument, None) not in (None, 0)
    ]
    if getattr(constraint, "stored_as", None) is RowStorage.INT8:
        in_8_bits = ", ".join(kind.value for kind in IN_8_BITS)
        demanded.append(f"stored_as='int8', which {in_8_bits} tables can be")
    return (
        f"nothing is allowed for table {name!r}: {', '.join(demanded) or 'no constraint'}, with "
        f"{sharded_by} on {device}. The search knows {kinds} with {', '.join(ANYWHERE)}; loosen "
        "the constraints, or use TorchRec's planner with Enumerator2D"
    )
