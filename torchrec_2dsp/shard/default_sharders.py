"""Sharders for collections behind id maps or feature processors; one for each kind of module."""

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.fp_embeddingbag import FeatureProcessedEmbeddingBagCollectionSharder
from torchrec.distributed.mc_embedding_modules import (
    BaseManagedCollisionEmbeddingCollectionSharder,
)
from torchrec.distributed.mc_modules import ManagedCollisionCollectionSharder
from torchrec.distributed.types import ModuleSharder, ParameterSharding, ShardingPlan
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from torchrec.modules.mc_embedding_modules import (
    ManagedCollisionEmbeddingBagCollection,
    ManagedCollisionEmbeddingCollection,
)

from torchrec_2dsp._compat.id_maps import id_map_of
from torchrec_2dsp._compat.wrapped_collections import (
    collection_inside,
    id_maps_of,
    processors_in,
    trains_processors,
)
from torchrec_2dsp.access.table_access import HotSet
from torchrec_2dsp.comms.alarm import agreeing
from torchrec_2dsp.comms.groups import world_group
from torchrec_2dsp.errors import ConfigError, PlanError
from torchrec_2dsp.plan.fits_module import check_managed, check_model, check_processed
from torchrec_2dsp.plan.plan2d import ModulePlan2D, Plan2D, as_plan_2d
from torchrec_2dsp.shard.managed_collisions import ShardedManagedCollisions2D
from torchrec_2dsp.shard.position_weights import ShardedFeatureProcessors2D
from torchrec_2dsp.shard.sharders import (
    EmbeddingBagCollectionSharder2D,
    EmbeddingCollectionSharder2D,
)


class _ManagedCollisionSharder2D(BaseManagedCollisionEmbeddingCollectionSharder[Any]):
    """The base class of sharders for collections behind id maps."""

    sharded_module_type = ShardedManagedCollisions2D
    """The type that `shard` returns."""

    def __init__(
        self, tables: "EmbeddingBagCollectionSharder2D | EmbeddingCollectionSharder2D", resets: bool
    ) -> None:
        super().__init__(tables, ManagedCollisionCollectionSharder())
        self.tables = tables
        """The sharder of the inner collection."""
        self.optimizer = tables.optimizer
        """The tables' optimizer."""
        self.resets = resets
        """True if evicted rows are reset for their new ids."""

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """Return all sharding types that the tables support."""
        return self.tables.sharding_types(compute_device_type)

    def compute_kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:
        """Return all compute kernels that the tables support."""
        return self.tables.compute_kernels(sharding_type, compute_device_type)

    def shard(  # pyright: ignore[reportIncompatibleVariableOverride]
        self,
        module: Any,
        params: dict[str, ParameterSharding],
        env: Any,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> ShardedManagedCollisions2D:
        """Shard a module for `DistributedModelParallel`; the plan's mesh replaces ``env``.

        Collectives:
            All ranks agree on the id maps; then the tables' sharder's, and the creation
            of a group.
        """
        device = torch.device("cpu") if device is None else device
        path = module_fqn or ""
        with agreeing(world_group()) as facts:
            check_managed(module, path, params)
            maps = {name: id_map_of(of_table) for name, of_table in id_maps_of(module).items()}
            facts |= {f"the id map of table {name!r}": maps[name].described() for name in maps}
            facts["reset_evicted_rows"] = str(self.resets)
            params, hot_ids = _without_hot_ids(params)
            facts["the hot ids"] = str(sorted(hot_ids.items()))
        sharded = self.tables.shard(collection_inside(module), params, env, device, module_fqn)
        return ShardedManagedCollisions2D(
            module,
            sharded,
            device,
            hot_ids=hot_ids,
            resets=self.resets,
            init_seed=self.tables.init_seed or 0,
        )


def _without_hot_ids(plan: Any) -> tuple[Any, dict[str, HotSet]]:
    """Return the plan with as many placeholder rows in place of hot ids, and these ids."""
    if not isinstance(plan, ModulePlan2D):
        return plan, {}
    hot_ids = {name: table.hot_set for name, table in plan.tables() if table.hot_set is not None}
    rows = {
        name: replace(table, hot_set=HotSet.of(range(len(hot_ids[name]))))
        for name, table in plan.tables()
        if name in hot_ids
    }
    return plan.with_tables({**plan, **rows}), hot_ids


class ManagedCollisionEmbeddingBagCollectionSharder2D(_ManagedCollisionSharder2D):
    """Shards `ManagedCollisionEmbeddingBagCollection`s, with one id map for the whole world."""

    module_type = ManagedCollisionEmbeddingBagCollection  # pyright: ignore
    """The modules that `shard` takes."""

    def __init__(
        self,
        ebc_sharder: EmbeddingBagCollectionSharder2D | None = None,
        *,
        reset_evicted_rows: bool = True,
    ) -> None:
        """Choose the tables' sharder, and how evicted rows are treated.

        Args:
            ebc_sharder: the sharder of the inner collection.
            reset_evicted_rows: reset a row when it gets another id, as TorchRec's sharded
                module does, to initial values without moments. Otherwise the new id continues with
                the evicted id's row, as in TorchRec's unsharded module.
        """
        super().__init__(ebc_sharder or EmbeddingBagCollectionSharder2D(), reset_evicted_rows)


class ManagedCollisionEmbeddingCollectionSharder2D(_ManagedCollisionSharder2D):
    """Shards `ManagedCollisionEmbeddingCollection`s, with one id map for the whole world."""

    module_type = ManagedCollisionEmbeddingCollection  # pyright: ignore
    """The modules that `shard` takes."""

    def __init__(
        self,
        ec_sharder: EmbeddingCollectionSharder2D | None = None,
        *,
        reset_evicted_rows: bool = True,
    ) -> None:
        """Choose the tables' sharder, and how evicted rows are treated.

        Args:
            ec_sharder: the sharder of the inner collection.
            reset_evicted_rows: as in `ManagedCollisionEmbeddingBagCollectionSharder2D`.
        """
        super().__init__(ec_sharder or EmbeddingCollectionSharder2D(), reset_evicted_rows)


class FeatureProcessedEmbeddingBagCollectionSharder2D(
    FeatureProcessedEmbeddingBagCollectionSharder
):
    """Shards `FeatureProcessedEmbeddingBagCollection`s, and trains their position weights."""

    sharded_module_type = ShardedFeatureProcessors2D  # pyright: ignore
    """The type that `shard` returns."""

    def __init__(self, ebc_sharder: EmbeddingBagCollectionSharder2D | None = None) -> None:
        """Choose the inner collection's sharder."""
        self.tables = ebc_sharder or EmbeddingBagCollectionSharder2D()
        """The sharder of the inner collection."""
        self.optimizer = self.tables.optimizer
        """The tables' optimizer; the dense part's trains position weights."""
        super().__init__(self.tables, self.tables.qcomm_codecs_registry)

    def shard(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        module: FeatureProcessedEmbeddingBagCollection,
        params: dict[str, ParameterSharding],
        env: Any,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> ShardedFeatureProcessors2D:
        """Shard a module for `DistributedModelParallel`; the plan's mesh replaces ``env``.

        Collectives:
            All ranks agree on the feature processors; then the tables' sharder's, and a
            broadcast of each processor's parameters and buffers.
        """
        device = torch.device("cpu") if device is None else device
        with agreeing(world_group()) as facts:
            check_processed(module, module_fqn or "")
            weights = processors_in(module).named_parameters()
            facts["the kind of feature processors"] = str(
                [(name, list(weight.shape), weight.requires_grad) for name, weight in weights]
            )
        tables = copy.copy(self.tables)
        # The weights' gradients need a lookup's rows as they were.
        tables.accumulates |= trains_processors(module)
        sharded = tables.shard(collection_inside(module), params, env, device, module_fqn)
        processed = ShardedFeatureProcessors2D(module, sharded, device)
        processed.broadcast_processors()
        return processed


def all_sharders(
    bags: EmbeddingBagCollectionSharder2D, sequences: EmbeddingCollectionSharder2D
) -> list[ModuleSharder[Any]]:
    """Return one sharder per kind of module, all based on the given two."""
    return [
        bags,
        sequences,
        FeatureProcessedEmbeddingBagCollectionSharder2D(bags),
        ManagedCollisionEmbeddingBagCollectionSharder2D(bags),
        ManagedCollisionEmbeddingCollectionSharder2D(sequences),
    ]


def get_default_sharders() -> list[ModuleSharder[Any]]:
    """Return one sharder per kind of module, with TorchRec's defaults.

    TorchRec's function of this name also has sharders for kinds that this package doesn't support.
    """
    return all_sharders(EmbeddingBagCollectionSharder2D(), EmbeddingCollectionSharder2D())


def described(sharder: ModuleSharder[Any]) -> str:
    """Return a text that is equal on all ranks if the sharders are."""
    params = getattr(sharder, "fused_params", None) or {}
    optimizer = getattr(sharder, "optimizer", None)
    return f"{type(sharder).__name__}({optimizer!r}, {sorted(params.items())!r})"


def checked_model_plan(
    module: nn.Module,
    plan: ShardingPlan | None,
    sharders: Sequence[ModuleSharder[Any]],
) -> Plan2D:
    """Return the plan if it fits module, world and sharders."""
    plan = as_plan_2d(plan)
    plan.mesh.check_world(dist.get_world_size())
    plan.validate()
    by_type = {sharder.module_type: sharder for sharder in sharders}
    own_kinds = tuple(type(sharder) for sharder in get_default_sharders())
    for path, _ in plan.modules():
        try:
            part = module.get_submodule(path)
        except AttributeError:
            raise PlanError(
                f"the plan names module {path!r}, which the model doesn't have; make the plan "
                "for this model"
            ) from None
        sharder = by_type.get(type(part))
        if not isinstance(sharder, own_kinds):
            raise ConfigError(
                f"module {path!r} ({type(part).__name__}) is in the plan, but its sharder is "
                f"{type(sharder).__name__}; pass one of "
                + ", ".join(kind.__name__ for kind in own_kinds)
            )
    check_model(module, [path for path, _ in plan.modules()])
    return plan
