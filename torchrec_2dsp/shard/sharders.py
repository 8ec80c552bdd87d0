"""The sharders that a user swaps in."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.types import ParameterSharding, QuantizedCommCodecs, ShardingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from torchrec_2dsp._compat.fbgemm import EmbOptimType
from torchrec_2dsp._compat.torchrec import (
    InBackwardOptimizers,
    get_local_size,
    in_backward_optimizers,
)
from torchrec_2dsp.comms.agreement import agreeing
from torchrec_2dsp.errors import ConfigError
from torchrec_2dsp.mesh.groups import MeshGroups, world_group
from torchrec_2dsp.optim.moment_scaled import (
    FROM_MESH,
    FromMesh,
    MomentScaledRowWiseAdaGrad,
    MomentScaledRowWiseAdaGradOptimizer,
)
from torchrec_2dsp.plan.plan2d import ModulePlan2D, Plan2D
from torchrec_2dsp.plan.remap import module_plan_for_rank
from torchrec_2dsp.plan.serialize import to_json
from torchrec_2dsp.plan.sync_config import GradientSync
from torchrec_2dsp.shard.embedding import ShardedEmbeddingCollection2D
from torchrec_2dsp.shard.embedding_bag import ShardedEmbeddingBagCollection2D
from torchrec_2dsp.shard.kernels import MOMENT_SCALE
from torchrec_2dsp.shard.replicated import Replication
from torchrec_2dsp.shard.validate import check_module_plan, check_rounding

Optimizer = MomentScaledRowWiseAdaGrad | EmbOptimType


class _Sharder2D:
    """What both sharders do: agree over the ranks, then shard for this rank's group."""

    always_capture = False
    """Take the exact path even where one group needs none; for tests and measurements."""

    def _init_2d(self, optimizer: Optimizer | None, keep_weights: bool) -> None:
        self.optimizer = optimizer
        self.keep_weights = keep_weights

    def _shard_2d(
        self: Any,
        module: Any,
        plan: Any,
        configs: list[Any],
        device: torch.device | None,
        path: str | None,
        make: Any,
    ) -> Any:
        device = torch.device("cpu") if device is None else device
        local_world_size = get_local_size(dist.get_world_size())
        with agreeing(world_group()) as facts:
            plan = check_module_plan(
                path or "",
                plan,
                configs,
                is_weighted=bool(getattr(module, "is_weighted", bool)()),
                local_world_size=local_world_size,
            )
            plan.mesh.check_world(dist.get_world_size())
            fused_params = self._fused_params_for(plan)
            facts["the plan"] = to_json(Plan2D({path or "": plan}, mesh=plan.mesh, sync=plan.sync))
            facts["the sharder's optimizer"] = repr(sorted(fused_params.items()))
            facts["the device type"] = device.type
            facts["LOCAL_WORLD_SIZE"] = str(local_world_size)
        groups = MeshGroups.for_mesh(plan.mesh, device.type)
        replication = Replication(
            groups=groups,
            sync=plan.sync,
            always_capture=self.always_capture,
            keep_weights=self.keep_weights,
        )
        with groups.node_groups(), _stock_optimizer_classes(module, plan):
            return make(
                module,
                module_plan_for_rank(
                    plan, groups.rank, device_type=device.type, local_world_size=local_world_size
                ),
                replication=replication,
                env=groups.sharding_env(),
                fused_params=fused_params,
                device=device,
                qcomm_codecs_registry=self.qcomm_codecs_registry,
                module_fqn=path,
            )

    def _fused_params_for(self: Any, plan: ModulePlan2D) -> dict[str, Any]:
        params = dict(self.fused_params or {})
        if isinstance(self.optimizer, MomentScaledRowWiseAdaGrad):
            params[MOMENT_SCALE] = _resolved(self.optimizer.moment_scale, plan)
        exact_copies = isinstance(plan.sync, GradientSync) and plan.mesh.num_groups > 1
        if exact_copies or any(table.hot_set is not None for _, table in plan.tables()):
            check_rounding("fused_params", params.get("stochastic_rounding"))
            # FBGEMM rounds 16-bit tables at random by default.
            params["stochastic_rounding"] = False
        return params


class EmbeddingBagCollectionSharder2D(_Sharder2D, EmbeddingBagCollectionSharder):
    """Shards `EmbeddingBagCollection`s by a `Plan2D`.

    Example:
        >>> import torchrec_2dsp as tdsp
        >>> sharder = tdsp.EmbeddingBagCollectionSharder2D(
        ...     optimizer=tdsp.MomentScaledRowWiseAdaGrad(lr=0.02)
        ... )
        >>> "row_wise" in sharder.sharding_types("cpu")
        True
    """

    def __init__(
        self,
        optimizer: Optimizer | None = None,
        *,
        fused_params: dict[str, Any] | None = None,
        qcomm_codecs_registry: dict[str, QuantizedCommCodecs] | None = None,
        keep_weights: bool = False,
    ) -> None:
        """
        Args:
            optimizer: the fused optimizer, ours or FBGEMM's; alternatively give it in
                ``fused_params`` or by ``apply_optimizer_in_backward``, as in TorchRec.
            fused_params: FBGEMM's parameters, as in TorchRec.
            qcomm_codecs_registry: quantised communication, as in TorchRec.
            keep_weights: take over the weights of a module that isn't on the meta device,
                which TorchRec drops.
        """
        EmbeddingBagCollectionSharder.__init__(
            self, _stock_params(optimizer, fused_params), qcomm_codecs_registry
        )
        self._init_2d(optimizer, keep_weights)

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """All of TorchRec's types, on every device."""
        return [kind.value for kind in ShardingType]

    def shard(
        self,
        module: EmbeddingBagCollection,
        params: dict[str, ParameterSharding],
        env: Any,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> ShardedEmbeddingBagCollection2D:
        """Called by `DistributedModelParallel`; ``env`` is replaced by the plan's mesh.

        Collectives:
            An agreement of all ranks on the arguments, then process groups and broadcasts.
        """
        configs = module.embedding_bag_configs()
        make = ShardedEmbeddingBagCollection2D
        return self._shard_2d(module, params, configs, device, module_fqn, make)

    @property
    def sharded_module_type(self) -> type[ShardedEmbeddingBagCollection2D]:
        """What `shard` returns."""
        return ShardedEmbeddingBagCollection2D


class EmbeddingCollectionSharder2D(_Sharder2D, EmbeddingCollectionSharder):
    """Shards `EmbeddingCollection`s by a `Plan2D`; see `EmbeddingBagCollectionSharder2D`."""

    def __init__(
        self,
        optimizer: Optimizer | None = None,
        *,
        fused_params: dict[str, Any] | None = None,
        qcomm_codecs_registry: dict[str, QuantizedCommCodecs] | None = None,
        use_index_dedup: bool = False,
    ) -> None:
        """
        Args:
            optimizer: as in `EmbeddingBagCollectionSharder2D`.
            fused_params: FBGEMM's parameters, as in TorchRec.
            qcomm_codecs_registry: quantised communication, as in TorchRec.
            use_index_dedup: as in TorchRec, which offers it on CUDA only.
        """
        EmbeddingCollectionSharder.__init__(
            self,
            _stock_params(optimizer, fused_params),
            qcomm_codecs_registry,
            use_index_dedup,
        )
        # TorchRec keeps the weights of an EmbeddingCollection by itself.
        self._init_2d(optimizer, keep_weights=False)

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """TorchRec's types for sequences."""
        return EmbeddingCollectionSharder.sharding_types(self, compute_device_type)

    def shard(
        self,
        module: EmbeddingCollection,
        params: dict[str, ParameterSharding],
        env: Any,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> ShardedEmbeddingCollection2D:
        """Called by `DistributedModelParallel`; ``env`` is replaced by the plan's mesh.

        Collectives:
            An agreement of all ranks on the arguments, then process groups and broadcasts.
        """

        def make(*args: Any, **kwargs: Any) -> ShardedEmbeddingCollection2D:
            return ShardedEmbeddingCollection2D(
                *args, use_index_dedup=self._use_index_dedup, **kwargs
            )

        configs = module.embedding_configs()
        return self._shard_2d(module, params, configs, device, module_fqn, make)

    @property
    def sharded_module_type(self) -> type[ShardedEmbeddingCollection2D]:
        """What `shard` returns."""
        return ShardedEmbeddingCollection2D


def _stock_params(
    optimizer: Optimizer | None, fused_params: dict[str, Any] | None
) -> dict[str, Any] | None:
    """Fused parameters in the user's units, without what FBGEMM doesn't know."""
    if optimizer is None:
        return fused_params
    if fused_params and "optimizer" in fused_params:
        raise ConfigError(
            f"both optimizer={optimizer!r} and fused_params['optimizer'] are given; give one"
        )
    if isinstance(optimizer, EmbOptimType):
        return {**(fused_params or {}), "optimizer": optimizer}
    return {
        **(fused_params or {}),
        "optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        "learning_rate": optimizer.lr,
        "eps": optimizer.eps,
    }


def _resolved(scale: float | FromMesh, plan: ModulePlan2D) -> float:
    """The moment scale under the plan's mesh and sync config."""
    if isinstance(plan.sync, GradientSync):
        if not isinstance(scale, FromMesh) and scale != 1.0:
            raise ConfigError(
                f"moment_scale={scale} with GradientSync, whose moments are exact; leave it at "
                "FROM_MESH or use WeightSync"
            )
        return 1.0
    return float(plan.mesh.num_groups) if isinstance(scale, FromMesh) else float(scale)


@contextmanager
def _stock_optimizer_classes(module: nn.Module, plan: ModulePlan2D) -> Iterator[None]:
    """Show TorchRec the class it knows for parameters that carry our optimizer class.

    TorchRec also edits the parameters' optimizer arguments in place; both are put back.
    """
    saved: list[tuple[nn.Parameter, InBackwardOptimizers]] = []
    for param in module.parameters():
        original = in_backward_optimizers(param)
        if original is None:
            continue
        saved.append((param, original))
        classes, kwargs = list(original.classes), [dict(entry) for entry in original.kwargs]
        for index, kind in enumerate(classes):
            if issubclass(kind, MomentScaledRowWiseAdaGradOptimizer):
                classes[index] = RowWiseAdagrad
                kwargs[index].setdefault("eps", 1e-8)
                scale = kwargs[index].get(MOMENT_SCALE, FROM_MESH)
                kwargs[index][MOMENT_SCALE] = _resolved(scale, plan)
        InBackwardOptimizers(classes, kwargs).attach_to(param)
    try:
        yield
    finally:
        for param, original in saved:
            original.attach_to(param)
