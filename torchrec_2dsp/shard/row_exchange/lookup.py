"""`RowLookup` and its kernels, which look up the rows that other ranks ask for."""

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from typing import Any, cast

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_2dsp._compat.fbgemm import OptimizerStep, is_on_gpu, output_dtype, tbe_shape
from torchrec_2dsp._compat.shardings import parts_of_lookup
from torchrec_2dsp._compat.torchrec import GroupedEmbeddingConfig
from torchrec_2dsp.rows.gradients import blocks_of, repeated
from torchrec_2dsp.rows.update import DirectLookup, TableRun, even_bags, read_rows, runs_of
from torchrec_2dsp.shard.kernels import EmbeddingKernel, SequenceLookup


class RowKernel(EmbeddingKernel):
    """Looks up numbered rows; only row exchange rounds its updates."""

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        """Return one row per id; a GPU reads them in bags that are short."""
        if not is_on_gpu(self.tbe):
            return super().forward(features)

        def run() -> torch.Tensor:
            ids, starts = features.values().long(), features.offsets()[:: features.stride()]
            return self.tbe(ids, even_bags(starts, ids.numel()))

        return self._lookup(run, features)

    def row_numbers(self, ids_by_table: KeyedJaggedTensor) -> torch.Tensor:
        """Return the requested rows' numbers, in the lookup's order."""
        ids = ids_by_table.values()
        num_tables = len(ids_by_table.keys())
        per_table = ids_by_table.lengths().view(num_tables, -1).sum(dim=1)
        return ids + repeated(self._first_rows, per_table, ids.numel())

    def read_rows(self, numbers: torch.Tensor) -> torch.Tensor:
        """Return the current rows, without a gradient, in the lookup's type."""
        return read_rows(self._runs, numbers).detach().to(output_dtype(self.tbe))

    def is_among(self, numbers: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
        """Return which rows are among others."""
        flags = self._flags
        flags[others] = True
        is_among = flags[numbers]
        flags[others] = False
        return is_among

    @property
    def updates_by_row(self) -> bool:
        """True if all updates run apart from the kernel's own backward; alike on all ranks."""
        return self._direct is not None

    def step(self) -> OptimizerStep:
        """Return the schedule's current step."""
        return self._by_row.step()

    def update_rows(self, numbers: torch.Tensor, grads: torch.Tensor, step: OptimizerStep) -> None:
        """Apply gradients at ``step``; a row's are added in this order."""
        if numbers.numel():
            self._by_row.update_rows(numbers, grads, step)

    @cached_property
    @torch.inference_mode(mode=False)
    def _by_row(self) -> DirectLookup:
        return self._direct or DirectLookup(self.tbe, rule=None)

    # What follows is made when it is first used, when the kernel is where it stays; also if that is
    # in an evaluation, whose tensors couldn't be changed afterwards.

    @cached_property
    @torch.inference_mode(mode=False)
    def _runs(self) -> list[TableRun]:
        (block,) = blocks_of(tbe_shape(self.tbe))
        return runs_of(block, [(weight,) for weight in self.tbe.split_embedding_weights()])

    @cached_property
    @torch.inference_mode(mode=False)
    def _first_rows(self) -> torch.Tensor:
        rows = [table.local_rows for table in self.table_configs]
        device = self.tbe.current_device
        return torch.tensor([0, *rows[:-1]], device=device).cumsum(0)

    @cached_property
    @torch.inference_mode(mode=False)
    def _flags(self) -> torch.Tensor:
        """One flag per row, false between calls; it saves sorting."""
        num_rows = sum(table.local_rows for table in self.table_configs)
        return torch.zeros(num_rows, dtype=torch.bool, device=self.tbe.current_device)

    def _updating(
        self, run: Callable[[], torch.Tensor], weights: torch.Tensor | None
    ) -> torch.Tensor:
        return super()._updating(run, None) if self._direct is None else self._direct.lookup(run)


class OwnedRows(list[torch.Tensor]):
    """The requested rows, block by block: `[rows, dim]`, by table, then by rank."""

    counts: list[torch.Tensor]
    """Row counts per table and rank, block by block: `[tables, ranks]`."""

    def view(self, *shape: int) -> "OwnedRows":
        """Return itself: here TorchRec shapes its sequences, which are tensors."""
        return self


class RowLookup(SequenceLookup):
    """Looks up the rows that other ranks ask for."""

    kernel_class = RowKernel

    def forward(self, sparse_features: KeyedJaggedTensor) -> OwnedRows:  # type: ignore[override]
        """Return the rows that all ranks want for one batch."""
        parts = self.parts(sparse_features)
        owned = OwnedRows(kernel(ids) for kernel, ids in parts)
        owned.counts = [ids.lengths().view(len(ids.keys()), -1) for _, ids in parts]
        return owned

    def parts(
        self, sparse_features: KeyedJaggedTensor
    ) -> list[tuple[RowKernel, KeyedJaggedTensor]]:
        """Return the kernels with their requests."""
        kernels, num_features = parts_of_lookup(self)
        return list(zip(cast(Any, kernels), sparse_features.split(num_features), strict=True))


def config_by_row(config: GroupedEmbeddingConfig) -> GroupedEmbeddingConfig:
    """Return a kernel's config for looking up rows: unweighted, one feature per table."""
    tables = [
        replace(table, feature_names=[table.name], embedding_names=[table.name], is_weighted=False)
        for table in config.embedding_tables
    ]
    return replace(config, embedding_tables=tables, is_weighted=False)
