"""A lookup of bags over the plugin's kernels."""

from typing import Any

from torchrec_2dsp._compat.torchrec import (
    BaseEmbedding,
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
