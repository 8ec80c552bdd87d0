"""Data-parallel tables, whole on every rank, trained by the tables' optimizer.

TorchRec wraps them in DDP and leaves them to the dense optimizer. Here their lookups are captured
like hot rows': row gradients are summed over all ranks after the backward, and applied once
by the fused optimizer's rule. They travel by row, or as whole tables where that is smaller.

    rank 0: rows 1, 4     \\                     / rows 1, 4, 7 with the same sums
    rank 1: rows 4, 7     - sums of all ranks --- rows 1, 4, 7 with the same sums
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor import ShardedTensorMetadata
from torchrec.distributed.embedding_types import ShardedEmbeddingTable

from torchrec_2dsp._compat.fbgemm import Tbe, keeps_untouched_rows, learning_rate_of, table_tensors
from torchrec_2dsp._compat.shardings import (
    PlainStateOptimizer,
    ShardingFacts,
    facts_of,
    replace_optimizer,
)
from torchrec_2dsp._compat.torchrec import (
    BaseEmbeddingLookup,
    DpPooledEmbeddingSharding,
    DpSequenceEmbeddingSharding,
    EmbeddingComputeKernel,
    GroupedEmbeddingConfig,
)
from torchrec_2dsp.codecs.rows import EXACT
from torchrec_2dsp.comms.groups import MeshGroups
from torchrec_2dsp.replicas.drift import DriftCheck
from torchrec_2dsp.replicas.gradient_sync import GradientSyncAction
from torchrec_2dsp.shard.kernels import (
    MOMENT_SCALE,
    Kernel,
    PooledLookup,
    SequenceLookup,
    kernels_of,
    make_lookup,
)
from torchrec_2dsp.shard.replica_sync import copied_shards


class WholeTablesOptimizer(PlainStateOptimizer):
    """A kernel's fused optimizer, whose state has plain tensors, like the weights."""

    def __init__(self, config: GroupedEmbeddingConfig, tbe: Tbe) -> None:
        params, state = {}, {}
        for table, tensors in zip(config.embedding_tables, table_tensors(tbe), strict=True):
            weight, *states = tensors.values()
            params[f"{table.name}.weight"] = weight
            # TorchRec's name for the first state tensor, whatever the rule calls it.
            names = ["momentum1", *list(tensors)[2:]]
            state[weight] = {
                f"{table.name}.{name}": value for name, value in zip(names, states, strict=False)
            }
        group = {"params": list(params.values()), "lr": learning_rate_of(tbe)}
        super().__init__(tbe, params, state, group)


class _WholeTables:
    """Marks a lookup of tables that are whole on every rank."""

    @property
    def module(self) -> nn.Module:
        """The lookup itself, where TorchRec reads DDP's ``module``."""
        assert isinstance(self, nn.Module)
        return self


class WholeTablesBags(_WholeTables, PooledLookup):
    """Looks up bags in tables that are whole on every rank."""


class WholeTablesSequences(_WholeTables, SequenceLookup):
    """Looks up sequences in tables that are whole on every rank."""


def _with_plain_state(lookup: BaseEmbeddingLookup) -> BaseEmbeddingLookup:
    for kernel in kernels_of([lookup]):
        replace_optimizer(kernel, WholeTablesOptimizer(kernel.config, kernel.tbe))
    return lookup


class DpPooled(DpPooledEmbeddingSharding):
    """Data-parallel bags."""

    def create_lookup(
        self,
        device: torch.device | None = None,
        fused_params: Any = None,
        feature_processor: Any = None,
    ) -> BaseEmbeddingLookup:
        """Build the lookup for this rank's copy."""
        facts = _as_one_shard(facts_of(self))
        # For per-sample weights, TorchRec undoes the division of bags' gradients by the rank count.
        # Here they aren't divided.
        options = {"feature_processor": feature_processor, "scale_weight_gradients": False}
        return _with_plain_state(make_lookup(WholeTablesBags, facts, device, **options))


class DpSequence(DpSequenceEmbeddingSharding):
    """Data-parallel sequences."""

    def create_lookup(
        self,
        device: torch.device | None = None,
        fused_params: Any = None,
        feature_processor: Any = None,
    ) -> BaseEmbeddingLookup:
        """Build the lookup for this rank's copy."""
        facts = _as_one_shard(facts_of(self))
        return _with_plain_state(make_lookup(WholeTablesSequences, facts, device))


def _as_one_shard(facts: ShardingFacts) -> ShardingFacts:
    """Return the tables with the metadata that fused kernels need: a single shard, on this rank."""
    return replace(facts, configs=[_fused(config, facts.device) for config in facts.configs])


def _fused(config: GroupedEmbeddingConfig, device: torch.device) -> GroupedEmbeddingConfig:
    """Return a config for a fused kernel whose copies stay equal."""
    params = dict(config.fused_params or {})
    # Moments merged over all ranks are exact: no moment scale here.
    params.pop(MOMENT_SCALE, None)
    # By default FBGEMM rounds 16-bit tables at random, differently on each rank.
    params.setdefault("stochastic_rounding", False)
    kernel = EmbeddingComputeKernel.FUSED
    tables = [_on_this_rank(table, device) for table in config.embedding_tables]
    return replace(config, embedding_tables=tables, compute_kernel=kernel, fused_params=params)


def _on_this_rank(table: ShardedEmbeddingTable, device: torch.device) -> ShardedEmbeddingTable:
    size = [table.num_embeddings, table.embedding_dim]
    shard = ShardMetadata([0, 0], size, f"rank:{dist.get_rank()}/{device}")
    return replace(
        table,
        compute_kernel=EmbeddingComputeKernel.FUSED,
        local_metadata=shard,
        global_metadata=ShardedTensorMetadata([shard], torch.Size(size)),
    )


def kernels_by_kind(lookups: Sequence[nn.Module]) -> tuple[list[Kernel], list[Kernel]]:
    """Return the lookups' kernels: those of sharded tables, then those of whole ones."""
    whole = [lookup for lookup in lookups if isinstance(lookup, _WholeTables)]
    sharded = [lookup for lookup in lookups if not isinstance(lookup, _WholeTables)]
    return list(kernels_of(sharded)), list(kernels_of(whole))


def whole_tables_action(
    kernels: Sequence[Kernel], groups: MeshGroups, drift_every: int
) -> GradientSyncAction:
    """Capture the kernels' backwards, and return the sync action that applies them.

    With any sync config, all ranks exchange exact gradients, and no update is late.
    """
    alarm, peers = groups.alarm, groups.hot_rows
    captures = [
        kernel.capture_rows(peers, EXACT, may_send_tables=keeps_untouched_rows(kernel.tbe))
        for kernel in kernels
    ]
    return GradientSyncAction(
        captures,
        alarm,
        DriftCheck(copied_shards(kernels), peers.everyone, alarm, drift_every),
        is_layered=peers.is_layered,
    )
