"""`Plan2D` as JSON, for plan files, for comparing plans between ranks, and for people."""

import enum
import hashlib
import json
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn, TypeVar

from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharding_spec import EnumerableShardingSpec
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.modules.embedding_configs import DataType

from torchrec_2dsp.access.table_access import HotSet
from torchrec_2dsp.codecs.rows import Transport
from torchrec_2dsp.errors import PlanError, UnsupportedError
from torchrec_2dsp.mesh import Mesh2D, RankLayout
from torchrec_2dsp.plan.parameter_sharding import (
    Exchange,
    ParameterSharding2D,
    Pipeline,
    RowOwners,
    RowStorage,
    ShardingType2D,
)
from torchrec_2dsp.plan.plan2d import Plan2D
from torchrec_2dsp.plan.sync import GradientSync, SyncConfig, WeightSync, parse_policy

_MAX_RANKS = 2**31 - 1
_MAX_ROWS = 2**63 - 1
_Named = TypeVar("_Named", BoundsCheckMode, DataType)


def _by_name(kind: type[_Named]) -> BeforeValidator:
    """Accept member names for one of TorchRec's enums."""

    def member(name: Any) -> _Named | None:
        if name is not None and name not in kind.__members__:
            raise ValueError(f"{name!r} is none of {', '.join(kind.__members__)}")
        return None if name is None else kind[name]

    return BeforeValidator(member)


_Rank = Annotated[int, Field(ge=0, lt=_MAX_RANKS)]
_Pair = Annotated[
    list[Annotated[int, Field(ge=0, le=_MAX_ROWS)]], Field(min_length=2, max_length=2)
]
# A `Literal` would accept True and 1.0 as 1.
_One = Annotated[int, Field(ge=1, le=1)]
_ByValue = Field(strict=False)


class _Record(BaseModel):
    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        arbitrary_types_allowed=True,
    )


class ShardRecord(_Record):
    """A table shard."""

    shard_offsets: _Pair
    shard_sizes: _Pair
    placement: str


class TableRecord(_Record):
    """One table's sharding."""

    sharding_type: Annotated[ShardingType2D, _ByValue]
    compute_kernel: Annotated[EmbeddingComputeKernel, _ByValue]
    ranks: Annotated[list[_Rank], Field(min_length=1)]
    shards: list[ShardRecord] | None
    # Fields of TorchRec and FBGEMM, under their own names.
    enforce_hbm: bool | None = None
    stochastic_rounding: bool | None = None
    bounds_check_mode: Annotated[BoundsCheckMode | None, _by_name(BoundsCheckMode)]
    output_dtype: Annotated[DataType | None, _by_name(DataType)]
    exchange: Annotated[Exchange, _ByValue]
    owners: Annotated[RowOwners, _ByValue] = RowOwners.BLOCK
    hot_rows: Annotated[list[int], Field(min_length=1)] | None
    transport: Annotated[Transport, _ByValue] = Transport.FP32
    stored_as: Annotated[RowStorage, _ByValue] = RowStorage.PLAIN
    num_groups: _One | None = None


_SAME_FIELDS = [name for name in TableRecord.model_fields if name not in ("shards", "hot_rows")]
"""The fields that `ParameterSharding2D` has, too."""


class MeshRecord(_Record):
    """The mesh that repeats the plan."""

    num_groups: int = Field(ge=1, le=_MAX_RANKS)
    group_size: int = Field(ge=1, le=_MAX_RANKS)
    layout: Annotated[RankLayout, _ByValue]


class GradientSyncRecord(_Record):
    """A `GradientSync` in a plan file."""

    kind: Literal["GradientSync"]
    transport: str = "fp32"
    delay: int = 0
    drift_every: int = 0


class WeightSyncRecord(_Record):
    """A `WeightSync` in a plan file."""

    kind: Literal["WeightSync"]
    policy: str = "every(1)"
    moments_policy: str | None = None
    rows: str = "touched"
    transport: str = "fp32"
    drift_every: int = 0
    dense_above: float | None = None


class PlanRecord(_Record):
    """A plan file's content."""

    schema_version: _One
    checksum: str | None = None
    mesh: MeshRecord
    sync: Annotated[GradientSyncRecord | WeightSyncRecord, Field(discriminator="kind")]
    # Files of earlier releases have neither field.
    pipeline: Annotated[Pipeline, _ByValue] = Pipeline.SPARSE_DIST
    full_duplex: bool = False
    modules: Annotated[
        dict[str, Annotated[dict[str, TableRecord], Field(min_length=1)]], Field(min_length=1)
    ]


SCHEMA_VERSION = 1
# The errors that the constructors below raise for values of a wrong type or range.
_MALFORMED = (KeyError, TypeError, ValueError, AttributeError, RuntimeError)
_UNSERIALIZED = ("cache_params", "key_value_params")


def to_json(plan: Plan2D) -> str:
    """Encode the plan as JSON; equal plans give equal text."""
    return json.dumps(
        {
            "schema_version": SCHEMA_VERSION,
            "mesh": {name: _plain(value) for name, value in vars(plan.mesh).items()},
            "sync": _sync_to_dict(plan.sync),
            "pipeline": plan.pipeline.value,
            "full_duplex": plan.full_duplex,
            "modules": {
                path: {name: _table_to_dict(name, table) for name, table in module.tables()}
                for path, module in plan.modules()
            },
        },
        indent=1,
        sort_keys=True,
    )


def from_json(text: str) -> Plan2D:
    """Decode a plan that `to_json`, `save` or a person wrote.

    Raises:
        PlanError: the text is anything else; the message names the place. A ``checksum``, which
            `save` writes, must be right if there is one.
    """
    try:
        data = json.loads(text, object_pairs_hook=_without_repeats, parse_constant=_no_constant)
        return _plan_of(_record_of(data))
    except PlanError as error:
        raise PlanError(f"not a plan file: {error}") from error
    except _MALFORMED as error:
        raise PlanError(
            f"not a plan file: {type(error).__name__}: {error}; write plans with "
            "torchrec_2dsp.plan.serialize.save"
        ) from error


def save(plan: Plan2D, path: str | Path) -> None:
    """Write `to_json` and a checksum to a file.

    Remove the checksum when you edit the file by hand.
    """
    data = json.loads(to_json(plan))
    _record_of(data)
    checked = {"checksum": _checksum(data), **data}
    Path(path).write_text(json.dumps(checked, indent=1, sort_keys=True) + "\n")


def load(path: str | Path) -> Plan2D:
    """Read a file that `save` wrote, or raise a `PlanError` that names it."""
    try:
        text = Path(path).read_text()
    except OSError as error:
        raise PlanError(f"{path} can't be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise PlanError(f"{path} is not a plan file: {error}") from error
    try:
        return from_json(text)
    except PlanError as error:
        raise PlanError(f"{path}: {error}") from error


def _record_of(data: Any) -> PlanRecord:
    if isinstance(data, dict):
        version = data.get("schema_version")
        if type(version) is int and version != SCHEMA_VERSION:
            raise PlanError(
                f"it has schema_version={version}; this release reads {SCHEMA_VERSION}, so plan "
                "again, or use the release that wrote it"
            )
    try:
        record = PlanRecord.model_validate(data)
    except ValidationError as error:
        wrong = error.errors()[0]
        where = ".".join(str(part) for part in wrong["loc"]) or "all of it"
        raise PlanError(
            f"{where}: {wrong['msg']}; mend it there, or write plans with "
            "torchrec_2dsp.plan.serialize.save"
        ) from error
    if record.checksum is not None:
        content = {key: value for key, value in data.items() if key != "checksum"}
        if record.checksum != _checksum(content):
            raise PlanError(
                "checksum: it is not that of the plan, so the file was damaged or edited; plan "
                "again, or remove the line if you edited it by hand"
            )
    return record


def _checksum(data: dict[str, Any]) -> str:
    """Return the checksum of a plan's JSON, independent of its layout."""
    canonical = json.dumps(data, sort_keys=True, separators=(",", ":"))
    return f"sha256:{hashlib.sha256(canonical.encode()).hexdigest()}"


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build a JSON object, or raise if a key occurs twice."""
    keys = Counter(key for key, _ in pairs)
    if len(keys) < len(pairs):
        key = next(key for key, count in keys.items() if count > 1)
        raise PlanError(f"{key!r} is there twice in one object; remove one of the two")
    return dict(pairs)


def _no_constant(name: str) -> NoReturn:
    raise PlanError(f"{name} is no number of a plan; write a finite one")


def _plan_of(record: PlanRecord) -> Plan2D:
    mesh = Mesh2D(**dict(record.mesh))
    plan = Plan2D({}, mesh, _sync_of(record.sync), record.pipeline, record.full_duplex)
    return plan.with_tables(
        {
            path: {
                name: _table_of(f"modules.{path}.{name}", table) for name, table in tables.items()
            }
            for path, tables in record.modules.items()
        }
    )


def _sync_to_dict(sync: SyncConfig) -> dict[str, Any]:
    fields = {
        name: value if isinstance(value, int | float | None) else str(value)
        for name, value in vars(sync).items()
    }
    return {"kind": type(sync).__name__, **fields}


def _sync_of(record: GradientSyncRecord | WeightSyncRecord) -> SyncConfig:
    values = record.model_dump(exclude={"kind"})
    try:
        if isinstance(record, GradientSyncRecord):
            return GradientSync(**values)
        for name in ("policy", "moments_policy"):
            if values[name] is not None:
                values[name] = parse_policy(values[name])
        return WeightSync(**values)
    except (ValueError, RecursionError) as error:
        raise PlanError(f"sync: {error}") from error


def _table_to_dict(name: str, table: ParameterSharding2D) -> dict[str, Any]:
    for field in _UNSERIALIZED:
        if getattr(table, field) is not None:
            raise UnsupportedError(
                f"table {name!r} has {field}, which a plan file can't hold; set it on the "
                "sharder's fused_params instead"
            )
    spec = table.sharding_spec
    shards = None
    if isinstance(spec, EnumerableShardingSpec):
        shards = [asdict(shard) | {"placement": str(shard.placement)} for shard in spec.shards]
    return {
        **{name: _plain(getattr(table, name)) for name in _SAME_FIELDS},
        "shards": shards,
        "hot_rows": None if table.hot_set is None else list(table.hot_set.row_ids),
    }


def _table_of(where: str, record: TableRecord) -> ParameterSharding2D:
    values = {name: getattr(record, name) for name in _SAME_FIELDS}
    # TorchRec stores these two as strings.
    values |= {name: values[name].value for name in ("sharding_type", "compute_kernel")}
    try:
        return ParameterSharding2D(
            **values,
            sharding_spec=None
            if record.shards is None
            else EnumerableShardingSpec([ShardMetadata(**dict(shard)) for shard in record.shards]),
            hot_set=None if record.hot_rows is None else HotSet(tuple(record.hot_rows)),
        )
    except _MALFORMED as error:
        raise PlanError(f"{where}: {error}; plan the table again, or mend it there") from error


def _plain(value: Any) -> Any:
    """Return an enum member as text: those of TorchRec and FBGEMM by name."""
    if isinstance(value, BoundsCheckMode | DataType):
        return value.name
    return value.value if isinstance(value, enum.Enum) else value
