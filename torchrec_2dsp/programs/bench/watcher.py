"""`BenchWatcher`: who is told how a benchmark goes on."""

from typing import Protocol

from torchrec_2dsp.programs.bench.results import Block, Outcome
from torchrec_2dsp.programs.calibrate.link_speed import LinkSpeeds


class BenchWatcher(Protocol):
    """Someone who is told what happens, usually on rank 0."""

    def speeds_measured(self, speeds: LinkSpeeds) -> None:
        """What the network gives."""
        ...

    def contestant_built(self, name: str, sharding: dict[str, int]) -> None:
        """It has trained its first steps."""
        ...

    def block_measured(self, name: str, block: Block) -> None:
        """One more block."""
        ...

    def contestant_out(self, name: str, outcome: Outcome, reason: str) -> None:
        """It is not going on."""
        ...
