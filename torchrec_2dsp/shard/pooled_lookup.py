"""The lookup of bags over the plugin's kernels, and how TorchRec's shardings come to it."""

from typing import Any

import torch
from torchrec.distributed.types import ShardingType

from torchrec_2dsp._compat.torchrec import (
    BaseEmbedding,
    BaseEmbeddingLookup,
    GroupedEmbeddingConfig,
    GroupedPooledEmbeddingsLookup,
)
from torchrec_2dsp.shard.kernels import EmbeddingBagKernel


class PooledLookup(GroupedPooledEmbeddingsLookup):
    """A lookup over `EmbeddingBagKernel`s."""

    def _create_embedding_kernel(
        self, config: GroupedEmbeddingConfig, device: Any, pg: Any, sharding_type: Any, env: Any
    ) -> BaseEmbedding:
        return EmbeddingBagKernel(config, pg, device, sharding_type, env)


class LooksUpBags:
    """A sharding of bags whose lookup has the plugin's kernels."""

    _LOOKUP: type[PooledLookup] = PooledLookup

    _LOOKUP_TYPE: ShardingType | None = None
    """How TorchRec's own `create_lookup` names the type to the lookup, which decides whether
    the kernel averages a bag or leaves that to the output."""

    def create_lookup(
        self: Any,
        device: torch.device | None = None,
        fused_params: dict[str, Any] | None = None,
        feature_processor: Any = None,
    ) -> BaseEmbeddingLookup:
        """What looks up this rank's shards."""
        return self._LOOKUP(
            grouped_configs=self._grouped_embedding_configs_per_rank[self._rank],
            pg=self._pg,
            device=device if device is not None else self._device,
            feature_processor=feature_processor,
            sharding_type=self._LOOKUP_TYPE,
            env=self._env,
        )
