"""Stochastic rounding of 16-bit tables, where their fused parameters ask for it.

FBGEMM's own draws other numbers on each rank, and its kernels for CPUs leave it out. Here rules on
tensors update such tables on every device, and round by `torchrec_2dsp.rows.rounding`.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from torchrec_2dsp._compat.fbgemm import SplitTableBatchedEmbeddingBagsCodegen, set_rounding
from torchrec_2dsp.plan.parameter_sharding import (
    ParameterSharding2D,
    RowOwners,
    RowSpread,
    num_rows,
)
from torchrec_2dsp.rows.rounding import HALF_TYPES, RoundedTable, StochasticRounding
from torchrec_2dsp.shard.hot_rows import HotRows
from torchrec_2dsp.shard.kernels import ROUNDING_SEED, Kernel, TableShard


def round_updates(
    kernels: Sequence[Kernel],
    hot_rows: HotRows,
    tables: Mapping[str, ParameterSharding2D],
    fused_params: Mapping[str, Mapping[str, Any]],
) -> None:
    """Let kernels round as their tables' fused parameters say, before anything updates them."""
    for kernel in kernels:
        shards = kernel.shards()
        rounded = [
            RoundedTable(shard.table, shard.column, _numbers(shard, tables[shard.table]))
            for shard in shards
        ]
        _round(kernel.tbe, rounded, fused_params)
    for tbe, slices in zip(hot_rows.kernels(), hot_rows.slices(), strict=True):
        rounded = [
            RoundedTable(hot.table, hot.column, partial(hot_rows.sets.numbers, hot.table))
            for hot in slices
        ]
        _round(tbe, rounded, fused_params)


def _round(
    tbe: SplitTableBatchedEmbeddingBagsCodegen,
    tables: Sequence[RoundedTable],
    fused_params: Mapping[str, Mapping[str, Any]],
) -> None:
    # Tables of one kernel have equal parameters.
    params = fused_params[tables[0].name]
    if params.get("stochastic_rounding") and tbe.weights_precision.as_dtype() in HALF_TYPES:
        set_rounding(tbe, StochasticRounding(int(params.get(ROUNDING_SEED, 0)), tuple(tables)))


def _numbers(
    shard: TableShard, sharding: ParameterSharding2D
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a function from a shard's rows, as they lie there to train, to the table's."""
    rows = num_rows(sharding)
    if sharding.owners is not RowOwners.HASH or rows is None:
        return lambda local_rows: local_rows + shard.row
    spread = RowSpread(rows)
    return lambda local_rows: spread.rows(local_rows + shard.row)
