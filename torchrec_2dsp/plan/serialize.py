"""`Plan2D` as JSON, for plan files, for comparing the plans of ranks, and for people."""

import json
from pathlib import Path
from typing import Any

from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharding_spec import EnumerableShardingSpec
from torchrec.distributed.types import ModuleShardingPlan
from torchrec.modules.embedding_configs import DataType

from torchrec_2dsp.access.hot_set import HotSet
from torchrec_2dsp.errors import PlanError, UnsupportedError
from torchrec_2dsp.mesh.mesh2d import Mesh2D, RankLayout
from torchrec_2dsp.plan.parameter_sharding import Exchange, ParameterSharding2D, RowOwners
from torchrec_2dsp.plan.plan2d import ModulePlan2D, Plan2D
from torchrec_2dsp.plan.sync_config import GradientSync, SyncConfig, WeightSync
from torchrec_2dsp.plan.sync_policy import parse_policy

SCHEMA_VERSION = 1
_POLICIES = {"policy", "moments_policy"}
_SYNC_CLASSES = {cls.__name__: cls for cls in (GradientSync, WeightSync)}
# What the constructors below raise for values of a wrong type or range.
_MALFORMED = (KeyError, TypeError, ValueError, AttributeError, RuntimeError)
_UNSERIALIZED = ("cache_params", "key_value_params")


def to_json(plan: Plan2D) -> str:
    """The plan as JSON text; equal plans give equal text.

    Example:
        >>> import torchrec_2dsp as tdsp
        >>> plan = tdsp.Plan2D({}, mesh=tdsp.Mesh2D(2, 2), sync=tdsp.GradientSync())
        >>> from torchrec_2dsp.plan.serialize import from_json, to_json
        >>> from_json(to_json(plan)) == plan
        True
    """
    return json.dumps(
        {
            "schema_version": SCHEMA_VERSION,
            "mesh": {
                "num_groups": plan.mesh.num_groups,
                "group_size": plan.mesh.group_size,
                "layout": plan.mesh.layout.value,
            },
            "sync": _sync_to_dict(plan.sync),
            "modules": {
                path: {name: _table_to_dict(name, table) for name, table in module.tables()}
                for path, module in plan.modules()
            },
        },
        indent=1,
        sort_keys=True,
    )


def from_json(text: str) -> Plan2D:
    """The plan that `to_json` wrote; raises `PlanError` for anything else."""
    try:
        plan = _plan_from_dict(json.loads(text))
        plan.validate()
    except PlanError:
        raise
    except _MALFORMED as error:
        raise PlanError(f"not a plan file: {type(error).__name__}: {error}") from error
    return plan


def save(plan: Plan2D, path: str | Path) -> None:
    """Write `to_json` to a file."""
    Path(path).write_text(to_json(plan) + "\n")


def load(path: str | Path) -> Plan2D:
    """Read a file that `save` wrote."""
    try:
        text = Path(path).read_text()
    except UnicodeDecodeError as error:
        raise PlanError(f"{path} is not a plan file: {error}") from error
    return from_json(text)


def _plan_from_dict(data: dict[str, Any]) -> Plan2D:
    version = data["schema_version"]
    if version != SCHEMA_VERSION:
        raise PlanError(
            f"plan file has schema_version={version}; this release reads {SCHEMA_VERSION}"
        )
    shape = data["mesh"]
    mesh = Mesh2D(shape["num_groups"], shape["group_size"], RankLayout(shape["layout"]))
    sync = _sync_from_dict(data["sync"])
    modules: dict[str, ModuleShardingPlan] = {
        path: ModulePlan2D(
            {name: _table_from_dict(table) for name, table in tables.items()},
            mesh=mesh,
            sync=sync,
        )
        for path, tables in data["modules"].items()
    }
    return Plan2D(plan=modules, mesh=mesh, sync=sync)


def _sync_to_dict(sync: SyncConfig) -> dict[str, Any]:
    fields = {
        name: value if isinstance(value, int | float | None) else str(value)
        for name, value in vars(sync).items()
    }
    return {"kind": type(sync).__name__, **fields}


def _sync_from_dict(data: dict[str, Any]) -> SyncConfig:
    data = dict(data)
    kind = _SYNC_CLASSES[data.pop("kind")]
    for name in _POLICIES & set(data):
        data[name] = None if data[name] is None else parse_policy(data[name])
    return kind(**data)


def _table_to_dict(name: str, table: ParameterSharding2D) -> dict[str, Any]:
    for field in _UNSERIALIZED:
        if getattr(table, field) is not None:
            raise UnsupportedError(
                f"table {name!r} has {field}, which a plan file can't hold; set it on the "
                "sharder's fused_params instead"
            )
    spec = table.sharding_spec
    shards = spec.shards if isinstance(spec, EnumerableShardingSpec) else None
    return {
        "sharding_type": table.sharding_type,
        "compute_kernel": table.compute_kernel,
        "ranks": table.ranks,
        "shards": None if shards is None else [_shard_to_dict(shard) for shard in shards],
        "enforce_hbm": table.enforce_hbm,
        "stochastic_rounding": table.stochastic_rounding,
        "bounds_check_mode": _name(table.bounds_check_mode),
        "output_dtype": _name(table.output_dtype),
        "exchange": table.exchange.value,
        "owners": table.owners.value,
        "hot_rows": None if table.hot_set is None else list(table.hot_set.row_ids),
        "num_groups": table.num_groups,
    }


def _table_from_dict(data: dict[str, Any]) -> ParameterSharding2D:
    data = dict(data)
    shards = data.pop("shards")
    hot_rows = data.pop("hot_rows")
    bounds, dtype = data.pop("bounds_check_mode"), data.pop("output_dtype")
    return ParameterSharding2D(
        sharding_spec=None
        if shards is None
        else EnumerableShardingSpec([ShardMetadata(**shard) for shard in shards]),
        hot_set=None if hot_rows is None else HotSet(tuple(hot_rows)),
        bounds_check_mode=None if bounds is None else BoundsCheckMode[bounds],
        output_dtype=None if dtype is None else DataType[dtype],
        exchange=Exchange(data.pop("exchange")),
        # Plan files of before have none.
        owners=RowOwners(data.pop("owners", RowOwners.BLOCK.value)),
        **data,
    )


def _shard_to_dict(shard: ShardMetadata) -> dict[str, Any]:
    return {
        "shard_offsets": list(shard.shard_offsets),
        "shard_sizes": list(shard.shard_sizes),
        "placement": str(shard.placement),
    }


def _name(member: BoundsCheckMode | DataType | None) -> str | None:
    return None if member is None else member.name
