"""The keys of logs in a config: files, columns, and how they are read."""

import math
from typing import Literal, Self

from pydantic import Field, model_validator

from torchrec_2dsp.programs.config.config_file import PathBesideConfig, PathsBesideConfig
from torchrec_2dsp.programs.config.section import Section
from torchrec_2dsp.programs.data.logs.ids import NUM_RESERVED
from torchrec_2dsp.programs.data.logs.text import FileLayout

Rest = Literal["drop", "pad"]
Encoding = Literal["hash", "vocabulary", "hour", "weekday"]
_TIMES = ("hour", "weekday")


class SparseColumn(Section):
    """A sparse feature: a column whose values become ids.

    Row 0 is for missing values. With a vocabulary, row 1 is for values that it lacks.

    Example:
        >>> from torchrec_2dsp.programs.data.logs.config import SparseColumn
        >>> SparseColumn(name="user", num_rows=100_000).source
        'user'
    """

    name: str = Field(min_length=1)
    """The feature's name in the batch."""

    column: str = ""
    """The column's name in the files; empty if it is the feature's."""

    encoding: Encoding = "hash"
    """How values become ids. "hash" spreads them over the rows; "vocabulary" gives each frequent
    value a row; "hour" and "weekday" are those of a time, in UTC, where Monday is the first day."""

    num_rows: int = Field(default=0, ge=0, le=2**31)
    """How many rows the table has; of a vocabulary, how many at most, and 0 for no limit."""

    min_count: int = Field(default=1, ge=1)
    """Values that the log has less often have no row in a vocabulary."""

    separator: str = ""
    """What stands between the values of a text; empty if a text is one value. Lists of a Parquet
    file need none."""

    max_ids: int = Field(default=0, ge=0)
    """How many of a list's last values count; 0 for all."""

    mean_ids: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    """About how many values a row has, for planning."""

    time_format: str = "unix"
    """How a time is written: "unix", as seconds since 1970; "yymmddhh", as digits such as 14102100;
    "iso", as in 2014-10-21T00:30Z; or a pattern of strptime, such as "%d/%b/%Y:%H:%M". A file's
    timestamps need none."""

    @property
    def source(self) -> str:
        """The column's name in the files."""
        return self.column or self.name

    @property
    def is_time(self) -> bool:
        """Whether ids are parts of a time."""
        return self.encoding in _TIMES

    @model_validator(mode="after")
    def _check_encoding(self) -> Self:
        if self.encoding == "hash" and self.num_rows < 2:
            raise ValueError(
                f"feature {self.name!r}: num_rows={self.num_rows} leaves no row to hash to beside "
                "the one for missing values; use at least 2"
            )
        if self.encoding == "vocabulary" and 0 < self.num_rows <= NUM_RESERVED:
            raise ValueError(
                f"feature {self.name!r}: num_rows={self.num_rows} leaves no row to a value beside "
                f"those for missing and unknown ones; use more than {NUM_RESERVED}, or 0"
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
            f"{where}time_format={time_format!r} is no form; use {choices}, or a pattern of "
            "strptime, such as '%Y-%m-%d %H:%M'"
        )


class DenseColumn(Section):
    """A dense feature: a column of numbers.

    They are filled, clipped, put on a logarithmic scale and standardised, in this order.
    """

    column: str = Field(min_length=1)
    """The column's name in the files."""

    fill: float = Field(default=0.0, allow_inf_nan=False)
    """The value of what is missing, infinite, or not a number."""

    lowest: float = Field(default=-math.inf)
    """Smaller values become this one."""

    highest: float = Field(default=math.inf)
    """Larger values become this one."""

    log1p: bool = False
    """Whether x becomes log(1 + x). It needs a `lowest` above -1."""

    scale: Literal["none", "given", "measured"] = "none"
    """Whether a mean is subtracted, and the difference divided by a standard deviation: those that
    are given here, or those of the training rows."""

    mean: float = Field(default=0.0, allow_inf_nan=False)
    """What is subtracted, with ``scale = "given"``."""

    std: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    """The divisor, with ``scale = "given"``."""

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
    """How they are chosen: the last rows of the log, files of their own, or the rows whose value in
    a column has a small hash, so that equal values are never in both splits."""

    share: float = Field(default=0.1, ge=0, lt=1)
    """The share of rows, or of values, that is held out; not for files."""

    files: PathsBesideConfig = ()
    """The files that are held out, with ``by = "files"``: paths and patterns."""

    column: str = ""
    """The column whose hash decides, with ``by = "hash"``."""

    @property
    def words(self) -> str:
        """A description of the choice.

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


class LogConfig(Section):
    """The keys that all logs of rows have: the files, and how they are read."""

    files: PathsBesideConfig = Field(min_length=1)
    """The files to train on, in their order: paths and patterns such as ``"day_*.gz"``, whose files
    are sorted by name, ``day_9`` before ``day_10``; also ``s3://``, ``gs://``, ``hdfs://`` and all
    else that pyarrow or fsspec opens. The name's end says what it is: ``.parquet``, ``.orc``,
    ``.feather``, ``.jsonl``, compressed (``.gz``, ``.bz2``, ``.zst``), or else a text file."""

    held_out: HeldOut = HeldOut()
    """The rows that are held out for evaluation."""

    epochs: int = Field(default=1, ge=0)
    """How often the training rows are read; 0 for endlessly. Held-out rows are read once."""

    rest: Rest = "drop"
    """What becomes of the last rows of an epoch, if they don't fill a batch: they are dropped, or
    the batch is filled with rows from the beginning of the epoch."""

    shuffled_blocks: int = Field(default=0, ge=0)
    """How many blocks of training rows are mixed with each other; 0 keeps the rows in order. Each
    rank has its part of these rows in memory."""

    seed: int = Field(default=0, ge=0)
    """Another seed is another order, if rows are mixed."""

    block_bytes: int = Field(default=4 * 2**20, ge=1)
    """About how many bytes of a text file are read together."""

    block_rows: int = Field(default=2**15, ge=1)
    """The most rows of another file that are read together."""

    num_ahead: int = Field(default=4, ge=0)
    """How many batches a thread makes ahead of time; 0 for none, and no thread."""

    malformed_limit: int = Field(default=0, ge=0)
    """How many lines of text files a rank may find that can't be read. Such a line's place in its
    batch is taken by the line before it."""

    prepared: PathBesideConfig = ""
    """The folder of files that were converted to Parquet, vocabularies, measured scales, and counts
    of rows. Empty for converted files alone, in a folder among the machine's temporary files."""

    @model_validator(mode="after")
    def _check_order(self) -> Self:
        if not self.shuffled_blocks:
            self.refuse_unread(["seed"], "is for shuffled_blocks; set it, or leave seed out")
        return self


class TableLayout(LogConfig):
    """A log of rows with a label, as text, Parquet, ORC, Feather or JSON lines."""

    label: str = Field(min_length=1)
    """The column of the label, a number from 0 to 1."""

    features: tuple[SparseColumn, ...] = Field(min_length=1)
    """The sparse features, in the order of the batch."""

    dense: tuple[DenseColumn, ...] = ()
    """The dense features, in the order of the batch."""

    columns: tuple[str, ...] = ()
    """The names of all columns of text files, in their order; a first line that repeats them is
    skipped. Empty if the first line of each file has the names."""

    delimiter: str = Field(default=",", min_length=1, max_length=1)
    """What stands between two values of a text file."""

    quote: str = Field(default='"', max_length=1)
    """What stands around values that have a delimiter in them; empty for nothing. A value can't
    have a line end in it."""

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
            raise ValueError(f"label={self.label!r} is a feature, too, which would tell it")
        return self

    @property
    def layout(self) -> FileLayout:
        """The way the files are read."""
        return FileLayout(
            names=self.columns,
            delimiter=self.delimiter,
            quote=self.quote,
            block_bytes=self.block_bytes,
            block_rows=self.block_rows,
        )


class InteractionsLayout(Section):
    """A log of interactions: who used which item when."""

    files: PathsBesideConfig = Field(min_length=1)
    """The files, in any order: paths and patterns."""

    user: str = "user_id:token"
    """The column of the users."""

    item: str = "item_id:token"
    """The column of the items."""

    time: str = "timestamp:float"
    """The column that orders the items of a user. Those of one time keep the order of the log."""

    time_format: str = "unix"
    """How a time is written: "unix", as a number; "iso"; or a pattern of strptime. Timestamps of a
    file need none."""

    feature: str = Field(default="item", min_length=1)
    """The name of the items' feature in the batch."""

    max_length: int = Field(default=50, ge=2)
    """How many of a user's last items a sample has; of a held-out sample, the item to predict is
    the last one."""

    min_items: int = Field(default=3, ge=3)
    """Users with fewer items are left out: one is held out, and of two more one is predicted."""

    is_shuffled: bool = True
    """Whether each epoch has the users in another random order; held-out users never have."""

    seed: int = Field(default=0, ge=0)
    """Another seed is another order."""

    epochs: int = Field(default=1, ge=0)
    """How often the users are read; 0 for endlessly. Held-out samples are read once."""

    rest: Rest = "drop"
    """What becomes of the last users of an epoch, if they don't fill a batch: they are dropped, or
    the batch is filled with users from the beginning of the epoch."""

    columns: tuple[str, ...] = ()
    """The names of all columns of text files; empty if the first line of each has them."""

    delimiter: str = Field(default="\t", min_length=1, max_length=1)
    """What stands between two values of a text file."""

    quote: str = Field(default="", max_length=1)
    """What stands around values of a text file; empty for nothing."""

    malformed_limit: int = Field(default=0, ge=0)
    """How many rows may lack a value, and how many lines may be unreadable."""

    num_ahead: int = Field(default=4, ge=0)
    """How many batches a thread makes ahead of time; 0 for none, and no thread."""

    prepared: PathBesideConfig = ""
    """The folder of files that were converted to Parquet. Empty for one among the machine's
    temporary files."""

    @model_validator(mode="after")
    def _check_order(self) -> Self:
        if not self.is_shuffled:
            self.refuse_unread(["seed"], "is for is_shuffled=true; set it, or leave seed out")
        return self

    @model_validator(mode="after")
    def _check_time(self) -> Self:
        _check_time_format("", self.time_format, "unix", "iso")
        return self

    @property
    def layout(self) -> FileLayout:
        """The way the files are read."""
        return FileLayout(
            names=self.columns,
            delimiter=self.delimiter,
            quote=self.quote,
            block_bytes=2**24,
            block_rows=2**18,
        )
