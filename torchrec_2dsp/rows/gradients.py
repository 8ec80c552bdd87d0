"""`RowGradients`: what one backward contributes to the distinct rows of a TBE's tables."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from torchrec_2dsp._compat.fbgemm import OptimizerStep, TbeShape


@dataclass(frozen=True)
class TableGradients:
    """The gradients of the touched rows of one table."""

    rows: torch.Tensor
    """Row ids, ascending and distinct, int64 `[n]`."""

    grads: torch.Tensor
    """One gradient per row, float32 `[n, dim]`."""


@dataclass(frozen=True)
class RowGradients:
    """The gradients of the touched rows of all tables of a TBE."""

    tables: tuple[TableGradients, ...]
    """One entry per table of the TBE, in its order."""

    step: OptimizerStep
    """Where the schedule stood when the gradients were computed."""

    @property
    def num_rows(self) -> int:
        """Touched rows of all tables."""
        return sum(table.rows.numel() for table in self.tables)


@dataclass(frozen=True)
class Lookup:
    """The inputs of one TBE forward."""

    ids: torch.Tensor
    """Row ids, feature by feature."""
    offsets: torch.Tensor
    """Bag boundaries in ``ids``: features x batch + 1."""
    weights: torch.Tensor | None
    """Per-sample weights, if any."""
    iteration: int
    """The count of this forward, which its update uses even if other forwards came since."""


def gradients_of_lookup(
    shape: TbeShape, lookup: Lookup, grad_output: torch.Tensor, max_gradient: float | None
) -> tuple[TableGradients, ...]:
    """The row gradients that a lookup's output gradient stands for.

    The occurrences of a row are added in the order of the batch, as the fused kernel does, so
    that for unweighted sums over one feature per table both give the same bits.

    Args:
        shape: the tables and features.
        lookup: what was looked up.
        grad_output: the gradient of the TBE's output, `[batch, sum of dims]`, or
            `[ids, dim]` for a sequence lookup.
        max_gradient: clip ``grad_output`` to this bound first.
    """
    grad_output = grad_output.float()
    if max_gradient is not None:
        grad_output = grad_output.clamp(-max_gradient, max_gradient)
    num_features = len(shape.feature_tables)
    batch_size = (lookup.offsets.numel() - 1) // num_features
    bounds = [0] * (num_features + 1)
    if batch_size > 0:
        bounds = lookup.offsets[::batch_size].tolist()
    feature_dims = [shape.table_dims[table] for table in shape.feature_tables]
    columns = [] if shape.is_sequence else list(grad_output.split(feature_dims, dim=1))

    def of_table(table: int) -> TableGradients:
        features = shape.features_of(table)
        # Features of a table are adjacent, and so are their ids.
        first, last = bounds[features[0]], bounds[features[-1] + 1]
        ids = lookup.ids[first:last].long()
        weights = None if lookup.weights is None else lookup.weights[first:last].float()
        if shape.is_sequence:
            contributions = grad_output[first:last]
            source = torch.arange(last - first, device=ids.device)
        else:
            contributions = torch.cat([columns[feature] for feature in features])
            offsets = lookup.offsets[features[0] * batch_size : (features[-1] + 1) * batch_size + 1]
            lengths = offsets.diff()
            bags = torch.arange(lengths.numel(), device=ids.device)
            source = bags.repeat_interleave(lengths, output_size=last - first)
            if shape.is_mean:
                share = lengths.clamp(min=1).reciprocal()[source]
                weights = share if weights is None else weights * share
        return _sum_by_row(ids, contributions, source, weights)

    return tuple(of_table(table) for table in range(shape.num_tables))


def sum_tables(parts: list[TableGradients], divisor: float) -> TableGradients:
    """The sum of several ranks' gradients of one table, divided by ``divisor``.

    Every rank that adds the same parts in the same order gets the same bits.
    """
    if len(parts) == 1 and divisor == 1.0:
        return parts[0]
    rows = torch.cat([part.rows for part in parts])
    grads = torch.cat([part.grads for part in parts])
    summed = _sum_by_row(rows, grads, torch.arange(rows.numel(), device=rows.device), None)
    return TableGradients(summed.rows, summed.grads / divisor if divisor != 1.0 else summed.grads)


def _sum_by_row(
    ids: torch.Tensor,
    contributions: torch.Tensor,
    source: torch.Tensor,
    weights: torch.Tensor | None,
) -> TableGradients:
    """Add ``contributions[source[i]] * weights[i]`` into row ``ids[i]``, in the order of i."""
    sorted_ids, order = ids.sort(stable=True)
    rows, counts = torch.unique_consecutive(sorted_ids, return_counts=True)
    if rows.numel() == 0:
        return TableGradients(rows, contributions.new_empty((0, contributions.shape[1])))
    # An embedding bag over the contributions gathers and adds without materialising them; each
    # bag is added sequentially on every backend, so the result is deterministic.
    grads = F.embedding_bag(
        source[order],
        contributions,
        counts.cumsum(0) - counts,
        mode="sum",
        per_sample_weights=None if weights is None else weights[order],
    )
    return TableGradients(rows, grads)
