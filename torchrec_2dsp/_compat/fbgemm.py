"""Adapters to FBGEMM's table-batched embedding (TBE): what this package reads and sets there."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from ctypes import c_float
from dataclasses import dataclass
from functools import cache, partial
from itertools import accumulate
from typing import Any, cast

import torch
import torch.nn.functional as F
from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import (
    EmbeddingLocation as EmbeddingLocation,
    PoolingMode,
)
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice as ComputeDevice,
    SplitTableBatchedEmbeddingBagsCodegen as Tbe,
    construct_split_state,
)

_UPDATED = ("weights", "momentum1", "momentum2")


@dataclass(frozen=True)
class TbeShape:
    """A TBE's tables and features."""

    table_rows: tuple[int, ...]
    """Rows per table."""
    table_dims: tuple[int, ...]
    """Columns per table."""
    feature_tables: tuple[int, ...]
    """Each feature's table; a table's features are adjacent."""
    is_sequence: bool
    """True if each id has an output row, false if each bag has one."""
    is_mean: bool
    """True if bags are averaged, false if they are summed."""

    @property
    def num_tables(self) -> int:
        """The number of tables."""
        return len(self.table_dims)

    def features_of(self, table: int) -> list[int]:
        """Return the features that look up ``table``."""
        tables = enumerate(self.feature_tables)
        return [feature for feature, feature_table in tables if feature_table == table]


@dataclass(frozen=True)
class OptimizerStep:
    """The learning rate and the iteration (Adam's bias correction) at a lookup, in kernel units."""

    learning_rate: float
    iteration: int


def tbe_shape(tbe: Tbe) -> TbeShape:
    """Return the tables and features in ``tbe``."""
    return TbeShape(
        table_rows=tuple(int(spec[0]) for spec in tbe.embedding_specs),
        table_dims=tuple(int(spec[1]) for spec in tbe.embedding_specs),
        feature_tables=tuple(int(table) for table in tbe.feature_table_map),
        is_sequence=tbe.pooling_mode == PoolingMode.NONE,
        is_mean=tbe.pooling_mode == PoolingMode.MEAN,
    )


def is_on_gpu(tbe: Tbe) -> bool:
    """Tell whether a kernel computes on a GPU."""
    return torch.device(tbe.current_device).type != "cpu"


def sum_bags(
    values: torch.Tensor,
    places: torch.Tensor,
    offsets: torch.Tensor,
    weights: torch.Tensor | None = None,
) -> torch.Tensor:
    """Sum bags of rows, without a gradient, each bag in order.

    On a GPU FBGEMM's lookup takes a quarter of the time of torch's, with the same bits.

    Args:
        values: rows, `[rows, dim]`.
        places: the bags' rows, bag after bag.
        offsets: each bag's start among ``places``, and the last bag's end.
        weights: a factor for each place.
    """
    dim = values.shape[1]
    if not places.numel():
        return values.new_zeros((offsets.numel() - 1, dim))  # Some kernels can't handle this.
    if values.is_cpu or values.dtype != torch.float32 or dim % 4:
        return F.embedding_bag(
            places,
            values.detach(),
            offsets,
            mode="sum",
            per_sample_weights=weights,
            include_last_offset=True,
        )
    return _sum_as_lookup(values.contiguous(), places, offsets, weights)


def starts_of(sizes: torch.Tensor) -> torch.Tensor:
    """Return where parts of these sizes begin, one after another, and where the last ends."""
    return torch.ops.fbgemm.asynchronous_complete_cumsum(sizes)


@torch.no_grad()
def _sum_as_lookup(
    values: torch.Tensor,
    places: torch.Tensor,
    offsets: torch.Tensor,
    weights: torch.Tensor | None = None,
) -> torch.Tensor:
    """Look bags up in a table whose weights are ``values``."""
    columns, rows = _bounds_of_table(values.shape[1], values.device)
    return torch.ops.fbgemm.dense_embedding_codegen_lookup_function(
        values.view(-1),
        weights_offsets=rows[:1],
        D_offsets=columns,
        total_D=values.shape[1],
        max_D=values.shape[1],
        hash_size_cumsum=rows,
        total_hash_size_bits=_MAX_ROW_BITS,
        indices=places.long(),
        offsets=offsets.long(),
        pooling_mode=PoolingMode.SUM.value,
        indice_weights=weights,
        feature_requires_grad=None,
        mixed_D=False,
    )


_MAX_ROW_BITS = 40


@cache
@torch.inference_mode(mode=False)
def _bounds_of_table(dim: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the bounds of a single table's columns and rows, on a device."""
    columns = torch.tensor([0, dim], dtype=torch.int32, device=device)
    return columns, torch.tensor([0, 2**_MAX_ROW_BITS], device=device)


def tell_empty_tables_apart(tbe: Tbe) -> None:
    """Keep the kernel's backward from confusing a table without rows with the next table.

    FBGEMM's CPU backward assumes that adjacent features belong to one table if their tables'
    rows begin at the same number, as they do after a table without rows. It then updates the next
    table with the empty one's columns. Here rows are numbered as if each table had at least one.
    """
    rows = [max(1, num_rows) for num_rows in tbe_shape(tbe).table_rows]
    first_rows = [0, *accumulate(rows)]
    numbers = [first_rows[table] for table in tbe_shape(tbe).feature_tables] + first_rows[-1:]
    _tensor(tbe.hash_size_cumsum).copy_(torch.tensor(numbers))
    tbe.total_hash_size = first_rows[-1]
    tbe.total_hash_size_bits = first_rows[-1].bit_length()


def last_lookup(tbe: Tbe) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the latest forward's ids and offsets, after the kernel's bounds check."""
    return tbe._indices, tbe._offsets


def learning_rate_of(tbe: Tbe) -> float:
    """Return the kernel's learning rate, in its own units."""
    return float(_tensor(tbe.learning_rate_tensor).item())


def set_learning_rate(tbe: Tbe, learning_rate: float) -> None:
    """Set the kernel's learning rate in place, in its own units."""
    _tensor(tbe.learning_rate_tensor).fill_(learning_rate)


def optimizer_arguments(tbe: Tbe, *names: str) -> dict[str, float]:
    """Return arguments of the kernel's optimizer, rounded as its float32 arithmetic reads them."""
    return {name: c_float(getattr(tbe.optimizer_args, name)).value for name in names}


HAS_ROW_WISE_MOMENT = {
    EmbOptimType.ADAM: False,
    EmbOptimType.LAMB: False,
    EmbOptimType.PARTIAL_ROWWISE_ADAM: True,
    EmbOptimType.PARTIAL_ROWWISE_LAMB: True,
}
"""FBGEMM's Adams, which need a rule on a CPU, and whether their second moment is row-wise."""


def needs_rule(optimizer: EmbOptimType, device_type: str) -> bool:
    """Return whether FBGEMM has no kernel for an optimizer that rules on tensors can replace."""
    return device_type == "cpu" and optimizer in HAS_ROW_WISE_MOMENT


def updates_by_rule(tbe: Tbe) -> bool:
    """Return whether only a rule on tensors can update this kernel's tables."""
    is_rounded = rounding_of(tbe) is not None
    device_type = torch.device(tbe.current_device).type
    return is_rounded or _needs_lookup(tbe) or needs_rule(tbe.optimizer, device_type)


def _needs_lookup(tbe: Tbe) -> bool:
    """Return whether FBGEMM can't look up such tables, on a CPU or a GPU."""
    return has_own_rows(tbe) or tbe.weights_precision is SparseType.BF16


_WEIGHTS = "split_embedding_weights"


def has_own_rows(tbe: Tbe) -> bool:
    """Return whether `replace_weights` has replaced a kernel's weights."""
    return _WEIGHTS in vars(tbe)


def replace_weights(tbe: Tbe, tables: Sequence[torch.Tensor]) -> None:
    """Let a kernel keep its tables in these tensors, which only rules update."""
    for place in ("host", "dev", "uvm"):
        weights = getattr(tbe, f"weights_{place}")
        if weights.numel():
            weights.data = weights.new_empty(0)
    vars(tbe)[_WEIGHTS] = lambda: list(tables)


def adopt_lookup(tbe: Tbe) -> None:
    """Give a kernel a forward by torch's operators if FBGEMM has none; only rules update it."""
    if _needs_lookup(tbe):
        # On the instance, which keeps FBGEMM's class.
        vars(tbe)["forward"] = partial(_look_up_in_float, tbe)


@torch.no_grad()
def _look_up_in_float(
    tbe: Tbe,
    indices: torch.Tensor,
    offsets: torch.Tensor,
    per_sample_weights: torch.Tensor | None = None,
) -> torch.Tensor:
    """Check ids as FBGEMM's forward does, and sum their rows in float32."""
    ids, offsets, weights, _ = tbe.prepare_inputs(indices, offsets, per_sample_weights)
    tbe._indices, tbe._offsets = ids, offsets
    shape, tables = tbe_shape(tbe), tbe.split_embedding_weights()
    num_features, outputs = len(shape.feature_tables), []
    num_bags = (offsets.numel() - 1) // num_features
    # The only wait for a GPU, however many features there are.
    bounds = offsets[::num_bags].tolist() if num_bags else [0] * (num_features + 1)
    for feature, table in enumerate(shape.feature_tables):
        bags = offsets[feature * num_bags : (feature + 1) * num_bags + 1]
        first, end = bounds[feature : feature + 2]
        output = tables[table].index_select(0, ids[first:end]).float()
        if not shape.is_sequence:
            factors = None if weights is None else weights[first:end]
            places = torch.arange(end - first, device=ids.device)
            output = sum_bags(output, places, bags - first, factors)
        if shape.is_mean:
            output /= bags.diff().clamp(min=1)[:, None]
        outputs.append(output)
    joined = torch.cat(outputs, dim=0 if shape.is_sequence else 1)
    return joined.to(output_dtype(tbe))


def rounding_of(tbe: Tbe) -> Any:
    """Return the rounding that rules apply to this kernel's rows; `None` for round-to-nearest."""
    return vars(tbe).get(_ROUNDING)


def set_rounding(tbe: Tbe, rounding: object) -> None:
    """Let only rules update this kernel's rows from now on, with this rounding."""
    setattr(tbe, _ROUNDING, rounding)


_ROUNDING = "rounding_by_rule"


def params_to_build(
    params: dict[str, Any], precision: SparseType, device: torch.device | None
) -> dict[str, Any]:
    """Return fused parameters that FBGEMM can build on ``device``; see `adopt_optimizer`."""
    if precision is SparseType.BF16:
        # FBGEMM's GPU kernels have no cache of this type, not even an empty one.
        params = {**params, "cache_precision": SparseType.FP32}
    device_type = "cpu" if device is None else device.type
    if not needs_rule(params.get("optimizer", EmbOptimType.EXACT_SGD), device_type):
        return params
    # AdaGrad has the first moment, and no other optimizer on a CPU misreads the arguments.
    return {**params, "optimizer": EmbOptimType.EXACT_ADAGRAD}


def adopt_optimizer(tbe: Tbe, params: dict[str, Any]) -> bool:
    """Give a kernel the optimizer in ``params``, with its states under FBGEMM's names.

    Returns whether the kernel was built with another one, so that only a rule updates its tables.
    """
    optimizer = params.get("optimizer", EmbOptimType.EXACT_SGD)
    if not needs_rule(optimizer, torch.device(tbe.current_device).type):
        return False
    second_moment = construct_split_state(
        tbe.embedding_specs, rowwise=HAS_ROW_WISE_MOMENT[optimizer], cacheable=False
    )
    dtype = cast(Any, torch.float32)
    tbe._apply_split(second_moment, prefix="momentum2", dtype=dtype)
    tbe.optimizer = optimizer
    return True


def without_update(
    tbe: Tbe,
    run: Callable[[], torch.Tensor],
    *,
    is_training: bool,
) -> Callable[[], torch.Tensor]:
    """Return a forward that works for every optimizer, and is counted only if it trains.

    Pipelines evaluate with gradients enabled, so these don't tell whether a forward trains.
    """
    if not updates_by_rule(tbe):
        is_counted = is_training or tbe.optimizer not in HAS_ROW_WISE_MOMENT
        return run if is_counted else partial(_uncounted, tbe, run)
    optimizer = tbe.optimizer

    def look_up() -> torch.Tensor:
        # All optimizers have the same forward.
        tbe.optimizer = EmbOptimType.EXACT_SGD
        try:
            output = run()
        finally:
            tbe.optimizer = optimizer
        if is_training:
            count_forwards(tbe, 1)
        return output

    return look_up


def _uncounted(tbe: Tbe, run: Callable[[], torch.Tensor]) -> torch.Tensor:
    """Run a forward that FBGEMM's GPU kernels would count as training."""
    output = run()
    count_forwards(tbe, -1)
    return output


def keeps_untouched_rows(tbe: Tbe) -> bool:
    """Return whether an update by a zero gradient leaves a row unchanged."""
    by_gradient_alone = (
        EmbOptimType.EXACT_SGD,
        EmbOptimType.EXACT_ADAGRAD,
        EmbOptimType.EXACT_ROWWISE_ADAGRAD,
    )
    args = tbe.optimizer_args
    return tbe.optimizer in by_gradient_alone and not (args.weight_decay or args.max_norm)


def writes_rows_plainly(tbe: Tbe) -> bool:
    """Return whether updates round float32 or float16 rows in GPU memory to the nearest."""
    is_half = tbe.weights_precision is SparseType.FP16 and not tbe.stochastic_rounding
    return (is_half or tbe.weights_precision is SparseType.FP32) and all(
        location == EmbeddingLocation.DEVICE for _, _, location, _ in tbe.embedding_specs
    )


def output_dtype(tbe: Tbe) -> torch.dtype:
    """Return the kernel's output type."""
    return SparseType.from_int(tbe.output_dtype).as_dtype()


def iteration_of(tbe: Tbe) -> int:
    """Return the number of forwards that the kernel has counted."""
    return int(_tensor(tbe.iter_cpu).item())


def count_forwards(tbe: Tbe, number: int) -> None:
    """Count forwards that FBGEMM didn't count, or uncount some that it did."""
    for counter in (tbe.iter, tbe.iter_cpu):
        _tensor(counter).add_(number)


def set_iteration(tbe: Tbe, iteration: int) -> None:
    """Set the kernel's forward count; FBGEMM keeps it twice."""
    for counter in (tbe.iter, tbe.iter_cpu):
        _tensor(counter).fill_(iteration)


def max_gradient(tbe: Tbe) -> float | None:
    """Return the bound to which the kernel clips each bag's gradient; `None` without one."""
    args = tbe.optimizer_args
    return float(args.max_gradient) if args.gradient_clipping else None


def optimizer_states(tbe: Tbe) -> list[dict[str, torch.Tensor]]:
    """Return each table's optimizer state by name, as views; empty dicts for plain SGD."""
    num_tables = len(tbe.embedding_specs)
    if tbe.optimizer == EmbOptimType.EXACT_SGD:
        return [{} for _ in range(num_tables)]
    states = tbe.get_optimizer_state()
    assert len(states) == num_tables
    return states


def table_tensors(tbe: Tbe) -> list[dict[str, torch.Tensor]]:
    """Return each table's weight and optimizer state, by name, as views."""
    tables = zip(tbe.split_embedding_weights(), optimizer_states(tbe), strict=True)
    return [{"weight": weight, **states} for weight, states in tables]


def write_counts(tbe: Tbe) -> list[int]:
    """Return how often weights and states were written, apart from the kernel's own updates.

    Autograd refuses the backward of a lookup that has read older versions.
    """
    names = [f"{kind}_{place}" for kind in _UPDATED for place in ("host", "dev", "uvm")]
    return [_version_of(getattr(tbe, name)) for name in names if hasattr(tbe, name)]


def _version_of(tensor: torch.Tensor) -> int:
    return tensor._version


@contextmanager
def updating_as_of(tbe: Tbe, step: OptimizerStep, *, as_sequence: bool) -> Iterator[None]:
    """Run a forward and a backward as at ``step``, unclipped, inside the context.

    With ``as_sequence``, the forward gives one output row per id, for any kernel pooling; its
    tables must have one dim.

    Bags' gradients were clipped when they were captured. A row's merged gradient is a
    sum of these, and is never clipped.
    """
    learning_rate, args = learning_rate_of(tbe), tbe.optimizer_args
    counters = (_tensor(tbe.iter), _tensor(tbe.iter_cpu))
    iterations = [counter.clone() for counter in counters]
    output_dtype, pooling = tbe.output_dtype, (tbe.pooling_mode, tbe.is_nobag)
    set_learning_rate(tbe, step.learning_rate)
    tbe.optimizer_args = args._replace(gradient_clipping=False)
    # An output's gradient has the output's type, and a merged row gradient is float32.
    tbe.output_dtype = SparseType.FP32.as_int()
    if as_sequence:
        tbe.pooling_mode, tbe.is_nobag = PoolingMode.NONE, True
    # The forward increments the counter before it uses it.
    for counter in counters:
        counter.fill_(step.iteration - 1)
    try:
        yield
    finally:
        set_learning_rate(tbe, learning_rate)
        tbe.optimizer_args = args
        tbe.output_dtype = output_dtype
        tbe.pooling_mode, tbe.is_nobag = pooling
        for counter, iteration in zip(counters, iterations, strict=True):
            counter.copy_(iteration)


def _tensor(buffer: object) -> torch.Tensor:
    """Cast a module's registered buffer, for which type checkers only know `object`."""
    return cast(torch.Tensor, buffer)
