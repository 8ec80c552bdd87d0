"""Row exchange, first step: which rows a batch needs, and who has them.

Every id becomes a *key*, the number of its row in the order of owners. One sort of the keys of a
kernel's features finds the distinct rows, by owner and by table, and where each one goes.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import record_function
from torchrec.distributed.types import Awaitable
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_2dsp._compat.torchrec import GroupedEmbeddingConfig, KJTAllToAll
from torchrec_2dsp.errors import UnsupportedError
from torchrec_2dsp.rows.gradients import RowSum

_LABEL = "## request rows ##"
"""In profiles."""

_MAX_INT32 = torch.iinfo(torch.int32).max


@dataclass(frozen=True)
class RowBlock:
    """The tables of one kernel, cut into blocks of rows, one for each owner."""

    dim: int
    """Columns of each table."""
    tables: tuple[str, ...]
    """Their names."""
    features: tuple[str, ...]
    """What looks them up, table by table."""
    feature_tables: tuple[int, ...]
    """The table of each feature."""
    rows_per_owner: tuple[int, ...]
    """For each table; the last owners may have fewer."""
    pooling: str
    """"SUM", "MEAN", or "NONE" for a sequence."""

    @classmethod
    def of(cls, config: GroupedEmbeddingConfig) -> "RowBlock":
        """The block of a kernel, of any rank."""
        tables = config.embedding_tables
        metadata = [table.global_metadata for table in tables]
        return cls(
            dim=tables[0].local_cols,
            tables=tuple(table.name for table in tables),
            features=tuple(name for table in tables for name in table.feature_names),
            feature_tables=tuple(
                index for index, table in enumerate(tables) for _ in table.feature_names
            ),
            rows_per_owner=tuple(
                one.shards_metadata[0].shard_sizes[0] for one in metadata if one is not None
            ),
            pooling=config.pooling.value,
        )

    @property
    def stride(self) -> int:
        """Keys per owner."""
        return sum(self.rows_per_owner)

    @property
    def bases(self) -> tuple[int, ...]:
        """For each table, the first key of an owner's rows, counted from the owner's first one."""
        return tuple(sum(self.rows_per_owner[:table]) for table in range(len(self.tables)))


@dataclass(frozen=True)
class Bags:
    """Which occurrences are summed, sample by sample, so that sums are a `KeyedTensor`'s rows."""

    num_features: int
    lengths: torch.Tensor
    """Occurrences in each bag."""
    weights: torch.Tensor | None
    """Of the occurrences."""


@dataclass(frozen=True)
class NeededRows:
    """What the local batch needs of one block, once it has come: its distinct rows, by owner."""

    sums: RowSum
    """The rows, and how they get their gradients."""
    places: torch.Tensor
    """For each occurrence, which of the rows it is: in bags bag by bag, else as in the batch."""
    counts: torch.Tensor
    """How many rows come from each owner, for each table: `[owners, tables]`."""
    bags: Bags | None
    """`None` for a sequence."""

    def record_stream(self, stream: torch.Stream) -> None:
        """Keep the tensors alive for ``stream``."""
        tensors = [self.places, self.counts]
        if self.bags is not None:
            tensors += [self.bags.lengths, self.bags.weights]
        for tensor in tensors:
            if tensor is not None:
                tensor.record_stream(stream)  # pyright: ignore[reportArgumentType]
        self.sums.record_stream(stream)


class RowRequests(nn.Module):
    """TorchRec's input exchange of a row-exchange sharding: distinct rows, to their owners."""

    def __init__(
        self, blocks: Sequence[RowBlock], group: dist.ProcessGroup, device: torch.device
    ) -> None:
        """
        Args:
            blocks: kernel by kernel.
            group: the owners.
            device: of the batches.
        """
        super().__init__()
        self._blocks = tuple(blocks)
        self._num_owners = dist.get_world_size(group)
        self._sizes = [len(block.features) for block in blocks]
        self._numberings = [_Numbering(block, self._num_owners, device) for block in blocks]
        tables = [table for block in blocks for table in block.tables]
        self._keys = tables * self._num_owners
        self._exchange = KJTAllToAll(group, [len(tables)] * self._num_owners)
        self._needed: list[NeededRows] = []

    def forward(self, features: KeyedJaggedTensor) -> Awaitable[Awaitable[KeyedJaggedTensor]]:
        """Ask for the rows of a batch.

        Args:
            features: those of the blocks, in their order.

        Returns:
            What all ranks ask this one for: a key for each table, a bag for each rank, in it the
            ids of rows in the local shard.

        Collectives:
            Those of TorchRec's input exchange, for one sample with all rows.
        """
        if features.variable_stride_per_key():
            raise UnsupportedError(
                "row exchange needs one batch size for all features of a batch; variable batch "
                "sizes per feature (VBE) need another exchange"
            )
        with record_function(_LABEL):
            parts = features.split(self._sizes)
            found = [one.find(part) for one, part in zip(self._numberings, parts, strict=True)]
            self._needed = [needed for needed, _ in found]
            counts = torch.cat([needed.counts for needed in self._needed], dim=1)
            asked = KeyedJaggedTensor(
                keys=self._keys,
                values=_owner_by_owner([ids for _, ids in found], self._needed),
                lengths=counts.reshape(-1),
                stride=1,
            )
        return self._exchange(asked)

    def take(self) -> list[NeededRows]:
        """What the last batch needs, block by block, forgotten here."""
        taken, self._needed = self._needed, []
        return taken


class _Numbering:
    """The keys of a block's rows."""

    def __init__(self, block: RowBlock, num_owners: int, device: torch.device) -> None:
        self._block = block
        self._num_owners = num_owners
        bases = torch.tensor(block.bases, device=device)
        rows = torch.tensor(block.rows_per_owner, device=device)
        tables = torch.tensor(block.feature_tables, device=device)
        self._feature_bases, self._feature_rows = bases[tables], rows[tables]
        # Sorting is quicker for shorter numbers.
        num_keys = num_owners * block.stride
        key_dtype = torch.int32 if num_keys <= _MAX_INT32 else torch.int64
        owners = torch.arange(num_owners, device=device)
        starts = (owners[:, None] * block.stride + bases).reshape(-1).to(key_dtype)
        self._starts = starts
        """The first key of each table of each owner."""
        self._bounds = torch.cat([starts, starts.new_tensor([num_keys])])

    def find(self, features: KeyedJaggedTensor) -> tuple[NeededRows, torch.Tensor]:
        """The distinct rows of the block's features; and their ids in their owners' shards."""
        lengths = features.lengths().view(len(self._block.features), features.stride())
        keys = self._keys(features.values().long(), lengths.sum(dim=1))
        if self._block.pooling == "NONE":
            sums, bags = RowSum(keys), None
            places = sums.places()
        else:
            sums, places, bags = _in_bags(keys, features, lengths, self._block.pooling)
        counts = torch.searchsorted(sums.keys, self._bounds).diff()
        asked = sums.keys - self._starts.repeat_interleave(counts, output_size=sums.keys.numel())
        return NeededRows(sums, places, counts.view(self._num_owners, -1), bags), asked.int()

    def _keys(self, ids: torch.Tensor, ids_per_feature: torch.Tensor) -> torch.Tensor:
        def spread(by_feature: torch.Tensor) -> torch.Tensor:
            return by_feature.repeat_interleave(ids_per_feature, output_size=ids.numel())

        rows = spread(self._feature_rows)
        owners = torch.div(ids, rows, rounding_mode="floor")
        keys = owners * (self._block.stride - rows) + ids + spread(self._feature_bases)
        return keys.to(self._bounds.dtype)


def _in_bags(
    keys: torch.Tensor, features: KeyedJaggedTensor, lengths: torch.Tensor, pooling: str
) -> tuple[RowSum, torch.Tensor, Bags]:
    """How rows get gradients from bags, and bags their sums from rows.

    Args:
        keys: of the occurrences, feature by feature.
        features: the batch.
        lengths: of the bags, `[features, batch]`.
        pooling: "SUM" or "MEAN".
    """
    num_ids, (num_features, batch_size) = keys.numel(), lengths.shape
    per_bag = lengths.reshape(-1)
    weights = features.weights_or_none()
    weights = None if weights is None else weights.float()
    if pooling == "MEAN":
        # An average is a weighted sum.
        shares = per_bag.clamp(min=1).reciprocal().repeat_interleave(per_bag, output_size=num_ids)
        weights = shares if weights is None else weights * shares
    bags = torch.arange(num_features * batch_size, device=keys.device)
    by_sample = bags.view(batch_size, num_features).t().reshape(-1)
    sums = RowSum(keys, by_sample.repeat_interleave(per_bag, output_size=num_ids), weights)
    by_feature = bags.view(num_features, batch_size).t().reshape(-1).int()
    bag_lengths, places, bag_weights = torch.ops.fbgemm.permute_1D_sparse_data(
        by_feature, per_bag, sums.places(), weights, num_ids
    )
    return sums, places, Bags(num_features, bag_lengths, bag_weights)


def _owner_by_owner(ids: list[torch.Tensor], needed: list[NeededRows]) -> torch.Tensor:
    """The blocks' ids, each in the order of owners, as one such list."""
    if len(ids) == 1:
        return ids[0]
    parts = [one.split(of.counts.sum(dim=1).tolist()) for one, of in zip(ids, needed, strict=True)]
    return torch.cat([part for of_owner in zip(*parts, strict=True) for part in of_owner])
