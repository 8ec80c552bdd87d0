"""TorchRec's shardings with this package's kernels and exchanges.

Each class overrides only TorchRec's factory methods: those for lookups, and where
another exchange runs, those for sending ids and outputs.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar, cast

import torch
from torchrec.distributed.types import CommOp, ShardingType
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_2dsp._compat.shardings import (
    callbacks_of,
    facts_of,
    id_exchange_of,
    regroup,
    replace_reduce_scatter,
    replace_reduce_scatter_in_node,
    widened,
)
from torchrec_2dsp._compat.torchrec import (
    BaseEmbeddingDist,
    BaseEmbeddingLookup,
    CwPooledEmbeddingSharding,
    CwSequenceEmbeddingSharding,
    EmbeddingSharding,
    EmbeddingShardingContext,
    GridPooledEmbeddingSharding,
    GroupedEmbeddingConfig,
    KJTAllToAllSplitsAwaitable,
    RwPooledEmbeddingSharding,
    RwSequenceEmbeddingSharding,
    SequenceShardingContext,
    TwPooledEmbeddingDist,
    TwPooledEmbeddingSharding,
    TwRwPooledEmbeddingSharding,
    TwSequenceEmbeddingSharding,
    intra_and_cross_node_pg_2D,
)
from torchrec_2dsp.codecs.rows import Transport
from torchrec_2dsp.comms.groups import Peers
from torchrec_2dsp.comms.row_wire import narrow_ids
from torchrec_2dsp.plan.parameter_sharding import Exchange, RowOwners, TableType
from torchrec_2dsp.shard.codecs import UnevenReduceScatter, codecs_by_dim
from torchrec_2dsp.shard.data_parallel import DpPooled, DpSequence
from torchrec_2dsp.shard.kernels import PooledLookup, SequenceLookup, make_lookup
from torchrec_2dsp.shard.nonempty import (
    FilledBags,
    NonEmptyContext,
    NonEmptyExchange,
    NonEmptyLookup,
    channels_of,
    find_filled,
)
from torchrec_2dsp.shard.row_exchange.exchange import RowContext, RowFetch, SequenceRowContext
from torchrec_2dsp.shard.row_exchange.lookup import RowLookup, config_by_row
from torchrec_2dsp.shard.row_exchange.requests import RowBlock, RowRequests
from torchrec_2dsp.shard.stages import BatchNotes

Device = torch.device | None


def widen_contexts(contexts: list[Any], shardings: Sequence[Any]) -> None:
    """Replace a batch's contexts by those that tell output exchanges what input exchanges did."""
    for index, sharding in enumerate(shardings):
        if isinstance(sharding, _NonEmpty | _ExchangesRows):
            contexts[index] = sharding.widened_context(contexts[index])


def completed_input(notes: BatchNotes, arrived: Any) -> Any:
    """Return the input exchange's result, with all batch sizes in the contexts.

    A re-attached pipeline starts its next batch's exchange twice, and looks up the first
    exchange's result. Nobody waits for the second exchange, so its context lacks the other ranks'
    batch sizes, which TorchRec then assumes to be equal.

    Collectives:
        The rest of the second exchange, on all ranks, if there was one.
    """
    is_incomplete = any(
        isinstance(awaitable, KJTAllToAllSplitsAwaitable)
        and context is not None
        and not context.batch_size_per_rank
        for awaitable, context in zip(notes.asked.awaitables, notes.shardings, strict=True)
    )
    return notes.asked.wait().wait() if is_incomplete else arrived


class _SendsIds(EmbeddingSharding[Any, Any, Any, Any]):
    """A sharding with TorchRec's exchange of ids, each in as few bytes as it needs."""

    def create_input_dist(self, device: Device = None) -> Any:
        """Build TorchRec's input exchange, with narrow ids."""
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
    """A sharding for bags with this package's kernels."""

    averages_as: ClassVar[ShardingType | None] = None
    """The type's name for TorchRec's kernel, which averages some types only at the output."""
    lookup_class: ClassVar[type[PooledLookup]] = PooledLookup

    def create_lookup(
        self, device: Device = None, fused_params: Any = None, feature_processor: Any = None
    ) -> BaseEmbeddingLookup:
        """Build the lookup for this rank's shards."""
        facts = facts_of(cast(Any, self))
        options = {"feature_processor": feature_processor, "sharding_type": self.averages_as}
        return make_lookup(self.lookup_class, facts, device, **options)


class _LooksUpSequences(_SendsIds):
    """A sharding for sequences with this package's kernels."""

    def create_lookup(
        self, device: Device = None, fused_params: Any = None, feature_processor: Any = None
    ) -> BaseEmbeddingLookup:
        """Build the lookup for this rank's shards."""
        return make_lookup(SequenceLookup, facts_of(cast(Any, self)), device)


class _ReducesInNode(_LooksUpBags):
    """Bags in tables that are row-wise in a node."""

    averages_as = ShardingType.TABLE_ROW_WISE

    def create_output_dist(self, device: Device = None) -> BaseEmbeddingDist:
        """Build TorchRec's output exchange, adapted to uneven batches."""
        output_dist = super().create_output_dist(device)
        replace_reduce_scatter_in_node(cast(Any, output_dist), UnevenReduceScatter)
        return output_dist


class _Rows(_LooksUpBags):
    """Row-wise bags."""

    averages_as = ShardingType.ROW_WISE

    def create_output_dist(self, device: Device = None) -> BaseEmbeddingDist:
        """Build TorchRec's output exchange, adapted to uneven batches."""
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


class _NonEmpty(_LooksUpBags):
    """A sharding that sends no empty bags."""

    lookup_class = NonEmptyLookup

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._facts = facts_of(cast(Any, self))
        self._dims = [
            [dim for config in configs for dim in config.embedding_dims()]
            for configs in self._facts.configs_per_rank
        ]
        # Owners of row-wise tables have parts that add up to a bag.
        is_summed = self.averages_as is ShardingType.ROW_WISE
        self._channels = channels_of(self._dims, is_summed=is_summed)
        self._filled: list[FilledBags] = []
        """The filled bags of the batch whose ids were sent last."""

    def create_input_dist(self, device: Device = None) -> Any:
        """Build TorchRec's input exchange, and note which bags are filled."""
        input_dist = super().create_input_dist(device)
        # A hook, because TorchRec's pipelines replace `forward` by one that fuses exchanges.
        id_exchange_of(input_dist).register_forward_pre_hook(
            lambda _, arguments: self._note_filled(arguments[0])
        )
        return input_dist

    def _note_filled(self, features: KeyedJaggedTensor) -> None:
        num_features = [len(of_owner) for of_owner in self._dims]
        by_feature = features.lengths().view(sum(num_features), features.stride())
        by_owner = by_feature.split(num_features)
        self._filled = [find_filled(channel, by_owner) for channel in self._channels]

    def create_output_dist(self, device: Device = None) -> Any:
        """Build the exchange for filled bags."""
        stock = super().create_output_dist(device)
        registry = cast(Any, self).qcomm_codecs_registry or {}
        return NonEmptyExchange(
            self._dims,
            self._channels,
            self._facts.group,
            device or self._facts.device,
            registry.get(CommOp.SEQUENCE_EMBEDDINGS_ALL_TO_ALL.name),
            list(callbacks_of(stock)) if isinstance(stock, TwPooledEmbeddingDist) else [],
        )

    def widened_context(self, context: EmbeddingShardingContext) -> EmbeddingShardingContext:
        """Add the bags that will arrive to the context; its batch's ids were sent last."""
        filled, self._filled = self._filled, []
        return widened(context, NonEmptyContext, {"filled": filled})


class NonEmptyTw(_NonEmpty, TwPooledEmbeddingSharding):
    """Table-wise bags."""


class NonEmptyCw(_NonEmpty, CwPooledEmbeddingSharding):
    """Column-wise and table-column-wise bags."""


class NonEmptyRw(_NonEmpty, RwPooledEmbeddingSharding):
    """Row-wise bags: an owner sends its partial bag if it has any rows in it."""

    averages_as = ShardingType.ROW_WISE


class _ExchangesRows(EmbeddingSharding[Any, Any, Any, Any]):
    """Row-wise tables whose distinct rows travel once, see `row_exchange`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        (sharding_infos,) = args[:1] or (kwargs["sharding_infos"],)
        kind = TableType.of_name(sharding_infos[0].param_sharding.sharding_type)
        spread = {
            info.embedding_config.name
            for info in sharding_infos
            if info.param_sharding.owners is RowOwners.HASH
        }
        sharding = cast(Any, self)
        # A kernel returns one row per id, so its tables share a dim.
        regroup(sharding, [_by_dim(groups) for groups in facts_of(sharding).configs_per_rank])
        self._facts = facts = facts_of(sharding)
        codecs = codecs_by_dim(kind, sharding.qcomm_codecs_registry)
        self._row_codecs = [
            codecs(config.embedding_tables[0].local_cols) for config in facts.configs
        ]
        self._blocks = [RowBlock.of(config, spread) for config in facts.configs]
        self._owners = Peers(facts.group)
        # TorchRec's groups for node-wise sharding; none with one rank per host, or one host.
        num_in_host = facts.env.node_group_size or 1
        if kind.exchange is Exchange.ROW_PER_HOST and 1 < num_in_host < facts.group.size():
            in_host_and_across = intra_and_cross_node_pg_2D(facts.env, facts.device)
            self._owners = Peers(facts.group, *in_host_and_across)
        self._requests: RowRequests | None = None

    def create_input_dist(self, device: Device = None) -> Any:
        """Build the row requests."""
        self._requests = RowRequests(self._blocks, self._owners, device or self._facts.device)
        return self._requests

    def create_lookup(
        self, device: Device = None, fused_params: Any = None, feature_processor: Any = None
    ) -> Any:
        """Build the lookup for this rank's rows."""
        by_row = [config_by_row(config) for config in self._facts.configs]
        return make_lookup(RowLookup, replace(self._facts, configs=by_row), device)

    def create_output_dist(self, device: Device = None) -> Any:
        """Build the row fetch."""
        return RowFetch(self._blocks, self._owners, device or self._facts.device, self._row_codecs)

    def widened_context(self, context: EmbeddingShardingContext) -> EmbeddingShardingContext:
        """Add the rows that will arrive to the context; its batch's ids were sent last."""
        assert self._requests is not None
        assert self._requests.requested is not None
        requested, self._requests.requested = self._requests.requested, None
        is_sequence = isinstance(context, SequenceShardingContext)
        kind = SequenceRowContext if is_sequence else RowContext
        return widened(context, kind, {"requested": requested})


def _by_dim(groups: Sequence[GroupedEmbeddingConfig]) -> list[GroupedEmbeddingConfig]:
    """Regroup tables by dim."""
    by_dim = []
    for group in groups:
        for dim in dict.fromkeys(table.local_cols for table in group.embedding_tables):
            tables = [table for table in group.embedding_tables if table.local_cols == dim]
            by_dim.append(replace(group, embedding_tables=tables))
    return by_dim


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
    """Return a sharding's class, which doesn't depend on its transport."""
    classes = _SEQUENCE if is_sequence else _POOLED
    return classes[replace(kind, transport=Transport.FP32)]
