"""`Workload`: a step's work, independent of the plan; and each row's optimizer state."""

import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from numpy.typing import NDArray
from torch import nn
from torch.optim import Optimizer
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.modules.embedding_configs import BaseEmbeddingConfig, data_type_to_dtype
from torchrec.modules.embedding_modules import (
    EmbeddingBagCollectionInterface,
    EmbeddingCollectionInterface,
)
from torchrec.modules.mc_embedding_modules import BaseManagedCollisionEmbeddingCollection

from torchrec_2dsp._compat.id_maps import id_map_of
from torchrec_2dsp._compat.torchrec import in_backward_optimizers
from torchrec_2dsp._compat.wrapped_collections import id_maps_of
from torchrec_2dsp.access.stats import AccessStats
from torchrec_2dsp.access.table_access import TableAccess
from torchrec_2dsp.cost.calibration import Kernels
from torchrec_2dsp.errors import ConfigError
from torchrec_2dsp.plan.fits_module import configs_of, is_left_whole
from torchrec_2dsp.plan.parameter_sharding import RowStorage, fused_kind

_COLLECTIONS = (EmbeddingBagCollectionInterface, EmbeddingCollectionInterface)

STATE_BYTES = 4
"""The bytes of a number in the optimizer state, which is fp32."""

ASSUMED_SKEW = 1.05
"""The skew that the search assumes if nothing was counted. In 4,096 samples of the Criteo log,
15 columns have more than 300 values: as many as tables of a million rows with skews from 0.99 to
1.53, with a median of 1.16."""

_BINS = 256

_LEAST_SKEW, _LARGEST_SKEW = 0.01, 3.0
_ENOUGH_REPEATS = 2.0
"""The repeated lookups expected under the assumed skew below which none is fitted."""

_VECTOR_PASSES = 5
"""Passes over the vectors that a model receives: as they arrived, in the model's order, joined,
and read and written by the next layer."""

_STATELESS = (EmbOptimType.SGD, EmbOptimType.EXACT_SGD, EmbOptimType.NONE)
_ONE_PER_ROW = (
    EmbOptimType.ROWWISE_ADAGRAD,
    EmbOptimType.EXACT_ROWWISE_ADAGRAD,
    EmbOptimType.EMAINPLACE_ROWWISE_ADAGRAD,
)
_TWO_PER_ELEMENT = (EmbOptimType.ADAM, EmbOptimType.LAMB)
_ONE_PER_ELEMENT_AND_ROW = (EmbOptimType.PARTIAL_ROWWISE_ADAM, EmbOptimType.PARTIAL_ROWWISE_LAMB)


@dataclass(frozen=True, kw_only=True)
class TableWork:
    """A step's work with one table.

    Example:
        >>> from torchrec_2dsp.cost.workload import TableWork
        >>> work = TableWork(name="t", num_rows=100, dim=64, ids_per_sample=1.0)
        >>> round(work.expected_distinct(100), 1)
        63.4
    """

    name: str
    num_rows: int
    dim: int

    ids_per_sample: float
    """Lookups per sample, over all of the table's features."""

    num_features: int = 1
    """Bags or sequences per sample."""

    element_bytes: float = 4.0
    """A number's bytes in the table, including its share of a row's scale."""

    state_bytes_per_row: float = 4.0
    """Bytes of optimizer state per row; 4 is row-wise AdaGrad's."""

    is_sequence: bool = False
    """True if each id gets its row, false if each bag gets its rows' sum."""

    is_frozen: bool = False
    """True if it is looked up but not trained."""

    access: TableAccess | None = None
    """Row frequencies, if they were counted."""

    skew: float = 0.0
    """The exponent of the decline in the use of rows, in an unknown order, if nothing was
    counted; 0 if all rows are used equally."""

    @property
    def likeness(self) -> Hashable:
        """A key that is equal for tables that can share an `AlikeWork`."""
        alike = replace(self, name="", num_rows=0, ids_per_sample=0.0, access=None, skew=0.0)
        return alike, self.is_counted

    @property
    def is_counted(self) -> bool:
        """True if row frequencies are known."""
        return self.access is not None and self.access.num_lookups > 0

    def expected_distinct(self, num_lookups: float, *, num_hot: int = 0) -> float:
        """Return the distinct rows that ``num_lookups`` touch, without the ``num_hot`` hottest."""
        if self.access is not None and self.access.num_lookups:
            distinct = self.access.expected_distinct(num_lookups, num_hot=num_hot)
            return min(distinct, float(max(0, self.num_rows - num_hot)))
        return (
            0.0
            if num_hot >= self.num_rows
            else _distinct(self.num_rows, self.skew, num_lookups, num_hot)
        )

    def distinct_by_block(
        self, num_lookups: float, num_blocks: int, *, num_hot: int = 0
    ) -> NDArray[np.float64]:
        """Return the distinct rows that lookups touch in each row block."""
        if self.access is not None and self.access.num_lookups:
            cold = self.access.without(num_hot) if num_hot else self.access
            cold_lookups = num_lookups * (1 - self.hot_share(num_hot))
            return cold.distinct_by_block(cold_lookups, num_blocks)
        return np.full(
            num_blocks, self.expected_distinct(num_lookups, num_hot=num_hot) / num_blocks
        )

    def share_by_block(self, num_blocks: int, *, num_hot: int = 0) -> NDArray[np.float64]:
        """Return each row block's share of the lookups of cold rows."""
        cold = None if self.access is None else self.access.without(num_hot)
        if cold is None or not cold.num_lookups:
            return np.full(num_blocks, 1 / num_blocks)
        return cold.share_by_block(num_blocks)

    def hot_share(self, num_hot: int) -> float:
        """Return the share of lookups that the ``num_hot`` hottest rows take."""
        if not num_hot:
            return 0.0
        if self.access is not None and self.access.num_lookups:
            return self.access.share_of(num_hot)
        ends, shares = zipf_bins(self.num_rows, self.skew)
        return float(np.diff(np.minimum(ends, num_hot), prepend=0) @ shares)


@dataclass(frozen=True, kw_only=True)
class AlikeWork(TableWork):
    """The work with several tables without hot rows, as one.

    Numbers of rows, ids and distinct rows are columns, with a number for each table. All else
    is the same for all tables, except that each may have its own row frequencies.
    """

    tables: Sequence[TableWork]

    _known: dict[bytes, NDArray[np.float64]] = field(default_factory=dict, compare=False)
    """Distinct rows by lookups."""

    @classmethod
    def of(cls, tables: Sequence[TableWork]) -> "AlikeWork":
        """Join tables with the same `TableWork.likeness`."""
        columns: dict[str, Any] = {
            name: np.array([[getattr(table, name)] for table in tables], dtype=np.float64)
            for name in ("num_rows", "ids_per_sample")
        }
        return cls(**vars(tables[0]) | columns, tables=tables)

    def expected_distinct(self, num_lookups: Any, *, num_hot: int = 0) -> Any:
        """Return the distinct rows that each table's lookups touch."""
        lookups = np.broadcast_to(num_lookups, (len(self.tables), 1))
        key = lookups.tobytes()
        if key not in self._known:
            if not self.is_counted:
                cold, shares = self._bins
                distinct = np.einsum("tb,tb->t", cold, 1 - (1 - shares) ** lookups)
            else:
                each = zip(self.tables, lookups[:, 0].tolist(), strict=True)
                distinct = np.array([table.expected_distinct(number) for table, number in each])
            self._known[key] = distinct[:, None]
        return self._known[key]

    def distinct_by_block(self, num_lookups: Any, num_blocks: int, *, num_hot: int = 0) -> Any:
        """Return the distinct rows that each table's lookups touch in each of its row blocks."""
        if not self.is_counted:
            return self.expected_distinct(num_lookups) / num_blocks * np.ones(num_blocks)
        lookups = np.broadcast_to(num_lookups, (len(self.tables), 1))[:, 0].tolist()
        each = zip(self.tables, lookups, strict=True)
        return np.stack([table.distinct_by_block(number, num_blocks) for table, number in each])

    def share_by_block(self, num_blocks: int, *, num_hot: int = 0) -> NDArray[np.float64]:
        """Return the share of each table's lookups in each of its row blocks."""
        tables = self.tables if self.is_counted else self.tables[:1]
        return np.stack([table.share_by_block(num_blocks) for table in tables])

    @cached_property
    def _bins(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Bins of rows with nearly equal use: their row counts, and each row's share."""
        rows, shares = np.zeros((2, len(self.tables), _BINS))
        for number, table in enumerate(self.tables):
            ends, of_bins = zipf_bins(table.num_rows, table.skew)
            rows[number, : len(ends)] = np.diff(ends, prepend=0.0)
            shares[number, : len(ends)] = of_bins
        return rows, shares


@lru_cache(2**17)
def _distinct(num_rows: int, skew: float, num_lookups: float, num_hot: int) -> float:
    ends, shares = zipf_bins(num_rows, skew)
    cold = ends - np.append(0.0, ends[:-1])
    if num_hot:
        cold = np.minimum(cold, np.maximum(ends - num_hot, 0.0))
    return float(cold @ (1 - (1 - shares) ** num_lookups))


def table_weights(module: nn.Module) -> Iterator[nn.Parameter]:
    """Yield the weights of a model's unsharded tables."""
    for part in _sharded_modules(module):
        if isinstance(part, _COLLECTIONS):
            yield from part.parameters()


def _sharded_modules(module: nn.Module) -> Iterator[nn.Module]:
    """Yield modules except those that are left whole on each rank."""
    whole = {part for top in filter(is_left_whole, module.modules()) for part in top.modules()}
    return (part for part in module.modules() if part not in whole)


def fitted_skew(num_rows: int, num_lookups: float, num_distinct: float) -> float:
    """Return the skew with which ``num_lookups`` touch ``num_distinct`` rows on average.

    It is the assumed skew if there are too few lookups, and never quite 0, which would mean
    that rows are known to be used equally.
    """
    if num_lookups - _distinct(num_rows, ASSUMED_SKEW, num_lookups, 0) < _ENOUGH_REPEATS:
        return ASSUMED_SKEW
    low, high = _LEAST_SKEW, _LARGEST_SKEW
    while high - low > _LEAST_SKEW:
        skew = (low + high) / 2
        is_too_large = _distinct(num_rows, skew, num_lookups, 0) < num_distinct
        low, high = (low, skew) if is_too_large else (skew, high)
    return low


@lru_cache(2**15)
def zipf_bins(num_rows: int, skew: float) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return bins of rows with nearly equal use: the bins' ends, and each row's share.

    Example:
        >>> from torchrec_2dsp.cost.workload import zipf_bins
        >>> ends, shares = zipf_bins(2, skew=1.0)
        >>> ends.tolist(), shares.round(2).tolist()
        ([1.0, 2.0], [0.68, 0.32])
    """
    if not skew:
        return np.array([float(num_rows)]), np.array([1 / num_rows])
    ends = np.unique(np.round(np.geomspace(1, num_rows, min(num_rows, _BINS))))
    starts = np.append(0.0, ends[:-1])
    power = 1 - skew if skew != 1 else 1e-9
    uses = ((ends + 0.5) ** power - (starts + 0.5) ** power) / power
    return ends, uses / uses.sum() / (ends - starts)


DDP_BUCKET_BYTES = 25 * 2**20
"""The size of a bucket of dense gradients in TorchRec's and torch's data parallelism."""
_NUM_SMALL_BUCKETS = 4


def has_small_buckets(device: str, world_size: int, local_world_size: int) -> bool:
    """Return whether `parallelize` makes them small: inside a host, that costs more than it hides.

    Example:
        >>> from torchrec_2dsp.cost.workload import has_small_buckets
        >>> has_small_buckets("cpu", 8, 2), has_small_buckets("cpu", 8, 8)
        (True, False)
    """
    # Nothing was measured on GPUs.
    return device == "cpu" and local_world_size < world_size


def small_bucket_bytes(gradient_bytes: float) -> float:
    """Return the size of the buckets in which `parallelize` sums dense gradients over hosts.

    In TorchRec's buckets a click model's gradients are all sent when the backward ends. If rows
    travel in few bits, ranks mostly wait for these gradients.

    Example:
        >>> from torchrec_2dsp.cost.workload import small_bucket_bytes
        >>> small_bucket_bytes(400_000.0), small_bucket_bytes(1e12)
        (100000.0, 26214400)
    """
    return min(max(gradient_bytes, 1.0) / _NUM_SMALL_BUCKETS, DDP_BUCKET_BYTES)


@dataclass(frozen=True, kw_only=True)
class DenseWork:
    """A step's work outside its tables."""

    forward_s: float = 0.0
    """Seconds of the forward on a rank, while its neighbours run it, too."""

    backward_s: float = 0.0
    """Seconds of the backward, with the optimizer and everything else except waiting."""

    gradient_bytes: float = 0.0
    """Bytes that are all-reduced over the world in each step."""

    bucket_bytes: float = DDP_BUCKET_BYTES
    """The bytes that are sent together."""

    @classmethod
    def of_model(cls, module: nn.Module, workload: "Workload", kernels: Kernels) -> "DenseWork":
        """Estimate the work: linear layers, and passes over the tables' vectors.

        Two operations per weight and sample, and twice as many backward. Everything else that a
        model does, such as interactions and attention, isn't counted.
        """
        tables = {id(weight) for weight in table_weights(module)}
        weights = [weight for weight in module.parameters() if id(weight) not in tables]
        vectors = sum(
            table.dim * (table.ids_per_sample if table.is_sequence else table.num_features)
            for table in workload.tables.values()
        )
        vector_bytes = float(workload.batch_size * vectors * STATE_BYTES)
        forward_s = _VECTOR_PASSES * kernels.pool.seconds(0.0, vector_bytes)
        if kernels.matmul is not None:
            operations = 2.0 * workload.batch_size * sum(weight.numel() for weight in weights)
            forward_s += kernels.matmul.seconds(operations, 0.0)
        gradient_bytes = sum(weight.nbytes for weight in weights if weight.requires_grad)
        return cls(
            forward_s=forward_s, backward_s=2 * forward_s, gradient_bytes=float(gradient_bytes)
        )


@dataclass(frozen=True)
class IdMapWork:
    """A step's work with id maps, which all ranks keep equal."""

    ids_per_sample: float = 0.0
    """Lookups per sample that go through a map."""
    num_rows: float = 0.0
    """Map rows that are sorted or compared, averaged over all steps."""
    num_maps: int = 1
    """Maps, of which ranks share those that sort ids."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A model's tables, and the size of the batches they look up."""

    batch_size: int
    """Samples per rank and step."""

    tables: Mapping[str, TableWork]
    """The work with each table, by name."""

    dense: DenseWork = field(default_factory=DenseWork)
    id_maps: IdMapWork = field(default_factory=IdMapWork)
    forward_wire_bytes: float = 4
    """A number's bytes in the output exchange; 2 with fp16 in ``QCommsConfig``."""

    backward_wire_bytes: float = 4
    """A number's bytes in the gradients of the output exchange."""

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ConfigError(f"batch_size={self.batch_size} leaves nothing to do; use 1 or more")

    @classmethod
    def of_model(
        cls,
        module: nn.Module,
        *,
        batch_size: int,
        constraints: Mapping[str, ParameterConstraints] | None = None,
        access: AccessStats | None = None,
        skew: float = 0.0,
    ) -> "Workload":
        """Return the work with an unsharded model's tables.

        Args:
            module: a model with `EmbeddingBagCollection` or `EmbeddingCollection` modules.
            batch_size: samples per rank and step.
            constraints: their pooling factors are the ids per bag, 1 without, times poolings and
                batch sizes, if any; their ``skew`` is a table's own.
            access: row frequencies; also the ids per sample for tables without pooling factors.
            skew: the assumed skew of tables without row frequencies.
        """
        tables: dict[str, TableWork] = {}
        for part in module.modules():
            is_collection = isinstance(part, _COLLECTIONS)
            weights = part.named_parameters() if is_collection else ()
            frozen = {name.split(".")[-2] for name, weight in weights if not weight.requires_grad}
            for config in configs_of(part) if is_collection else ():
                constraint = (constraints or {}).get(config.name)
                constrained = getattr(constraint, "skew", None)
                tables[config.name] = replace(
                    _table_work(config, constraint, access, batch_size),
                    is_sequence=isinstance(part, EmbeddingCollectionInterface),
                    is_frozen=config.name in frozen,
                    skew=skew if constrained is None else constrained,
                )
        if unknown := sorted(set(access or {}) - set(tables)):
            raise ConfigError(
                f"statistics of table {unknown[0]!r}, which the model doesn't have; it has "
                f"{', '.join(tables) or 'no tables'}"
            )
        return cls(batch_size=batch_size, tables=tables, id_maps=_id_map_work(module, tables))

    def table(self, name: str) -> TableWork:
        """Return the work with a table; raise `ConfigError` if the model has no such table."""
        if name not in self.tables:
            raise ConfigError(
                f"the workload has no table {name!r}; it has {', '.join(self.tables) or 'none'}"
            )
        return self.tables[name]

    @cached_property
    def num_without_access(self) -> int:
        """The number of tables without statistics."""
        return sum(table.access is None for table in self.tables.values())


def _id_map_work(module: nn.Module, tables: Mapping[str, TableWork]) -> IdMapWork:
    maps = {
        name: id_map
        for part in _sharded_modules(module)
        if isinstance(part, BaseManagedCollisionEmbeddingCollection)
        for name, id_map in id_maps_of(part).items()
    }
    num_rows = sum(id_map_of(id_map).rows_per_batch for id_map in maps.values())
    ids_per_sample = sum(tables[name].ids_per_sample for name in maps)
    return IdMapWork(ids_per_sample, num_rows, max(len(maps), 1))


def _table_work(
    config: BaseEmbeddingConfig,
    constraint: ParameterConstraints | None,
    access: AccessStats | None,
    batch_size: int,
) -> TableWork:
    counted = None if access is None else access.get(config.name)
    storage = getattr(constraint, "stored_as", RowStorage.PLAIN)
    dtype = data_type_to_dtype(config.data_type)
    ids = float(len(config.feature_names)) if counted is None else counted.lookups_per_sample
    # Without factors, the counts determine everything.
    if constraint is not None and (counted is None or constraint.pooling_factors != [1.0]):
        ids = _constrained_ids(config, constraint, batch_size)
    return TableWork(
        name=config.name,
        num_rows=config.num_embeddings,
        dim=config.embedding_dim,
        ids_per_sample=ids,
        num_features=len(config.feature_names),
        element_bytes=storage.bytes_per_number(config.embedding_dim, dtype.itemsize),
        access=counted,
    )


def _constrained_ids(
    config: BaseEmbeddingConfig, constraint: ParameterConstraints, batch_size: int
) -> float:
    """Return a table's ids per sample; a single number stands for all of its features."""
    num_features, numbers = len(config.feature_names), []
    for name, default in (("pooling_factors", 1), ("num_poolings", 1), ("batch_sizes", batch_size)):
        values = getattr(constraint, name) or [default]
        if len(values) not in (1, num_features):
            raise ConfigError(
                f"constraints of table {config.name!r}: {name} has {len(values)} numbers, and the "
                f"table {num_features} features; give one for each, or one for all"
            )
        numbers.append(values * num_features if len(values) == 1 else values)
    return sum(map(math.prod, zip(*numbers, strict=True))) / batch_size


def optimizer_of(weight: Any, fused_params: Mapping[str, Any]) -> EmbOptimType | type[Optimizer]:
    """Return the optimizer that an unsharded table's kernel will run: plain SGD by default."""
    applied = in_backward_optimizers(weight)
    return applied.classes[0] if applied else fused_params.get("optimizer", EmbOptimType.EXACT_SGD)


def state_bytes_per_row(optimizer: EmbOptimType | type[Optimizer], dim: int) -> int:
    """Return the bytes of optimizer state for one row in a shard with ``dim`` columns.

    ``optimizer`` is its fused kernel's name, or the class that was applied. An unknown optimizer
    counts as one number per element.
    """
    kind = fused_kind(optimizer)
    if kind in _STATELESS:
        return 0
    if kind in _ONE_PER_ROW:
        return STATE_BYTES
    per_row = 1 if kind in _ONE_PER_ELEMENT_AND_ROW else 0
    return ((2 if kind in _TWO_PER_ELEMENT else 1) * dim + per_row) * STATE_BYTES
