"""Initial tables that don't depend on the sharding.

In TorchRec each shard draws its own numbers, so a seed's tables differ between meshes. Here a
table is cut into blocks of rows, each drawn separately with a seed derived from the user's seed,
the table's name and the block's number. A rank draws the blocks that have its rows.

`EvictedRows` resets rows that get another id, with managed collisions.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torchrec.distributed.types import ShardingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection

from torchrec_2dsp.errors import ConfigError, UnsupportedError
from torchrec_2dsp.plan.fits_module import configs_of
from torchrec_2dsp.replicas.synced_shard import UNSYNCED_STATES, TableShard
from torchrec_2dsp.shard.hot_rows import HotRows
from torchrec_2dsp.shard.kernels import Kernel
from torchrec_2dsp.shard.row_exchange.stages import RowArrangement
from torchrec_2dsp.shard.stages import BatchNotes, Stage

BLOCK_ROWS = 1024
"""The rows in a block: few enough that a shard draws little beyond its own rows, and enough
that seeding takes no time."""


def checked_seed(seed: int | None) -> int | None:
    """Return the seed, or raise `ConfigError`."""
    if seed is not None and (type(seed) is not int or seed < 0):
        raise ConfigError(f"init_seed={seed!r} is no seed; use 0 or more, or leave it out")
    return seed


def is_drawn_alike(module: Any) -> bool:
    """Return whether TorchRec draws all rows of the module's tables alike, so that any may swap."""
    on_meta = all(weight.is_meta for weight in module.parameters())
    return on_meta and all(_is_uniform(config.init_fn) for config in configs_of(module))


def _is_uniform(init_fn: Any) -> bool:
    """Return whether ``init_fn`` is a table config's default."""
    is_uniform = isinstance(init_fn, partial) and init_fn.func is nn.init.uniform_
    return is_uniform and not init_fn.args and init_fn.keywords.keys() == {"a", "b"}


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
    """Draw a table's part that starts at ``row`` and ``column``, in place."""
    num_rows, num_columns = part.shape
    end = row + num_rows
    for first in range(row - row % BLOCK_ROWS, end, BLOCK_ROWS):
        block = drawn_block(config, seed, first // BLOCK_ROWS)
        drawn = slice(max(row, first), min(end, first + len(block)))
        part[drawn.start - row : drawn.stop - row] = block[
            drawn.start - first : drawn.stop - first, column : column + num_columns
        ]


def drawn_block(config: Any, seed: int, number: int) -> torch.Tensor:
    """Return a table block's initial values; seeds the CPU's generator."""
    size = min(BLOCK_ROWS, config.num_embeddings - number * BLOCK_ROWS)
    return _drawn(config, f"{seed}, {config.name}, {number}", size)


def drawn_rows(config: Any, seed: int, number: int, num_rows: int) -> torch.Tensor:
    """Return new initial values for rows that an id map has given to other ids.

    ``number`` is the batch's number. The CPU's generator stays unchanged.
    """
    with torch.random.fork_rng(devices=[]):
        return _drawn(config, f"{seed}, {config.name}, evicted {number}", num_rows)


def _drawn(config: Any, text: str, num_rows: int) -> torch.Tensor:
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    torch.default_generator.manual_seed(int.from_bytes(digest) >> 1)
    block = torch.empty(num_rows, config.embedding_dim)
    config.init_fn(block)
    return block


class EvictedRows(Stage):
    """Resets the rows that a batch's id maps have given to other ids.

    A reset row has a new initial value, equal on all ranks, and no moments. The reset comes after
    all earlier batches' updates, and before the batch is looked up.
    """

    def __init__(
        self,
        configs: Sequence[Any],
        kernels: Sequence[Kernel],
        arrangement: RowArrangement | None,
        hot_rows: HotRows | None,
        before_use: Callable[[], None],
        seed: int,
    ) -> None:
        self._configs = {config.name: config for config in configs}
        self._kernels = list(kernels)
        self._arrangement = arrangement
        self._hot_rows = hot_rows
        self._before_use = before_use
        self._seed = seed

    def before_accumulating(self) -> None:
        """Refuse to accumulate: an evicted id's gradients would change the row for its next id."""
        raise UnsupportedError(
            "accumulate() doesn't know managed collisions, which may give a row to another id "
            "while gradients for the first one wait; use larger batches"
        )

    # The first lookup may be in inference mode, whose tensors can't be changed later.
    @torch.inference_mode(mode=False)
    @torch.no_grad()
    def before_lookup(self, notes: BatchNotes) -> None:
        """Reset the rows; earlier stages have already applied all pending updates."""
        evictions, notes.evictions = notes.evictions, []
        for eviction in evictions:
            if eviction.rows.keys() & self._configs.keys():
                self._before_use()
                self._reset(eviction.rows, eviction.number)

    def _reset(self, rows: Mapping[str, torch.Tensor], number: int) -> None:
        values = {
            name: drawn_rows(self._configs[name], self._seed, number, evicted.numel())
            for name, evicted in rows.items()
            if name in self._configs
        }
        for kernel in self._kernels:
            places = []
            for shard in kernel.shards():
                evicted = rows.get(shard.table, _NO_ROWS)
                place, is_here = self._places(shard, evicted.to(shard.device))
                places.append((shard, place, is_here))
            kernel.tell_write([place for _, place, _ in places])
            for shard, place, is_here in places:
                if place.numel():
                    _write(shard, place, values[shard.table].to(shard.device)[is_here])
        for shard, slots, is_hot in () if self._hot_rows is None else self._hot_rows.replicas(rows):
            _write(shard, slots, values[shard.table].to(shard.device)[is_hot])

    def _places(self, shard: TableShard, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the rows' places in a shard, and a flag for each row that it has."""
        if self._arrangement is not None:
            rows = self._arrangement.positions(shard.table, rows)
        places = rows - shard.row
        is_here = (places >= 0) & (places < shard.num_rows)
        return places[is_here], is_here


_NO_ROWS = torch.empty(0, dtype=torch.int64)


def _write(shard: TableShard, places: torch.Tensor, values: torch.Tensor) -> None:
    for name, tensor in shard.tensors.items():
        if name == "weight":
            columns = slice(shard.column, shard.column + tensor.shape[1])
            # Hidden from autograd, like an update.
            tensor.data[places] = values[:, columns].to(tensor.dtype)
        elif name not in UNSYNCED_STATES:
            tensor.data[places] = 0
