"""Row updates: by the TBE's own fused optimizer, or by equivalent rules on tensors."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch

from torchrec_2dsp._compat.fbgemm import (
    EmbOptimType,
    OptimizerStep,
    Tbe,
    TbeShape,
    is_on_gpu,
    iteration_of,
    keeps_untouched_rows,
    last_lookup,
    learning_rate_of,
    max_gradient,
    optimizer_arguments,
    optimizer_states,
    rounding_of,
    table_tensors,
    tbe_shape,
    updates_by_rule,
    updating_as_of,
    writes_rows_plainly,
)
from torchrec_2dsp._compat.triton import runs_triton
from torchrec_2dsp.comms.collectives import constant
from torchrec_2dsp.optim import (
    RuleArguments,
    adagrad_step,
    adam_step,
    lamb_step,
    row_wise_adagrad_step,
    sgd_step,
)
from torchrec_2dsp.rows.eight_bits import EightBitRows
from torchrec_2dsp.rows.gradients import (
    Block,
    BlockGradients,
    Lookup,
    LookupRows,
    RowGradients,
    RowSum,
    blocks_of,
)
from torchrec_2dsp.rows.rounding import rounded

Rule = Callable[..., torch.Tensor]
"""An update rule: ``rule(grad, *states, weights=..., args=...)`` changes the states in place and
returns what to subtract from the rows."""


_MAX_PADDING = 4
"""The most bags per row with which rows are looked up as bags, whose kernel is faster per row."""


def even_bags(starts: torch.Tensor, num_ids: int) -> torch.Tensor:
    """Return offsets that cut each feature's ids into the same number of bags, similar in size.

    A GPU's warp takes one bag after another. For a sequence kernel, whose output doesn't depend
    on bags, many short bags are read by many warps at once.

    Args:
        starts: each feature's first place among the ids, and the last feature's end.
        num_ids: the number of all ids, which is known without asking the GPU.

    Example:
        >>> import torch
        >>> from torchrec_2dsp.rows.update import even_bags
        >>> even_bags(torch.tensor([0, 5, 6]), num_ids=6)
        tensor([0, 1, 3, 5, 5, 5, 6])
    """
    num_features = starts.numel() - 1
    num_bags = max(num_ids // max(num_features, 1), 1)
    numbers = torch.arange(num_bags, device=starts.device)
    cuts = starts[:-1, None] + starts.diff()[:, None] * numbers // num_bags
    return torch.cat([cuts.view(-1), starts[-1:]])


class RowUpdater:
    """Applies `RowGradients` to a TBE, as its fused backward would have.

    A forward over the distinct rows, one row per bag, and a backward with each row's gradient equal
    the fused update bit for bit, for FBGEMM's exact optimizers. Each feature has as many bags as
    the one with the most rows; if most bags would be empty, rows are looked up as a sequence,
    whose kernel rounds differently. On a GPU they always are.
    """

    def __init__(self, tbe: Tbe) -> None:
        self._tbe = tbe
        self._shape = tbe_shape(tbe)
        self._blocks = blocks_of(self._shape)
        self.in_even_bags = is_on_gpu(tbe) and len(self._blocks) == 1
        """True if rows are always looked up as a sequence, in `even_bags`, without a wait."""

    @property
    def num_tables(self) -> int:
        """The number of tables in the kernel."""
        return self._shape.num_tables

    def apply(self, gradients: RowGradients) -> None:
        """Run one fused update with ``gradients``, at their lookup's step."""
        if gradients.num_rows == 0:
            return
        as_sequence = self._shape.is_sequence or self.in_even_bags
        features = [] if as_sequence else self._by_feature(gradients)
        if features and len(self._blocks) == 1:
            num_bags = max(feature.rows.numel() for feature in features) * len(features)
            as_sequence = num_bags > _MAX_PADDING * gradients.num_rows
        if as_sequence:
            (block,) = gradients.blocks
            ids, starts = self._starts.of(block.keys)
            offsets, grad_output = even_bags(starts, ids.numel()), block.grads
        else:
            ids = torch.cat([feature.rows for feature in features])
            offsets, grad_output = _as_bags(features)
        with (
            updating_as_of(self._tbe, gradients.step, as_sequence=as_sequence),
            torch.enable_grad(),
        ):
            self._tbe(ids, offsets).backward(grad_output)

    @cached_property
    @torch.inference_mode(mode=False)
    def _starts(self) -> "_Starts":
        return _Starts(self._shape, self._blocks[0], torch.device(self._tbe.current_device))

    def _by_feature(self, gradients: RowGradients) -> list["_FeatureRows"]:
        """Return each feature's rows; a table's first feature has all its rows."""
        carried: dict[int, _FeatureRows] = {}
        for block, block_gradients in zip(self._blocks, gradients.blocks, strict=True):
            rows = block.rows_of(block_gradients.keys)
            grads = block_gradients.grads.split([part.numel() for part in rows])
            for table, *parts in zip(block.tables, rows, grads, strict=True):
                carried[self._shape.features_of(table)[0]] = _FeatureRows(*parts)
        empty = {
            feature: carried[self._shape.features_of(table)[0]].without_rows()
            for feature, table in enumerate(self._shape.feature_tables)
        }
        return [carried.get(feature, empty[feature]) for feature in sorted(empty)]


class _Starts:
    """Finds each feature's rows among keys, on the keys' device."""

    def __init__(self, shape: TbeShape, block: Block, device: torch.device) -> None:
        firsts = [shape.features_of(table)[0] for table in block.tables]
        features = range(len(shape.feature_tables) + 1)
        # A feature that isn't its table's first has no rows: it starts where the next one does.
        starts = [sum(first < feature for first in firsts) for feature in features]
        self._bases = torch.tensor([*block.bases, block.num_rows], device=device)
        self._starts = torch.tensor(starts, device=device)

    def of(self, keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the row numbers for ascending ``keys``, and each feature's start among them."""
        keys = keys.long()
        starts = torch.searchsorted(keys, self._bases)
        tables = torch.searchsorted(self._bases, keys, right=True) - 1
        return keys - self._bases[tables], starts[self._starts]


class _FeatureRows(NamedTuple):
    """The rows that one feature looks up to update them, and their gradients."""

    rows: torch.Tensor
    grads: torch.Tensor

    def without_rows(self) -> "_FeatureRows":
        return _FeatureRows(self.rows[:0], self.grads[:0])


def _as_bags(features: list[_FeatureRows]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return offsets with one row per bag and empty bags at the end, and the bags' gradient."""
    device = features[0].rows.device
    num_rows = [feature.rows.numel() for feature in features]
    batch_size, sizes = max(num_rows), torch.tensor(num_rows, device=device)
    ends = torch.arange(1, batch_size + 1, device=device).minimum(sizes[:, None])
    ends += (sizes.cumsum(0) - sizes)[:, None]
    offsets = torch.cat([ends.new_zeros(1), ends.view(-1)])
    dims = [feature.grads.shape[1] for feature in features]
    grad_output = features[0].grads.new_zeros((batch_size, sum(dims)))
    for feature, column in zip(features, grad_output.split(dims, dim=1), strict=True):
        column[: feature.grads.shape[0]] = feature.grads
    return offsets, grad_output


class DirectLookup:
    """Runs a kernel's forward, and updates its rows in the backward pass, or at any time.

    A `Rule` updates them, or the `quickest_updater` if there is none. On a CPU, FBGEMM's sequence
    kernel's backward pass takes six times as long, and some optimizers have none.
    """

    def __init__(self, tbe: Tbe, rule: Rule | None) -> None:
        self._tbe = tbe
        self._shape = tbe_shape(tbe)
        self._blocks = blocks_of(self._shape)
        self._updater = quickest_updater(tbe) if rule is None else DirectUpdater(tbe, rule)
        # Autograd only runs a function's backward if an input needs a gradient.
        self._anchor = torch.zeros(1, requires_grad=True)

    def lookup(
        self, run: Callable[[], torch.Tensor], weights: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Run the kernel's forward with per-sample ``weights``; its backward pass updates rows."""
        output: torch.Tensor = _DirectLookup.apply(self._anchor, self, run, weights)  # pyright: ignore[reportAssignmentType]
        return output

    def step(self) -> OptimizerStep:
        """Return the kernel's current learning rate and iteration."""
        return OptimizerStep(learning_rate_of(self._tbe), iteration_of(self._tbe))

    def latest(self, weights: torch.Tensor | None) -> tuple[Lookup, OptimizerStep]:
        """Return the latest forward's inputs, learning rate and iteration."""
        return Lookup(*last_lookup(self._tbe), weights), self.step()

    def update(self, lookup: Lookup, step: OptimizerStep, grad_output: torch.Tensor) -> None:
        """Update ``lookup``'s rows with its output's gradient."""
        rows = LookupRows(self._shape, self._blocks, lookup)
        gradients = rows.gradients(grad_output, max_gradient(self._tbe))
        self._updater.apply(RowGradients(tuple(gradients), step))

    def update_rows(self, keys: torch.Tensor, grads: torch.Tensor, step: OptimizerStep) -> None:
        """Update rows in a kernel with one block; gradients have been clipped at the output."""
        rows = RowSum(keys)
        summed = rows.of(grads.float())
        self._updater.apply(RowGradients((BlockGradients(rows.keys, summed),), step))


class _DirectLookup(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        anchor: torch.Tensor,
        direct: DirectLookup,
        run: Callable[[], torch.Tensor],
        weights: torch.Tensor | None,
    ) -> torch.Tensor:
        output = run()
        # If `update_rows` is called instead, there is no gradient, and zeros would also update.
        ctx.set_materialize_grads(False)
        ctx.direct, ctx.latest = direct, direct.latest(weights)
        return output

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor | None) -> tuple[None, None, None, None]:
        if grad_outputs[0] is not None:
            ctx.direct.update(*ctx.latest, grad_outputs[0])
        return None, None, None, None


RULES: dict[EmbOptimType, Rule] = {
    EmbOptimType.EXACT_SGD: sgd_step,
    EmbOptimType.EXACT_ADAGRAD: adagrad_step,
    EmbOptimType.EXACT_ROWWISE_ADAGRAD: row_wise_adagrad_step,
}
"""The rules of FBGEMM's fused kernels, up to the order of additions. On a CPU they take a third of
the kernels' time, because a kernel sorts once more and looks every row up first."""

RULES_WITHOUT_KERNEL: dict[EmbOptimType, Rule] = {
    EmbOptimType.ADAM: adam_step,
    EmbOptimType.PARTIAL_ROWWISE_ADAM: adam_step,
    EmbOptimType.LAMB: lamb_step,
    EmbOptimType.PARTIAL_ROWWISE_LAMB: lamb_step,
}
"""The rules of FBGEMM's CUDA kernels that have no CPU counterpart."""


def rule_for(tbe: Tbe) -> Rule | None:
    """Return the rule that can replace a kernel's own update; `None` if there is none.

    GPU kernels are fast already, quantised rows aren't floating-point numbers, and an optimizer
    with more states than the rule takes computes something else.
    """
    if updates_by_rule(tbe):
        return (RULES | RULES_WITHOUT_KERNEL)[tbe.optimizer]
    is_float = all(weight.is_floating_point() for weight in tbe.split_embedding_weights())
    rule = RULES.get(tbe.optimizer)
    if rule is None or is_on_gpu(tbe) or not is_float:
        return None
    return rule if all(set(states) <= {"sum"} for states in optimizer_states(tbe)) else None


class DirectUpdater:
    """Applies `RowGradients` to a TBE's weights and optimizer state.

    Meanwhile nothing else may change these rows, and they may not be cached elsewhere.
    """

    def __init__(self, tbe: Tbe, rule: Rule) -> None:
        self._tbe = tbe
        self._rule = rule
        self._rounding = rounding_of(tbe)
        tables = [tuple(tensors.values()) for tensors in table_tensors(tbe)]
        self.num_tables = len(tables)
        self._blocks = blocks_of(tbe_shape(tbe))
        self._runs = [runs_of(block, tables) for block in self._blocks]

    @torch.no_grad()
    def apply(self, gradients: RowGradients) -> None:
        """Update once with ``gradients``, at their lookup's learning rate and iteration."""
        args = RuleArguments(
            lr=gradients.step.learning_rate,
            iteration=gradients.step.iteration,
            **optimizer_arguments(self._tbe, "eps", "beta1", "beta2", "weight_decay"),
        )
        for shape, runs, block in zip(self._blocks, self._runs, gradients.blocks, strict=True):
            keys, ends = block.keys.long(), []
            if len(runs) > 1:
                bounds = constant(tuple(run.first_key for run in runs[1:]), keys.device)
                ends = torch.searchsorted(keys, bounds).tolist()
            parts = keys.tensor_split(ends), block.grads.tensor_split(ends)
            draws: Sequence[torch.Tensor | None] = [None] * len(runs)
            if self._rounding is not None:
                draws = self._rounding.draws(shape, keys, args.iteration).tensor_split(ends)
            for run, run_keys, grad, run_draws in zip(runs, *parts, draws, strict=True):
                rows = run_keys - run.first_key if run.first_key else run_keys
                weights, *states = run.tensors
                row_states = [state.index_select(0, rows) for state in states]
                step = self._rule(
                    grad,
                    *row_states,
                    weights=partial(_rows_of, weights, rows),
                    args=args,
                )
                for state, row_state in zip(states, row_states, strict=True):
                    state.index_copy_(0, rows, row_state)
                _subtract(weights, rows, step, run_draws)


class OnePassUpdater:
    """Applies `RowGradients` to a TBE in GPU memory, by a kernel that visits each row once.

    FBGEMM's kernels first look all rows up, check their numbers and sort them.
    """

    def __init__(self, tbe: Tbe) -> None:
        from torchrec_2dsp.rows.gpu_kernels import rows_in_memory, update_rows

        self._tbe = tbe
        self._update_rows = update_rows
        tables = [tuple(tensors.values()) for tensors in table_tensors(tbe)]
        self.num_tables = len(tables)
        runs = [runs_of(block, tables) for block in blocks_of(tbe_shape(tbe))]
        self._blocks = [
            rows_in_memory([run.first_key for run in of], [run.tensors for run in of])
            for of in runs
        ]

    @torch.no_grad()
    def apply(self, gradients: RowGradients) -> None:
        """Update once with ``gradients``, at their lookup's learning rate."""
        rates = {"lr": gradients.step.learning_rate, **optimizer_arguments(self._tbe, "eps")}
        for rows, block in zip(self._blocks, gradients.blocks, strict=True):
            self._update_rows(rows, block.keys, block.grads, **rates)


def updates_in_one_pass(tbe: Tbe) -> bool:
    """Return whether `OnePassUpdater` can run, with the same result as the kernel's own update."""
    states = [state for of_table in optimizer_states(tbe) for state in of_table.items()]
    return (
        tbe.optimizer in RULES
        and keeps_untouched_rows(tbe)
        and writes_rows_plainly(tbe)
        and all(name == "sum" and state.dtype == torch.float32 for name, state in states)
        and runs_triton(torch.device(tbe.current_device))
    )


Updater = RowUpdater | DirectUpdater | OnePassUpdater
"""Applies row gradients to a TBE."""


def quickest_updater(tbe: Tbe) -> Updater:
    """Return the fastest updater: by a `Rule`, in one pass, or else by the fused kernel."""
    rule = rule_for(tbe)
    if rule is not None:
        return DirectUpdater(tbe, rule)
    return OnePassUpdater(tbe) if updates_in_one_pass(tbe) else RowUpdater(tbe)


def _rows_of(weights: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    return weights.index_select(0, rows).float()


def _subtract(
    weights: torch.Tensor, rows: torch.Tensor, step: torch.Tensor, draws: torch.Tensor | None
) -> None:
    """Subtract ``step`` from these rows in ``weights``; rows must be distinct."""
    if isinstance(weights, EightBitRows):
        weights.store.write(rows, weights.store.read(rows) - step, draws)
        return
    if weights.dtype == step.dtype:
        # With ``alpha=-1`` and a positive step, torch takes three times as long.
        weights.index_add_(0, rows, step.neg_())
        return
    # A step in the weights' own type would be rounded before the difference is.
    exact, dtype = weights.index_select(0, rows) - step, weights.dtype
    weights.index_copy_(0, rows, exact.to(dtype) if draws is None else rounded(exact, draws, dtype))


@dataclass(frozen=True)
class TableRun:
    """Tables that are adjacent in memory, as one table for one torch call."""

    first_key: int
    """The first row's key."""
    tensors: tuple[torch.Tensor, ...]
    """Tensors with one entry per row, such as weights and optimizer states."""


def runs_of(block: Block, tables: Sequence[tuple[torch.Tensor, ...]]) -> list[TableRun]:
    """Return a block's tables, in its order, in as few runs as their memory allows."""
    runs: list[TableRun] = []
    for table, first_key in zip(block.tables, block.bases, strict=True):
        tensors = tables[table]
        if runs and all(map(_is_followed_by, runs[-1].tensors, tensors)):
            joined = tuple(map(_joined, runs[-1].tensors, tensors))
            runs[-1] = replace(runs[-1], tensors=joined)
        else:
            runs.append(TableRun(first_key, tensors))
    return runs


def read_rows(runs: Sequence[TableRun], keys: torch.Tensor) -> torch.Tensor:
    """Return the rows with these ``keys`` from each run's first tensor."""
    if len(runs) == 1:
        return runs[0].tensors[0].index_select(0, keys)
    rows = runs[0].tensors[0].new_empty((keys.numel(), runs[0].tensors[0].shape[1]))
    bounds = keys.new_tensor([run.first_key for run in runs[1:]])
    run_of_key = torch.searchsorted(bounds, keys, right=True)
    for number, run in enumerate(runs):
        places = (run_of_key == number).nonzero().view(-1)
        rows.index_copy_(0, places, run.tensors[0].index_select(0, keys[places] - run.first_key))
    return rows


def _is_followed_by(first: torch.Tensor, second: torch.Tensor) -> bool:
    if isinstance(first, EightBitRows) or isinstance(second, EightBitRows):
        return False
    return (
        first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
        and first.storage_offset() + first.numel() == second.storage_offset()
        and first.is_contiguous()
        and second.is_contiguous()
        and (first.dtype, first.shape[1:]) == (second.dtype, second.shape[1:])
    )


def _joined(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    size = (first.shape[0] + second.shape[0], *first.shape[1:])
    return first.as_strided(size, first.stride(), first.storage_offset())
