"""What `bench-sync` found: the numbers as measured, written to JSON and read again."""

import statistics
from pathlib import Path

from pydantic import ValidationError

from torchrec_2dsp.bench.results import Setting
from torchrec_2dsp.errors import ConfigError
from torchrec_2dsp.recipe.sections import Section

FORMAT = 1


class SyncTimes(Section):
    """One sync of one shard, measured several times."""

    num_groups: int
    """Copies of the shard."""

    shard_mib: float
    """Size of its weights."""

    touched_share: float
    """Which share of the rows each copy has changed."""

    sync: str
    """The contestant."""

    seconds: tuple[float, ...]
    """Of the slowest rank, repeat by repeat."""

    tracking_s: tuple[float, ...]
    """What noting the changed rows took, on the slowest rank."""

    sent_bytes: float
    """To other ranks, mean over ranks and repeats."""

    @property
    def median_s(self) -> float:
        """Of the repeats."""
        return statistics.median(self.seconds)

    @property
    def case(self) -> tuple[int, float, float]:
        """What a contestant is compared within."""
        return (self.num_groups, self.shard_mib, self.touched_share)


class SyncBenchResult(Section):
    """One run of `bench-sync`."""

    format: int = FORMAT
    """Of this file."""

    setting: Setting
    """Where and how it ran."""

    reference: str
    """The contestant that the others are compared with."""

    times: tuple[SyncTimes, ...]
    """Case by case, then in the order of the config."""

    def find(self, case: tuple[int, float, float], sync: str) -> SyncTimes:
        """One contestant in one case."""
        return next(one for one in self.times if (one.case, one.sync) == (case, sync))

    def save(self, path: str | Path) -> None:
        """Write JSON."""
        Path(path).write_text(self.model_dump_json(indent=1) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> "SyncBenchResult":
        """Read what `save` wrote.

        Raises:
            ConfigError: it can't be read, or it is something else.
        """
        try:
            return cls.model_validate_json(Path(path).read_text())
        except OSError as error:
            raise ConfigError(f"{path} can't be read: {error.strerror}") from error
        except (ValidationError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path} is not the JSON of bench-sync: {error}") from error
