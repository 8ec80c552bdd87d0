"""The config keys for logs: files, columns, and reading options."""

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from torchrec_2dsp.errors import ConfigError
from torchrec_2dsp.programs.config.config_file import PathBesideConfig, PathsBesideConfig
from torchrec_2dsp.programs.config.section import Section, Seed
from torchrec_2dsp.programs.data.logs.files import list_files
from torchrec_2dsp.programs.data.logs.ids import NUM_RESERVED

Rest = Literal["drop", "pad"]
Encoding = Literal["hash", "vocabulary", "hour", "weekday"]
_TIMES = ("hour", "weekday")


class ColumnKind(enum.Enum):
    """A column's purpose, which determines its valid values."""

    TEXT = "text, integers or booleans, or lists of them"
    """Values that become ids."""

    NUMBER = "numbers"
    """A dense feature."""

    INTEGER = "integers or timestamps"
    """A time that becomes ids, or integers that serve as ids and as a dense feature."""

    TIME = "integers, numbers or timestamps"
    """A time that rows are sorted by."""

    WRITTEN_TIME = "timestamps, dates or text"
    """A time in a given format."""

    LABEL = "numbers from 0 to 1"
    """The label, which every row must have."""


@dataclass(frozen=True)
class LogColumn:
    """A column to read."""

    kind: ColumnKind

    time_format: str = ""
    """The format of a `WRITTEN_TIME`: "iso", or a strptime pattern."""


Columns = Mapping[str, LogColumn]
"""The columns to read, by name."""


class SparseColumn(Section):
    """A sparse feature: a column whose values become ids.

    Row 0 is for missing values. With a vocabulary, row 1 is for unknown values.
    """

    name: str = Field(min_length=1)
    """The feature's name in the batch."""

    column: str = ""
    """The column's name in the files; by default the feature's name."""

    encoding: Encoding = "hash"
    """The mapping from values to ids. "hash" spreads them over the rows; "vocabulary" gives each
    frequent value a row; "hour" and "weekday" are parts of a time, in UTC, with weeks from
    Monday."""

    num_rows: int = Field(default=0, ge=0, le=2**31)
    """The table's number of rows; with a vocabulary, its upper limit, or 0 for none."""

    min_count: int = Field(default=1, ge=1)
    """The smallest count with which a value enters a vocabulary."""

    separator: str = ""
    """The separator between values in a string; empty if a string is one value. Parquet lists need
    none."""

    max_ids: int = Field(default=0, ge=0)
    """The number of last values to keep from a list; 0 for all."""

    mean_ids: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    """The approximate number of values per row, for planning."""

    time_format: str = "unix"
    """The time format: "unix", as seconds since 1970; "yymmddhh", as digits such as 14102100;
    "iso", as in 2014-10-21T00:30Z; or a strptime pattern, such as "%d/%b/%Y:%H:%M". A file's
    timestamps need none."""

    @property
    def source(self) -> str:
        """The column's name in the files."""
        return self.column or self.name

    @property
    def is_time(self) -> bool:
        """True if ids are parts of a time."""
        return self.encoding in _TIMES

    @model_validator(mode="after")
    def _check_encoding(self) -> Self:
        if self.encoding == "hash" and self.num_rows < 2:
            raise ValueError(
                f"feature {self.name!r}: num_rows={self.num_rows} leaves no row for hashed values, "
                "since one is for missing values; use at least 2"
            )
        if self.encoding == "vocabulary" and 0 < self.num_rows <= NUM_RESERVED:
            raise ValueError(
                f"feature {self.name!r}: num_rows={self.num_rows} leaves no row for a value, since "
                f"missing and unknown values have their own; use more than {NUM_RESERVED}, or 0"
            )
        if self.encoding != "vocabulary" and self.min_count != 1:
            raise ValueError(
                f"feature {self.name!r}: min_count={self.min_count} is for encoding='vocabulary'"
            )
        if self.is_time and (self.separator or self.max_ids or self.num_rows):
            raise ValueError(
                f"feature {self.name!r}: encoding={self.encoding!r} has one id and knows its rows; "
                "leave out separator, max_ids and num_rows"
            )
        _check_time_format(f"feature {self.name!r}: ", self.time_format, "unix", "yymmddhh", "iso")
        return self


def _check_time_format(where: str, time_format: str, *names: str) -> None:
    if time_format not in names and "%" not in time_format:
        choices = ", ".join(map(repr, names))
        raise ValueError(
            f"{where}time_format={time_format!r} isn't a time format; use {choices}, or a "
            "strptime pattern, such as '%Y-%m-%d %H:%M'"
        )
    if "%Z" in time_format.replace("%%", ""):
        raise ValueError(
            f"{where}time_format={time_format!r} has %Z, and names of time zones aren't read; "
            "write offsets such as +0200, and use %z"
        )


class DenseColumn(Section):
    """A dense feature: a column with numbers.

    They are filled, clipped, put on a logarithmic scale and standardised, in this order.
    """

    column: str = Field(min_length=1)
    """The column's name in the files."""

    fill: float = Field(default=0.0, allow_inf_nan=False)
    """The replacement for missing, infinite and NaN values."""

    lowest: float = Field(default=-math.inf)
    """The lower bound: smaller values are clipped to it."""

    highest: float = Field(default=math.inf)
    """The upper bound: larger values are clipped to it."""

    log1p: bool = False
    """Replace x by log(1 + x). Requires a `lowest` above -1."""

    scale: Literal["none", "given", "measured"] = "none"
    """Standardisation: subtract a mean and divide by a standard deviation, either given here or
    measured on the training rows."""

    mean: float = Field(default=0.0, allow_inf_nan=False)
    """The mean, with ``scale = "given"``."""

    std: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    """The standard deviation, with ``scale = "given"``."""

    @model_validator(mode="after")
    def _check_steps(self) -> Self:
        if math.isnan(self.lowest) or math.isnan(self.highest) or self.lowest > self.highest:
            raise ValueError(
                f"column {self.column!r}: lowest={self.lowest} is not below highest={self.highest}"
            )
        if self.log1p and self.lowest <= -1:
            raise ValueError(
                f"column {self.column!r}: log1p needs lowest above -1, and it is {self.lowest}; "
                "use lowest = 0"
            )
        if self.scale != "given" and (self.mean, self.std) != (0.0, 1.0):
            raise ValueError(
                f"column {self.column!r}: mean and std are for scale='given', and scale is "
                f"{self.scale!r}"
            )
        return self


class HeldOut(Section):
    """The rows that are held out for evaluation."""

    by: Literal["last", "files", "hash"] = "last"
    """The rule that selects them: the log's last rows, separate files, or the rows whose value in a
    column has a small hash, so that equal values are never in both splits."""

    share: float = Field(default=0.1, ge=0, lt=1)
    """The share of rows, or of values, that is held out; not for files."""

    files: PathsBesideConfig = ()
    """The held-out files, with ``by = "files"``: paths and patterns."""

    column: str = ""
    """The column to hash, with ``by = "hash"``."""

    @property
    def words(self) -> str:
        """The rule in words.

        Example:
            >>> from torchrec_2dsp.programs.data.logs.config import HeldOut
            >>> HeldOut(share=0.143).words
            'the last 14.3%'
        """
        if self.by == "files":
            return f"those of {', '.join(self.files)}"
        share = f"{100 * self.share:.3g}%"
        return f"the last {share}" if self.by == "last" else f"{share} of the {self.column} values"

    @model_validator(mode="after")
    def _check_choice(self) -> Self:
        if (self.by == "files") != bool(self.files):
            raise ValueError(f"by={self.by!r} and files={self.files!r} don't belong together")
        if (self.by == "hash") != bool(self.column):
            raise ValueError(f"by={self.by!r} and column={self.column!r} don't belong together")
        if self.by == "files":
            self.refuse_unread(["share"], "is for by='last' or 'hash'; leave it out")
        return self


class LogFiles(Section):
    """The keys that all logs have: the files, and what to do with their rows, or users."""

    files: PathsBesideConfig = Field(min_length=1)
    """The files to train on, in order: paths and patterns such as ``"day_*.gz"``, whose files are
    sorted by name, ``day_9`` before ``day_10``; also ``s3://``, ``gs://``, ``hdfs://`` and all else
    that pyarrow or fsspec opens. The extension gives the format: ``.parquet``, ``.orc``,
    ``.feather``, ``.jsonl``, compressed (``.gz``, ``.bz2``, ``.zst``), or else a text file."""

    epochs: int = Field(default=1, ge=0)
    """The number of passes over the training rows, or users; 0 for no end. Held-out ones are read
    once."""

    rest: Rest = "drop"
    """The treatment of an epoch's last, incomplete batch: drop it, or pad it from the beginning of
    the epoch."""

    seed: Seed = 0
    """The seed for shuffling."""

    malformed_limit: int = Field(default=0, ge=0)
    """The most malformed lines in all text files. The line before a malformed one replaces it. Of
    interactions, as many rows may lack a value, and are left out."""

    num_ahead: int = Field(default=4, ge=0)
    """The number of batches that a thread prefetches; 0 for none, without a thread."""

    prepared: PathBesideConfig = ""
    """The folder for files converted to Parquet, vocabularies, measured scales, and row counts. If
    empty, only converted files are kept, in the machine's temporary folder."""


class LogConfig(LogFiles):
    """The keys that all logs of rows have."""

    held_out: HeldOut = HeldOut()
    """The rows that are held out for evaluation."""

    shuffled_blocks: int = Field(default=0, ge=0)
    """The number of training blocks to shuffle together; 0 keeps the rows in order. Each rank has
    its share of these rows in memory."""

    block_bytes: int = Field(default=4 * 2**20, ge=1)
    """The approximate number of a text file's bytes to parse at a time."""

    block_rows: int = Field(default=2**15, ge=1)
    """The most rows to read at a time from a file in another format."""

    @model_validator(mode="after")
    def _check_order(self) -> Self:
        if not self.shuffled_blocks:
            self.refuse_unread(["seed"], "is for shuffled_blocks; set it, or leave seed out")
        return self


class TableLayout(LogConfig):
    """A row log with a label, as text, Parquet, ORC, Feather or JSON lines."""

    label: str = Field(min_length=1)
    """The label column, a number from 0 to 1."""

    features: tuple[SparseColumn, ...] = Field(min_length=1)
    """The sparse features, in batch order."""

    dense: tuple[DenseColumn, ...] = ()
    """The dense features, in batch order."""

    columns: tuple[str, ...] = ()
    """The names of all columns in text files, in order; a first line that repeats them is skipped.
    Empty if each file's first line has the names."""

    delimiter: str = Field(default=",", min_length=1, max_length=1)
    """The character between values in a text file."""

    quote: str = Field(default='"', max_length=1)
    """The quote character for values that contain a delimiter; empty for none. Values can't contain
    line ends."""

    @model_validator(mode="after")
    def _check_names(self) -> Self:
        for key, names in (
            ("features", [feature.name for feature in self.features]),
            ("dense", [column.column for column in self.dense]),
            ("columns", self.columns),
        ):
            repeated = sorted({name for name in names if list(names).count(name) > 1})
            if repeated:
                raise ValueError(f"{key}: {repeated[0]!r} is used twice; rename one")
        used = [feature.source for feature in self.features]
        used += [column.column for column in self.dense]
        if self.label in used:
            raise ValueError(f"label={self.label!r} is also a feature, which would leak it")
        return self

    def all_files(self) -> tuple[str, ...]:
        """List the files, held-out ones last."""
        return list_files(self.files) + list_files(self.held_out.files)

    def read_columns(self) -> dict[str, LogColumn]:
        """Return the columns to read, with their purposes."""
        columns = {column.column: LogColumn(ColumnKind.NUMBER) for column in self.dense}
        for feature in self.features:
            column = LogColumn(ColumnKind.TEXT)
            if feature.is_time:
                is_number = feature.time_format in ("unix", "yymmddhh")
                kind = ColumnKind.INTEGER if is_number else ColumnKind.WRITTEN_TIME
                column = LogColumn(kind, "" if is_number else feature.time_format)
            other = columns.setdefault(feature.source, column)
            if other.time_format != column.time_format:
                raise ConfigError(
                    f"column {feature.source!r} is a time "
                    f"({column.time_format or other.time_format}) for one feature, and something "
                    "else for another; give all one time_format"
                )
            # Integers are valid as numbers and as text, so they can serve several features.
            if other != column:
                columns[feature.source] = LogColumn(ColumnKind.INTEGER)
        columns[self.label] = LogColumn(ColumnKind.LABEL)
        return columns


class InteractionsLayout(LogFiles):
    """A log of interactions between users and items, with times."""

    block_bytes: ClassVar[int] = 2**24
    block_rows: ClassVar[int] = 2**18

    user: str = "user_id:token"
    """The user column."""

    item: str = "item_id:token"
    """The item column."""

    time: str = "timestamp:float"
    """The column that orders a user's items. Items with equal times keep the log's order."""

    time_format: str = "unix"
    """The time format: "unix", as a number; "iso"; or a strptime pattern. A file's timestamps need
    none."""

    feature: str = Field(default="item", min_length=1)
    """The name of the items' feature in the batch."""

    max_length: int = Field(default=50, ge=2)
    """The number of a user's last items in a sample; a held-out sample's last item is the one to
    predict."""

    min_items: int = Field(default=3, ge=3)
    """The fewest items per user; users with fewer are dropped. One item is held out, and at least
    one of two others is predicted."""

    is_shuffled: bool = True
    """Shuffle the users in each epoch; held-out users keep their order."""

    columns: tuple[str, ...] = ()
    """The names of all columns in text files; empty if each file's first line has them."""

    delimiter: str = Field(default="\t", min_length=1, max_length=1)
    """The character between values in a text file."""

    quote: str = Field(default="", max_length=1)
    """The quote character in a text file; empty for none."""

    @model_validator(mode="after")
    def _check_order_and_time(self) -> Self:
        if not self.is_shuffled:
            self.refuse_unread(["seed"], "is for is_shuffled=true; set it, or leave seed out")
        _check_time_format("", self.time_format, "unix", "iso")
        return self

    def all_files(self) -> tuple[str, ...]:
        """List the files."""
        return list_files(self.files)

    def read_columns(self) -> dict[str, LogColumn]:
        """Return the columns to read, with their purposes."""
        time = LogColumn(ColumnKind.TIME)
        if self.time_format != "unix":
            time = LogColumn(ColumnKind.WRITTEN_TIME, self.time_format)
        text = LogColumn(ColumnKind.TEXT)
        return {self.user: text, self.item: text, self.time: time}


LogLayout = TableLayout | InteractionsLayout
"""A section that describes a log's files."""
