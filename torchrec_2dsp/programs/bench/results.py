"""What a benchmark found: the numbers as measured, written to JSON and read again."""

import enum
from collections.abc import Sequence
from typing import Any, ClassVar

from pydantic import ConfigDict, Field

from torchrec_2dsp.programs.config.json_file import JsonFile
from torchrec_2dsp.programs.config.sections import Section

FORMAT = 1


class Outcome(enum.StrEnum):
    """How a contestant ended."""

    MEASURED = "measured"
    """All its blocks count."""

    CRASHED = "crashed"
    """A rank raised or died."""

    HUNG = "hung"
    """A rank missed the deadline."""

    DISQUALIFIED = "disqualified"
    """Its losses are not those of the reference, though they should be."""


class Block(Section):
    """Some steps of one contestant in one round."""

    round: int
    """From 0."""

    num_steps: int
    """Steps that were timed together."""

    step_s: float = Field(gt=0)
    """Mean time of a step on the slowest rank; of a ceiling, whose ranks don't wait for each other,
    on a rank in the mean."""

    link_bytes: float | None = None
    """Bytes sent on the counted interface, per rank and step; None if none is counted."""

    loopback_bytes: float | None = None
    """As `link_bytes`, for traffic that stayed inside a host."""

    foreign_load: float
    """Cores that the benchmark couldn't have, on the busiest machine: other processes had them,
    or other virtual machines."""

    probe_s: float | None = None
    """What a fixed piece of work took just before, in processor time, mean over ranks; None in
    files from before there was one."""


class Phase(Section):
    """A part of the traced step."""

    name: str
    """What the rank did, or what it waited for."""

    seconds: float
    """Per step, mean over steps and ranks."""

    waiting: bool
    """Whether it is time in which the rank waited for a collective."""


class Traffic(Section):
    """What one kind of collective carried."""

    name: str
    """Operation, such as all_to_all_single."""

    calls: float
    """Per rank and step."""

    sent_bytes: float
    """What an ideal algorithm sends to other ranks, per rank and step."""


class RowTravel(Section):
    """How the row gradients of a step travel, mean over ranks."""

    window_s: float
    """From when they are sent until their rows are needed: so long they cost nothing."""

    waited_s: float
    """What the lookup then waits for them."""


class ContestantResult(Section):
    """All that is known of one contestant."""

    # Losses that are not finite survive JSON, which has no numbers for them.
    model_config = ConfigDict(ser_json_inf_nan="strings")

    name: str
    """As in the config."""

    description: str
    """In words."""

    kind: str
    """stock, two_d or ceiling."""

    outcome: Outcome
    """Whether its numbers count."""

    reason: str = ""
    """Why they don't."""

    sharding: dict[str, int] = Field(default_factory=dict)
    """How many tables have which sharding type."""

    predicted: dict[str, float] | None = None
    """Seconds of the step's parts, as fields of `StepCost`; None without a calibration."""

    blocks: tuple[Block, ...] = ()
    """In the order of the rounds."""

    phases: tuple[Phase, ...] = ()
    """The traced step, part by part; they add up to it."""

    traffic: tuple[Traffic, ...] = ()
    """What its collectives carried in the traced step."""

    row_travel: RowTravel | None = None
    """Of a `GradientSync`; None of others."""

    peak_memory_bytes: int | None = None
    """The most memory that its process on any rank had, beyond what it started with."""

    losses: tuple[float, ...] = ()
    """Of the global batch, step by step from the first one."""

    loss_gap: float | None = None
    """The largest difference to the reference, over the steps that both did."""

    loss_bound: float | None = None
    """What `loss_gap` may be; None for a ceiling, which trains nothing."""


class Setting(Section):
    """Where and how it ran."""

    title: str
    """Of the benchmark."""

    when: str
    """Date and time, UTC."""

    command: str
    """What repeats it."""

    hosts: int
    """Groups of `ranks_per_host` ranks."""

    ranks_per_host: int
    """LOCAL_WORLD_SIZE."""

    network: str
    """In words."""

    cluster: str = ""
    """What an emulated cluster says of itself; empty where machines are real."""

    machine: dict[str, str]
    """Processor, cores, memory, kernel."""

    versions: dict[str, str]
    """Of Python and the packages that matter."""

    link_speeds: dict[str, float | None]
    """Bytes per second that a rank sends while all others do; None for a link that isn't there."""

    config: dict[str, Any]
    """The whole config."""


class BenchResult(JsonFile):
    """One run of a benchmark."""

    what_it_is: ClassVar[str] = "the JSON of a benchmark"

    format: int = FORMAT
    """Of this file."""

    setting: Setting
    """Where and how it ran."""

    reference: str
    """Whose losses the others were held against."""

    contestants: tuple[ContestantResult, ...]
    """In the order of the config."""

    dense_from: tuple[str, ...] = ()
    """The ceilings that predictions take from what a step does beside its tables; without any, the
    model without its tables was timed."""

    def measured(self) -> tuple[ContestantResult, ...]:
        """Those whose numbers count, ceilings included."""
        return tuple(one for one in self.contestants if one.outcome is Outcome.MEASURED)


def mean_traffic(ranks: Sequence[Sequence[Traffic]]) -> tuple[Traffic, ...]:
    """The traffic of a mean rank, by name; what a rank doesn't have counts as none."""
    names = sorted({one.name for traffic in ranks for one in traffic})
    rows = {
        name: [one for traffic in ranks for one in traffic if one.name == name] for name in names
    }
    return tuple(
        Traffic(
            name=name,
            calls=sum(one.calls for one in some) / len(ranks),
            sent_bytes=sum(one.sent_bytes for one in some) / len(ranks),
        )
        for name, some in rows.items()
    )


def mean_travel(ranks: Sequence[RowTravel | None]) -> RowTravel | None:
    """Over the ranks whose rows travel; `None` if no rank's do."""
    known = [one for one in ranks if one is not None]
    if not known:
        return None
    return RowTravel(
        window_s=sum(one.window_s for one in known) / len(known),
        waited_s=sum(one.waited_s for one in known) / len(known),
    )
