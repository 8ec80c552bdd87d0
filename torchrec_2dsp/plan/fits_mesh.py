"""Checks that a plan's shards cover each table once, cut as its sharding type requires."""

import math
from collections.abc import Sequence
from itertools import chain, pairwise
from typing import Any, cast

from torch.distributed._shard.metadata import ShardMetadata
from torchrec.distributed.types import ParameterSharding, ShardingType

from torchrec_2dsp._compat.torchrec import EmbeddingComputeKernel
from torchrec_2dsp.codecs.rows import Transport
from torchrec_2dsp.errors import PlanError, UnsupportedError
from torchrec_2dsp.mesh import Mesh2D
from torchrec_2dsp.plan.parameter_sharding import (
    IN_8_BITS,
    ROW_EXCHANGES,
    ParameterSharding2D,
    RowOwners,
    RowStorage,
    ShardingType2D,
    kinds_of,
    num_rows,
)

_WHOLE_ROWS = (ShardingType.ROW_WISE, ShardingType.TABLE_ROW_WISE)
_WHOLE_COLUMNS = (ShardingType.COLUMN_WISE, ShardingType.TABLE_COLUMN_WISE)
_REMEDY = "plan the table again, or write its shards as its sharding type cuts them"


def check_shards(
    where: str, kind: ShardingType, shards: Sequence[ShardMetadata], group_size: int
) -> None:
    """Raise `PlanError` unless the shards cover a table once, cut as its sharding type requires.

    ``where`` names the table in messages; its type isn't data parallel.
    """
    _check_numbers(where, shards)
    num_rows = max(shard.shard_offsets[0] + shard.shard_sizes[0] for shard in shards)
    num_columns = max(shard.shard_offsets[1] + shard.shard_sizes[1] for shard in shards)
    if not num_rows or not num_columns:
        raise PlanError(f"table {where} has {num_rows} rows of {num_columns} columns; {_REMEDY}")
    _check_cover(where, shards, num_rows, num_columns)
    if kind is ShardingType.TABLE_WISE and len(shards) != 1:
        raise PlanError(f"table {where} is table-wise and has {len(shards)} shards; {_REMEDY}")
    if kind in _WHOLE_ROWS and any(shard.shard_sizes[1] != num_columns for shard in shards):
        raise PlanError(f"table {where} is {kind.value}, but a shard lacks columns; {_REMEDY}")
    if kind in _WHOLE_COLUMNS and any(shard.shard_sizes[0] != num_rows for shard in shards):
        raise PlanError(f"table {where} is {kind.value}, but a shard lacks rows; {_REMEDY}")
    # TorchRec gives the n-th shard of a row-wise table to rank n.
    ranks = _ranks(shards)
    if kind is ShardingType.ROW_WISE and not _names_each_rank(ranks, group_size):
        raise PlanError(
            f"table {where} is row-wise with shards on ranks {ranks}, but needs one on each of the "
            f"ranks 0..{group_size - 1}, in this order; {_REMEDY}"
        )


def _check_blocks(where: str, kind: ShardingType, shards: Sequence[ShardMetadata]) -> None:
    """Raise unless rows are in equal blocks, on ranks in order, as TorchRec's lookup assumes."""
    by_column: dict[int, list[ShardMetadata]] = {}
    for shard in shards:
        by_column.setdefault(shard.shard_offsets[1], []).append(shard)
    for blocks in by_column.values():
        rows = sum(shard.shard_sizes[0] for shard in blocks)
        block = math.ceil(rows / len(blocks))
        for start, shard in zip(range(0, block * len(blocks), block), blocks, strict=True):
            size = max(0, min(block, rows - start))
            if shard.shard_sizes[0] != size or (size and shard.shard_offsets[0] != start):
                raise PlanError(
                    f"table {where} is {kind.value}, and a shard has {shard.shard_sizes[0]} rows "
                    f"from row {shard.shard_offsets[0]} on where TorchRec looks {size} up from row "
                    f"{start} on; {_REMEDY}"
                )
        ranks = _ranks(blocks)
        if ranks and ranks != list(range(ranks[0], ranks[0] + len(ranks))):
            raise PlanError(
                f"table {where} is {kind.value} with rows on ranks {ranks}, which don't follow one "
                f"another; {_REMEDY}"
            )


def _names_each_rank(ranks: Sequence[int], group_size: int) -> bool:
    """Return whether ``ranks`` are a group's ranks in order."""
    return len(ranks) == group_size and list(ranks) == list(range(group_size))


def _ranks(shards: Sequence[ShardMetadata]) -> list[int]:
    return [cast(int, shard.placement.rank()) for shard in shards if shard.placement is not None]


def _check_numbers(where: str, shards: Sequence[ShardMetadata]) -> None:
    places = [numbers for shard in shards for numbers in (shard.shard_offsets, shard.shard_sizes)]
    flat = list(chain.from_iterable(places))
    if set(map(len, places)) == {2} and set(map(type, flat)) == {int} and min(flat) >= 0:
        return  # This check takes a tenth of the loop's time for a million shards.
    for index, shard in enumerate(shards):
        for name, values in (
            ("shard_offsets", shard.shard_offsets),
            ("shard_sizes", shard.shard_sizes),
        ):
            if [type(value) for value in values] != [int, int] or min(values) < 0:
                raise PlanError(
                    f"table {where} has {name}={list(values)} in shard {index}: they are a number "
                    f"of rows and one of columns, whole and not negative; {_REMEDY}"
                )


def _check_cover(
    where: str, shards: Sequence[ShardMetadata], num_rows: int, num_columns: int
) -> None:
    """Raise unless blocks of columns, cut into runs of rows, cover the table exactly once."""
    blocks: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for shard in shards:
        (row, column), (rows, columns) = shard.shard_offsets, shard.shard_sizes
        blocks.setdefault((column, columns), []).append((row, rows))
    _check_runs(f"table {where}: columns", list(blocks), num_columns)
    for (column, columns), runs in blocks.items():
        _check_runs(
            f"table {where}: rows of columns {column}..{column + columns - 1}", runs, num_rows
        )


def _check_runs(what: str, runs: list[tuple[int, int]], total: int) -> None:
    """Raise unless the runs, pairs of start and size, follow one another from 0 to ``total``."""
    ordered = [(0, 0), *sorted(runs), (total, 0)]
    for (start, size), (next_start, _) in pairwise(ordered):
        if start + size < next_start:
            raise PlanError(f"{what} {start + size}..{next_start - 1} are in no shard; {_REMEDY}")
        if start + size > next_start:
            raise PlanError(
                f"{what} {next_start}..{start + size - 1} are in more than one shard; {_REMEDY}"
            )


def check_size(table: ParameterSharding, config: Any) -> None:
    """Raise `PlanError` if a table's shards add up to another size than its config's."""
    shards = getattr(table.sharding_spec, "shards", None) or []
    size, planned = (config.num_embeddings, config.embedding_dim), (0, 0)
    for shard in shards:
        (row, column), (rows, columns) = shard.shard_offsets, shard.shard_sizes
        planned = max(planned[0], row + rows), max(planned[1], column + columns)
    if shards and planned != size:
        raise PlanError(
            f"table {config.name!r} has {size[0]} rows of {size[1]} columns, and {planned[0]} of "
            f"{planned[1]} in its plan; plan the model again"
        )


def check_fits_mesh(where: str, table: ParameterSharding2D, mesh: Mesh2D) -> None:
    """Raise `PlanError` if ``mesh``'s groups can't run a table as its sharding says."""
    kind = ShardingType2D(table.sharding_type)
    allowed = kinds_of(table.exchange)
    if kind.base.value not in allowed:
        raise PlanError(
            f"table {where} is {kind.value}, but exchange={table.exchange.value!r} is for tables "
            f"sharded {', '.join(allowed)}: constrain it with sharding_types={[allowed[0]]} when "
            "you plan"
        )
    if table.owners is RowOwners.HASH and table.exchange not in ROW_EXCHANGES:
        raise PlanError(
            f"table {where} has owners='hash', which is for row exchange: pin it with "
            "exchange='row', or with owners='block'"
        )
    _check_storage(where, table, kind)
    if table.num_groups not in (None, 1):
        raise PlanError(
            f"table {where} has num_groups={table.num_groups}: a table has one copy in the world, "
            "with num_groups=1, or one in each group of the plan's mesh, with None"
        )
    if kind is ShardingType2D.DATA_PARALLEL:
        _check_data_parallel(where, table, mesh)
    else:
        _check_sharded(where, table, mesh, kind)


def _check_storage(where: str, table: ParameterSharding2D, kind: ShardingType2D) -> None:
    """Raise if the table's rows can't be kept in 8 bits."""
    if table.stored_as is RowStorage.PLAIN:
        return
    for is_there, what in (
        (table.owners is RowOwners.HASH, "owners='hash'"),
        (kind.base not in IN_8_BITS, kind.value),
        (table.compute_kernel != EmbeddingComputeKernel.FUSED.value, table.compute_kernel),
    ):
        if is_there:
            raise UnsupportedError(
                f"table {where} is {what}, where rows can't be stored_as='int8': change one of them"
            )


def _check_data_parallel(where: str, table: ParameterSharding2D, mesh: Mesh2D) -> None:
    transport = f"transport={table.transport.value!r}"
    for is_there, problem in (
        (table.num_groups is not None, "which is a copy on every rank, not num_groups=1"),
        (table.hot_set is not None, "so every rank holds all its rows already; remove its hot set"),
        (table.sharding_spec is not None, "a copy on every rank, and has shards; remove them"),
        (table.transport is not Transport.FP32, f"so no rows travel; leave {transport} out"),
    ):
        if is_there:
            raise PlanError(f"table {where} is data parallel, {problem}, or shard it another way")
    if table.ranks is not None and not _names_each_rank(sorted(table.ranks), mesh.group_size):
        raise PlanError(
            f"table {where} is data parallel on ranks {table.ranks}, but every rank of a "
            f"sharding group has a copy: use ranks 0..{mesh.group_size - 1}"
        )


def _check_sharded(
    where: str, table: ParameterSharding2D, mesh: Mesh2D, kind: ShardingType2D
) -> None:
    shards = getattr(table.sharding_spec, "shards", None)
    if not shards:
        raise PlanError(
            f"table {where} ({table.sharding_type}) has no shards; plan it with Planner2D, or "
            "with a stock planner for one sharding group"
        )
    ranks = [shard.placement.rank() for shard in shards] + list(table.ranks or [])
    outside = [rank for rank in ranks if rank is None or not 0 <= rank < mesh.group_size]
    if outside:
        raise PlanError(
            f"table {where} has a shard on rank {outside[0]}, but a sharding group of {mesh} has "
            f"ranks 0..{mesh.group_size - 1}; make the plan for world_size={mesh.group_size}"
        )
    check_shards(where, kind.base, shards, mesh.group_size)
    if table.owners is not RowOwners.HASH and kind.base not in _WHOLE_COLUMNS:
        _check_blocks(where, kind.base, shards)
    if table.ranks is not None and list(table.ranks) != _ranks(shards):
        raise PlanError(
            f"table {where} names ranks {list(table.ranks)}, but its shards are on "
            f"{_ranks(shards)}; name the rank of each shard, in the order of the shards"
        )
    if table.hot_set is not None:
        rows = num_rows(table)
        assert rows is not None
        # Only the model knows whether these ids are rows, or whether an id map gives them rows.
        if len(table.hot_set) > rows:
            raise PlanError(
                f"table {where} has {rows} rows, and {len(table.hot_set)} of them can't be hot; "
                "pin fewer"
            )
