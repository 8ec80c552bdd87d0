"""TorchRec's lookups over the plugin's kernels."""

from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed.types import ShardingType

from torchrec_2dsp._compat.shardings import ShardingFacts
from torchrec_2dsp._compat.torchrec import (
    BaseEmbedding,
    GroupedEmbeddingConfig,
    GroupedEmbeddingsLookup,
    GroupedPooledEmbeddingsLookup,
)
from torchrec_2dsp.shard.kernels import EmbeddingBagKernel, EmbeddingKernel, Kernel


class PooledLookup(GroupedPooledEmbeddingsLookup):
    """A lookup over `EmbeddingBagKernel`s."""

    def _create_embedding_kernel(
        self, config: GroupedEmbeddingConfig, device: Any, pg: Any, sharding_type: Any, env: Any
    ) -> BaseEmbedding:
        return EmbeddingBagKernel(config, pg, device, sharding_type, env)


class SequenceLookup(GroupedEmbeddingsLookup):
    """A lookup over `EmbeddingKernel`s."""

    def _create_embedding_kernel(
        self, config: GroupedEmbeddingConfig, pg: Any, device: Any, env: Any = None
    ) -> BaseEmbedding:
        return EmbeddingKernel(config, pg, device)


Pooled = TypeVar("Pooled", bound=PooledLookup)


def pooled_lookup(
    facts: ShardingFacts,
    device: torch.device | None,
    feature_processor: Any,
    sharding_type: ShardingType | None,
    kind: type[Pooled],
) -> Pooled:
    """What looks up the bags of a sharding on this rank.

    Args:
        facts: of the sharding.
        device: of the tables, if not that of the sharding.
        feature_processor: TorchRec's, if any.
        sharding_type: how TorchRec's own `create_lookup` names the type to the lookup, which
            decides whether the kernel averages a bag or leaves that to the output.
        kind: the class of the lookup.
    """
    return kind(
        grouped_configs=facts.configs,
        pg=facts.group,
        device=facts.device if device is None else device,
        feature_processor=feature_processor,
        sharding_type=sharding_type,
        env=facts.env,
    )


def sequence_lookup(facts: ShardingFacts, device: torch.device | None) -> SequenceLookup:
    """What looks up the sequences of a sharding on this rank.

    Args:
        facts: of the sharding.
        device: of the tables, if not that of the sharding.
    """
    return SequenceLookup(
        grouped_configs=facts.configs,
        pg=facts.group,
        device=facts.device if device is None else device,
        env=facts.env,
    )


def kernels_of(lookups: Iterable[nn.Module]) -> Iterator[Kernel]:
    """The fused kernels of a sharded module's lookups.

    TorchRec keeps lookups in plain lists, where `modules()` doesn't find them.
    """
    for lookup in lookups:
        if isinstance(lookup, DistributedDataParallel):
            continue
        for module in lookup.modules():
            if isinstance(module, (EmbeddingBagKernel, EmbeddingKernel)):
                yield module
