"""`TableRun`: tables of a block that follow one another in memory, used as one table."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from torchrec_2dsp.rows.blocks import Block


@dataclass(frozen=True)
class TableRun:
    """Tables that are adjacent in memory, as one table, so that one torch call covers them all."""

    first_key: int
    """The key of the first row."""
    tensors: tuple[torch.Tensor, ...]
    """Tensors with one entry per row, such as weights and optimizer states."""


def runs_of(block: Block, tables: Sequence[tuple[torch.Tensor, ...]]) -> list[TableRun]:
    """The tables of a block, in its order, in as few runs as their memory allows.

    Args:
        block: a block of a TBE.
        tables: the tensors of each table of the TBE, in the same order for every table.
    """
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
    """The rows with these ``keys``, read from the first tensor of each run."""
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
