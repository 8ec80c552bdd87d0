"""`Block`: tables of a TBE with one dimension, whose rows are numbered through.

A row's *key* is its number in the block. One sort over keys replaces one per table.
"""

from dataclasses import dataclass

import torch

from torchrec_2dsp._compat.fbgemm import TbeShape

_MAX_INT32 = torch.iinfo(torch.int32).max


@dataclass(frozen=True)
class Block:
    """Tables of one dimension."""

    dim: int
    """Columns of each."""

    features: tuple[int, ...]
    """The TBE's features that look them up."""

    tables: tuple[int, ...]
    """The TBE's tables, in the order of their features."""

    bases: tuple[int, ...]
    """For each table, the key of its first row."""

    num_rows: int
    """Of all tables."""

    @property
    def key_dtype(self) -> torch.dtype:
        """What a key fits into."""
        return torch.int32 if self.num_rows <= _MAX_INT32 else torch.int64

    def feature_bases(self, shape: TbeShape, device: torch.device) -> torch.Tensor:
        """For each feature of the block, the key of the first row that it may look up."""
        base_of = dict(zip(self.tables, self.bases, strict=True))
        bases = [base_of[shape.feature_tables[feature]] for feature in self.features]
        return torch.tensor(bases, device=device)

    def rows_of(self, keys: torch.Tensor) -> list[torch.Tensor]:
        """Ascending keys as row numbers, table by table."""
        bounds = torch.tensor([*self.bases[1:]], dtype=torch.int64, device=keys.device)
        parts = keys.tensor_split(torch.searchsorted(keys, bounds).tolist())
        return [part - base for part, base in zip(parts, self.bases, strict=True)]


def blocks_of(shape: TbeShape) -> tuple[Block, ...]:
    """The blocks of a TBE, most often one.

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
