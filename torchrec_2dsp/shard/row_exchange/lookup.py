"""`RowLookup`: owners look up the rows that ranks have asked them for."""

from dataclasses import replace
from typing import Any, cast

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_2dsp._compat.shardings import parts_of_lookup
from torchrec_2dsp._compat.torchrec import (
    BaseEmbedding,
    GroupedEmbeddingConfig,
    GroupedEmbeddingsLookup,
)
from torchrec_2dsp.shard.row_exchange.kernel import RowKernel


class OwnedRows(list[torch.Tensor]):
    """The rows that ranks have asked this one for, block by block: `[rows, dim]`, table by table,
    in a table rank by rank."""

    counts: list[torch.Tensor]
    """How many rows of each table each rank gets, block by block: `[tables, ranks]`."""

    def view(self, *shape: int) -> "OwnedRows":
        """Itself: TorchRec's sequences are tensors that are put into shape here."""
        return self


class RowLookup(GroupedEmbeddingsLookup):
    """Looks up the rows that other ranks ask for, one output row for each."""

    def _create_embedding_kernel(
        self, config: GroupedEmbeddingConfig, pg: Any, device: Any, env: Any = None
    ) -> BaseEmbedding:
        return RowKernel(config, pg, device)

    def forward(self, sparse_features: KeyedJaggedTensor) -> OwnedRows:  # type: ignore[override]
        """The rows of one batch of all ranks."""
        parts = self.parts(sparse_features)
        owned = OwnedRows(kernel(ids) for kernel, ids in parts)
        owned.counts = [ids.lengths().view(len(ids.keys()), -1) for _, ids in parts]
        return owned

    def parts(
        self, sparse_features: KeyedJaggedTensor
    ) -> list[tuple[RowKernel, KeyedJaggedTensor]]:
        """The kernels, and what each is asked for."""
        kernels, num_features = parts_of_lookup(self)
        return list(zip(cast(Any, kernels), sparse_features.split(num_features), strict=True))


def config_by_row(config: GroupedEmbeddingConfig) -> GroupedEmbeddingConfig:
    """The config of a kernel that looks up rows: unweighted, with one feature for each table."""
    tables = [
        replace(table, feature_names=[table.name], embedding_names=[table.name], is_weighted=False)
        for table in config.embedding_tables
    ]
    return replace(config, embedding_tables=tables, is_weighted=False)
