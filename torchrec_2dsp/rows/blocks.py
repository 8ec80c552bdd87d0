"""`Block`: the tables of a TBE with the same dimension, their rows numbered in one sequence.

A row's *key* is its number in the block. One sort over keys replaces one per table.
"""

from dataclasses import dataclass

import torch

from torchrec_2dsp._compat.fbgemm import TbeShape

_MAX_INT32 = torch.iinfo(torch.int32).max


@dataclass(frozen=True)
class Block:
    """Tables of a TBE with the same dimension, their rows numbered in one sequence."""

    dim: int
    """Columns of each table."""

    features: tuple[int, ...]
    """The features of the TBE that look these tables up."""

    tables: tuple[int, ...]
    """These tables' numbers in the TBE, in the order of their features."""

    bases: tuple[int, ...]
    """For each table, the key of its first row."""

    num_rows: int
    """Rows of all tables together."""

    @property
    def key_dtype(self) -> torch.dtype:
        """The smallest integer type, int32 or int64, that every key fits into."""
        return torch.int32 if self.num_rows <= _MAX_INT32 else torch.int64

    def feature_bases(self, shape: TbeShape, device: torch.device) -> torch.Tensor:
        """For each feature of the block, the key of its table's first row."""
        base_of = dict(zip(self.tables, self.bases, strict=True))
        bases = [base_of[shape.feature_tables[feature]] for feature in self.features]
        return torch.tensor(bases, device=device)

    def rows_of(self, keys: torch.Tensor) -> list[torch.Tensor]:
        """The row numbers in each table that ascending ``keys`` stand for."""
        bounds = torch.tensor([*self.bases[1:]], dtype=torch.int64, device=keys.device)
        parts = keys.tensor_split(torch.searchsorted(keys, bounds).tolist())
        return [part - base for part, base in zip(parts, self.bases, strict=True)]


def blocks_of(shape: TbeShape) -> tuple[Block, ...]:
    """The blocks of a TBE; most TBEs have one.

    Example:
        >>> from torchrec_2dsp._compat.fbgemm import TbeShape
        >>> from torchrec_2dsp.rows.blocks import blocks_of
        >>> shape = TbeShape((10, 20, 30), (8, 4, 8), (0, 1, 1, 2), False, False)
        >>> [(block.dim, block.tables, block.bases) for block in blocks_of(shape)]
        [(8, (0, 2), (0, 10)), (4, (1,), (0,))]
    """
    blocks = []
    for dim in dict.fromkeys(shape.table_dims[table] for table in shape.feature_tables):
        features = [
            feature
            for feature, table in enumerate(shape.feature_tables)
            if shape.table_dims[table] == dim
        ]
        tables = list(dict.fromkeys(shape.feature_tables[feature] for feature in features))
        bases, num_rows = [], 0
        for table in tables:
            bases.append(num_rows)
            num_rows += shape.table_rows[table]
        blocks.append(Block(dim, tuple(features), tuple(tables), tuple(bases), num_rows))
    return tuple(blocks)
