"""The codecs that a plan asks for, where TorchRec looks codecs up."""

import math
from collections.abc import Callable, Sequence
from typing import Any

from torchrec.distributed.types import CommOp, QuantizedCommCodecs

from torchrec_2dsp.codecs.rows import Transport
from torchrec_2dsp.comms.row_wire import stock_codecs
from torchrec_2dsp.plan.parameter_sharding import TableType

_OPERATIONS = (
    CommOp.POOLED_EMBEDDINGS_ALL_TO_ALL,
    CommOp.POOLED_EMBEDDINGS_REDUCE_SCATTER,
    CommOp.SEQUENCE_EMBEDDINGS_ALL_TO_ALL,
)
"""What TorchRec's shardings look codecs up by."""


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
        return registry
    widths = [
        shard.shard_sizes[1]
        for info in sharding_infos
        for shard in info.param_sharding.sharding_spec.shards
    ]
    codecs = stock_codecs(kind.transport, math.gcd(*widths))
    return dict.fromkeys((operation.name for operation in _OPERATIONS), codecs)


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
