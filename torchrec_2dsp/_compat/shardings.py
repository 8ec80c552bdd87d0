"""Adapters to private attributes of TorchRec's shardings and sharded modules.

The plugin's subclasses of TorchRec's shardings replace a part of what these build.
"""

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import nn
from torchrec.distributed.dist_data import KJTAllToAll
from torchrec.distributed.embedding import ShardedEmbeddingCollection
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
from torchrec.distributed.sharding.grid_sharding import GridPooledEmbeddingDist
from torchrec.distributed.sharding.rw_sharding import RwPooledEmbeddingDist, RwSparseFeaturesDist
from torchrec.distributed.sharding.tw_sharding import TwSparseFeaturesDist
from torchrec.distributed.sharding.twrw_sharding import TwRwPooledEmbeddingDist

MakeReduceScatter = Callable[[dist.ProcessGroup, Any], Any]
"""Makes a reduce-scatter of pooled embeddings from its group and its codecs."""


def replace_reduce_scatter(output_dist: RwPooledEmbeddingDist, make: MakeReduceScatter) -> None:
    """Let the output exchange of row-wise tables use another reduce-scatter."""
    output_dist._dist = make(output_dist._pg, output_dist._codecs)


def replace_reduce_scatter_in_node(
    output_dist: TwRwPooledEmbeddingDist | GridPooledEmbeddingDist, make: MakeReduceScatter
) -> None:
    """Let the output exchange of tables that are row-wise in a node use another reduce-scatter."""
    output_dist._create_output_dist_modules()
    output_dist._intra_dist = make(output_dist._intra_pg, output_dist._intra_codecs)


def id_exchange_of(input_dist: RwSparseFeaturesDist | TwSparseFeaturesDist) -> KJTAllToAll:
    """The all-to-all of ids inside an input exchange."""
    return input_dist._dist


def lookups_of(
    module: ShardedEmbeddingBagCollection | ShardedEmbeddingCollection,
) -> list[nn.Module]:
    """The lookups of a sharded module, one per sharding."""
    return module._lookups


def input_dists_of(
    module: ShardedEmbeddingBagCollection | ShardedEmbeddingCollection,
) -> list[nn.Module]:
    """The input exchanges of a sharded module, one per sharding."""
    return module._input_dists


def output_dists_of(
    module: ShardedEmbeddingBagCollection | ShardedEmbeddingCollection,
) -> list[nn.Module]:
    """The output exchanges of a sharded module, one per sharding."""
    return module._output_dists
