"""`RowLookup` and its kernels, which look up the rows that other ranks ask for."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import accumulate, islice
from typing import Any, cast

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_2dsp._compat.fbgemm import (
    OptimizerStep,
    count_forwards,
    is_on_gpu,
    output_dtype,
    tbe_shape,
)
from torchrec_2dsp._compat.shardings import parts_of_lookup
from torchrec_2dsp._compat.torchrec import GroupedEmbeddingConfig
from torchrec_2dsp.comms.collectives import constant
from torchrec_2dsp.rows.gradients import blocks_of, repeated, transposed
from torchrec_2dsp.rows.update import DirectLookup, TableRun, even_bags, read_rows, runs_of
from torchrec_2dsp.shard.kernels import EmbeddingKernel, SequenceLookup


class RowKernel(EmbeddingKernel):
    """Looks up numbered rows; only row exchange rounds its updates."""

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        """Return one row per id; a GPU reads them in short bags."""
        if not is_on_gpu(self.tbe):
            return super().forward(features)

        def run() -> torch.Tensor:
            ids, starts = features.values().long(), features.offsets()[:: features.stride()]
            return self.tbe(ids, even_bags(starts, ids.numel()))

        return self._lookup(run, features)

    def row_numbers(self, ids_by_table: KeyedJaggedTensor) -> torch.Tensor:
        """Return the requested rows' numbers, rank by rank; the lookup's order is by table."""
        counts, ids = counts_of(ids_by_table), ids_by_table.values()
        num_ranks, device = counts.shape[1], ids.device
        order = transposed(num_ranks, len(counts), device, torch.int32)
        counts, ids, _ = torch.ops.fbgemm.permute_1D_sparse_data(
            order, counts.reshape(-1), ids, None, ids.numel()
        )
        return ids + repeated(constant(self._first_rows * num_ranks, device), counts, ids.numel())

    def read_rows(self, numbers: torch.Tensor) -> torch.Tensor:
        """Return the current rows without a gradient, in the lookup's type."""
        return read_rows(self._runs, numbers).to(output_dtype(self.tbe))

    def count_lookup(self) -> None:
        """Count a batch whose rows are read by `read_rows`, as a forward would."""
        if self.tbe.training and torch.is_grad_enabled():
            count_forwards(self.tbe, 1)

    def is_among(self, numbers: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
        """Return 1 for each row that is among ``others``, and 0 for each row that isn't."""
        flags = self._flags
        flags.index_fill_(0, others, 1)
        is_among = flags.index_select(0, numbers)
        flags.index_fill_(0, others, 0)
        return is_among

    def step(self) -> OptimizerStep:
        """Return the schedule's current step."""
        return self._by_row.step()

    def update_rows(self, numbers: torch.Tensor, grads: torch.Tensor, step: OptimizerStep) -> None:
        """Apply gradients at ``step``; a row's gradients are added in this order."""
        if numbers.numel():
            self._by_row.update_rows(numbers, grads, step)

    @cached_property
    @torch.inference_mode(mode=False)
    def _by_row(self) -> DirectLookup:
        return self._direct or DirectLookup(self.tbe, rule=None)

    # What follows is created on first use, when the kernel is where it stays; this may be in an
    # evaluation, whose tensors couldn't be changed afterwards.

    @cached_property
    @torch.inference_mode(mode=False)
    def _runs(self) -> list[TableRun]:
        (block,) = blocks_of(tbe_shape(self.tbe))
        return runs_of(block, [(weight,) for weight in self.tbe.split_embedding_weights()])

    @cached_property
    def _first_rows(self) -> tuple[int, ...]:
        rows = [table.local_rows for table in self.table_configs]
        return tuple(accumulate(rows[:-1], initial=0))

    @cached_property
    @torch.inference_mode(mode=False)
    def _flags(self) -> torch.Tensor:
        """One flag per row, 0 between calls; it saves sorting."""
        num_rows = sum(table.local_rows for table in self.table_configs)
        return torch.zeros(num_rows, dtype=torch.uint8, device=self.tbe.current_device)

    def _updating(
        self, run: Callable[[], torch.Tensor], weights: torch.Tensor | None
    ) -> torch.Tensor:
        return super()._updating(run, None) if self._direct is None else self._direct.lookup(run)


class OwnedRows(list[torch.Tensor]):
    """The requested rows, block by block: `[rows, dim]`, by table, then by rank."""

    counts: list[torch.Tensor]
    """Row counts per table and rank, block by block: `[tables, ranks]`."""

    def view(self, *shape: int) -> "OwnedRows":
        """Return itself: TorchRec reshapes sequences here, which are tensors."""
        return self


def counts_of(ids_by_table: KeyedJaggedTensor) -> torch.Tensor:
    """Return how many rows each rank asks for: `[tables, ranks]`."""
    return ids_by_table.lengths().view(len(ids_by_table.keys()), -1)


def num_by_rank(counts: Sequence[torch.Tensor]) -> list[list[int]]:
    """Count each block's rows by rank, in one transfer, because it waits for the GPU."""
    by_table = iter(torch.cat(list(counts)).tolist())
    return [list(map(sum, zip(*islice(by_table, len(block)), strict=True))) for block in counts]


class RowLookup(SequenceLookup):
    """Looks up the rows that other ranks ask for."""

    kernel_class = RowKernel
    is_for_journeys = False
    """True if journeys carry the next batch's rows, which they read themselves."""

    def forward(self, sparse_features: KeyedJaggedTensor) -> OwnedRows:  # type: ignore[override]
        """Return the rows that all ranks want for one batch; none if journeys carry them."""
        if self.is_for_journeys:
            for kernel in self.kernels():
                kernel.count_lookup()
            return OwnedRows()
        parts = self.parts(sparse_features)
        owned = OwnedRows(kernel(ids) for kernel, ids in parts)
        owned.counts = [counts_of(ids) for _, ids in parts]
        return owned

    def parts(
        self, sparse_features: KeyedJaggedTensor
    ) -> list[tuple[RowKernel, KeyedJaggedTensor]]:
        """Return the kernels with their requests."""
        _, num_features = parts_of_lookup(self)
        return list(zip(self.kernels(), sparse_features.split(num_features), strict=True))

    def kernels(self) -> list[RowKernel]:
        """Return the kernels."""
        return cast(Any, parts_of_lookup(self)[0])


def config_by_row(config: GroupedEmbeddingConfig) -> GroupedEmbeddingConfig:
    """Return a kernel's config for looking up rows: unweighted, one feature per table.

    A row's gradient is the sum of its bags' gradients, which `ClipGradients` has clipped.
    """
    tables = [
        replace(table, feature_names=[table.name], embedding_names=[table.name], is_weighted=False)
        for table in config.embedding_tables
    ]
    params = {**(config.fused_params or {}), "gradient_clipping": False}
    return replace(config, embedding_tables=tables, is_weighted=False, fused_params=params)
