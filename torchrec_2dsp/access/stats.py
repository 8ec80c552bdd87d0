"""`AccessStats`: how often the rows of a model's tables are looked up."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torchrec_2dsp.access.merge import merged
from torchrec_2dsp.access.parquet import read_tables, write_tables
from torchrec_2dsp.access.plot import plot_cdf
from torchrec_2dsp.access.table_access import TableAccess
from torchrec_2dsp.errors import ConfigError


class AccessStats(Mapping[str, TableAccess]):
    """What a `RowCounter` has counted, by table: a mapping that can be saved, merged and plotted.

    Example:
        >>> from torchrec_2dsp.access.stats import AccessStats
        >>> from torchrec_2dsp.access.table_access import TableAccess
        >>> stats = AccessStats({"t": TableAccess.of_counts([0, 7, 0, 2, 1], num_samples=5)})
        >>> both = stats.merge(stats)
        >>> both["t"].num_lookups, both["t"].share_of(1)
        (20.0, 0.7)
    """

    def __init__(self, tables: Mapping[str, TableAccess]) -> None:
        self._tables = dict(tables)

    def __getitem__(self, table: str) -> TableAccess:
        if table not in self._tables:
            raise ConfigError(
                f"nothing was counted for table {table!r}; these were counted: "
                f"{', '.join(self._tables) or 'none'}"
            )
        return self._tables[table]

    def get(self, table: str, default: Any = None) -> Any:
        """A table's accesses, or ``default``; `Mapping` would expect a `KeyError`."""
        return self._tables.get(table, default)

    def __contains__(self, table: object) -> bool:
        return table in self._tables

    def __iter__(self) -> Iterator[str]:
        return iter(self._tables)

    def __len__(self) -> int:
        return len(self._tables)

    def __repr__(self) -> str:
        lookups = sum(table.num_lookups for table in self._tables.values())
        return f"AccessStats({len(self)} tables, {lookups:.4g} lookups)"

    def expected_distinct_rows(self, table: str, batch_size: int) -> float:
        """How many different rows of a table a batch touches, in the mean."""
        return self.expected_touched_rows(table, batch_size, steps=1)

    def expected_touched_rows(self, table: str, batch_size: int, steps: int) -> float:
        """How many different rows of a table some batches touch together, in the mean."""
        access = self[table]
        return access.expected_distinct(steps * batch_size * access.lookups_per_sample)

    def merge(self, *others: "AccessStats") -> "AccessStats":
        """The stats of all logs together."""
        every = [self, *others]
        names = dict.fromkeys(name for stats in every for name in stats)
        return AccessStats(
            {
                name: merged(name, [stats[name] for stats in every if name in stats])
                for name in names
            }
        )

    def save(self, path: str | Path) -> None:
        """Write the statistics as a Parquet file."""
        write_tables(Path(path), self._tables)

    @classmethod
    def load(cls, path: str | Path) -> "AccessStats":
        """Read what `save` has written.

        Args:
            path: a file; or a folder, whose ``*.parquet`` are merged: one for each rank, or day.
        """
        path = Path(path)
        files = sorted(path.glob("*.parquet")) if path.is_dir() else [path]
        if not files:
            raise ConfigError(f"{path} has no *.parquet files; AccessStats.save writes them")
        first, *others = (cls(read_tables(file)) for file in files)
        return first.merge(*others) if others else first

    def plot(self, path: str | Path) -> None:
        """Write an SVG: which share of a table's lookups its hottest rows take."""
        plot_cdf(self._tables, path)
