"""Embedding bags in 2D, with hot rows."""

import copy
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torchrec.distributed.embeddingbag import (
    EmbeddingBagCollectionContext,
    ShardedEmbeddingBagCollection,
)
from torchrec.distributed.types import ShardingEnv, ShardingType
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import (
    EmbeddingBagCollection,
    get_embedding_names_by_table,
)
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from torchrec_2dsp._compat.shardings import input_dists_of
from torchrec_2dsp._compat.torchrec import CwPooledEmbeddingSharding
from torchrec_2dsp.comms.alarm import Check
from torchrec_2dsp.plan.parameter_sharding import (
    ParameterSharding2D,
    base_type,
    nonempty_type,
)
from torchrec_2dsp.plan.plan2d import ModulePlan2D
from torchrec_2dsp.shard.batch.batch_check import BatchCheck
from torchrec_2dsp.shard.batch.input_exchange import completed_input
from torchrec_2dsp.shard.batch.variable_batch_sizes import BagsOfSamples, distinct_bags
from torchrec_2dsp.shard.hot_rows.module import check_keyed_jagged
from torchrec_2dsp.shard.hot_rows.split import HotBatch
from torchrec_2dsp.shard.nonempty.bags import keep_filled_bags
from torchrec_2dsp.shard.prefetch.module import PrefetchContext, RowPrefetchModule
from torchrec_2dsp.shard.replication import Replication
from torchrec_2dsp.shard.row_exchange.context import keep_needed_rows
from torchrec_2dsp.shard.shardings import POOLED

_AVERAGED_HERE = (
    ShardingType.ROW_WISE.value,
    ShardingType.TABLE_ROW_WISE.value,
    ShardingType.GRID_SHARD.value,
    nonempty_type(ShardingType.ROW_WISE),
)
"""Sharding types of which a rank sees parts of bags. TorchRec doesn't average grid tables at all.
For the others it divides whole outputs, also those of tables of other types, by lengths + 1e-6, and
fails where a rank has no samples."""


@dataclass
class BagContext(PrefetchContext, EmbeddingBagCollectionContext):
    """TorchRec's per-batch context, with what the batch looks up in the replicas."""

    hot: HotBatch | None = None
    """`None` without hot rows."""
    batch_check: Check | None = None
    """Whether all ranks' batches are right, on its way."""
    bag_lengths: dict[str, torch.Tensor] | None = None
    """Ids per bag of the outputs that this module averages itself, by name."""
    bags_of_samples: BagsOfSamples | None = None
    """Which bags each sample has, where features have batch sizes of their own."""

    def record_stream(self, stream: torch.Stream) -> None:
        """Keep the tensors alive for ``stream``."""
        super().record_stream(stream)
        if self.hot is not None:
            self.hot.record_stream(stream)
        for lengths in (self.bag_lengths or {}).values():
            lengths.record_stream(stream)
        if self.bags_of_samples is not None:
            self.bags_of_samples.record_stream(stream)


class ShardedEmbeddingBagCollection2D(RowPrefetchModule, ShardedEmbeddingBagCollection):
    """TorchRec's sharded collection, repeated over the groups of a mesh."""

    def __init__(
        self, module: Any, plan: ModulePlan2D, *, replication: Replication, **stock: Any
    ) -> None:
        tables = dict(plan.tables())
        configs: list[EmbeddingBagConfig] = module.embedding_bag_configs()
        # TorchRec averages by the ids it sees, which lack the hot ones: tables with hot rows are
        # summed by TorchRec and averaged here, too.
        averaged_here = {
            config.name
            for config in configs
            if config.pooling is PoolingType.MEAN
            and (
                tables[config.name].hot_set is not None
                or tables[config.name].sharding_type in _AVERAGED_HERE
            )
        }
        output_names = get_embedding_names_by_table(configs)
        self._outputs_averaged_here = {
            output: feature
            for config, outputs in zip(configs, output_names, strict=True)
            if config.name in averaged_here
            for output, feature in zip(outputs, config.feature_names, strict=True)
        }
        summing = cast(EmbeddingBagCollection, _Summing(module, averaged_here))
        ShardedEmbeddingBagCollection.__init__(self, summing, plan, **stock)
        self._batch_check = BatchCheck(
            replication.tables_beside or configs, replication.bad_ids, replication.groups.alarm
        )
        fused_params = {
            info.embedding_config.name: info.fused_params or {}
            for infos in self.sharding_type_to_sharding_infos.values()
            for info in infos
        }
        actions = self._init_hot_rows(configs, plan, fused_params, replication)
        self._init_replication(replication, module, plan, [*actions, self.lagging])

    @property
    def module_sharding_plan(self) -> Any:
        """What TorchRec makes state dicts by; it knows its own sharding types only."""
        return self._module_sharding_plan

    @module_sharding_plan.setter
    def module_sharding_plan(self, plan: dict[str, ParameterSharding2D]) -> None:  # pyright: ignore
        self._module_sharding_plan = {
            name: replace(table, sharding_type=base_type(table.sharding_type))
            for name, table in plan.items()
        }

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
        sharding_type = sharding_infos[0].param_sharding.sharding_type
        if sharding_type not in POOLED:
            return super().create_embedding_bag_sharding(
                sharding_infos, env, device, permute_embeddings, qcomm_codecs_registry
            )
        made = POOLED[sharding_type]
        extra = {}
        if issubclass(made, CwPooledEmbeddingSharding):
            extra["permute_embeddings"] = permute_embeddings
        return made(
            sharding_infos, env, device, qcomm_codecs_registry=qcomm_codecs_registry, **extra
        )

    def create_context(self) -> BagContext:
        """TorchRec's context, widened."""
        return BagContext()

    def input_dist(self, ctx: Any, features: Any) -> Any:
        """Check the batch, take hot ids out, then distribute the others as TorchRec does."""
        if isinstance(features, KeyedJaggedTensor):
            bags = distinct_bags(features, self._batch_check.ids.features)
            ctx.bags_of_samples = bags.of_samples
            features, ctx.batch_check = self._batch_check(bags.features, bags.error)
        if self._outputs_averaged_here:
            check_keyed_jagged(features)
            lengths = features.lengths().view(len(features.keys()), features.stride())
            by_feature = dict(zip(features.keys(), lengths, strict=True))
            ctx.bag_lengths = {
                output: by_feature[feature]
                for output, feature in self._outputs_averaged_here.items()
            }
        features, ctx.hot = self._split_hot_rows(features)
        ctx.asked = super().input_dist(ctx, features)
        keep_needed_rows(ctx.sharding_contexts, input_dists_of(self))
        keep_filled_bags(ctx.sharding_contexts, input_dists_of(self))
        return ctx.asked

    def compute_and_output_dist(self, ctx: Any, input: Any) -> Any:
        """Sync what is pending, then look up; hot rows are added while the cold ones travel."""
        if ctx.batch_check is not None:
            ctx.batch_check.wait()
        input, ctx.asked = completed_input(ctx, ctx.asked, input), None
        self._hold_hot_rows(ctx.hot)
        self._before_lookup()
        self._prepare_rows(ctx)
        awaitable = super().compute_and_output_dist(ctx, input)
        hot = self._lookup_hot_rows(ctx.hot)
        if hot or ctx.bag_lengths is not None:
            awaitable.callbacks.append(
                lambda cold: _complete_bags(cold, hot, ctx.bag_lengths or {})
            )
        if ctx.bags_of_samples is not None:
            awaitable.callbacks.append(ctx.bags_of_samples.pooled)
        awaitable = self._let_others_follow(awaitable, ctx)
        return self._watch_backward(awaitable, lambda: self._hold_hot_rows(ctx.hot))


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


def _complete_bags(
    cold: KeyedTensor, hot: dict[str, torch.Tensor], bag_lengths: dict[str, torch.Tensor]
) -> KeyedTensor:
    """Add the hot rows to the cold sums, then average where that was left to us."""
    dims = cold.length_per_key()
    parts = []
    for name, part in zip(cold.keys(), cold.values().split(dims, dim=1), strict=True):
        feature = name.split("@")[0]
        if feature in hot:
            part = part + hot[feature]
        if name in bag_lengths:
            part = part / bag_lengths[name].clamp(min=1).to(part.dtype)[:, None]
        parts.append(part)
    return KeyedTensor(
        keys=cold.keys(), length_per_key=dims, values=torch.cat(parts, dim=1), key_dim=1
    )
