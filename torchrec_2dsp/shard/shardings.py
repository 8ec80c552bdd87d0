"""TorchRec's shardings with the plugin's kernels and exchanges.

Each class overrides TorchRec's factory methods and nothing else: those for lookups, and where
another exchange runs, those that send ids and outputs.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar, cast

import torch
from torchrec.distributed.types import ShardingType

from torchrec_2dsp._compat.shardings import (
    facts_of,
    id_exchange_of,
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
    GridPooledEmbeddingSharding,
    RwPooledEmbeddingSharding,
    RwSequenceEmbeddingSharding,
    TwPooledEmbeddingSharding,
    TwRwPooledEmbeddingSharding,
    TwSequenceEmbeddingSharding,
)
from torchrec_2dsp.codecs.rows import Transport
from torchrec_2dsp.comms.row_wire import narrow_ids
from torchrec_2dsp.plan.parameter_sharding import Exchange, TableType
from torchrec_2dsp.shard.codecs import UnevenReduceScatter
from torchrec_2dsp.shard.data_parallel import DpPooled, DpSequence
from torchrec_2dsp.shard.kernels import PooledLookup, pooled_lookup, sequence_lookup
from torchrec_2dsp.shard.nonempty import NonEmptyBags
from torchrec_2dsp.shard.row_exchange.exchange import RowExchange

Device = torch.device | None


def widen_contexts(contexts: list[Any], shardings: Sequence[Any]) -> None:
    """Replace a batch's contexts by those that tell output exchanges what input exchanges did."""
    for index, sharding in enumerate(shardings):
        if isinstance(sharding, _NonEmpty | _ExchangesRows):
            contexts[index] = sharding.widened_context(contexts[index])


class _SendsIds(EmbeddingSharding[Any, Any, Any, Any]):
    """A sharding with TorchRec's exchange of ids, each in as few bytes as it needs."""

    def create_input_dist(self, device: Device = None) -> Any:
        """Make TorchRec's input exchange, with narrow ids."""
        input_dist = super().create_input_dist(device)  # pyright: ignore[reportAbstractUsage]
        tables = (
            table
            for configs in facts_of(cast(Any, self)).configs_per_rank
            for config in configs
            for table in config.embedding_tables
        )
        narrow_ids(
            id_exchange_of(cast(Any, input_dist)), max(table.num_embeddings for table in tables)
        )
        return input_dist


class _LooksUpBags(_SendsIds):
    """A sharding for bags over the plugin's kernels."""

    averages_as: ClassVar[ShardingType | None] = None
    """The type's name for TorchRec's kernel, which leaves some types' averages to the output."""

    def create_lookup(
        self, device: Device = None, fused_params: Any = None, feature_processor: Any = None
    ) -> BaseEmbeddingLookup:
        """Make the lookup for this rank's shards."""
        facts = facts_of(cast(Any, self))
        return pooled_lookup(facts, device, feature_processor, self.averages_as, PooledLookup)


class _LooksUpSequences(_SendsIds):
    """A sharding for sequences over the plugin's kernels."""

    def create_lookup(
        self, device: Device = None, fused_params: Any = None, feature_processor: Any = None
    ) -> BaseEmbeddingLookup:
        """Make the lookup for this rank's shards."""
        return sequence_lookup(facts_of(cast(Any, self)), device)


class _ReducesInNode(_LooksUpBags):
    """Bags in tables that are row-wise in a node."""

    averages_as = ShardingType.TABLE_ROW_WISE

    def create_output_dist(self, device: Device = None) -> BaseEmbeddingDist:
        """Make TorchRec's output exchange, fit for uneven batches."""
        output_dist = super().create_output_dist(device)
        replace_reduce_scatter_in_node(cast(Any, output_dist), UnevenReduceScatter)
        return output_dist


class _Rows(_LooksUpBags):
    """Row-wise bags."""

    averages_as = ShardingType.ROW_WISE

    def create_output_dist(self, device: Device = None) -> BaseEmbeddingDist:
        """Make TorchRec's output exchange, fit for uneven batches."""
        output_dist = super().create_output_dist(device)
        replace_reduce_scatter(cast(Any, output_dist), UnevenReduceScatter)
        return output_dist


class TwPooled(_LooksUpBags, TwPooledEmbeddingSharding):
    """Table-wise bags."""


class CwPooled(_LooksUpBags, CwPooledEmbeddingSharding):
    """Column-wise and table-column-wise bags."""


class RwPooled(_Rows, RwPooledEmbeddingSharding):
    """Row-wise bags."""


class TwRwPooled(_ReducesInNode, TwRwPooledEmbeddingSharding):
    """Table-row-wise bags: row-wise inside a node."""


class GridPooled(_ReducesInNode, GridPooledEmbeddingSharding):
    """Grid-sharded bags: row-wise inside a node, column-wise over nodes."""


class TwSequence(_LooksUpSequences, TwSequenceEmbeddingSharding):
    """Table-wise sequences."""


class CwSequence(_LooksUpSequences, CwSequenceEmbeddingSharding):
    """Column-wise sequences."""


class RwSequence(_LooksUpSequences, RwSequenceEmbeddingSharding):
    """Row-wise sequences."""


class _NonEmpty(_SendsIds):
    """A sharding that sends no bags without ids."""

    is_summed: ClassVar[bool] = False
    """True if owners have parts that add up to a bag."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.bags = NonEmptyBags.of(cast(Any, self), is_summed=self.is_summed)
        """Finds and exchanges the bags."""

    def create_input_dist(self, device: Device = None) -> Any:
        """Make TorchRec's input exchange, and note which bags have ids."""
        return self.bags.heard(super().create_input_dist(device))

    def create_lookup(
        self, device: Device = None, fused_params: Any = None, feature_processor: Any = None
    ) -> Any:
        """Make the lookup for this rank's shards."""
        return self.bags.lookup(device, feature_processor)

    def create_output_dist(self, device: Device = None) -> Any:
        """Make the exchange for bags with ids."""
        return self.bags.output_dist(device, super().create_output_dist(device))

    def widened_context(self, context: EmbeddingShardingContext) -> EmbeddingShardingContext:
        """Add the bags that will come to the context; its batch's ids were sent last."""
        return self.bags.widened_context(context)


class NonEmptyTw(_NonEmpty, TwPooledEmbeddingSharding):
    """Table-wise bags."""


class NonEmptyCw(_NonEmpty, CwPooledEmbeddingSharding):
    """Column-wise and table-column-wise bags."""


class NonEmptyRw(_NonEmpty, RwPooledEmbeddingSharding):
    """Row-wise bags: an owner sends its partial bag if it has any rows in it."""

    is_summed = True


class _ExchangesRows(EmbeddingSharding[Any, Any, Any, Any]):
    """Row-wise tables whose distinct rows travel once."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        (sharding_infos,) = args[:1] or (kwargs["sharding_infos"],)
        self.rows = RowExchange.of(cast(Any, self), sharding_infos)
        """Requests and fetches rows."""

    def create_input_dist(self, device: Device = None) -> Any:
        """Make the requests for rows."""
        return self.rows.input_dist(device)

    def create_lookup(
        self, device: Device = None, fused_params: Any = None, feature_processor: Any = None
    ) -> Any:
        """Make the lookup for this rank's rows."""
        return self.rows.lookup(device)

    def create_output_dist(self, device: Device = None) -> Any:
        """Make the row fetch."""
        return self.rows.output_dist(device)

    def widened_context(self, context: EmbeddingShardingContext) -> EmbeddingShardingContext:
        """Add the rows that will come to the context; its batch's ids were sent last."""
        return self.rows.widened_context(context)


class RowExchangePooled(_ExchangesRows, RwPooledEmbeddingSharding):
    """Bags whose rows are exchanged."""


class RowExchangeSequence(_ExchangesRows, RwSequenceEmbeddingSharding):
    """Sequences whose rows are exchanged."""


_POOLED: dict[TableType, Any] = {
    TableType(ShardingType.DATA_PARALLEL): DpPooled,
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
"""The shardings of bags by type; table-column-wise is column-wise."""

_SEQUENCE: dict[TableType, Any] = {
    TableType(ShardingType.DATA_PARALLEL): DpSequence,
    TableType(ShardingType.TABLE_WISE): TwSequence,
    TableType(ShardingType.COLUMN_WISE): CwSequence,
    TableType(ShardingType.ROW_WISE): RwSequence,
    TableType(ShardingType.ROW_WISE, Exchange.ROW): RowExchangeSequence,
    TableType(ShardingType.ROW_WISE, Exchange.ROW_PER_HOST): RowExchangeSequence,
}
"""The shardings of sequences by type."""


def sharding_class(kind: TableType, *, is_sequence: bool) -> Any:
    """Return a sharding's class, whatever its transport."""
    classes = _SEQUENCE if is_sequence else _POOLED
    return classes[replace(kind, transport=Transport.FP32)]
