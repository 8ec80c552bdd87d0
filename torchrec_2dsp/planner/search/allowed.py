"""The ways to shard a table that the search may choose: those it knows and the user allows."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.distributed.types import ShardingType

from torchrec_2dsp._compat.torchrec import EmbeddingComputeKernel
from torchrec_2dsp.codecs.rows import Transport
from torchrec_2dsp.cost.workload import TableWork
from torchrec_2dsp.plan.parameter_sharding import Exchange, base_type, kinds_of
from torchrec_2dsp.planner.constraints import ParameterConstraints2D
from torchrec_2dsp.planner.search.choices import Choice

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
"""How many columns a column-wise shard has at least, as in TorchRec."""


def allowed_kernels(
    constraint: ParameterConstraints | None, work: TableWork, device: str
) -> dict[ShardingType, str]:
    """The types that may be searched, with the kernel of each, if a sharder has them."""
    demanded = None if constraint is None else constraint.sharding_types
    type_names = [kind.value for kind in _BY_DEFAULT] if demanded is None else demanded
    types = {base_type(kind) for kind in type_names}
    named = None if constraint is None else constraint.compute_kernels
    kernels: dict[ShardingType, str] = {}
    for kind in _KNOWN:
        is_dense = kind is ShardingType.DATA_PARALLEL
        if is_dense and work.is_sequence and device == "cpu":
            continue  # TorchRec can't look it up.
        kernel = (EmbeddingComputeKernel.DENSE if is_dense else EmbeddingComputeKernel.FUSED).value
        if kind.value in types and (not named or kernel in named):
            kernels[kind] = kernel
    return kernels


def choices_of(
    kinds: Iterable[ShardingType],
    constraint: ParameterConstraints | None,
    work: TableWork,
    transports: Sequence[Transport] = (Transport.FP32,),
) -> list[Choice]:
    """Every way that is allowed. Of what costs the same, the search takes what comes first.

    Args:
        kinds: the sharding types that may be had.
        constraint: what the user demands of the table.
        work: of a step with it.
        transports: how rows may travel, unless the user says so for this table.
    """
    demanded = getattr(constraint, "transport", None) or transports
    choices = [
        replace(choice, transport=transport)
        for kind in kinds
        for choice in _choices(kind, constraint, work)
        for transport in ((Transport.FP32,) if kind is ShardingType.DATA_PARALLEL else demanded)
    ]
    return sorted(
        choices,
        key=lambda choice: (
            list(Exchange).index(choice.exchange),
            list(Transport).index(choice.transport),
        ),
    )


def nothing_text(
    name: str, constraint: ParameterConstraints | None, sharded_by: str, device: str
) -> str:
    """The error text for a table whose demands can't be met."""
    kinds = ", ".join(kind.value for kind in _KNOWN)
    demanded = []
    for what in ("sharding_types", "compute_kernels", "exchange", "transport", "hot_rows"):
        if getattr(constraint, what, None):
            demanded.append(f"{what}={getattr(constraint, what)}")
    return (
        f"nothing is allowed for table {name!r}: {', '.join(demanded) or 'no constraint'}, with "
        f"{sharded_by} on {device}. The search knows {kinds} with fused and dense kernels; loosen "
        "the constraints"
    )


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
