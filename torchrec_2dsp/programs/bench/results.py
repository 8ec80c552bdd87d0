"""A benchmark's results: the numbers as measured, written to JSON and read again."""

import enum
from typing import Any, ClassVar, Literal

from pydantic import ConfigDict, Field

from torchrec_2dsp.programs.config.section import JsonFile, Section

DEALT_KEY = "balance"
"""A contestant's section in earlier results: it dealt its samples to ranks by cost."""

_STOCK_DENSE = ("ddp", "fp16", "powersgd")
"""The kinds of dense part that torch implements alone."""


class Outcome(enum.StrEnum):
    """A contestant's outcome."""

    MEASURED = "measured"
    """All its blocks count."""

    CRASHED = "crashed"
    """A rank raised or died."""

    HUNG = "hung"
    """A rank missed the deadline."""

    DISQUALIFIED = "disqualified"
    """Its losses differ from the reference's, though they should agree."""


class ContestantBlock(Section):
    """Some steps of one contestant in one round, timed together."""

    # Earlier results also have the bytes that stayed inside hosts.
    model_config = ConfigDict(extra="ignore")

    round: int
    num_steps: int
    step_s: float = Field(gt=0)
    """The slowest rank's mean step time; for a ceiling, whose ranks don't wait for each other, the
    mean rank's."""

    link_bytes: float | None = None
    """Bytes sent on the counted interface, per rank and step; None if none is counted."""

    foreign_load: float
    """Cores that other processes or other virtual machines took, on the busiest machine."""

    probe_s: float = Field(gt=0)
    """Processor seconds for a fixed piece of work just before, mean over ranks."""


class ComputeTimes(Section):
    """The training threads' processor time in a step; a rank that waits uses none."""

    mean_s: float
    """Seconds per rank, mean over ranks and steps."""

    slowest_s: float
    """Seconds of a step's slowest rank, mean over steps."""


class Phase(Section):
    """A phase in the traced step."""

    name: str
    """The rank's activity."""

    seconds: float
    """Seconds per step, mean over steps and ranks."""

    waiting: bool
    """True if the rank waited for a collective."""


class MeasuredTraffic(Section):
    """One collective's traffic."""

    name: str
    """The operation, such as all_to_all_single."""

    calls: float
    """Calls per rank and step."""

    sent_bytes: float
    """Bytes that an ideal algorithm sends to other ranks, per rank and step."""


class EncodedTraffic(Section):
    """The bytes that a transport saves, per rank and step, mean over ranks."""

    rows_fp32_bytes: float = 0.0
    """fp32 bytes for rows, bags and their gradients, each counted once for all receivers; 0 without
    a row transport."""

    rows_bytes: float = 0.0
    """Their bytes on the wire."""

    replicas_fp32_bytes: float = 0.0
    """Bytes that a rank would have sent to its replica peers in fp32."""

    replicas_bytes: float = 0.0
    """Bytes that it sent to them, ids included."""


class DenseTraffic(Section):
    """The bytes of thresholded dense gradients, per rank and step, mean over ranks."""

    fp32_bytes: float
    """Bytes that a rank would have sent in a ring all-reduce in fp32."""

    sent_bytes: float
    """Bytes that it sent, data-parallel tables included."""

    density: float
    """The chosen elements' share."""

    residual_norm: float
    """The Euclidean norm of a rank's residual, not sent yet, after the last step."""


class RowTravel(Section):
    """The travel time of a step's row gradients, mean over ranks."""

    window_s: float
    """Seconds from sending gradients until their rows are needed: until then they cost nothing."""

    waited_s: float
    """Seconds that the lookup then waits for them."""


class ContestantResult(Section):
    """One contestant's measurements."""

    # JSON has no numbers for losses that aren't finite, and earlier results also say how evenly
    # samples were dealt to ranks.
    model_config = ConfigDict(extra="ignore", ser_json_inf_nan="strings")

    name: str
    """The contestant's name in the config."""

    description: str
    """The contestant in words."""

    kind: str
    """stock, two_d, parallelized or ceiling."""

    outcome: Outcome
    """The outcome; the numbers count only if it was measured."""

    reason: str = ""
    """The reason why they don't count; empty if they do."""

    sharding: dict[str, int] = Field(default_factory=dict)
    """Table counts by sharding type."""

    dense_plan: str = ""
    """The dense part that was predicted to be fastest; empty if none was planned."""

    predicted: dict[str, float] | None = None
    """Predicted seconds of each part in `StepCost`; None without a calibration."""

    blocks: tuple[ContestantBlock, ...] = ()
    phases: tuple[Phase, ...] = ()
    """The traced step's phases; they add up to it."""

    traffic: tuple[MeasuredTraffic, ...] = ()
    """The traced step's traffic, by collective."""

    encoded: EncodedTraffic | None = None
    """The bytes before and after encoding; None without any, and in files from before they were
    counted."""

    dense: DenseTraffic | None = None
    """The bytes of thresholded dense gradients; None without thresholds, and in files from before
    they were counted."""

    row_travel: RowTravel | None = None
    """The travel of a `GradientSync`'s row gradients; None for other syncs."""

    compute: ComputeTimes | None = None
    """The processor time of all blocks' steps; None on accelerators."""

    peak_memory_bytes: int | None = None
    """The peak memory of a process on any rank, beyond what it started with."""

    losses: tuple[float, ...] = ()
    """The global batch's losses, step by step from the first one."""

    loss_gap: float | None = None
    """The largest difference from the reference's losses over the first steps
    (`LossConfig.num_steps`). None for a ceiling, which trains nothing."""

    loss_bound: float | None = None
    """The largest `loss_gap` that counts; None for contestants that aren't judged by it."""

    ne_gap: float | None = None
    """The normalized entropy over the steps that both trained, relative to the reference's, minus
    1: above 0 is worse. None for a ceiling."""

    ne_bound: float | None = None
    """The largest `ne_gap` that counts, in either direction; None without a gap."""


class BenchSetting(Section):
    """A benchmark's place and circumstances."""

    title: str
    when: str
    """The date and the time, UTC."""

    command: str
    """The command that repeats the benchmark."""

    hosts: int
    ranks_per_host: int
    """Ranks per host: LOCAL_WORLD_SIZE."""

    network: str
    cluster: str = ""
    """An emulated cluster's own description; empty where machines are real."""

    machine: dict[str, str]
    """The processor, the cores, the memory and the kernel."""

    versions: dict[str, str]
    """The versions of Python and the main packages."""

    link_speeds: dict[str, float | None]
    """Bytes per second that a rank sends while all others do; None for a link that isn't there."""

    config: dict[str, Any]


class BenchResult(JsonFile):
    """One benchmark run."""

    what_it_is: ClassVar[str] = "the JSON of a benchmark"
    format: Literal[2] = 2
    """The file's format."""

    setting: BenchSetting
    reference: str
    """The contestant whose losses the others were compared with."""

    contestants: tuple[ContestantResult, ...]
    """The contestants, in the config's order."""

    dense_from: tuple[str, ...] = ()
    """The ceilings whose steps gave the predictions the time outside the tables; without any, the
    model without its tables was timed."""

    def measured(self) -> tuple[ContestantResult, ...]:
        """Return the contestants whose numbers count, ceilings included."""
        return tuple(
            contestant for contestant in self.contestants if contestant.outcome is Outcome.MEASURED
        )

    def stock(self) -> list[ContestantResult]:
        """Return the measured contestants of torch and TorchRec alone, in full duplex or not."""

        def is_stock(contestant: ContestantResult) -> bool:
            section = self.setting.config.get("contestants", {}).get(contestant.name, {})
            dense = (section.get("dense") or {}).get("kind", "ddp")
            return (
                contestant.kind == "stock" and dense in _STOCK_DENSE and not section.get(DEALT_KEY)
            )

        return list(filter(is_stock, self.measured()))
