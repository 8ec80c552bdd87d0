"""TorchRec's shardings with the plugin's kernels: nothing but factory methods is overridden."""

from typing import Any

import torch
from torchrec.distributed.types import ShardingType

from torchrec_2dsp._compat.shardings import (
    replace_reduce_scatter,
    replace_reduce_scatter_in_node,
)
from torchrec_2dsp._compat.torchrec import (
    BaseEmbedding,
    BaseEmbeddingDist,
    BaseEmbeddingLookup,
    CwPooledEmbeddingSharding,
    CwSequenceEmbeddingSharding,
    GridPooledEmbeddingDist,
    GridPooledEmbeddingSharding,
    GroupedEmbeddingConfig,
    GroupedEmbeddingsLookup,
    RwPooledEmbeddingDist,
    RwPooledEmbeddingSharding,
    RwSequenceEmbeddingSharding,
    TwPooledEmbeddingSharding,
    TwRwPooledEmbeddingDist,
    TwRwPooledEmbeddingSharding,
    TwSequenceEmbeddingSharding,
)
from torchrec_2dsp.plan.parameter_sharding import ROW_EXCHANGE, ROW_EXCHANGE_PER_HOST, nonempty_type
from torchrec_2dsp.shard.kernels import EmbeddingKernel
from torchrec_2dsp.shard.nonempty.exchange import NonEmptyCw, NonEmptyRw, NonEmptyTw
from torchrec_2dsp.shard.pooled_lookup import LooksUpBags
from torchrec_2dsp.shard.row_exchange.exchange import (
    PerHostRowExchangePooled,
    PerHostRowExchangeSequence,
    RowExchangePooled,
    RowExchangeSequence,
)
from torchrec_2dsp.shard.uneven_batches import UnevenReduceScatter


class SequenceLookup(GroupedEmbeddingsLookup):
    """A lookup over `EmbeddingKernel`s."""

    def _create_embedding_kernel(
        self, config: GroupedEmbeddingConfig, pg: Any, device: Any, env: Any = None
    ) -> BaseEmbedding:
        return EmbeddingKernel(config, pg, device)


class _Sequence:
    def create_lookup(
        self: Any,
        device: torch.device | None = None,
        fused_params: dict[str, Any] | None = None,
        feature_processor: Any = None,
    ) -> BaseEmbeddingLookup:
        return SequenceLookup(
            grouped_configs=self._grouped_embedding_configs_per_rank[self._rank],
            pg=self._pg,
            device=device if device is not None else self._device,
            env=self._env,
        )


class TwPooled(LooksUpBags, TwPooledEmbeddingSharding):
    """Table-wise bags."""


class CwPooled(LooksUpBags, CwPooledEmbeddingSharding):
    """Column-wise and table-column-wise bags."""


class RwPooled(LooksUpBags, RwPooledEmbeddingSharding):
    """Row-wise bags."""

    _LOOKUP_TYPE = ShardingType.ROW_WISE

    def create_output_dist(self, device: torch.device | None = None) -> BaseEmbeddingDist:
        """Stock, but for uneven batches."""
        made = super().create_output_dist(device)
        assert isinstance(made, RwPooledEmbeddingDist)
        replace_reduce_scatter(made, UnevenReduceScatter)
        return made


class _NodeWise(LooksUpBags):
    """Table-row-wise and grid sharding: row-wise inside a node."""

    _LOOKUP_TYPE = ShardingType.TABLE_ROW_WISE

    def create_output_dist(self: Any, device: torch.device | None = None) -> BaseEmbeddingDist:
        """Stock, but for uneven batches."""
        made = super().create_output_dist(device)  # type: ignore[misc]
        assert isinstance(made, (TwRwPooledEmbeddingDist, GridPooledEmbeddingDist))
        replace_reduce_scatter_in_node(made, UnevenReduceScatter)
        return made


class TwRwPooled(_NodeWise, TwRwPooledEmbeddingSharding):
    """Table-row-wise bags."""


class GridPooled(_NodeWise, GridPooledEmbeddingSharding):
    """Grid-sharded bags."""


class TwSequence(_Sequence, TwSequenceEmbeddingSharding):
    """Table-wise sequences."""


class CwSequence(_Sequence, CwSequenceEmbeddingSharding):
    """Column-wise sequences."""


class RwSequence(_Sequence, RwSequenceEmbeddingSharding):
    """Row-wise sequences."""


POOLED = {
    ShardingType.TABLE_WISE.value: TwPooled,
    ShardingType.COLUMN_WISE.value: CwPooled,
    ShardingType.ROW_WISE.value: RwPooled,
    ShardingType.TABLE_ROW_WISE.value: TwRwPooled,
    ShardingType.GRID_SHARD.value: GridPooled,
    ROW_EXCHANGE: RowExchangePooled,
    ROW_EXCHANGE_PER_HOST: PerHostRowExchangePooled,
    nonempty_type(ShardingType.TABLE_WISE): NonEmptyTw,
    nonempty_type(ShardingType.COLUMN_WISE): NonEmptyCw,
    nonempty_type(ShardingType.ROW_WISE): NonEmptyRw,
}
"""Bag shardings by TorchRec's type; data parallel is stock, table-column-wise runs as
column-wise."""

SEQUENCE = {
    ShardingType.TABLE_WISE.value: TwSequence,
    ShardingType.COLUMN_WISE.value: CwSequence,
    ShardingType.ROW_WISE.value: RwSequence,
    ROW_EXCHANGE: RowExchangeSequence,
    ROW_EXCHANGE_PER_HOST: PerHostRowExchangeSequence,
}
"""Sequence shardings by TorchRec's type; data parallel is stock."""
