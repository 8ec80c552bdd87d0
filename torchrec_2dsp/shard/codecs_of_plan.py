"""The codecs that a plan asks for, where TorchRec looks codecs up."""

import math
from collections.abc import Callable, Sequence
from typing import Any

from torchrec.distributed.types import CommOp, QuantizedCommCodecs, ShardingType
from torchrec.modules.embedding_configs import PoolingType

from torchrec_2dsp.codecs.rows import Transport
from torchrec_2dsp.comms.row_wire import stock_codecs
from torchrec_2dsp.errors import UnsupportedError
from torchrec_2dsp.plan.parameter_sharding import Exchange, TableType

_OPERATIONS = (
    CommOp.POOLED_EMBEDDINGS_ALL_TO_ALL,
    CommOp.POOLED_EMBEDDINGS_REDUCE_SCATTER,
    CommOp.SEQUENCE_EMBEDDINGS_ALL_TO_ALL,
)
"""What TorchRec's shardings look codecs up by."""

_SUMMED = (ShardingType.ROW_WISE, ShardingType.TABLE_ROW_WISE, ShardingType.GRID_SHARD)
"""Types of which the output exchange adds parts of bags."""


def codecs_registry(
    kind: TableType, sharding_infos: Sequence[Any], registry: dict[str, Any] | None
) -> dict[str, Any] | None:
    """The codecs of a sharding by TorchRec's names: what the plan says, or else what the user gave.

    Shards of different width travel in one tensor, so each scale is for as many columns as divide
    them all.

    Args:
        kind: the type of the sharding.
        sharding_infos: TorchRec's description of its tables.
        registry: the user's.
    """
    if kind.transport is Transport.FP32:
        _check_packing(kind, sharding_infos, pack_size(registry))
        return registry
    widths = _widths(sharding_infos)
    codecs = stock_codecs(kind.transport, math.gcd(*widths))
    return dict.fromkeys((operation.name for operation in _OPERATIONS), codecs)


def pack_size(registry: dict[str, Any] | None) -> int:
    """Return how many numbers the user's codecs encode together, as TorchRec's INT8 does."""
    pairs = (registry or {}).values()
    contexts = [codec.create_context() for pair in pairs for codec in (pair.forward, pair.backward)]
    return max((context.row_dim for context in contexts if context is not None), default=1)


def _widths(sharding_infos: Sequence[Any]) -> list[int]:
    specs = [info.param_sharding.sharding_spec for info in sharding_infos]
    return [shard.shard_sizes[1] for spec in specs for shard in spec.shards]


def _check_packing(kind: TableType, sharding_infos: Sequence[Any], size: int) -> None:
    """Refuse codecs that TorchRec's exchange of the type fails with."""
    if size == 1:
        return
    table = sharding_infos[0].embedding_config
    is_pooled = kind.exchange is Exchange.POOLED and table.pooling is not PoolingType.NONE
    if is_pooled and kind.base in _SUMMED:
        raise UnsupportedError(
            f"table {table.name!r} is {kind.base.value}, whose bags TorchRec can't add in packs of "
            f"{size} numbers (as by INT8); leave out the codecs and plan with transports=['int8']"
        )
    if not is_pooled and math.gcd(*_widths(sharding_infos)) % size:
        raise UnsupportedError(
            f"the rows of table {table.name!r} don't fill packs of {size} numbers, in which the "
            "codecs (such as TorchRec's INT8) encode; leave them out and plan with "
            "transports=['int8']"
        )


def codecs_by_dim(
    kind: TableType, registry: dict[str, Any] | None
) -> Callable[[int], QuantizedCommCodecs | None]:
    """What tells the codecs of rows by their dimension: what the plan says, or what the user gave.

    Args:
        kind: the type of the sharding.
        registry: the user's.
    """
    if kind.transport is not Transport.FP32:
        return lambda dim: stock_codecs(kind.transport, dim)
    of_user = (registry or {}).get(CommOp.SEQUENCE_EMBEDDINGS_ALL_TO_ALL.name)
    return lambda dim: of_user
