"""Row exchange: each distinct row of a batch travels once, whatever the number of samples.

Tables are sharded by rows. TorchRec's row-wise sharding sends partial sums of every bag to every
sample's rank; here a rank asks the owners for the distinct rows of its batch (`row_requests.py`),
they are fetched, and bags are summed where the samples are (`row_pooling.py`). In the backward, one
gradient per distinct row goes to its owner.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torchrec.distributed.types import Awaitable, CommOp
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_2dsp._compat.torchrec import (
    BaseEmbedding,
    EmbeddingShardingContext,
    GroupedEmbeddingConfig,
    GroupedEmbeddingsLookup,
    RwPooledEmbeddingSharding,
    RwSequenceEmbeddingSharding,
    SequenceEmbeddingsAllToAll,
    SequenceShardingContext,
)
from torchrec_2dsp.shard.kernels import EmbeddingKernel
from torchrec_2dsp.shard.row_pooling import pool_rows
from torchrec_2dsp.shard.row_requests import NeededRows, RowBlock, RowRequests


class _NeedsRows:
    """What both contexts below add to TorchRec's."""

    needed: list[NeededRows]

    def record_stream(self: Any, stream: torch.Stream) -> None:
        """Keep the tensors alive for ``stream``."""
        super().record_stream(stream)  # type: ignore[misc]
        for one in self.needed:
            one.record_stream(stream)


@dataclass
class RowContext(_NeedsRows, EmbeddingShardingContext):
    """TorchRec's context of a batch in one sharding, with the rows that it needs."""

    needed: list[NeededRows] = field(default_factory=list)
    """By block."""


@dataclass
class SequenceRowContext(_NeedsRows, SequenceShardingContext):
    """The same for sequences."""

    needed: list[NeededRows] = field(default_factory=list)
    """By block."""


def keep_needed_rows(contexts: list[Any], input_dists: Sequence[nn.Module]) -> None:
    """Put what the last batch needs into its contexts, sharding by sharding."""
    for index, requests in enumerate(input_dists):
        if isinstance(requests, RowRequests):
            stock = contexts[index]
            is_sequence = isinstance(stock, SequenceShardingContext)
            made = SequenceRowContext if is_sequence else RowContext
            contexts[index] = made(**vars(stock), needed=requests.take())


class OwnedRows(list[torch.Tensor]):
    """The rows that ranks have asked this one for, block by block: `[rows, dim]`, table by table,
    in a table rank by rank."""

    counts: list[torch.Tensor]
    """By block, how many of each table each rank gets: `[tables, ranks]`."""

    def view(self, *shape: int) -> "OwnedRows":
        """Itself: TorchRec's sequences are tensors that are put into shape here."""
        return self


class RowLookup(GroupedEmbeddingsLookup):
    """Looks up the rows that other ranks ask for, one output row for each."""

    def _create_embedding_kernel(
        self, config: GroupedEmbeddingConfig, pg: Any, device: Any, env: Any = None
    ) -> BaseEmbedding:
        return EmbeddingKernel(config, pg, device)

    def forward(self, sparse_features: KeyedJaggedTensor) -> OwnedRows:  # type: ignore[override]
        """The rows of one batch of all ranks."""
        asked = sparse_features.split(self._feature_splits)
        owned = OwnedRows(kernel(one) for kernel, one in zip(self._emb_modules, asked, strict=True))
        owned.counts = [one.lengths().view(len(one.keys()), -1) for one in asked]
        return owned


class RowFetch(nn.Module):
    """TorchRec's output exchange of a row-exchange sharding: rows to the ranks that need them."""

    def __init__(
        self, blocks: Sequence[RowBlock], group: Any, device: torch.device, codecs: Any
    ) -> None:
        super().__init__()
        num_ranks = group.size()
        self._exchanges = nn.ModuleList(
            SequenceEmbeddingsAllToAll(group, [len(block.tables)] * num_ranks, device, codecs)
            for block in blocks
        )

    def forward(
        self, owned: OwnedRows, sharding_ctx: "RowContext | SequenceRowContext"
    ) -> "PooledRows":
        """Start to fetch.

        Collectives:
            One all-to-all for each block, waited for by what is returned; one more in the
            backward.
        """
        fetching = [
            exchange(
                rows,
                lengths=counts,
                input_splits=needed.counts.sum(dim=1).tolist(),
                output_splits=counts.sum(dim=0).tolist(),
            )
            for exchange, rows, counts, needed in zip(
                self._exchanges, owned, owned.counts, sharding_ctx.needed, strict=True
            )
        ]
        return PooledRows(fetching, sharding_ctx.needed)


class PooledRows(Awaitable[torch.Tensor]):
    """Rows that are fetched, then summed by bag: `[batch, columns of all features]`; those of
    sequences are spread: `[ids, dim]`."""

    def __init__(
        self, fetching: Sequence[Awaitable[torch.Tensor]], needed: Sequence[NeededRows]
    ) -> None:
        super().__init__()
        self._fetching = fetching
        self._needed = needed

    def _wait_impl(self) -> torch.Tensor:
        pooled = [
            pool_rows(fetched.wait(), needed)
            for fetched, needed in zip(self._fetching, self._needed, strict=True)
        ]
        is_sequence = self._needed[0].bags is None
        return pooled[0] if len(pooled) == 1 else torch.cat(pooled, dim=0 if is_sequence else 1)


class _RowExchange:
    """What the two shardings have in common."""

    def _init_blocks(self: Any) -> None:
        # One row per id comes out of a kernel, so a kernel has tables of one dimension.
        per_rank = [_by_dim(groups) for groups in self._grouped_embedding_configs_per_rank]
        self._grouped_embedding_configs_per_rank = per_rank
        self._grouped_embedding_configs = per_rank[self._rank]
        self._blocks = [RowBlock.of(config) for config in self._grouped_embedding_configs]

    def create_input_dist(self: Any, device: torch.device | None = None) -> Any:
        """What asks for rows."""
        return RowRequests(self._blocks, self._pg, device or self._device)

    def create_output_dist(self: Any, device: torch.device | None = None) -> Any:
        """What fetches rows."""
        registry = self.qcomm_codecs_registry or {}
        codecs = registry.get(CommOp.SEQUENCE_EMBEDDINGS_ALL_TO_ALL.name)
        return RowFetch(self._blocks, self._pg, device or self._device, codecs)

    def create_lookup(
        self: Any,
        device: torch.device | None = None,
        fused_params: dict[str, Any] | None = None,
        feature_processor: Any = None,
    ) -> Any:
        """What looks up the rows of this rank's shards."""
        return RowLookup(
            grouped_configs=[_by_row(config) for config in self._grouped_embedding_configs],
            pg=self._pg,
            device=device or self._device,
            env=self._env,
        )


class RowExchangePooled(_RowExchange, RwPooledEmbeddingSharding):
    """Bags whose rows are exchanged."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._init_blocks()


class RowExchangeSequence(_RowExchange, RwSequenceEmbeddingSharding):
    """Sequences whose rows are exchanged."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._init_blocks()


def _by_dim(groups: Sequence[GroupedEmbeddingConfig]) -> list[GroupedEmbeddingConfig]:
    """The same tables, with one dimension to a group."""
    made = []
    for group in groups:
        for dim in dict.fromkeys(table.local_cols for table in group.embedding_tables):
            tables = [table for table in group.embedding_tables if table.local_cols == dim]
            made.append(replace(group, embedding_tables=tables))
    return made


def _by_row(config: GroupedEmbeddingConfig) -> GroupedEmbeddingConfig:
    """The config of a kernel that looks up rows: unweighted, with one feature for each table."""
    tables = [
        replace(table, feature_names=[table.name], embedding_names=[table.name], is_weighted=False)
        for table in config.embedding_tables
    ]
    return replace(config, embedding_tables=tables, is_weighted=False)
