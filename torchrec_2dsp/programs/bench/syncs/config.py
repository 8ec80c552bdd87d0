"""The config of `bench-sync`: which shards, how much of them has changed, and who syncs."""

from typing import Self

from pydantic import Field, model_validator

from torchrec_2dsp.mesh import RankLayout
from torchrec_2dsp.programs.config.section import Section
from torchrec_2dsp.programs.config.sections import ReplicationConfig


class SyncBenchConfig(Section):
    """Everything that one run of `bench-sync` needs."""

    title: str = "Sync"
    """The title of the report."""

    network: str = ""
    """The network as the report describes it."""

    num_groups: tuple[int, ...] = (2,)
    """How many copies each shard has; each must divide the number of ranks."""

    layout: RankLayout = RankLayout.CONTIGUOUS
    """The place of the copies: "contiguous" has them on different hosts, "strided" in one."""

    shard_mib: tuple[float, ...] = (64.0,)
    """Sizes of the weights of a rank's shard."""

    dim: int = Field(default=64, ge=4, multiple_of=4)
    """How many columns the table has."""

    touched_shares: tuple[float, ...] = (0.001, 0.01, 0.1, 1.0)
    """The shares of the rows that each copy has changed, drawn for each by itself."""

    repeats: int = Field(default=5, ge=1)
    """How often each sync is timed."""

    seed: int = Field(default=0, ge=0)
    """The seed of the rows that change, and of the order of the syncs."""

    syncs: dict[str, ReplicationConfig] = Field(min_length=1)
    """The syncs that are compared, by name."""

    reference: str
    """The contestant that the others are compared with."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.reference not in self.syncs:
            raise ValueError(
                f"reference={self.reference!r} is no sync; use one of {', '.join(self.syncs)}"
            )
        for name in ("num_groups", "shard_mib", "touched_shares"):
            values = getattr(self, name)
            if not values or min(values) <= 0:
                raise ValueError(f"{name}={list(values)} needs at least one value, all above 0")
        if min(self.num_groups) < 2:
            raise ValueError(f"num_groups={list(self.num_groups)}: one group has nothing to sync")
        if max(self.touched_shares) > 1:
            raise ValueError(f"touched_shares={list(self.touched_shares)} goes beyond 1, all rows")
        return self

    def num_rows(self, shard_mib: float) -> int:
        """Rows of a shard of fp32 weights."""
        return max(1, int(shard_mib * 2**20) // (4 * self.dim))
