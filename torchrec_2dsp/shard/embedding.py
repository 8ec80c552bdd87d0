"""Sequence embeddings in 2D."""

from dataclasses import dataclass
from typing import Any

import torch
from torchrec.distributed.embedding import EmbeddingCollectionContext, ShardedEmbeddingCollection
from torchrec.distributed.types import ShardingEnv
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_2dsp._compat.shardings import input_dists_of
from torchrec_2dsp.comms.alarm import Check
from torchrec_2dsp.plan.plan2d import ModulePlan2D
from torchrec_2dsp.shard.batch.batch_check import BatchCheck
from torchrec_2dsp.shard.batch.input_exchange import completed_input
from torchrec_2dsp.shard.batch.variable_batch_sizes import BagsOfSamples, distinct_bags
from torchrec_2dsp.shard.hot_rows.sequences import join_sequences
from torchrec_2dsp.shard.hot_rows.split import HotBatch
from torchrec_2dsp.shard.prefetch.module import PrefetchContext, RowPrefetchModule
from torchrec_2dsp.shard.replication import Replication
from torchrec_2dsp.shard.row_exchange.context import keep_needed_rows
from torchrec_2dsp.shard.shardings import SEQUENCE


@dataclass
class SequenceContext(PrefetchContext, EmbeddingCollectionContext):
    """TorchRec's per-batch context, with the check of the batch."""

    batch_check: Check | None = None
    """Whether all ranks' batches are right, on its way."""
    hot: HotBatch | None = None
    """What the batch looks up in the replicas, `None` without hot rows."""
    bags_of_samples: BagsOfSamples | None = None
    """Which bags each sample has, where features have batch sizes of their own."""

    def record_stream(self, stream: torch.Stream) -> None:
        """Keep the tensors alive for ``stream``."""
        super().record_stream(stream)
        if self.hot is not None:
            self.hot.record_stream(stream)
        if self.bags_of_samples is not None:
            self.bags_of_samples.record_stream(stream)


class ShardedEmbeddingCollection2D(RowPrefetchModule, ShardedEmbeddingCollection):
    """TorchRec's sharded collection, repeated over the groups of a mesh."""

    def __init__(
        self, module: Any, plan: ModulePlan2D, *, replication: Replication, **stock: Any
    ) -> None:
        ShardedEmbeddingCollection.__init__(self, module, plan, **stock)
        configs = module.embedding_configs()
        self._batch_check = BatchCheck(
            replication.tables_beside or configs, replication.bad_ids, replication.groups.alarm
        )
        actions = self._init_hot_rows(configs, plan, self._fused_params_by_table(), replication)
        self._init_replication(replication, module, plan, [*actions, self.lagging])

    def _fused_params_by_table(self) -> dict[str, dict[str, Any]]:
        """TorchRec keeps them with its kernels' configs, in the user's units."""
        return {
            table.name: config.fused_params or {}
            for sharding in self._sharding_type_to_sharding.values()
            for configs in getattr(sharding, "_grouped_embedding_configs_per_rank", [])
            for config in configs
            for table in config.embedding_tables
        }

    @classmethod
    def create_embedding_sharding(
        cls,
        sharding_type: str,
        sharding_infos: list[Any],
        env: ShardingEnv,
        device: torch.device | None = None,
        qcomm_codecs_registry: dict[str, Any] | None = None,
    ) -> Any:
        """TorchRec's sharding of the type, with the plugin's kernels."""
        if sharding_type not in SEQUENCE:
            return super().create_embedding_sharding(
                sharding_type, sharding_infos, env, device, qcomm_codecs_registry
            )
        return SEQUENCE[sharding_type](
            sharding_infos=sharding_infos,
            env=env,
            device=device,
            qcomm_codecs_registry=qcomm_codecs_registry,
        )

    def create_context(self) -> SequenceContext:
        """TorchRec's context, widened."""
        return SequenceContext()

    def input_dist(self, ctx: Any, features: Any) -> Any:
        """Check the batch, take hot ids out, then distribute the others as TorchRec does."""
        if isinstance(features, KeyedJaggedTensor):
            bags = distinct_bags(features, self._batch_check.ids.features)
            ctx.bags_of_samples = bags.of_samples
            features, ctx.batch_check = self._batch_check(bags.features, bags.error)
        features, ctx.hot = self._split_hot_rows(features)
        ctx.asked = super().input_dist(ctx, features)
        keep_needed_rows(ctx.sharding_contexts, input_dists_of(self))
        return ctx.asked

    def compute_and_output_dist(self, ctx: Any, input: Any) -> Any:
        """Sync what is pending, then look up; hot rows while the cold ones travel."""
        if ctx.batch_check is not None:
            ctx.batch_check.wait()
        input, ctx.asked = completed_input(ctx, ctx.asked, input), None
        self._hold_hot_rows(ctx.hot)
        self._before_lookup()
        self._prepare_rows(ctx)
        awaitable = super().compute_and_output_dist(ctx, input)
        if ctx.hot is not None:
            hot = self._lookup_hot_rows(ctx.hot)
            awaitable.callbacks.append(lambda cold: join_sequences(cold, hot, ctx.hot))
        if ctx.bags_of_samples is not None:
            awaitable.callbacks.append(ctx.bags_of_samples.sequences)
        awaitable = self._let_others_follow(awaitable, ctx)
        return self._watch_backward(awaitable, lambda: self._hold_hot_rows(ctx.hot))
