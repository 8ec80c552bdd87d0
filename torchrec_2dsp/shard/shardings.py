"""TorchRec's shardings with the plugin's kernels and exchanges.

Each class overrides factory methods of TorchRec's and nothing else: what looks rows up, and where
another exchange runs, what sends ids and outputs.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol, runtime_checkable

import torch
from torchrec.distributed.types import ShardingType

from torchrec_2dsp._compat.shardings import (
    facts_of,
    replace_reduce_scatter,
    replace_reduce_scatter_in_node,
)
from torchrec_2dsp._compat.torchrec import (
    BaseEmbeddingDist,
    BaseEmbeddingLookup,
    CwPooledEmbeddingSharding,
    CwSequenceEmbeddingSharding,
    EmbeddingSharding,
    EmbeddingShardingContext,
    GridPooledEmbeddingDist,
    GridPooledEmbeddingSharding,
    RwPooledEmbeddingDist,
    RwPooledEmbeddingSharding,
    RwSequenceEmbeddingSharding,
    TwPooledEmbeddingSharding,
    TwRwPooledEmbeddingDist,
    TwRwPooledEmbeddingSharding,
    TwSequenceEmbeddingSharding,
)
from torchrec_2dsp.codecs.rows import Transport
from torchrec_2dsp.plan.parameter_sharding import Exchange, TableType
from torchrec_2dsp.shard.codecs import UnevenReduceScatter
from torchrec_2dsp.shard.kernels import PooledLookup, pooled_lookup, sequence_lookup
from torchrec_2dsp.shard.nonempty import NonEmptyBags
from torchrec_2dsp.shard.row_exchange.exchange import RowExchange

Device = torch.device | None


@runtime_checkable
class NotesBatches(Protocol):
    """A sharding whose output exchange has to know something of a batch that TorchRec forgets."""

    def widened_context(self, context: EmbeddingShardingContext) -> EmbeddingShardingContext:
        """The context of the batch whose ids were sent last, widened by what was noted of it."""
        ...


def widen_contexts(contexts: list[Any], shardings: Sequence[Any]) -> None:
    """Put wider contexts of a batch in the place of TorchRec's, for shardings that know more of it.

    TorchRec hands them to the output exchanges, which learn so what the input exchanges did.

    Args:
        contexts: TorchRec's, one for each sharding; changed in place.
        shardings: in the same order.
    """
    for index, sharding in enumerate(shardings):
        if isinstance(sharding, NotesBatches):
            contexts[index] = sharding.widened_context(contexts[index])


class TwPooled(TwPooledEmbeddingSharding):
    """Table-wise bags."""

    def create_lookup(
        self, device: Device = None, fused_params: Any = None, feature_processor: Any = None
    ) -> BaseEmbeddingLookup:
        """What looks up this rank's shards."""
        return pooled_lookup(facts_of(self), device, feature_processor, None, PooledLookup)


class CwPooled(CwPooledEmbeddingSharding):
    """Column-wise and table-column-wise bags."""

    def create_lookup(
        self, device: Device = None, fused_params: Any = None, feature_processor: Any = None
    ) -> BaseEmbeddingLookup:
        """What looks up this rank's shards."""
        return pooled_lookup(facts_of(self), device, feature_processor, None, PooledLookup)


class RwPooled(RwPooledEmbeddingSharding):
    """Row-wise bags."""

    def create_lookup(
        self, device: Device = None, fused_params: Any = None, feature_processor: Any = None
    ) -> BaseEmbeddingLookup:
        """What looks up this rank's shards."""
        kind = ShardingType.ROW_WISE
        return pooled_lookup(facts_of(self), device, feature_processor, kind, PooledLookup)

    def create_output_dist(self, device: Device = None) -> BaseEmbeddingDist:
        """Stock, but for uneven batches."""
        output_dist = super().create_output_dist(device)
        assert isinstance(output_dist, RwPooledEmbeddingDist)
        replace_reduce_scatter(output_dist, UnevenReduceScatter)
        return output_dist


class TwRwPooled(TwRwPooledEmbeddingSharding):
    """Table-row-wise bags: row-wise inside a node."""

    def create_lookup(
        self, device: Device = None, fused_params: Any = None, feature_processor: Any = None
    ) -> BaseEmbeddingLookup:
        """What looks up this rank's shards."""
        kind = ShardingType.TABLE_ROW_WISE
        return pooled_lookup(facts_of(self), device, feature_processor, kind, PooledLookup)

    def create_output_dist(self, device: Device = None) -> BaseEmbeddingDist:
        """Stock, but for uneven batches."""
        output_dist = super().create_output_dist(device)
        assert isinstance(output_dist, TwRwPooledEmbeddingDist)
        replace_reduce_scatter_in_node(output_dist, UnevenReduceScatter)
        return output_dist


class GridPooled(GridPooledEmbeddingSharding):
    """Grid-sharded bags: row-wise inside a node, column-wise over nodes."""

    def create_lookup(
        self, device: Device = None, fused_params: Any = None, feature_processor: Any = None
    ) -> BaseEmbeddingLookup:
        """What looks up this rank's shards."""
        kind = ShardingType.TABLE_ROW_WISE
        return pooled_lookup(facts_of(self), device, feature_processor, kind, PooledLookup)

    def create_output_dist(self, device: Device = None) -> BaseEmbeddingDist:
        """Stock, but for uneven batches."""
        output_dist = super().create_output_dist(device)
        assert isinstance(output_dist, GridPooledEmbeddingDist)
        replace_reduce_scatter_in_node(output_dist, UnevenReduceScatter)
        return output_dist


class _NonEmpty(EmbeddingSharding[Any, Any, Any, Any]):
    """Bags of which those without ids don't travel."""

    bags: NonEmptyBags
    """What finds and exchanges them; each subclass makes its own."""

    def create_input_dist(self, device: Device = None) -> Any:
        """TorchRec's, at which it is noted which bags have ids."""
        return self.bags.heard(super().create_input_dist(device))

    def create_lookup(
        self, device: Device = None, fused_params: Any = None, feature_processor: Any = None
    ) -> Any:
        """What looks up this rank's shards."""
        return self.bags.lookup(device, feature_processor)

    def create_output_dist(self, device: Device = None) -> Any:
        """What exchanges the bags."""
        return self.bags.output_dist(device, super().create_output_dist(device))

    def widened_context(self, context: EmbeddingShardingContext) -> EmbeddingShardingContext:
        """See `NotesBatches`."""
        return self.bags.widened_context(context)


class NonEmptyTw(_NonEmpty, TwPooledEmbeddingSharding):
    """Table-wise bags."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.bags = NonEmptyBags.of(self, is_summed=False)


class NonEmptyCw(_NonEmpty, CwPooledEmbeddingSharding):
    """Column-wise and table-column-wise bags."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.bags = NonEmptyBags.of(self, is_summed=False)


class NonEmptyRw(_NonEmpty, RwPooledEmbeddingSharding):
    """Row-wise bags: an owner sends its part of a bag if it has any of its rows."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.bags = NonEmptyBags.of(self, is_summed=True)


class _ExchangesRows(EmbeddingSharding[Any, Any, Any, Any]):
    """Row-wise tables, each distinct row of which travels once."""

    rows: RowExchange
    """What asks for rows and fetches them; each subclass makes its own."""

    def create_input_dist(self, device: Device = None) -> Any:
        """What asks for rows."""
        return self.rows.input_dist(device)

    def create_lookup(
        self, device: Device = None, fused_params: Any = None, feature_processor: Any = None
    ) -> Any:
        """What looks up the rows of this rank's shards."""
        return self.rows.lookup(device)

    def create_output_dist(self, device: Device = None) -> Any:
        """What fetches rows."""
        return self.rows.output_dist(device)

    def widened_context(self, context: EmbeddingShardingContext) -> EmbeddingShardingContext:
        """See `NotesBatches`."""
        return self.rows.widened_context(context)


class RowExchangePooled(_ExchangesRows, RwPooledEmbeddingSharding):
    """Bags whose rows are exchanged."""

    def __init__(self, sharding_infos: list[Any], *args: Any, **kwargs: Any) -> None:
        super().__init__(sharding_infos, *args, **kwargs)
        self.rows = RowExchange.of(self, sharding_infos)


class RowExchangeSequence(_ExchangesRows, RwSequenceEmbeddingSharding):
    """Sequences whose rows are exchanged."""

    def __init__(self, sharding_infos: list[Any], *args: Any, **kwargs: Any) -> None:
        super().__init__(sharding_infos, *args, **kwargs)
        self.rows = RowExchange.of(self, sharding_infos)


class TwSequence(TwSequenceEmbeddingSharding):
    """Table-wise sequences."""

    def create_lookup(
        self, device: Device = None, fused_params: Any = None, feature_processor: Any = None
    ) -> BaseEmbeddingLookup:
        """What looks up this rank's shards."""
        return sequence_lookup(facts_of(self), device)


class CwSequence(CwSequenceEmbeddingSharding):
    """Column-wise sequences."""

    def create_lookup(
        self, device: Device = None, fused_params: Any = None, feature_processor: Any = None
    ) -> BaseEmbeddingLookup:
        """What looks up this rank's shards."""
        return sequence_lookup(facts_of(self), device)


class RwSequence(RwSequenceEmbeddingSharding):
    """Row-wise sequences."""

    def create_lookup(
        self, device: Device = None, fused_params: Any = None, feature_processor: Any = None
    ) -> BaseEmbeddingLookup:
        """What looks up this rank's shards."""
        return sequence_lookup(facts_of(self), device)


_POOLED: dict[TableType, Any] = {
    TableType(ShardingType.TABLE_WISE): TwPooled,
    TableType(ShardingType.COLUMN_WISE): CwPooled,
    TableType(ShardingType.ROW_WISE): RwPooled,
    TableType(ShardingType.TABLE_ROW_WISE): TwRwPooled,
    TableType(ShardingType.GRID_SHARD): GridPooled,
    TableType(ShardingType.ROW_WISE, Exchange.ROW): RowExchangePooled,
    TableType(ShardingType.ROW_WISE, Exchange.ROW_PER_HOST): RowExchangePooled,
    TableType(ShardingType.TABLE_WISE, Exchange.NONEMPTY): NonEmptyTw,
    TableType(ShardingType.COLUMN_WISE, Exchange.NONEMPTY): NonEmptyCw,
    TableType(ShardingType.ROW_WISE, Exchange.NONEMPTY): NonEmptyRw,
}
"""The shardings of bags by type; data parallel is stock, and table-column-wise is column-wise."""

_SEQUENCE: dict[TableType, Any] = {
    TableType(ShardingType.TABLE_WISE): TwSequence,
    TableType(ShardingType.COLUMN_WISE): CwSequence,
    TableType(ShardingType.ROW_WISE): RwSequence,
    TableType(ShardingType.ROW_WISE, Exchange.ROW): RowExchangeSequence,
    TableType(ShardingType.ROW_WISE, Exchange.ROW_PER_HOST): RowExchangeSequence,
}
"""The shardings of sequences by type; data parallel is stock."""


def pooled_sharding(kind: TableType) -> Any:
    """The class of a sharding of bags, whatever their transport; `None` where it is TorchRec's."""
    return _POOLED.get(replace(kind, transport=Transport.FP32))


def sequence_sharding(kind: TableType) -> Any:
    """The class of a sharding of sequences; `None` where it is TorchRec's."""
    return _SEQUENCE.get(replace(kind, transport=Transport.FP32))
