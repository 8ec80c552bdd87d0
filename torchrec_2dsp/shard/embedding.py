"""Sequence embeddings in 2D, with hot rows."""

from typing import Any

import torch
from torchrec.distributed.types import ShardingEnv, ShardingType

from torchrec_2dsp._compat.torchrec import ColumnWiseSequences
from torchrec_2dsp.plan.parameter_sharding import TableType
from torchrec_2dsp.plan.plan2d import ModulePlan2D
from torchrec_2dsp.shard.base_types import ShowsBaseTypes
from torchrec_2dsp.shard.batch.notes import SequenceContext
from torchrec_2dsp.shard.codecs_of_plan import codecs_registry
from torchrec_2dsp.shard.outputs import JoinSequences
from torchrec_2dsp.shard.shardings import sequence_sharding
from torchrec_2dsp.shard.sync.replication import Replication
from torchrec_2dsp.shard.tables import Tables2D


class ShardedEmbeddingCollection2D(ShowsBaseTypes, ColumnWiseSequences):  # pyright: ignore[reportIncompatibleVariableOverride]
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
        super().__init__(module, plan, **stock)
        configs = module.embedding_configs()
        device = stock["device"] or torch.device("cpu")
        self.order_column_shards(configs, self.module_sharding_plan)
        self.tables = Tables2D(self, module, configs, plan, replication, device, JoinSequences())
        """What this package adds."""

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
        kind = TableType.of_name(sharding_type)
        sharding = sequence_sharding(kind)
        if sharding is None:
            return super().create_embedding_sharding(
                sharding_type, sharding_infos, env, device, qcomm_codecs_registry
            )
        return sharding(
            sharding_infos=sharding_infos,
            env=env,
            device=device,
            qcomm_codecs_registry=codecs_registry(kind, sharding_infos, qcomm_codecs_registry),
        )

    def is_column_wise(self, sharding_type: str) -> bool:
        """Whether tables of this type have shards of some of the columns, however they travel."""
        return TableType.of_name(sharding_type).base is ShardingType.COLUMN_WISE

    def create_context(self) -> SequenceContext:
        """TorchRec's context of a batch, with a place for the stages' notes."""
        return SequenceContext()

    def input_dist(self, ctx: Any, features: Any) -> Any:
        """Let the stages see the batch, then distribute its ids as TorchRec does."""
        return self.tables.send_ids(ctx, features, super().input_dist)

    def compute_and_output_dist(self, ctx: Any, input: Any) -> Any:
        """Look up as TorchRec does, and what the stages look up beside it."""
        return self.tables.look_up(ctx, input, super().compute_and_output_dist)
