"""The results of a benchmark: the numbers as measured, written to JSON and read again."""

import enum
from typing import Any, ClassVar

from pydantic import ConfigDict, Field, model_validator

from torchrec_2dsp.programs.bench.traffic import (
    DenseTraffic,
    EncodedTraffic,
    MeasuredTraffic,
    RowTravel,
)
from torchrec_2dsp.programs.config.section import JsonFile, Section

BENCH_RESULT_FORMAT = 2


class Outcome(enum.StrEnum):
    """The ways in which a contestant ends."""

    MEASURED = "measured"
    """All blocks of the contestant count."""

    CRASHED = "crashed"
    """A rank raised or died."""

    HUNG = "hung"
    """A rank missed the deadline."""

    DISQUALIFIED = "disqualified"
    """The losses are not those of the reference, though they should be."""


class ContestantBlock(Section):
    """The measurements of some steps of one contestant in one round."""

    round: int
    """The number of the round, from 0."""

    num_steps: int
    """Steps that were timed together."""

    step_s: float = Field(gt=0)
    """Mean time of a step on the slowest rank; of a ceiling, whose ranks don't wait for each other,
    on a rank in the mean."""

    link_bytes: float | None = None
    """Bytes sent on the counted interface, per rank and step; None if none is counted."""

    loopback_bytes: float | None = None
    """Bytes like `link_bytes`, of traffic that stayed inside a host."""

    foreign_load: float
    """Cores that the benchmark couldn't have, on the busiest machine: other processes had them,
    or other virtual machines."""

    probe_s: float | None = None
    """Processor seconds of a fixed piece of work just before, mean over ranks; None in files from
    before there was one."""


class DealtSamples(Section):
    """What became of the samples of a contestant that deals them to its ranks by their cost."""

    imbalance_before: float
    """How many times the mean the slowest rank would have taken with the samples that it reads, by
    their costs; 1 is even."""

    imbalance_after: float
    """How many times the mean the slowest rank takes with the samples that it was dealt."""

    moved_share: float
    """The share of the samples that were given to another rank."""

    sent_bytes: float
    """Bytes of samples that a rank sent to others per step, mean over ranks."""


class ComputeTimes(Section):
    """The processor time of the threads that train, in a step: while a rank waits it uses none."""

    mean_s: float
    """Seconds of a rank, mean over ranks and steps."""

    slowest_s: float
    """Seconds of the rank that took longest in a step, mean over steps."""


class Phase(Section):
    """A part of the traced step."""

    name: str
    """The work or the wait of the rank, by name."""

    seconds: float
    """Seconds per step, mean over steps and ranks."""

    waiting: bool
    """Whether it is time in which the rank waited for a collective."""


class ContestantResult(Section):
    """The measurements of one contestant."""

    # Losses that are not finite survive JSON, which has no numbers for them.
    model_config = ConfigDict(ser_json_inf_nan="strings")

    name: str
    """The contestant's name in the config."""

    description: str
    """The contestant in words."""

    kind: str
    """The kind of contestant: stock, two_d or ceiling."""

    outcome: Outcome
    """The outcome, which says whether the numbers count."""

    reason: str = ""
    """The reason why the numbers don't count; empty if they do."""

    sharding: dict[str, int] = Field(default_factory=dict)
    """How many tables have which sharding type."""

    dense_plan: str = ""
    """What was predicted to be the fastest dense part; empty if none was planned."""

    predicted: dict[str, float] | None = None
    """Seconds of the step's parts, as fields of `StepCost`; None without a calibration."""

    blocks: tuple[ContestantBlock, ...] = ()
    """The blocks, in the order of the rounds."""

    phases: tuple[Phase, ...] = ()
    """The traced step, part by part; they add up to it."""

    traffic: tuple[MeasuredTraffic, ...] = ()
    """The traffic of each kind of collective in the traced step."""

    encoded: EncodedTraffic | None = None
    """The bytes before and after encoding; None if no transport encoded any, and in files from
    before they were counted."""

    dense: DenseTraffic | None = None
    """The bytes of thresholded dense gradients; None without thresholds, and in files from before
    they were counted."""

    row_travel: RowTravel | None = None
    """The travel of a `GradientSync`'s row gradients; None of other syncs."""

    dealt: DealtSamples | None = None
    """What became of the samples; None unless they are dealt by cost, and in older files."""

    compute: ComputeTimes | None = None
    """The processor time of the steps of all blocks; None on accelerators, and in older files."""

    peak_memory_bytes: int | None = None
    """The most memory that its process on any rank had, beyond what it started with."""

    losses: tuple[float, ...] = ()
    """The losses of the global batch, step by step from the first one."""

    loss_gap: float | None = None
    """The largest difference of a loss to the reference's, over the first steps
    (`LossConfig.num_steps`); in files of format 1, over all steps. None for a ceiling, which
    trains nothing."""

    loss_bound: float | None = None
    """The largest `loss_gap` that counts; None for those that aren't judged by it."""

    ne_gap: float | None = None
    """The normalized entropy over the steps that both did, relative to the reference's, minus 1:
    above 0 is worse. None for a ceiling, and in files of format 1."""

    ne_bound: float | None = None
    """The largest `ne_gap` that counts, in either direction; None where there is no gap."""


class BenchSetting(Section):
    """The place and the circumstances of a benchmark."""

    title: str
    """The title of the benchmark."""

    when: str
    """The date and the time, UTC."""

    command: str
    """The command that repeats the benchmark."""

    hosts: int
    """How many hosts there were, with `ranks_per_host` ranks each."""

    ranks_per_host: int
    """How many ranks a host had: LOCAL_WORLD_SIZE."""

    network: str
    """The network in words."""

    cluster: str = ""
    """An emulated cluster's description of itself; empty where machines are real."""

    machine: dict[str, str]
    """The processor, the cores, the memory and the kernel."""

    versions: dict[str, str]
    """The versions of Python and of the packages that matter."""

    link_speeds: dict[str, float | None]
    """Bytes per second that a rank sends while all others do; None for a link that isn't there."""

    config: dict[str, Any]
    """The whole config of the benchmark."""


class BenchResult(JsonFile):
    """One run of a benchmark."""

    what_it_is: ClassVar[str] = "the JSON of a benchmark"

    format: int = Field(default=BENCH_RESULT_FORMAT, ge=1, le=BENCH_RESULT_FORMAT)
    """The format of this file. In format 1 losses were judged step by step, over all steps."""

    setting: BenchSetting
    """The place and the circumstances of the benchmark."""

    reference: str
    """The contestant whose losses the others were held against."""

    contestants: tuple[ContestantResult, ...]
    """The contestants, in the order of the config."""

    dense_from: tuple[str, ...] = ()
    """The ceilings that predictions take from what a step does beside its tables; without any, the
    model without its tables was timed."""

    @model_validator(mode="before")
    @classmethod
    def _read_format_1(cls, tree: Any) -> Any:
        """Leave out a config's bounds of losses where they were bounds of something else."""
        if not isinstance(tree, dict) or tree.get("format") != 1:
            return tree
        setting = dict(tree.get("setting") or {})
        config = {key: part for key, part in (setting.get("config") or {}).items() if key != "loss"}
        config["contestants"] = {
            name: {key: value for key, value in contestant.items() if key != "loss_bound"}
            for name, contestant in (config.get("contestants") or {}).items()
        }
        return {**tree, "setting": {**setting, "config": config}}

    def measured(self) -> tuple[ContestantResult, ...]:
        """The contestants whose numbers count, ceilings included."""
        return tuple(
            contestant for contestant in self.contestants if contestant.outcome is Outcome.MEASURED
        )
