"""The keys of a log of rows in a config: its files, how they are read, its columns."""

from typing import Literal, Self

from pydantic import Field, model_validator

from torchrec_2dsp.programs.config.config_file import PathBesideConfig, PathsBesideConfig
from torchrec_2dsp.programs.config.section import Section
from torchrec_2dsp.programs.data.logs.columns import DenseColumn, SparseColumn
from torchrec_2dsp.programs.data.logs.epochs import Rest
from torchrec_2dsp.programs.data.logs.sources import FileFormat


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
        """The choice in words.

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
        return self


class LogConfig(Section):
    """The keys that all logs of rows have: the files, and how they are read."""

    files: PathsBesideConfig = Field(min_length=1)
    """The files to train on, in their order: paths and patterns such as ``"day_*.gz"``, whose files
    are sorted by name, ``day_9`` before ``day_10``. A name that ends in ``.parquet`` is a Parquet
    file, one that ends in ``.gz`` a compressed text file, and any other a text file."""

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
    """The most rows of a Parquet file that are read together."""

    num_ahead: int = Field(default=4, ge=0)
    """How many batches a thread makes ahead of time; 0 for none, and no thread."""

    malformed_limit: int = Field(default=0, ge=0)
    """How many lines of text files a rank may find that can't be read. Such a line's place in its
    batch is taken by the line before it."""

    prepared: PathBesideConfig = ""
    """The folder of what a pass over the files finds: counts of rows, vocabularies, measured
    scales. Empty to count rows anew each time."""


class TableLayout(LogConfig):
    """A log of rows with a label, as CSV, TSV or Parquet."""

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
    def layout(self) -> FileFormat:
        """How the files are read."""
        return FileFormat(
            names=self.columns,
            delimiter=self.delimiter,
            quote=self.quote,
            block_bytes=self.block_bytes,
            block_rows=self.block_rows,
        )
