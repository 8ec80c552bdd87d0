"""What a plan file may say: each key, its type and its bounds. Nothing is converted silently."""

from typing import Annotated, Any, Literal, TypeVar

from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.modules.embedding_configs import DataType

from torchrec_2dsp.mesh.mesh2d import RankLayout
from torchrec_2dsp.plan.parameter_sharding import Exchange, RowOwners, ShardingType2D

_MAX_RANKS = 2**31 - 1
_MAX_ROWS = 2**63 - 1
_Named = TypeVar("_Named", BoundsCheckMode, DataType)


def _by_name(kind: type[_Named]) -> BeforeValidator:
    """Takes the name of a member of one of TorchRec's enums, whose values are others."""

    def member(name: Any) -> _Named | None:
        if name is not None and name not in kind.__members__:
            raise ValueError(f"{name!r} is none of {', '.join(kind.__members__)}")
        return None if name is None else kind[name]

    return BeforeValidator(member)


_Rank = Annotated[int, Field(ge=0, lt=_MAX_RANKS)]
_Pair = Annotated[
    list[Annotated[int, Field(ge=0, le=_MAX_ROWS)]], Field(min_length=2, max_length=2)
]
# A `Literal` would take True and 1.0 for 1.
_One = Annotated[int, Field(ge=1, le=1)]
_ByValue = Field(strict=False)


class _Record(BaseModel):
    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        arbitrary_types_allowed=True,
    )


class ShardRecord(_Record):
    """One shard of a table."""

    shard_offsets: _Pair
    """Its first row and its first column."""

    shard_sizes: _Pair
    """How many rows and columns it has."""

    placement: str
    """Where it lies, as TorchRec writes it: ``rank:1/cpu``."""


class TableRecord(_Record):
    """How one table is sharded."""

    sharding_type: Annotated[ShardingType2D, _ByValue]
    """The name of the type's 2D form."""

    compute_kernel: Annotated[EmbeddingComputeKernel, _ByValue]
    """TorchRec's name."""

    ranks: Annotated[list[_Rank], Field(min_length=1)]
    """The rank of each shard."""

    shards: list[ShardRecord] | None
    """None for a data parallel table."""

    enforce_hbm: bool | None = None
    """As in TorchRec."""

    stochastic_rounding: bool | None = None
    """As in TorchRec."""

    bounds_check_mode: Annotated[BoundsCheckMode | None, _by_name(BoundsCheckMode)]
    """FBGEMM's name."""

    output_dtype: Annotated[DataType | None, _by_name(DataType)]
    """TorchRec's name."""

    exchange: Annotated[Exchange, _ByValue]
    """How its rows travel."""

    owners: Annotated[RowOwners, _ByValue] = RowOwners.BLOCK
    """Which rank has which rows."""

    hot_rows: Annotated[list[int], Field(min_length=1)] | None
    """Rows that every rank holds, ascending."""

    num_groups: _One | None = None
    """1 for one copy in the world."""


class MeshRecord(_Record):
    """Which ranks repeat the plan."""

    num_groups: int = Field(ge=1, le=_MAX_RANKS)
    """Copies of the tables."""

    group_size: int = Field(ge=1, le=_MAX_RANKS)
    """Ranks that share one."""

    layout: Annotated[RankLayout, _ByValue]
    """How ranks are dealt to groups."""


class GradientSyncRecord(_Record):
    """A `GradientSync`."""

    kind: Literal["GradientSync"]
    """The class."""

    transport: str = "fp32"
    """How gradients travel."""

    delay: int = 0
    """In steps."""

    drift_every: int = 0
    """In syncs."""


class WeightSyncRecord(_Record):
    """A `WeightSync`."""

    kind: Literal["WeightSync"]
    """The class."""

    policy: str = "every(1)"
    """As text."""

    moments_policy: str | None = None
    """As text."""

    rows: str = "touched"
    """Which rows are sent."""

    transport: str = "fp32"
    """How rows travel."""

    drift_every: int = 0
    """In syncs."""

    dense_above: float | None = None
    """A share of a shard's rows."""


class PlanRecord(_Record):
    """A plan file."""

    schema_version: _One
    """The version of the file's schema."""

    checksum: str | None = None
    """The checksum of all else; a plan that was written by hand has none."""

    mesh: MeshRecord
    """Which ranks repeat the plan."""

    sync: Annotated[GradientSyncRecord | WeightSyncRecord, Field(discriminator="kind")]
    """How replicas stay equal."""

    modules: dict[str, dict[str, TableRecord]]
    """The tables, by module path and name."""
