"""What `bench-sync` found: the numbers as measured, written to JSON and read again."""

import statistics
from typing import ClassVar

from torchrec_2dsp.programs.bench.results import Setting
from torchrec_2dsp.programs.config.json_file import JsonFile
from torchrec_2dsp.programs.config.sections import Section

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


class SyncBenchResult(JsonFile):
    """One run of `bench-sync`."""

    what_it_is: ClassVar[str] = "the JSON of bench-sync"

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
