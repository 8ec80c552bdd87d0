"""Adapter to TorchRec's sharded sequences: column-wise tables by whatever name their type has."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from torchrec.distributed.embedding import ShardedEmbeddingCollection


class ColumnWiseSequences(ShardedEmbeddingCollection):
    """TorchRec's collection, which tells column-wise shardings by the name ``column_wise`` alone.

    A subclass says which ones are column-wise.
    """

    @abstractmethod
    def is_column_wise(self, sharding_type: str) -> bool:
        """Whether tables of this type have shards of some of the columns."""

    def order_column_shards(self, configs: Sequence[Any], plan: Mapping[str, Any]) -> None:
        """Let outputs have their columns in order.

        Args:
            configs: of all tables.
            plan: of them, by the names that TorchRec's types have.
        """
        self._generate_permute_indices_per_feature(list(configs), dict(plan))

    def _embedding_dim_for_sharding_type(self, sharding_type: str) -> int:
        """How many columns the looked-up rows of a sharding have; of column-wise shards all alike,
        as TorchRec wants them."""
        if not self.is_column_wise(sharding_type):
            return ShardedEmbeddingCollection._embedding_dim_for_sharding_type(self, sharding_type)
        shards: Any = self._sharding_type_to_sharding[sharding_type].embedding_shard_metadata()
        return shards[0].shard_sizes[1]
