"""What a plan file may say: each key, its type and its bounds. Nothing is converted silently."""

from typing import Annotated, Any, Literal, TypeVar

from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.modules.embedding_configs import DataType

from torchrec_2dsp.codecs.rows import Transport
from torchrec_2dsp.mesh import RankLayout
from torchrec_2dsp.plan.parameter_sharding import Exchange, ShardingType2D
from torchrec_2dsp.plan.row_owners import RowOwners

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
    """The shard's first row and first column."""

    shard_sizes: _Pair
    """How many rows and columns the shard has."""

    placement: str
    """The shard's rank and device, as TorchRec writes them: ``rank:1/cpu``."""


class TableRecord(_Record):
    """How one table is sharded."""

    sharding_type: Annotated[ShardingType2D, _ByValue]
    """The name of the type's 2D form."""

    compute_kernel: Annotated[EmbeddingComputeKernel, _ByValue]
    """The compute kernel, by TorchRec's name."""

    ranks: Annotated[list[_Rank], Field(min_length=1)]
    """The rank of each shard."""

    shards: list[ShardRecord] | None
    """The table's shards; none for a data parallel table."""

    enforce_hbm: bool | None = None
    """TorchRec's field of the same name."""

    stochastic_rounding: bool | None = None
    """TorchRec's field of the same name."""

    bounds_check_mode: Annotated[BoundsCheckMode | None, _by_name(BoundsCheckMode)]
    """How FBGEMM treats ids out of bounds, by its own name."""

    output_dtype: Annotated[DataType | None, _by_name(DataType)]
    """The type of looked-up vectors, by TorchRec's name."""

    exchange: Annotated[Exchange, _ByValue]
    """How the table's rows travel."""

    owners: Annotated[RowOwners, _ByValue] = RowOwners.BLOCK
    """Which rank has which rows of the table."""

    hot_rows: Annotated[list[int], Field(min_length=1)] | None
    """Rows that every rank holds, ascending."""

    transport: Annotated[Transport, _ByValue] = Transport.FP32
    """How the table's rows and their gradients look on the wire."""

    num_groups: _One | None = None
    """How many copies the world has: 1, or none for one copy in each group."""


class MeshRecord(_Record):
    """The mesh that repeats the plan."""

    num_groups: int = Field(ge=1, le=_MAX_RANKS)
    """How many copies of the tables there are."""

    group_size: int = Field(ge=1, le=_MAX_RANKS)
    """How many ranks share a copy."""

    layout: Annotated[RankLayout, _ByValue]
    """How ranks are dealt to groups."""


class GradientSyncRecord(_Record):
    """A `GradientSync` in a plan file."""

    kind: Literal["GradientSync"]
    """The name of the class."""

    transport: str = "fp32"
    """The type in which row gradients travel."""

    delay: int = 0
    """How many steps an update may be late."""

    drift_every: int = 0
    """Copies are compared after so many syncs; 0 for never."""


class WeightSyncRecord(_Record):
    """A `WeightSync` in a plan file."""

    kind: Literal["WeightSync"]
    """The name of the class."""

    policy: str = "every(1)"
    """The policy of the weights, as text."""

    moments_policy: str | None = None
    """The policy of the optimizer state, as text; none for that of the weights."""

    rows: str = "touched"
    """The rows that are sent: touched ones or all."""

    transport: str = "fp32"
    """The type in which touched rows travel."""

    drift_every: int = 0
    """Copies are compared after so many syncs; 0 for never."""

    dense_above: float | None = None
    """The share of a shard's rows from which on the whole shard is averaged."""


class PlanRecord(_Record):
    """The content of a plan file."""

    schema_version: _One
    """The version of the file's schema."""

    checksum: str | None = None
    """The checksum of all else; a plan that was written by hand has none."""

    mesh: MeshRecord
    """The mesh that repeats the plan."""

    sync: Annotated[GradientSyncRecord | WeightSyncRecord, Field(discriminator="kind")]
    """How replicas are kept equal."""

    modules: Annotated[
        dict[str, Annotated[dict[str, TableRecord], Field(min_length=1)]], Field(min_length=1)
    ]
    """The tables, by module path and name."""
