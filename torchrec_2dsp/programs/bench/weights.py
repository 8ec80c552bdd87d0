"""Initial weights as a function of the row, so that every sharding starts from the same tables.

TorchRec draws them shard by shard, and a whole table fits on no rank where it matters.
"""

import math
from collections.abc import Sequence

import torch
from torch import nn

from torchrec_2dsp.programs.data.dataset import DatasetFeature
from torchrec_2dsp.programs.models.model import table_name
from torchrec_2dsp.programs.models.planned import local_shards

_BLOCK_ROWS = 4096


def fill_tables_(model: nn.Module, features: Sequence[DatasetFeature], dim: int, seed: int) -> None:
    """Write the initial weights of every table into this rank's shards, in place."""
    state = model.state_dict()
    for index, feature in enumerate(features):
        (key,) = (key for key in state if key.endswith(f".{table_name(feature.name)}.weight"))
        for shard, row, column in local_shards(state[key]):
            for start in range(0, shard.shape[0], _BLOCK_ROWS):
                part = shard[start : start + _BLOCK_ROWS]
                rows = initial_rows(
                    row + start, row + start + len(part), dim, feature.num_rows, (seed, index)
                )
                part.copy_(rows[:, column : column + shard.shape[1]])


def initial_rows(
    start: int, end: int, dim: int, num_rows: int, seed: tuple[int, int]
) -> torch.Tensor:
    """Rows of a table: uniform within one over the root of its rows, as TorchRec draws them.

    Args:
        start: the first row.
        end: the one after the last.
        dim: of the table.
        num_rows: of the table.
        seed: of the model, and the number of the table.
    """
    parts = []
    for block in range(start // _BLOCK_ROWS, (end - 1) // _BLOCK_ROWS + 1):
        generator = torch.Generator()
        generator.manual_seed((seed[0] * 4_099 + seed[1]) * 2**24 + block)
        first = block * _BLOCK_ROWS
        drawn = torch.rand(_BLOCK_ROWS, dim, generator=generator)
        parts.append(drawn[max(start - first, 0) : end - first])
    return (2.0 * torch.cat(parts) - 1.0) / math.sqrt(num_rows)
