"""The columns of a log as a config names them: sparse features, dense features."""

import math
from typing import Literal, Self

from pydantic import Field, model_validator

from torchrec_2dsp.programs.config.section import Section
from torchrec_2dsp.programs.data.logs.vocabulary import NUM_RESERVED

Encoding = Literal["hash", "vocabulary", "hour", "weekday"]
_TIMES = ("hour", "weekday")


class SparseColumn(Section):
    """A sparse feature: a column whose values become ids.

    Row 0 is for missing values. With a vocabulary, row 1 is for values that it lacks.

    Example:
        >>> from torchrec_2dsp.programs.data.logs.columns import SparseColumn
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

    time_format: Literal["unix", "yymmddhh"] = "unix"
    """How a time is written: as seconds since 1970, or as digits such as 14102100."""

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
        return self


class DenseColumn(Section):
    """A dense feature: a column of numbers, which are filled, clipped, put on a logarithmic scale
    and standardised, in this order."""

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
