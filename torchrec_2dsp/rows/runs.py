"""Tables of a block that follow one another in memory, as one table."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from torchrec_2dsp.rows.blocks import Block


@dataclass(frozen=True)
class TableRun:
    """Tables whose rows are neighbours, as one table: torch works on all of them at once."""

    first_key: int
    """The key of the first row."""
    tensors: tuple[torch.Tensor, ...]
    """What is known of the rows, such as weights and states."""


def runs_of(block: Block, tables: Sequence[tuple[torch.Tensor, ...]]) -> list[TableRun]:
    """The tables of a block, in its order, in as few runs as their memory allows.

    Args:
        block: of a TBE.
        tables: the tensors of each of the TBE's tables, alike for all.
    """
    found: list[TableRun] = []
    for table, first_key in zip(block.tables, block.bases, strict=True):
        tensors = tables[table]
        if found and all(map(_is_followed_by, found[-1].tensors, tensors)):
            joined = tuple(map(_joined, found[-1].tensors, tensors))
            found[-1] = replace(found[-1], tensors=joined)
        else:
            found.append(TableRun(first_key, tensors))
    return found


def read_rows(runs: Sequence[TableRun], keys: torch.Tensor) -> torch.Tensor:
    """Rows of the first tensors, in the order of ``keys``."""
    if len(runs) == 1:
        return runs[0].tensors[0].index_select(0, keys)
    rows = runs[0].tensors[0].new_empty((keys.numel(), runs[0].tensors[0].shape[1]))
    bounds = keys.new_tensor([run.first_key for run in runs[1:]])
    run_of_key = torch.searchsorted(bounds, keys, right=True)
    for number, run in enumerate(runs):
        places = (run_of_key == number).nonzero().view(-1)
        rows.index_copy_(0, places, run.tensors[0].index_select(0, keys[places] - run.first_key))
    return rows


def _is_followed_by(one: torch.Tensor, other: torch.Tensor) -> bool:
    return (
        one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
        and one.storage_offset() + one.numel() == other.storage_offset()
        and one.is_contiguous()
        and other.is_contiguous()
        and (one.dtype, one.shape[1:]) == (other.dtype, other.shape[1:])
    )


def _joined(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    size = (one.shape[0] + other.shape[0], *one.shape[1:])
    return one.as_strided(size, one.stride(), one.storage_offset())
