"""The results of `bench-sync`: the numbers as measured, written to JSON and read again."""

import statistics
from typing import ClassVar

from torchrec_2dsp.programs.bench.results import BenchSetting
from torchrec_2dsp.programs.config.section import JsonFile, Section

SYNC_BENCH_FORMAT = 1


class SyncTimes(Section):
    """The times of one sync of one shard, measured several times."""

    num_groups: int
    """How many copies the shard has."""

    shard_mib: float
    """The size of the shard's weights."""

    touched_share: float
    """The share of the rows that each copy has changed."""

    sync: str
    """The name of the sync."""

    seconds: tuple[float, ...]
    """Seconds of the slowest rank, repeat by repeat."""

    tracking_s: tuple[float, ...]
    """Seconds of noting the changed rows, on the slowest rank."""

    sent_bytes: float
    """Bytes to other ranks, mean over ranks and repeats."""

    @property
    def median_s(self) -> float:
        """The median time of the repeats."""
        return statistics.median(self.seconds)

    @property
    def case(self) -> tuple[int, float, float]:
        """The shard and the share of changed rows, within which syncs are compared."""
        return (self.num_groups, self.shard_mib, self.touched_share)


class SyncBenchResult(JsonFile):
    """The result of one run of `bench-sync`."""

    what_it_is: ClassVar[str] = "the JSON of bench-sync"

    format: int = SYNC_BENCH_FORMAT
    """The format of this file."""

    setting: BenchSetting
    """The place and the circumstances of the benchmark."""

    reference: str
    """The contestant that the others are compared with."""

    times: tuple[SyncTimes, ...]
    """Case by case, then in the order of the config."""

    def find(self, case: tuple[int, float, float], sync: str) -> SyncTimes:
        """One contestant in one case."""
        return next(times for times in self.times if (times.case, times.sync) == (case, sync))
