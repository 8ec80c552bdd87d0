"""The parts of sharded tables that a rank holds, whoever has sharded them."""

from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.tensor import DTensor


def local_shards(value: Any) -> Iterator[tuple[torch.Tensor, int, int]]:
    """The parts of a table on this rank, with their first row and column.

    Args:
        value: the table's weight in a state dict of TorchRec.
    """
    if isinstance(value, ShardedTensor):
        for shard in value.local_shards():
            row, column = shard.metadata.shard_offsets
            yield shard.tensor, row, column
    elif isinstance(value, DTensor):
        local: Any = value.to_local()
        # A rank without a shard has an offset all the same.
        for shard, (row, column) in zip(local.local_shards(), local.local_offsets(), strict=False):
            yield shard, row, column
    else:
        yield value, 0, 0
