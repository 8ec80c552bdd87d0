"""From a model, its sharders and the user's constraints to what the search chooses from."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import nn
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.distributed.types import ModuleSharder, ShardingType
from torchrec.modules.embedding_configs import PoolingType
from torchrec.modules.embedding_modules import (
    EmbeddingBagCollectionInterface,
    EmbeddingCollectionInterface,
)

from torchrec_2dsp._compat.torchrec import EmbeddingComputeKernel
from torchrec_2dsp.cost.optimizer_state import state_bytes_per_row
from torchrec_2dsp.cost.workload import TableWork, Workload
from torchrec_2dsp.errors import PlanError
from torchrec_2dsp.plan.parameter_sharding import Exchange, base_type, kinds_of
from torchrec_2dsp.planner.constraints import ParameterConstraints2D
from torchrec_2dsp.planner.search.choices import Candidate, Choice

_BY_DEFAULT = (
    ShardingType.DATA_PARALLEL,
    ShardingType.TABLE_WISE,
    ShardingType.ROW_WISE,
    ShardingType.TABLE_ROW_WISE,
)
"""All types that train as the unsharded model does. Column-wise ones have a moment of their own for
each part of a row, so they must be asked for."""
_KNOWN = (*_BY_DEFAULT, ShardingType.COLUMN_WISE)
_MIN_COLUMNS = 32
"""Of a column-wise shard, as in TorchRec."""


def candidates_of(
    module: nn.Module,
    sharders: Sequence[ModuleSharder[nn.Module]],
    constraints: Mapping[str, ParameterConstraints] | None,
    workload: Workload,
    device: str,
) -> list[Candidate]:
    """Every table of every module that has a sharder.

    Args:
        module: the unsharded model.
        sharders: say which types and kernels there are.
        constraints: per table.
        workload: what a step does with each.
        device: "cpu" or "cuda".

    Raises:
        PlanError: nothing is allowed for a table, or two tables share a name.
    """
    known = {sharder.module_type: sharder for sharder in sharders}
    found: dict[str, Candidate] = {}
    for path, part, sharder in _sharded_parts(module, known):
        cold = _always_cold(part)
        for name, weight in sharder.shardable_parameters(part).items():
            if name in found:
                raise PlanError(
                    f"modules {found[name].path!r} and {path!r} both have a table {name!r}; the "
                    "search tells tables apart by their names: rename one"
                )
            constraint = (constraints or {}).get(name)
            work = replace(
                workload.table(name),
                state_bytes_per_row=float(
                    state_bytes_per_row(_optimizer(weight, sharder), weight.shape[1])
                ),
            )
            kernels = _kernels(name, sharder, constraint, work, device)
            choices = [choice for kind in kernels for choice in _choices(kind, constraint, work)]
            # Of what costs the same, the search takes what comes first.
            choices.sort(key=lambda choice: list(Exchange).index(choice.exchange))
            if not choices:
                raise PlanError(_nothing_text(name, constraint, sharder, device))
            is_said = getattr(constraint, "hot_rows", None) is not None
            found[name] = Candidate(
                path, weight, work, choices, kernels, constraint, not is_said and name not in cold
            )
    return list(found.values())


def _sharded_parts(
    module: nn.Module, sharders: Mapping[type, ModuleSharder[nn.Module]], path: str = ""
) -> Iterator[tuple[str, nn.Module, ModuleSharder[nn.Module]]]:
    """Modules with a sharder, which takes all that is below them."""
    sharder = sharders.get(type(module))
    if sharder is not None:
        yield path, module, sharder
        return
    for name, child in module.named_children():
        yield from _sharded_parts(child, sharders, f"{path}.{name}" if path else name)


def _always_cold(part: nn.Module) -> set[str]:
    """Tables that can't have hot rows, as `shard` refuses them."""
    if isinstance(part, EmbeddingBagCollectionInterface):
        configs, averages = part.embedding_bag_configs(), part.is_weighted()
    elif isinstance(part, EmbeddingCollectionInterface):
        configs, averages = part.embedding_configs(), False
    else:
        return set()
    users = Counter(feature for config in configs for feature in config.feature_names)
    return {
        config.name
        for config in configs
        if any(users[feature] > 1 for feature in config.feature_names)
        or (averages and getattr(config, "pooling", None) is PoolingType.MEAN)
    }


def _optimizer(weight: Any, sharder: ModuleSharder[nn.Module]) -> EmbOptimType | type:
    """The optimizer that a table's fused kernel will run: plain SGD unless told."""
    applied = getattr(weight, "_optimizer_classes", None)
    if applied:
        return applied[0]
    fused_params = cast(Any, sharder).fused_params or {}
    return fused_params.get("optimizer", EmbOptimType.EXACT_SGD)


def _kernels(
    name: str,
    sharder: ModuleSharder[nn.Module],
    constraint: ParameterConstraints | None,
    work: TableWork,
    device: str,
) -> dict[ShardingType, str]:
    """The kernel of each type that is allowed."""
    demanded = None if constraint is None else constraint.sharding_types
    wanted = [one.value for one in _BY_DEFAULT] if demanded is None else demanded
    allowed = {base_type(kind) for kind in wanted}
    kernels: dict[ShardingType, str] = {}
    for value in sharder.sharding_types(device):
        kind = ShardingType(value)
        if value not in allowed or kind not in _KNOWN:
            continue
        is_dense = kind is ShardingType.DATA_PARALLEL
        if is_dense and work.is_sequence and device == "cpu":
            continue  # TorchRec can't look it up.
        kernel = (EmbeddingComputeKernel.DENSE if is_dense else EmbeddingComputeKernel.FUSED).value
        named = None if constraint is None else constraint.compute_kernels
        if kernel in sharder.compute_kernels(value, device) and (not named or kernel in named):
            kernels[kind] = kernel
    return kernels


def _choices(
    kind: ShardingType, constraint: ParameterConstraints | None, work: TableWork
) -> Iterator[Choice]:
    two_d = constraint if isinstance(constraint, ParameterConstraints2D) else None
    num_hot = (two_d.hot_rows or 0) if two_d is not None else 0
    if kind is ShardingType.DATA_PARALLEL:
        if not num_hot and (two_d is None or not two_d.exchange):
            yield Choice(kind)
        return
    for exchange in Exchange:
        if two_d is not None and two_d.exchange is not None and exchange not in two_d.exchange:
            continue
        if kind.value not in kinds_of(exchange):
            continue
        if exchange is Exchange.NONEMPTY and work.is_sequence:
            continue
        for column_shards in _column_shards(kind, constraint, work):
            yield Choice(kind, exchange, column_shards, min(num_hot, work.num_rows))


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
    name: str,
    constraint: ParameterConstraints | None,
    sharder: ModuleSharder[nn.Module],
    device: str,
) -> str:
    known = ", ".join(kind.value for kind in _KNOWN)
    demanded = []
    for what in ("sharding_types", "compute_kernels", "exchange", "hot_rows"):
        if getattr(constraint, what, None):
            demanded.append(f"{what}={getattr(constraint, what)}")
    return (
        f"nothing is allowed for table {name!r}: {', '.join(demanded) or 'no constraint'}, with a "
        f"{type(sharder).__name__} on {device}. The search knows {known} with fused and dense "
        "kernels; loosen the constraints"
    )
