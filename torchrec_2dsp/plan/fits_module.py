"""Checks that the sharders can fully take over a model's embedding collections.

The sharders replace collections and leave the rest of a model on every rank. That fails where
TorchRec wraps a collection in a module that learns from ids, where a table is tied or frozen or
has hooks, and where one collection has two names.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, cast

from torch import nn
from torchrec.distributed.types import (
    EmbeddingModuleShardingPlan,
    ModuleSharder,
    ParameterSharding,
    ShardingPlan,
)
from torchrec.modules.embedding_configs import DataType, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from torchrec.modules.fused_embedding_modules import (
    FusedEmbeddingBagCollection,
    FusedEmbeddingCollection,
)
from torchrec.modules.itep_embedding_modules import (
    ITEPEmbeddingBagCollection,
    ITEPEmbeddingCollection,
)
from torchrec.modules.itep_modules import GenericITEPModule
from torchrec.modules.mc_embedding_modules import (
    BaseManagedCollisionEmbeddingCollection,
    ManagedCollisionEmbeddingBagCollection,
    ManagedCollisionEmbeddingCollection,
)
from torchrec.modules.mc_modules import ManagedCollisionCollection, ManagedCollisionModule

from torchrec_2dsp._compat.id_maps import unequal_on_ranks
from torchrec_2dsp._compat.torchrec import EmbeddingComputeKernel, carried_by
from torchrec_2dsp._compat.wrapped_collections import (
    collection_inside,
    id_maps_of,
    position_weights,
    processors_in,
    table_configs,
    trains_processors,
)
from torchrec_2dsp.access.table_access import HotSet
from torchrec_2dsp.errors import ConfigError, PlanError, UnsupportedError
from torchrec_2dsp.plan.fits_mesh import check_size
from torchrec_2dsp.plan.parameter_sharding import Exchange, ParameterSharding2D, ShardingType2D
from torchrec_2dsp.plan.plan2d import ModulePlan2D, Plan2D, is_proposed
from torchrec_2dsp.plan.sync import GradientSync

COLLECTIONS = (EmbeddingBagCollection, EmbeddingCollection)
"""The modules that the sharders replace."""

FUSED = (FusedEmbeddingBagCollection, FusedEmbeddingCollection)
_PROCESSED = FeatureProcessedEmbeddingBagCollection
_MANAGED = (ManagedCollisionEmbeddingBagCollection, ManagedCollisionEmbeddingCollection)
SHARDED_TYPES = (*COLLECTIONS, *_MANAGED, _PROCESSED)
"""The modules that have a sharder."""

_LEFT_WHOLE = "is_left_whole"
_NO_PLAN: Mapping[str, ParameterSharding] = MappingProxyType({})
_REASONS: dict[type[nn.Module], str] = dict.fromkeys(
    FUSED,
    "updates its tables by an optimizer of its own; use EmbeddingBagCollection or "
    "EmbeddingCollection, and give the optimizer to the sharder",
)
_REASONS |= dict.fromkeys(
    (ITEPEmbeddingBagCollection, ITEPEmbeddingCollection, GenericITEPModule),
    "prunes rows by what each rank has seen; use its collection alone",
)
_REASONS |= dict.fromkeys(
    (ManagedCollisionCollection, ManagedCollisionModule),
    "maps raw ids to rows by what each rank has seen; put it with its tables into a "
    "ManagedCollisionEmbeddingBagCollection or ManagedCollisionEmbeddingCollection of the plan",
)
_LEARNING = (GenericITEPModule, ManagedCollisionCollection, ManagedCollisionModule)
"""Modules that learn from ids, and may hold no collection."""
_REASONS |= {
    BaseManagedCollisionEmbeddingCollection: (
        "maps raw ids to rows by what each rank has seen where its collection alone is sharded; "
        "pass a ManagedCollisionEmbeddingBagCollectionSharder2D or "
        "ManagedCollisionEmbeddingCollectionSharder2D, which get_default_sharders() has"
    ),
    _PROCESSED: (
        "trains feature processors, whose gradients are lost where its collection alone is "
        "sharded; pass a FeatureProcessedEmbeddingBagCollectionSharder2D, which "
        "get_default_sharders() has, or freeze the processors with requires_grad_(False)"
    ),
}
_LEAVABLE = tuple(kind for kind in _REASONS if kind not in FUSED)


def leave_whole(*modules: nn.Module) -> None:
    """Leave modules on each rank as they are, though they would be refused for learning from ids.

    Call it on all ranks, before planning. From then on only parameters are kept equal::

        tdsp.leave_whole(model.id_maps.eval())
    """
    for module in modules:
        if not isinstance(module, _LEAVABLE):
            raise ConfigError(
                f"leave_whole() got a {type(module).__name__}, which isn't refused for what it "
                "learns from ids; give it modules that are"
            )
        setattr(module, _LEFT_WHOLE, True)


def is_left_whole(module: nn.Module) -> bool:
    """Return whether `leave_whole` was called with a module."""
    return hasattr(module, _LEFT_WHOLE)


def check_model(model: nn.Module, paths: Iterable[str] | None = None) -> None:
    """Raise `UnsupportedError` for the first module that can't be sharded as a whole.

    The modules at ``paths`` are sharded, all of them by default.
    """
    chosen = None if paths is None else set(paths)
    unsharded = {part for top in filter(is_left_whole, model.modules()) for part in top.modules()}
    for path in chosen or ():
        if not unsharded.isdisjoint(model.get_submodule(path).modules()):
            raise UnsupportedError(f"the plan shards {path!r}, given to leave_whole(); plan anew")

    def of_kind(kind: Any) -> dict[nn.Module, str]:
        return {
            module: path
            for path, module in model.named_modules()
            if isinstance(module, kind) and module not in unsharded
            if chosen is None or path in chosen
        }

    sharded, managed, processed = map(of_kind, (COLLECTIONS, _MANAGED, _PROCESSED))
    for module, path in managed.items():
        check_managed(module, path)
        sharded[collection_inside(module)] = path
    for module, path in processed.items():
        check_processed(module, path)
        sharded[collection_inside(module)] = path
    checked = unsharded.union(*(module.modules() for module in (*managed, *processed)))
    replaced = {*sharded, *managed, *processed}
    for path, module in model.named_modules():
        if module in checked and not isinstance(module, FUSED):
            continue
        is_alone = isinstance(module, (*FUSED, *_LEARNING))
        if is_alone or not replaced.isdisjoint(module.children()):
            check_holder(module, path)
    _check_carried(*sharded)
    _check_tied(model, sharded)


def check_holder(holder: nn.Module, path: str | None = None) -> None:
    """Raise `UnsupportedError` unless sharded collections can replace a module's children."""
    kind_name = type(holder).__name__
    for kind, reason in _REASONS.items():
        if isinstance(holder, kind) and (kind is not _PROCESSED or trains_processors(holder)):
            subject = "the model has" if path is None else f"module {path!r} is"
            raise UnsupportedError(
                f"{subject} a {kind_name}, which {reason}"
                + ("; or leave it whole on each rank by leave_whole(module)" * (kind in _LEAVABLE))
            )
    first_names: dict[nn.Module, str] = {}
    for name, child in holder.named_modules(remove_duplicate=False):
        is_sharded = isinstance(child, SHARDED_TYPES)
        if "." in name or child is holder or not is_sharded:
            continue
        if child in first_names:
            raise UnsupportedError(
                f"{kind_name if path is None else f'module {path!r}'} has one collection under two "
                f"names, {first_names[child]!r} and {name!r}, of which TorchRec shards the first "
                "only; keep one of the names"
            )
        first_names[child] = name
    for name, child in holder.named_children():
        if isinstance(child, _LEARNING) and not is_left_whole(child):
            check_holder(child, None if path is None else f"{path}.{name}")


def check_managed(module: Any, path: str, plan: Mapping[str, ParameterSharding] = _NO_PLAN) -> None:
    """Raise `UnsupportedError` unless id maps stay equal on all ranks and the plan suits them."""
    _check_carried(module, collection_inside(module))
    configs = {config.name: config for config in table_configs(module)}
    users = Counter(feature for config in configs.values() for feature in config.feature_names)
    maps = id_maps_of(module)
    if len(set(maps.values())) < len(maps):
        raise UnsupportedError(
            f"tables of module {path!r} share a managed collision module; give each its own"
        )
    for name, id_map in maps.items():
        reason = unequal_on_ranks(id_map, configs[name])
        if reason is not None:
            raise UnsupportedError(
                f"the managed collision module of table {name!r} in module {path!r} {reason}; use "
                "MCHManagedCollisionModule with LFU, LRU or DistanceLFU, and another filter if "
                "any, or HashZchManagedCollisionModule without this"
            )
    if frozen := frozen_tables(collection_inside(module)):
        raise UnsupportedError(
            f"table {frozen[0]!r} of module {path!r} has requires_grad=False, but managed "
            "collisions, which give its rows to other ids; let it be trained"
        )
    shared = [feature for feature, count in users.items() if count > 1]
    if shared:
        raise UnsupportedError(
            f"feature {shared[0]!r} looks up several tables of module {path!r}, or one twice, "
            "which TorchRec's managed collisions don't map apart; give each lookup a feature of "
            "its own"
        )
    sync = getattr(plan, "sync", None)
    if isinstance(sync, GradientSync) and sync.delay:
        raise UnsupportedError(
            f"module {path!r} has managed collisions, whose rows begin anew at times, but "
            f"GradientSync(delay={sync.delay}) updates rows later; leave the delay out"
        )


_MAX_SLOTS = 2**24
"""Position weights travel by slot number, as float32."""


def check_processed(module: Any, path: str) -> None:
    """Raise `UnsupportedError` unless feature processors can be trained or are frozen."""
    _check_carried(module, collection_inside(module))
    weights = position_weights(processors_in(module))
    if weights is None and not trains_processors(module):
        return
    if weights is None:
        raise UnsupportedError(
            f"module {path!r} trains feature processors that aren't position weights; use "
            "PositionWeightedModule or PositionWeightedModuleCollection, freeze the processors by "
            "requires_grad_(False), or leave the module whole on each rank by leave_whole(module)"
        )
    if sum(map(len, weights.values())) >= _MAX_SLOTS:
        raise UnsupportedError(
            f"module {path!r} has {sum(map(len, weights.values()))} position weights, of which "
            f"less than {_MAX_SLOTS} can be told apart; give a smaller max_feature_length"
        )
    if not trains_processors(module):
        return
    if frozen := frozen_tables(collection_inside(module)):
        raise UnsupportedError(
            f"table {frozen[0]!r} of module {path!r} has requires_grad=False, but trained position "
            "weights, whose gradients need a trained table's lookup; freeze the feature processors "
            "or train the table"
        )


def frozen_tables(collection: nn.Module) -> list[str]:
    """Return the names of a collection's frozen tables."""
    return [name for name, table in _tables_of(collection) if not table.weight.requires_grad]


def sharded_parts(
    module: nn.Module,
    sharders: Mapping[type, ModuleSharder[nn.Module]],
    path: str = "",
    visited: set[nn.Module] | None = None,
) -> Iterator[tuple[str, nn.Module, ModuleSharder[nn.Module]]]:
    """Yield modules that have a sharder, without looking inside them or inside those left whole.

    A module that several parents share has its first parent's path, as in TorchRec.
    """
    visited = set() if visited is None else visited
    if module in visited or is_left_whole(module):
        return
    visited.add(module)
    sharder = sharders.get(type(module))
    if sharder is not None:
        yield path, module, sharder
        return
    for name, child in module.named_children():
        yield from sharded_parts(child, sharders, f"{path}.{name}" if path else name, visited)


def check_alone(collection: nn.Module) -> None:
    """Raise `UnsupportedError` if a collection has hooks, or its tables share a parameter."""
    _check_carried(collection)
    _check_tied(collection, [collection])


def _check_carried(*replaced: nn.Module) -> None:
    for module in replaced:
        parts = {type(module).__name__: module}
        if isinstance(module, COLLECTIONS):
            parts |= {f"table {name!r}": table for name, table in _tables_of(module)}
        for subject, part in parts.items():
            if carried := carried_by(part):
                raise UnsupportedError(
                    f"{subject} has {carried}, which sharding drops; put what it does to ids or "
                    "outputs into a module around the collection"
                )


def _check_tied(model: nn.Module, sharded: Iterable[nn.Module]) -> None:
    owners: dict[int, str] = {}
    sharded_tables = {
        id(table.weight): name for module in sharded for name, table in _tables_of(module)
    }
    for path, module in model.named_modules():
        for name, param in module.named_parameters(recurse=False, remove_duplicate=False):
            if id(param) not in sharded_tables:
                continue
            owner = f"{path}.{name}"
            if id(param) in owners:
                raise UnsupportedError(
                    f"the parameters {owners[id(param)]!r} and {owner!r} are tied, which sharding "
                    "undoes; use one table with the features of both, or untie them"
                )
            owners[id(param)] = owner


def _tables_of(collection: Any) -> Iterator[tuple[str, Any]]:
    is_bags = isinstance(collection, EmbeddingBagCollection)
    yield from (collection.embedding_bags if is_bags else collection.embeddings).items()


_COLUMNS_AT_A_TIME = 4
"""The number of columns that FBGEMM's kernels work on at a time."""


def check_tables(model: nn.Module) -> None:
    """Raise an error for the first table of ``model`` that `check_table_configs` refuses."""
    for path, module in model.named_modules():
        check_table_configs(path, configs_of(module), is_weighted=has_weights(module))


def configs_of(module: Any) -> list[Any]:
    """Return an unsharded module's table configs; none if it has no tables itself."""
    if hasattr(module, "embedding_bag_configs"):
        return module.embedding_bag_configs()
    return module.embedding_configs() if hasattr(module, "embedding_configs") else []


def has_weights(module: Any) -> bool:
    """Return whether an embedding module's lookups are weighted; sequences have no weights."""
    return bool(getattr(module, "is_weighted", bool)())


def check_table_configs(path: str, configs: Iterable[Any], *, is_weighted: bool = False) -> None:
    """Raise an error for the first table that no kernel can hold or that can't be pooled."""
    for config in configs:
        if is_weighted and getattr(config, "pooling", None) is PoolingType.MEAN:
            raise UnsupportedError(
                f"table {config.name!r} averages weighted bags, which TorchRec's sharding types "
                "define differently, and its unsharded module not at all; use SUM pooling, and "
                "divide the weights where you need a mean"
            )
        where = f"table {config.name!r} of module {path!r}"
        if config.data_type not in (DataType.FP32, DataType.FP16, DataType.BF16):
            raise UnsupportedError(
                f"{where} has data_type={config.data_type!r}, which can't be trained; use FP32, "
                "FP16 or BF16, or plan it with stored_as='int8'"
            )
        if config.use_virtual_table:
            raise UnsupportedError(
                f"{where} has use_virtual_table=True, for key-value kernels, whose replicas can't "
                "be synced; leave it out, or map ids to rows by managed collisions"
            )
        if config.num_embeddings_post_pruning not in (None, config.num_embeddings):
            raise UnsupportedError(
                f"{where} has num_embeddings_post_pruning={config.num_embeddings_post_pruning}, "
                "which is for inference; leave it out to train all rows"
            )
        if config.num_embeddings < 1:
            raise PlanError(f"{where} has {config.num_embeddings} rows; give it at least one")
        if config.embedding_dim < 1 or config.embedding_dim % _COLUMNS_AT_A_TIME:
            rounded = -(-max(config.embedding_dim, 1) // _COLUMNS_AT_A_TIME) * _COLUMNS_AT_A_TIME
            raise PlanError(
                f"{where} has embedding_dim={config.embedding_dim}; FBGEMM's kernels need a "
                f"multiple of {_COLUMNS_AT_A_TIME}, such as {rounded}"
            )


def table_text(config: Any) -> str:
    """Return, as text, the part of a table's config that must be equal on all ranks.

    Example:
        >>> from torchrec.modules.embedding_configs import EmbeddingConfig
        >>> from torchrec_2dsp.plan.fits_module import table_text
        >>> table_text(
        ...     EmbeddingConfig(name="t", num_embeddings=9, embedding_dim=8, feature_names=["f"])
        ... )
        "9 x 8 FP32, a sequence of ['f']"
    """
    pooling = getattr(config, "pooling", None)
    return (
        f"{config.num_embeddings} x {config.embedding_dim} {config.data_type.value}, "
        f"{'a sequence' if pooling is None else pooling.value} of {config.feature_names}"
    )


def check_module_plan(
    path: str,
    plan: Mapping[str, ParameterSharding],
    configs: list[Any],
    *,
    is_weighted: bool,
    local_world_size: int,
) -> ModulePlan2D:
    """Return ``plan`` as a `ModulePlan2D`, or raise an error that names the mismatch."""
    check_table_configs(path, configs, is_weighted=is_weighted)
    plan = _as_2d(path, plan)
    names = {config.name for config in configs}
    missing, unknown = sorted(names - set(plan)), sorted(set(plan) - names)
    if missing or unknown:
        raise PlanError(
            f"the plan of module {path!r} doesn't fit its tables: "
            + "; ".join(
                f"{what} {', '.join(tables)}"
                for what, tables in (("missing", missing), ("unknown", unknown))
                if tables
            )
        )
    for part in plan.parts():
        node_size = part.mesh.node_group_size(local_world_size)
        for name, table in part.tables():
            _check_table(name, table, part, node_size)
    for config in configs:
        check_size(plan[config.name], config)
        _check_sequence(plan[config.name], config)
    _check_hot_sets(path, plan, configs)
    return plan


def _as_2d(path: str, plan: Mapping[str, ParameterSharding]) -> ModulePlan2D:
    """Convert a stock plan that this package's proposers chose."""
    if isinstance(plan, ModulePlan2D):
        return plan
    stock = ShardingPlan({path: EmbeddingModuleShardingPlan(plan)})
    if not is_proposed(stock):
        raise ConfigError(
            f"module {path!r} has a stock plan; pass Planner2D's, or Plan2D.from_stock(plan, "
            "mesh=Mesh2D.for_world(...))"
        )
    return cast(ModulePlan2D, Plan2D.from_stock(stock).plan[path])


_DENSE_KERNELS = (EmbeddingComputeKernel.DENSE.value,)
_KERNELS = (EmbeddingComputeKernel.FUSED.value, EmbeddingComputeKernel.FUSED_UVM.value)


def _check_table(name: str, table: ParameterSharding2D, plan: ModulePlan2D, node_size: int) -> None:
    kind = ShardingType2D(table.sharding_type)
    kernels = _KERNELS if kind is not ShardingType2D.DATA_PARALLEL else _DENSE_KERNELS
    if table.compute_kernel not in kernels:
        raise UnsupportedError(
            f"table {name!r} ({kind.value}) has compute_kernel={table.compute_kernel!r}; replicas "
            "of cached or key-value tables can't be synced yet: constrain it to "
            + " or ".join(map(repr, kernels))
        )
    shards = getattr(table.sharding_spec, "shards", None) or []
    fits_hosts = {
        ShardingType2D.TABLE_ROW_WISE: len(shards) == node_size,
        ShardingType2D.GRID_SHARD: len(shards) % node_size == 0,
    }
    if not fits_hosts.get(kind, True):
        raise PlanError(
            f"table {name!r} ({kind.value}) has {len(shards)} shards, but a sharding group of "
            f"{plan.mesh} has {node_size} ranks per host; plan it with local_world_size={node_size}"
        )
    firsts = shards[::node_size] if kind in fits_hosts else []
    first_ranks = [shard.placement.rank() for shard in firsts]
    if any(rank % node_size for rank in first_ranks):
        raise PlanError(
            f"table {name!r} ({kind.value}) has rows from ranks {first_ranks} on, and hosts begin "
            f"at multiples of {node_size} in a sharding group of {plan.mesh}; plan it again"
        )


def _check_hot_sets(path: str, plan: ModulePlan2D, configs: list[Any]) -> None:
    users = Counter(feature for config in configs for feature in config.feature_names)
    for config in configs:
        hot_set: HotSet | None = plan[config.name].hot_set  # type: ignore[attr-defined]
        if hot_set is None:
            continue
        where = f"{path}.{config.name}" if path else config.name
        hot_set.check_fits(where, config.num_embeddings)
        shared = [feature for feature in config.feature_names if users[feature] > 1]
        if shared:
            is_twice = config.feature_names.count(shared[0]) > 1
            tables = "one table twice, and it" if is_twice else "several tables, one of which"
            raise UnsupportedError(
                f"feature {shared[0]!r} looks up {tables} ({config.name!r}) has hot rows; remove "
                "its hot set or give each lookup a feature of its own"
            )


def _check_sequence(table: Any, config: Any) -> None:
    if not hasattr(config, "pooling") and table.exchange is Exchange.NONEMPTY:
        raise UnsupportedError(
            f"table {config.name!r} has exchange='nonempty', which is for bags, and belongs to "
            "an EmbeddingCollection; a sequence has no empty bags to leave out"
        )
