"""Embedding bags in 2D, with hot rows."""

import copy
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
from torchrec.distributed.types import ShardingEnv, ShardingType
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import (
    EmbeddingBagCollection,
    get_embedding_names_by_table,
)

from torchrec_2dsp._compat.torchrec import CwPooledEmbeddingSharding
from torchrec_2dsp.codecs.rows import Transport
from torchrec_2dsp.plan.parameter_sharding import Exchange, ParameterSharding2D, TableType
from torchrec_2dsp.plan.plan2d import ModulePlan2D
from torchrec_2dsp.shard.base_types import ShowsBaseTypes
from torchrec_2dsp.shard.batch.notes import BagContext
from torchrec_2dsp.shard.codecs_of_plan import codecs_registry
from torchrec_2dsp.shard.outputs import JoinBags
from torchrec_2dsp.shard.shardings import pooled_sharding
from torchrec_2dsp.shard.sync.replication import Replication
from torchrec_2dsp.shard.tables import Tables2D

_AVERAGED_HERE = (
    TableType(ShardingType.ROW_WISE),
    TableType(ShardingType.TABLE_ROW_WISE),
    TableType(ShardingType.GRID_SHARD),
    TableType(ShardingType.ROW_WISE, Exchange.NONEMPTY),
)
"""Sharding types of which a rank sees parts of bags. TorchRec doesn't average grid tables at all.
For the others it divides whole outputs, also those of tables of other types, by lengths + 1e-6, and
fails where a rank has no samples."""


class ShardedEmbeddingBagCollection2D(ShowsBaseTypes, ShardedEmbeddingBagCollection):  # pyright: ignore[reportIncompatibleVariableOverride]
    """TorchRec's sharded collection, repeated over the groups of a mesh."""

    def __init__(
        self, module: Any, plan: ModulePlan2D, *, replication: Replication, **stock: Any
    ) -> None:
        """
        Args:
            module: the unsharded collection.
            plan: of its tables, as this rank runs it.
            replication: how the collection is repeated.
            stock: the other arguments of TorchRec's class.
        """
        configs: list[EmbeddingBagConfig] = module.embedding_bag_configs()
        averaged = _averaged_here(configs, plan)
        summing = cast(EmbeddingBagCollection, _Summing(module, averaged))
        super().__init__(summing, plan, **stock)
        device = stock["device"] or torch.device("cpu")
        outputs = JoinBags(_outputs_of(configs, averaged))
        self.tables = Tables2D(self, module, configs, plan, replication, device, outputs)
        """What this package adds."""

    @classmethod
    def create_embedding_bag_sharding(
        cls,
        sharding_infos: list[Any],
        env: ShardingEnv,
        device: torch.device | None = None,
        permute_embeddings: bool = False,
        qcomm_codecs_registry: dict[str, Any] | None = None,
    ) -> Any:
        """TorchRec's sharding of the type, with the plugin's kernels."""
        kind = TableType.of_name(sharding_infos[0].param_sharding.sharding_type)
        sharding = pooled_sharding(kind)
        if sharding is None:
            return super().create_embedding_bag_sharding(
                sharding_infos, env, device, permute_embeddings, qcomm_codecs_registry
            )
        extra = {}
        if issubclass(sharding, CwPooledEmbeddingSharding):
            extra["permute_embeddings"] = permute_embeddings
        registry = codecs_registry(kind, sharding_infos, qcomm_codecs_registry)
        return sharding(sharding_infos, env, device, qcomm_codecs_registry=registry, **extra)

    def create_context(self) -> BagContext:
        """TorchRec's context of a batch, with a place for the stages' notes."""
        return BagContext()

    def input_dist(self, ctx: Any, features: Any) -> Any:
        """Let the stages see the batch, then distribute its ids as TorchRec does."""
        return self.tables.send_ids(ctx, features, super().input_dist)

    def compute_and_output_dist(self, ctx: Any, input: Any) -> Any:
        """Look up as TorchRec does, and what the stages look up beside it."""
        return self.tables.look_up(ctx, input, super().compute_and_output_dist)


def _averaged_here(configs: Iterable[EmbeddingBagConfig], plan: ModulePlan2D) -> set[str]:
    """The tables that TorchRec sums and this package averages.

    TorchRec averages by the ids it sees, which lack the hot ones: so tables with hot rows belong
    to them, too.
    """
    tables = dict(plan.tables())
    return {
        config.name
        for config in configs
        if config.pooling is PoolingType.MEAN
        and (
            tables[config.name].hot_set is not None
            or _without_transport(tables[config.name]) in _AVERAGED_HERE
        )
    }


def _without_transport(table: ParameterSharding2D) -> TableType:
    return replace(TableType.of_name(table.sharding_type), transport=Transport.FP32)


def _outputs_of(configs: Sequence[EmbeddingBagConfig], tables: set[str]) -> dict[str, str]:
    """The outputs of some tables: the feature of each, by the output's name."""
    names = get_embedding_names_by_table(list(configs))
    return {
        output: feature
        for config, outputs in zip(configs, names, strict=True)
        if config.name in tables
        for output, feature in zip(outputs, config.feature_names, strict=True)
    }


class _Summing:
    """An unsharded module that shows some of its averaging tables as summing ones."""

    def __init__(self, module: Any, tables: Iterable[str]) -> None:
        self._module = module
        self._configs = []
        for config in module.embedding_bag_configs():
            if config.name in set(tables):
                config = copy.copy(config)
                config.pooling = PoolingType.SUM
            self._configs.append(config)

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        return self._configs

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)
