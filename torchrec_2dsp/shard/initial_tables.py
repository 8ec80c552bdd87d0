"""Initial tables that are the same however they are sharded.

TorchRec lets each shard draw its own numbers, so one seed gives other tables on each mesh. Here a
table is cut into blocks of rows, and each block is drawn by itself, from a seed that follows from
the user's, the table's name and the block's number. A rank draws the blocks in which it has rows.
"""

import hashlib
from typing import Any

import torch
from torch import nn
from torchrec.distributed.types import ShardingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection

from torchrec_2dsp.errors import ConfigError

BLOCK_ROWS = 1024
"""Rows of a block: few enough that a shard draws little that isn't its own, and enough that
seeding takes no time."""


def checked_seed(seed: int | None) -> int | None:
    """Return the seed, or raise `ConfigError`."""
    if seed is not None and (type(seed) is not int or seed < 0):
        raise ConfigError(f"init_seed={seed!r} is no seed; use 0 or more, or leave it out")
    return seed


def configs_of(module: Any) -> list[Any]:
    """Return an unsharded module's table configs."""
    is_bags = hasattr(module, "embedding_bag_configs")
    return module.embedding_bag_configs() if is_bags else module.embedding_configs()


@torch.no_grad()
def draw_tables_(module: Any, configs: list[Any], seed: int) -> None:
    """Draw this rank's part of a sharded module's tables, in place."""
    by_name = {config.name: config for config in configs}
    # Rows that are spread over owners are written by their numbers.
    module.tables.complete_state()
    with torch.random.fork_rng(devices=[]):
        for kernel in module.tables.kernels():
            for shard in kernel.shards():
                weight = shard.tensors["weight"]
                draw_part_(weight, by_name[shard.table], seed, shard.row, shard.column)
        tables = module.embedding_bags if hasattr(module, "embedding_bags") else module.embeddings
        for name, sharding in module.module_sharding_plan.items():
            if sharding.sharding_type == ShardingType.DATA_PARALLEL.value:
                draw_part_(tables[name].weight, by_name[name], seed, 0, 0)


@torch.no_grad()
def draw_whole_tables_(model: nn.Module, seed: int) -> None:
    """Draw an unsharded model's tables in place, like `draw_tables_`."""
    with torch.random.fork_rng(devices=[]):
        for module in model.modules():
            if not isinstance(module, (EmbeddingBagCollection, EmbeddingCollection)):
                continue
            bags = isinstance(module, EmbeddingBagCollection)
            tables: Any = module.embedding_bags if bags else module.embeddings
            for config in configs_of(module):
                draw_part_(tables[config.name].weight, config, seed, 0, 0)


@torch.no_grad()
def draw_part_(part: torch.Tensor, config: Any, seed: int, row: int, column: int) -> None:
    """Draw a table's part from ``row`` and ``column`` on, in place."""
    num_rows, num_columns = part.shape
    end = row + num_rows
    for first in range(row - row % BLOCK_ROWS, end, BLOCK_ROWS):
        block = drawn_block(config, seed, first // BLOCK_ROWS)
        drawn = slice(max(row, first), min(end, first + len(block)))
        part[drawn.start - row : drawn.stop - row] = block[
            drawn.start - first : drawn.stop - first, column : column + num_columns
        ]


def drawn_block(config: Any, seed: int, number: int) -> torch.Tensor:
    """Return a table block's initial values. Seeds the CPU's generator.

    Example:
        >>> from torchrec.modules.embedding_configs import EmbeddingBagConfig
        >>> from torchrec_2dsp.shard.initial_tables import drawn_block
        >>> table = EmbeddingBagConfig(num_embeddings=1_500, embedding_dim=4, name="t_user")
        >>> drawn_block(table, seed=0, number=1).shape
        torch.Size([476, 4])
    """
    size = min(BLOCK_ROWS, config.num_embeddings - number * BLOCK_ROWS)
    text = f"{seed}, {config.name}, {number}".encode()
    digest = hashlib.blake2b(text, digest_size=8).digest()
    torch.default_generator.manual_seed(int.from_bytes(digest) >> 1)
    block = torch.empty(size, config.embedding_dim)
    config.init_fn(block)
    return block
