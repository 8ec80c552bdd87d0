"""The config section ``[data]`` for logs: tables, two well-known logs, and interactions."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from torchrec_2dsp.programs.data.dataset import Progress
from torchrec_2dsp.programs.data.logs.batches import TableData
from torchrec_2dsp.programs.data.logs.config import (
    DenseColumn,
    InteractionsLayout,
    LogConfig,
    SparseColumn,
    TableLayout,
)
from torchrec_2dsp.programs.data.logs.conversion import convert
from torchrec_2dsp.programs.data.logs.sequence_data import SequenceData
from torchrec_2dsp.programs.data.logs.source import converted_files

_CRITEO_DENSE = tuple(f"I{number}" for number in range(1, 14))
_CRITEO_SPARSE = tuple(f"C{number}" for number in range(1, 27))
_AVAZU = (
    *("id", "click", "hour", "C1", "banner_pos", "site_id", "site_domain", "site_category"),
    *("app_id", "app_domain", "app_category", "device_id", "device_ip", "device_model"),
    *("device_type", "device_conn_type", "C14", "C15", "C16", "C17", "C18", "C19", "C20", "C21"),
)
_AVAZU_SIZES = ("C15", "C16")
"""The banner's width and height, the only columns with numbers rather than names."""


class TableConfig(TableLayout):
    """A row log with a label, as text, Parquet, ORC, Feather or JSON lines.

    Example:
        >>> from torchrec_2dsp.programs.config.config_file import make_config
        >>> from torchrec_2dsp.programs.data.logs.sections import TableConfig
        >>> tree = {
        ...     "files": ["log/*.parquet"],
        ...     "label": "click",
        ...     "features": [{"name": "user", "num_rows": 1_000_000}],
        ... }
        >>> make_config(TableConfig, tree).held_out.share
        0.1
    """

    kind: Literal["table"] = "table"
    """The kind of data."""

    def dataset(self, progress: Progress | None = None) -> TableData:
        """Open the log.

        Converts files and builds vocabularies and scales where ``prepared`` lacks them.

        Args:
            progress: called during that work.
        """
        return TableData(self, progress)

    def convert(self, rank: int, world_size: int, progress: Progress | None = None) -> None:
        """Convert a rank's share of the files, so that opening them is fast."""
        convert(converted_files(self), rank=rank, world_size=world_size, progress=progress)


class KnownLogConfig(LogConfig):
    """The keys of a log with known columns."""

    encoding: Literal["hash", "vocabulary"] = "hash"
    """The mapping from values to ids: hashed, or by a vocabulary from the training rows."""

    num_rows: int = Field(default=1_000_000, ge=3, le=2**31)
    """The number of rows per table; with a vocabulary, its upper limit."""

    rows: dict[str, int] = Field(default_factory=dict)
    """Different numbers of rows, by feature."""

    min_count: int = Field(default=10, ge=1)
    """The smallest count with which a value enters a vocabulary."""

    def sparse(self, names: tuple[str, ...]) -> tuple[SparseColumn, ...]:
        """Return these columns as sparse features."""
        unknown = sorted(self.rows.keys() - set(names))
        if unknown:
            raise ValueError(f"rows: there is no feature {unknown[0]!r}; use {', '.join(names)}")
        is_hash = self.encoding == "hash"
        return tuple(
            SparseColumn(
                name=name,
                encoding=self.encoding,
                num_rows=self.rows.get(name, self.num_rows),
                min_count=1 if is_hash else self.min_count,
            )
            for name in names
        )

    @abstractmethod
    def table(self) -> TableConfig:
        """Return the log as a table."""

    def _table(self, label: str, counts: Sequence[str], **keys: object) -> TableConfig:
        """Return a table with these dense counts, put on a logarithmic scale."""
        dense = [DenseColumn(column=name, lowest=0.0, log1p=True) for name in counts]
        shared = {name: getattr(self, name) for name in LogConfig.model_fields}
        return TableConfig.model_validate(
            {**shared, "label": label, "dense": dense, "quote": "", **keys}
        )

    @model_validator(mode="after")
    def _check_table(self) -> Self:
        if self.encoding == "hash":
            self.refuse_unread(
                ["min_count"], "is for encoding='vocabulary'; set it, or leave min_count out"
            )
        self.table()
        return self

    def dataset(self, progress: Progress | None = None) -> TableData:
        """Open the log; see `TableConfig.dataset`."""
        return self.table().dataset(progress)

    def convert(self, rank: int, world_size: int, progress: Progress | None = None) -> None:
        """Convert a rank's share of the files; see `TableConfig.convert`."""
        self.table().convert(rank, world_size, progress)


class CriteoConfig(KnownLogConfig):
    """Criteo's click logs: a label, 13 counts, 26 categories; tab separated, without a header.

    Counts are clipped at 0, and put on a logarithmic scale.
    """

    kind: Literal["criteo"] = "criteo"
    """The kind of data."""

    def table(self) -> TableConfig:
        """Return the log as a table."""
        return self._table(
            "label",
            _CRITEO_DENSE,
            columns=("label", *_CRITEO_DENSE, *_CRITEO_SPARSE),
            delimiter="\t",
            features=self.sparse(_CRITEO_SPARSE),
        )


class AvazuConfig(KnownLogConfig):
    """Avazu's click logs: 21 categories, with the hour and the weekday as ids.

    The banner's width and height are dense features as well.

    Example:
        >>> from torchrec_2dsp.programs.data.logs.sections import AvazuConfig
        >>> [feature.name for feature in AvazuConfig(files=("train.gz",)).table().features][:3]
        ['hour', 'weekday', 'C1']
    """

    kind: Literal["avazu"] = "avazu"
    """The kind of data."""

    def table(self) -> TableConfig:
        """Return the log as a table."""
        times = [
            SparseColumn(name=part, column="hour", encoding=part, time_format="yymmddhh")
            for part in ("hour", "weekday")
        ]
        return self._table(
            "click",
            _AVAZU_SIZES,
            columns=_AVAZU,
            features=[*times, *self.sparse(_AVAZU[3:])],
        )


class InteractionsConfig(InteractionsLayout):
    """A log of interactions between users and items, with times.

    Each user becomes one sequence, whose last item is held out. Column names default to those in
    RecBole's files.
    """

    kind: Literal["interactions"] = "interactions"
    """The kind of data."""

    def dataset(self, progress: Progress | None = None) -> SequenceData:
        """Open the log and read it completely; see `TableConfig.dataset`."""
        return SequenceData(self, progress)

    def convert(self, rank: int, world_size: int, progress: Progress | None = None) -> None:
        """Convert a rank's share of the files; see `TableConfig.convert`."""
        convert(converted_files(self), rank=rank, world_size=world_size, progress=progress)


LoggedData = Annotated[
    TableConfig | CriteoConfig | AvazuConfig | InteractionsConfig, Field(discriminator="kind")
]
"""The config sections for logs in files."""
