"""The sections of a benchmark's config for its schedule, its network and its losses."""

from typing import Literal

from pydantic import Field

from torchrec_2dsp.programs.config.section import Section


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
    """Which contestants must train the same, and how closely.

    Bounds of NE are relative differences of the normalized entropy of all trained steps, which are
    those of mean losses, because all contestants train on the same batches.
    """

    num_steps: int = Field(default=10, ge=1)
    """So many first losses are compared step by step. Rounding differences grow with the steps, and
    later losses say nothing one by one."""

    exact_bound: float = Field(default=1e-4, gt=0)
    """The largest difference of a first step's loss, for contestants whose arithmetic is that of
    one table on the global batch. Others aren't compared step by step."""

    exact_ne_bound: float = Field(default=1e-3, gt=0)
    """The bound of NE for contestants whose arithmetic is that of one table."""

    fp16_ne_bound: float = Field(default=2e-3, gt=0)
    """The bound of NE for communication in fp16, which keeps 11 bits of each number."""

    bf16_ne_bound: float = Field(default=3e-3, gt=0)
    """The bound of NE for communication in bf16, which keeps 8 bits of each number."""

    int8_ne_bound: float = Field(default=3e-3, gt=0)
    """The bound of NE for communication in int8: 8 bits, scaled by the largest number of a row."""

    int4_ne_bound: float = Field(default=1e-2, gt=0)
    """The bound of NE for communication in int4: 4 bits, scaled by the largest number of a row."""

    nearly_ne_bound: float = Field(default=5e-2, gt=0)
    """The bound of NE for another algorithm: averaged replicas, late updates, and optimizer state
    by column shard."""

    spread_factor: float = Field(default=3.0, ge=0)
    """So many times the largest NE difference among TorchRec's own exact contestants is allowed to
    everyone, where that is more than the bound; 0 for never."""

    def ne_bound_of(self, arithmetic: str) -> float:
        """The bound of NE for communication in a transport; ``fp32`` is exact."""
        bounds = {
            "fp32": self.exact_ne_bound,
            "fp16": self.fp16_ne_bound,
            "bf16": self.bf16_ne_bound,
            "int8": self.int8_ne_bound,
            "int4": self.int4_ne_bound,
        }
        return bounds[arithmetic]
