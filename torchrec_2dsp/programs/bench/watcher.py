"""`BenchWatcher`: who is told how a benchmark goes on."""

from typing import Protocol

from torchrec_2dsp.programs.bench.results import ContestantBlock, Outcome
from torchrec_2dsp.programs.calibrate.link_speed import LinkSpeeds


class BenchWatcher(Protocol):
    """Someone who is told what happens, usually on rank 0."""

    def speeds_measured(self, speeds: LinkSpeeds) -> None:
        """The speeds of the network were measured."""
        ...

    def contestant_built(self, name: str, sharding: dict[str, int], dense_plan: str) -> None:
        """A contestant has trained its first steps, by a planned dense part if it asked for one."""
        ...

    def block_measured(self, name: str, block: ContestantBlock) -> None:
        """A block of a contestant was measured."""
        ...

    def contestant_out(self, name: str, outcome: Outcome, reason: str) -> None:
        """A contestant is not going on."""
        ...
