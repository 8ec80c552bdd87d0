"""The sharder for sequences."""

from typing import Any

import torch
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.types import ParameterSharding, QuantizedCommCodecs
from torchrec.modules.embedding_modules import EmbeddingCollection

from torchrec_2dsp._compat.shardings import dedups_ids
from torchrec_2dsp.shard.bad_ids import BadIds
from torchrec_2dsp.shard.embedding import ShardedEmbeddingCollection2D
from torchrec_2dsp.shard.optimizers import Optimizer, sorted_out, stock_params
from torchrec_2dsp.shard.parted import PartedModule
from torchrec_2dsp.shard.sharders import Sharder2D


def sequence_sharding_types(
    sharder: EmbeddingCollectionSharder, compute_device_type: str
) -> list[str]:
    """TorchRec's types for sequences that work: on a CPU, FBGEMM's data-parallel lookup gives bags.

    Args:
        sharder: TorchRec's, or one that is based on it.
        compute_device_type: what ranks compute on.
    """
    kinds = EmbeddingCollectionSharder.sharding_types(sharder, compute_device_type)
    is_on_cpu = compute_device_type == "cpu"
    return [kind for kind in kinds if not (is_on_cpu and kind == "data_parallel")]


class EmbeddingCollectionSharder2D(Sharder2D, EmbeddingCollectionSharder):
    """Shards `EmbeddingCollection`s by a `Plan2D`; see `EmbeddingBagCollectionSharder2D`."""

    def __init__(
        self,
        optimizer: Optimizer | dict[str, Any] | None = None,
        qcomm_codecs_registry: dict[str, QuantizedCommCodecs] | None = None,
        use_index_dedup: bool = False,
        *,
        fused_params: dict[str, Any] | None = None,
        bad_ids: BadIds | str = BadIds.RAISE,
        init_seed: int | None = None,
        accumulates: bool = False,
    ) -> None:
        """
        Args:
            optimizer: as in `EmbeddingBagCollectionSharder2D`.
            qcomm_codecs_registry: quantised communication, as in TorchRec.
            use_index_dedup: as in TorchRec, which offers it on CUDA only.
            fused_params: FBGEMM's parameters, as in TorchRec.
            bad_ids: as in `EmbeddingBagCollectionSharder2D`.
            init_seed: as in `EmbeddingBagCollectionSharder2D`; what the module holds is dropped.
            accumulates: as in `EmbeddingBagCollectionSharder2D`.
        """
        optimizer, fused_params = sorted_out(optimizer, fused_params)
        EmbeddingCollectionSharder.__init__(
            self,
            stock_params(optimizer, fused_params),
            qcomm_codecs_registry,
            use_index_dedup,
        )
        # TorchRec keeps the weights of an EmbeddingCollection by itself.
        self._init_2d(optimizer, False, bad_ids, init_seed, accumulates)

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """TorchRec's types for sequences; none is looked up data parallel on a CPU."""
        return sequence_sharding_types(self, compute_device_type)

    def shard(  # type: ignore[override]  # where tables are of several meshes
        self,
        module: EmbeddingCollection,
        params: dict[str, ParameterSharding],
        env: Any,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> ShardedEmbeddingCollection2D | PartedModule:
        """Called by `DistributedModelParallel`; ``env`` is replaced by the plan's mesh.

        Collectives:
            An agreement of all ranks on the arguments, then process groups and broadcasts.
        """

        def make(*args: Any, **kwargs: Any) -> ShardedEmbeddingCollection2D:
            return ShardedEmbeddingCollection2D(*args, use_index_dedup=dedups_ids(self), **kwargs)

        configs = module.embedding_configs()
        return self._shard_2d(module, params, configs, device, module_fqn, make)

    @property
    def sharded_module_type(self) -> type[ShardedEmbeddingCollection2D]:
        """What `shard` returns."""
        return ShardedEmbeddingCollection2D
