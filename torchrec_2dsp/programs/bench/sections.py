"""The sections of a benchmark's config for its schedule, its network and its losses."""

from typing import Literal

from pydantic import Field

from torchrec_2dsp.programs.config.sections import Section


class ScheduleConfig(Section):
    """How much is trained, and when something counts as stuck."""

    batch_size: int = Field(default=1024, ge=1)
    """Samples per rank and step."""

    rounds: int = Field(default=7, ge=5)
    """Blocks of each contestant. In a round each contestant trains one, in a random order."""

    block_s: float = Field(default=2.0, gt=0)
    """About how long a block takes."""

    max_block_steps: int = Field(default=40, ge=1)
    """The most steps of a block."""

    warmup_steps: int = Field(default=4, ge=3)
    """Steps before the first block: allocations, connections, DDP's choice of buckets."""

    traced_steps: int = Field(default=4, ge=1)
    """Steps of the block that is traced, whose times count for the split by phase alone."""

    deadline_s: float = Field(default=180.0, gt=0)
    """After so long without an answer to "build", "trace" or a block, a contestant is out."""

    seed: int = Field(default=0, ge=0)
    """The seed of the order of the contestants and of the bootstrap."""

    device: Literal["cpu", "cuda"] = "cpu"
    """The device on which each rank computes."""


class NetworkConfig(Section):
    """The network between the ranks."""

    interface: str = ""
    """Count bytes on this network interface, such as eth0; empty: count the payload of each
    collective instead. An interface's counters include what others send."""

    description: str = ""
    """The network as the report describes it."""


class LossConfig(Section):
    """Which contestants must train the same, and how closely."""

    num_steps: int | None = Field(default=None, ge=1)
    """So many first losses are compared, by default all. For models in which rounding grows so
    fast that later losses say nothing."""

    exact_bound: float = Field(default=1e-4, gt=0)
    """The bound of contestants whose arithmetic is that of one table on the global batch."""

    fp16_bound: float = Field(default=5e-3, gt=0)
    """The bound of communication in fp16, which keeps 11 bits of each number."""

    bf16_bound: float = Field(default=1e-2, gt=0)
    """The bound of communication in bf16, which keeps 8 bits of each number."""

    int8_bound: float = Field(default=1e-2, gt=0)
    """The bound of communication in int8: 8 bits, scaled by the largest number of a row."""

    int4_bound: float = Field(default=5e-2, gt=0)
    """The bound of communication in int4: 4 bits, scaled by the largest number of a row."""

    nearly_bound: float = Field(default=5e-2, gt=0)
    """The bound of another algorithm: averaged replicas, and optimizer state by column shard."""

    def bound_of(self, arithmetic: str) -> float:
        """The bound of communication in a transport; ``fp32`` is exact."""
        bounds = {
            "fp32": self.exact_bound,
            "fp16": self.fp16_bound,
            "bf16": self.bf16_bound,
            "int8": self.int8_bound,
            "int4": self.int4_bound,
        }
        return bounds[arithmetic]
