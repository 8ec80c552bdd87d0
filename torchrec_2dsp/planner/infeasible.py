"""Why no plan fits: which table, and how many bytes are missing. Pure."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from torchrec.distributed.planner.types import (
    PlannerError,
    PlannerErrorType,
    ShardingOption,
    Storage,
)

from torchrec_2dsp.mesh import Mesh2D

REMEDY = (
    "use a larger group_size, reserve a smaller share of the memory (storage_reservation), or "
    "allow more sharding types and kernels (constraints)"
)

_NOTHING_FITS = (
    PlannerErrorType.INSUFFICIENT_STORAGE,
    PlannerErrorType.STRICT_CONSTRAINTS,
    PlannerErrorType.PARTITION,
)


@dataclass(frozen=True)
class Shortfall:
    """The memory that tables need at the least, and the memory that there is."""

    table: str
    """The table that needs the most on one rank."""

    table_bytes: int
    """Bytes that the table needs on one rank, with the option that needs least there."""

    rank_bytes: int
    """Bytes for tables on a rank of the group: the rank that has most."""

    all_tables_bytes: int
    """Bytes of all tables over the ranks of a group, each with its smallest option."""

    group_bytes: int
    """Bytes for tables on all ranks of the group together."""

    buffer_bytes: int = 0
    """Bytes of batches and vectors of all tables on a group, each with its smallest option."""

    def sentence(self) -> str:
        """The shortfall in words, empty if the sums alone don't explain it.

        Example:
            >>> from torchrec_2dsp.planner.infeasible import Shortfall
            >>> Shortfall("t", 1_500, 1_000, 2_000, 4_000).sentence()
            "table 't' needs 1,500 bytes on one rank, 500 more than the 1,000 there are"
        """
        largest = f"table {self.table!r} needs {self.table_bytes:,} bytes on one rank"
        if self.table_bytes > self.rank_bytes:
            return (
                f"{largest}, {self.table_bytes - self.rank_bytes:,} more than the "
                f"{self.rank_bytes:,} there are"
            )
        if self.all_tables_bytes > self.group_bytes:
            return (
                f"the tables need {self.all_tables_bytes:,} bytes on a group, "
                f"{self.all_tables_bytes - self.group_bytes:,} more than the "
                f"{self.group_bytes:,} there are; {largest}, the most of all tables"
            )
        missing = self.all_tables_bytes + self.buffer_bytes - self.group_bytes
        if self.buffer_bytes and missing > 0:
            return (
                f"the tables need {self.all_tables_bytes:,} bytes on a group, and a step's batches "
                f"and vectors {self.buffer_bytes:,}, {missing:,} more than the "
                f"{self.group_bytes:,} there are, which a smaller batch_size changes"
            )
        return ""


def shortfall(options: Iterable[ShardingOption], ranks: Sequence[Storage]) -> Shortfall | None:
    """The least that a search space needs, against what its ranks have.

    Args:
        options: all options of all tables, with estimates of their storage.
        ranks: what each rank of the group has left for tables.

    Returns:
        The figures of the scarcer kind of memory, `None` without any option.
    """
    by_table: dict[str, list[ShardingOption]] = {}
    for option in options:
        by_table.setdefault(option.fqn, []).append(option)
    if not by_table:
        return None
    return max(
        (_shortfall_of(kind, by_table, ranks) for kind in ("hbm", "ddr")),
        key=lambda candidate: max(
            candidate.table_bytes - candidate.rank_bytes,
            candidate.all_tables_bytes - candidate.group_bytes,
        ),
    )


def failure_text(
    mesh: Mesh2D | str, error: Exception, missing: Callable[[], Shortfall | None]
) -> str:
    """The message of a search that TorchRec's planner ended with an error.

    Args:
        mesh: what was planned for.
        error: TorchRec's.
        missing: says what was missing; asked only where that was the reason.
    """
    if isinstance(error, PlannerError) and error.error_type in _NOTHING_FITS:
        return no_plan_text(mesh, missing(), str(error))
    return f"planning for {mesh} failed: {type(error).__name__}: {error}"


def no_plan_text(mesh: Mesh2D | str, missing: Shortfall | None, stock_text: str) -> str:
    """The message of a search that found nothing, with TorchRec's own below it."""
    sentence = missing.sentence() if missing is not None else ""
    reason = f": {sentence}" if sentence else ""
    below = f"\n{stock_text}" if stock_text else ""
    return f"no plan fits a sharding group of {mesh}{reason}; {REMEDY}.{below}"


def _shortfall_of(
    kind: str, by_table: dict[str, list[ShardingOption]], ranks: Sequence[Storage]
) -> Shortfall:
    on_one_rank = {
        fqn: min(max(_shard_bytes(kind, option)) for option in options)
        for fqn, options in by_table.items()
    }
    table = max(on_one_rank, key=lambda fqn: on_one_rank[fqn])
    available = [getattr(storage, kind) for storage in ranks]
    return Shortfall(
        table=by_table[table][0].name,
        table_bytes=on_one_rank[table],
        rank_bytes=max(available),
        all_tables_bytes=sum(
            min(sum(_shard_bytes(kind, option)) for option in options)
            for options in by_table.values()
        ),
        group_bytes=sum(available),
    )


def _shard_bytes(kind: str, option: ShardingOption) -> list[int]:
    return [0 if shard.storage is None else getattr(shard.storage, kind) for shard in option.shards]
