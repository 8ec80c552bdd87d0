"""The sharders, which turn a `Plan2D` into sharded modules: one for bags, one for sequences."""

import logging
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embedding_types import BaseEmbeddingSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.types import (
    ParameterSharding,
    QuantizedCommCodecs,
    ShardingType,
)

from torchrec_2dsp._compat.shardings import dedups_ids
from torchrec_2dsp._compat.torchrec import get_local_size, without_weights
from torchrec_2dsp._compat.triton import runs_triton
from torchrec_2dsp.comms.alarm import agreeing
from torchrec_2dsp.comms.groups import MeshGroups, check_whole, world_group
from torchrec_2dsp.errors import ConfigError, UnsupportedError
from torchrec_2dsp.plan.fits_module import (
    check_alone,
    check_holder,
    check_module_plan,
    frozen_tables,
    has_weights,
    table_text,
)
from torchrec_2dsp.plan.parameter_sharding import Exchange
from torchrec_2dsp.plan.plan2d import ModulePlan2D, Plan2D, module_plan_for_rank
from torchrec_2dsp.plan.serialize import to_json
from torchrec_2dsp.shard.batch import BadIds
from torchrec_2dsp.shard.initial_tables import checked_seed, configs_of, draw_tables_
from torchrec_2dsp.shard.optimizers import (
    Optimizer,
    check_optimizers,
    params_for_plan,
    params_without_optimizer,
    sorted_out,
    stock_optimizer_classes,
    stock_params,
)
from torchrec_2dsp.shard.parted import PartedModule, ShardedModule2D, TablesAndMore
from torchrec_2dsp.shard.replica_sync import Replication
from torchrec_2dsp.shard.sharded_modules import (
    ShardedEmbeddingBagCollection2D,
    ShardedEmbeddingCollection2D,
    SomeTables,
)
from torchrec_2dsp.shard.tables import Tables2D

logger = logging.getLogger(__name__)


class _Part(NamedTuple):
    """A module's tables that are repeated by the same mesh."""

    module: Any
    plan: ModulePlan2D
    fused_params: dict[str, Any]
    are_frozen: bool


class Sharder2D(BaseEmbeddingSharder[Any]):
    """The base class of sharders: agrees with all ranks, then shards for this rank's group."""

    def _init_2d(
        self,
        optimizer: Optimizer | None,
        keep_weights: bool,
        bad_ids: BadIds | str,
        init_seed: int | None,
        accumulates: bool,
    ) -> None:
        if keep_weights and init_seed is not None:
            raise ConfigError(
                f"keep_weights=True and init_seed={init_seed} contradict each other; give one"
            )
        self.optimizer = optimizer
        self.keep_weights = keep_weights
        self.init_seed = checked_seed(init_seed)
        self.bad_ids = BadIds.of(bad_ids)
        self.accumulates = accumulates

    def shard(  # pyright: ignore[reportIncompatibleVariableOverride]
        self,
        module: Any,
        params: dict[str, ParameterSharding],
        env: Any,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> Any:
        """Shard a module for `DistributedModelParallel`; the plan's mesh replaces ``env``.

        Collectives:
            All ranks agree on the arguments; then process groups are created, and tables broadcast.
        """
        check_whole(env.process_group)
        device = torch.device("cpu") if device is None else device
        configs = configs_of(module)
        local_world_size = get_local_size(dist.get_world_size())
        with agreeing(world_group()) as facts:
            path, frozen = module_fqn or "", frozen_tables(module)
            plan, parts = self.checked_plan(module, params, path, device.type, local_world_size)
            plan.mesh.check_world(dist.get_world_size())
            facts["frozen tables"] = ", ".join(frozen)
            # Copies that other kernels update would differ in their last bits.
            facts["whether Triton runs"] = str(runs_triton(device))
            facts |= self._facts(path, plan, [part.fused_params for part in parts])
            facts |= {f"table {config.name!r}": table_text(config) for config in configs}
            facts["the device type"] = device.type
            facts["LOCAL_WORLD_SIZE"] = str(local_world_size)
        _warn_of_idle_hot_sets(plan, configs)
        beside = tuple(configs) if len(parts) > 1 else ()
        where = {"device": device, "local_world_size": local_world_size, "path": module_fqn}
        shard_part = partial(self._shard_part, **where)
        sharded = [shard_part(part, beside) for part in parts]
        if len(sharded) == 1 and not frozen:
            return sharded[0]
        blank = without_weights(module)

        def reshard(tables: Tables2D, unfrozen: Collection[str]) -> list[Any]:
            own = {name: plan[name] for name in plan if name in tables.table_names}
            plans = plan.with_tables(own).parts()
            return [
                partial(
                    shard_part,
                    self._part(blank, configs, part, device.type, is_frozen),
                    tuple(configs),
                )
                for part, is_frozen in _trained_and_frozen(plans, own.keys() - unfrozen)
            ]

        return PartedModule(configs, sharded, reshard)

    def checked_plan(
        self,
        module: Any,
        params: Mapping[str, ParameterSharding],
        path: str,
        device_type: str,
        local_world_size: int,
    ) -> "tuple[ModulePlan2D, list[_Part]]":
        """Return a module's plan and its parts, or raise `shard`'s error."""
        configs = configs_of(module)
        check_alone(module)
        plan = check_module_plan(
            path,
            params,
            configs,
            is_weighted=has_weights(module),
            local_world_size=local_world_size,
        )
        parts = [
            self._part(module, configs, part, device_type, is_frozen)
            for part, is_frozen in _trained_and_frozen(plan.parts(), frozen_tables(module))
        ]
        return plan, parts

    def _part(
        self,
        module: Any,
        configs: list[Any],
        plan: ModulePlan2D,
        device_type: str,
        is_frozen: bool,
    ) -> "_Part":
        """Return a mesh's tables, after checking their optimizers."""
        part: Any = module
        if len(plan) < len(configs) or is_frozen:
            shown = [config for config in configs if config.name in plan]
            part = SomeTables(module, shown, are_frozen=is_frozen)
        fused_params = params_for_plan(self.fused_params, self.optimizer, plan)
        if is_frozen:
            fused_params = params_without_optimizer(fused_params)
        check_optimizers(part, fused_params, plan, device_type)
        return _Part(part, plan, fused_params, is_frozen)

    def _shard_part(
        self,
        part: "_Part",
        tables_beside: tuple[Any, ...],
        device: torch.device,
        local_world_size: int,
        path: str | None,
    ) -> Any:
        groups = MeshGroups.for_mesh(part.plan.mesh, device.type, full_duplex=part.plan.full_duplex)
        replication = Replication(
            groups=groups,
            sync=part.plan.sync,
            bad_ids=self.bad_ids,
            tables_beside=tables_beside,
            accumulates=self.accumulates,
            are_frozen=part.are_frozen,
        )
        rank_plan = module_plan_for_rank(
            part.plan, groups.rank, device_type=device.type, local_world_size=local_world_size
        )
        with (
            agreeing(world_group()),
            groups.node_groups(),
            stock_optimizer_classes(part.module, part.plan),
        ):
            sharded = self._make(
                part.module,
                rank_plan,
                replication=replication,
                env=groups.sharding_env(),
                fused_params=part.fused_params,
                device=device,
                qcomm_codecs_registry=self.qcomm_codecs_registry,
                module_fqn=path,
            )
            if self.keep_weights:
                sharded.tables.keep_weights(part.module)
        if self.init_seed is not None:
            draw_tables_(sharded, configs_of(part.module), self.init_seed)
        # Only now that no rank has failed, because this waits for the others.
        sharded.tables.broadcast_replicas()
        if self.init_seed is None:
            sharded.tables.take_drawn_rows(part.module)
        return sharded

    def _make(self, *args: Any, **kwargs: Any) -> Any:
        """Build a sharded module."""
        return cast(Any, self).sharded_module_type(*args, **kwargs)

    def _facts(
        self, path: str, plan: ModulePlan2D, fused_params: list[dict[str, Any]]
    ) -> dict[str, str]:
        """Return the facts that must be equal on all ranks."""
        return {
            "the plan": to_json(
                Plan2D({path: plan}, mesh=plan.mesh, sync=plan.sync, full_duplex=plan.full_duplex)
            ),
            "the sharder's optimizer": repr(
                (self.optimizer, [sorted(of_part.items()) for of_part in fused_params])
            ),
            "bad_ids": self.bad_ids.value,
            "init_seed": str(self.init_seed),
            "accumulates": str(self.accumulates),
        }


def _trained_and_frozen(
    plans: Iterable[ModulePlan2D], frozen: Collection[str]
) -> Iterator[tuple[ModulePlan2D, bool]]:
    """Yield each plan for its trained tables, then for its frozen ones."""
    for plan in plans:
        trained = [name for name in plan if name not in frozen]
        if len(trained) == len(plan):
            yield plan, False
            continue
        if trained:
            yield plan.with_tables({name: plan[name] for name in trained}), False
        yield plan.with_tables({name: plan[name] for name in plan if name in frozen}), True


def _check_holder(holder: nn.Module, name: str, child: nn.Module | None) -> None:
    """Refuse holders with no part to shard; a sharder doesn't see its module's holder."""
    kinds = ShardedModule2D | PartedModule | TablesAndMore
    # TorchRec's pipelines re-register parts of sharded modules.
    if isinstance(child, kinds) and not isinstance(holder, kinds):
        check_holder(holder)


register_module_module_registration_hook(_check_holder)


def _warn_of_idle_hot_sets(plan: ModulePlan2D, configs: list[Any]) -> None:
    """Warn of tables whose hot rows save no bytes.

    TorchRec's output exchange sends one vector per bag, even if all the bag's ids are hot. For
    sequences it sends a vector per id.
    """
    bags = {config.name for config in configs if hasattr(config, "pooling")}
    idle = [
        name
        for part in plan.parts()
        if part.mesh.group_size > 1
        for name, table in part.tables()
        if name in bags and table.hot_set is not None and table.exchange is Exchange.POOLED
    ]
    if idle and dist.get_rank() == 0:
        logger.warning(
            "hot rows of %s save no bytes: TorchRec's output exchange ships every bag; pin the "
            "tables with exchange='nonempty', or, if they are sharded row-wise, exchange='row'",
            ", ".join(idle),
        )


class EmbeddingBagCollectionSharder2D(Sharder2D, EmbeddingBagCollectionSharder):
    """Shards `EmbeddingBagCollection`s by a `Plan2D`.

    Example:
        >>> import torchrec_2dsp as tdsp
        >>> sharder = tdsp.EmbeddingBagCollectionSharder2D(
        ...     optimizer=tdsp.MomentScaledRowWiseAdaGrad(lr=0.02)
        ... )
        >>> "row_wise" in sharder.sharding_types("cpu")
        True
    """

    sharded_module_type = ShardedEmbeddingBagCollection2D  # pyright: ignore
    """The type that `shard` returns."""

    def __init__(
        self,
        optimizer: Optimizer | dict[str, Any] | None = None,
        qcomm_codecs_registry: dict[str, QuantizedCommCodecs] | None = None,
        *,
        fused_params: dict[str, Any] | None = None,
        keep_weights: bool = False,
        bad_ids: BadIds | str = BadIds.RAISE,
        init_seed: int | None = None,
        accumulates: bool = False,
    ) -> None:
        """Choose the optimizer, and how weights and ids are treated.

        Args:
            optimizer: the fused optimizer, this package's or FBGEMM's; you may also give it in
                ``fused_params`` or by ``apply_optimizer_in_backward``, as in TorchRec. A dict is
                taken as ``fused_params``, the first argument of TorchRec's sharders.
            qcomm_codecs_registry: codecs for quantised communication, as in TorchRec.
            fused_params: FBGEMM's parameters, as in TorchRec.
            keep_weights: keep the weights of a module that isn't on the meta device,
                which TorchRec drops.
            bad_ids: how to treat ids that their table has no row for: "raise" an `InputError` on
                all ranks, "drop" them, or "clamp" them to the first or last row.
            init_seed: draw initial tables from this seed, independently of mesh and sharding
                type; by default from the ranks' seeds, as in TorchRec.
            accumulates: let `accumulate` make one update of several batches, and a backward one
                of several lookups, even with a single sharding group or a `WeightSync`, whose
                updates are otherwise part of the backward.
        """
        optimizer, fused_params = sorted_out(optimizer, fused_params)
        EmbeddingBagCollectionSharder.__init__(
            self, stock_params(optimizer, fused_params), qcomm_codecs_registry
        )
        self._init_2d(optimizer, keep_weights, bad_ids, init_seed, accumulates)

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """Return all of TorchRec's types, on every device."""
        return [kind.value for kind in ShardingType]


class EmbeddingCollectionSharder2D(Sharder2D, EmbeddingCollectionSharder):
    """Shards `EmbeddingCollection`s by a `Plan2D`; see `EmbeddingBagCollectionSharder2D`."""

    sharded_module_type = ShardedEmbeddingCollection2D  # pyright: ignore
    """The type that `shard` returns."""

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
        """Choose the optimizer, and how ids are treated.

        Args:
            optimizer: as in `EmbeddingBagCollectionSharder2D`.
            qcomm_codecs_registry: codecs for quantised communication, as in TorchRec.
            use_index_dedup: as in TorchRec, which supports it only on CUDA.
            fused_params: FBGEMM's parameters, as in TorchRec.
            bad_ids: as in `EmbeddingBagCollectionSharder2D`.
            init_seed: as in `EmbeddingBagCollectionSharder2D`; the module's weights are dropped.
            accumulates: as in `EmbeddingBagCollectionSharder2D`.
        """
        optimizer, fused_params = sorted_out(optimizer, fused_params)
        EmbeddingCollectionSharder.__init__(
            self,
            stock_params(optimizer, fused_params),
            qcomm_codecs_registry,
            use_index_dedup,
        )
        # TorchRec keeps them only if the module wasn't built on the meta device.
        self._init_2d(optimizer, init_seed is None, bad_ids, init_seed, accumulates)

    def _make(self, *args: Any, **kwargs: Any) -> ShardedEmbeddingCollection2D:
        """Build a sharded module; raise on a CPU if it would have to find equal ids."""
        if dedups_ids(self) and kwargs["device"].type == "cpu":
            raise UnsupportedError(
                "use_index_dedup=True is for CUDA: FBGEMM finds equal ids by a CUDA kernel; "
                "leave it out"
            )
        return ShardedEmbeddingCollection2D(*args, use_index_dedup=dedups_ids(self), **kwargs)
