"""`Schedule`: the order in which a pipeline's ranks work on stages and micro-batches. Pure."""

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType

from torchrec_2dsp._compat.pipelining import order_of_work
from torchrec_2dsp.errors import ConfigError, check_choice, check_count


class WorkKind(enum.Enum):
    """A kind of work on a micro-batch in a stage."""

    FORWARD = "F"
    BACKWARD = "B"
    """The whole backward."""

    INPUT_GRADIENT = "I"
    """The part of the backward that the previous stage waits for."""

    WEIGHT_GRADIENT = "W"
    """The part of the backward that no rank waits for."""


@dataclass(frozen=True)
class Work:
    """One piece of a rank's work."""

    kind: WorkKind
    stage: int
    micro_batch: int


SCHEDULES: Mapping[str, int] = MappingProxyType(
    {
        "GPipe": 1,
        "1F1B": 1,
        "Interleaved1F1B": 0,
        "InterleavedZeroBubble": 0,
        "ZBVZeroBubble": 2,
        "DualPipeV": 2,
    }
)
"""Each schedule's stages per rank; 0 for any number."""
_MADE_HERE = "GPipe", "1F1B"
"""Schedules whose order isn't torch's."""
_V_SHAPED = "ZBVZeroBubble", "DualPipeV"
"""Schedules whose stages go through the ranks and back."""


@dataclass(frozen=True)
class Schedule:
    """Stages, the ranks that run them, and each rank's work order.

    Example:
        >>> from torchrec_2dsp.dense.pipelined.schedule import Schedule
        >>> schedule = Schedule("1F1B", num_stages=2, num_micro_batches=3)
        >>> [f"{work.kind.value}{work.micro_batch}" for work in schedule.work[0]]
        ['F0', 'F1', 'B0', 'F2', 'B1', 'B2']
        >>> [f"{work.kind.value}{work.micro_batch}" for work in schedule.work[1]]
        ['F0', 'B0', 'F1', 'B1', 'F2', 'B2']
        >>> Schedule("ZBVZeroBubble", 4, num_micro_batches=4, stages_per_rank=2).stages_of(0)
        (0, 3)

    Raises:
        ConfigError: there is no such schedule, or it doesn't support these numbers.
    """

    name: str
    """One of `SCHEDULES`."""

    num_stages: int
    num_micro_batches: int
    stages_per_rank: int = 1

    def __post_init__(self) -> None:
        check_choice("schedule", self.name, SCHEDULES)
        for name in ("num_stages", "num_micro_batches", "stages_per_rank"):
            check_count(name, getattr(self, name))
        allowed = SCHEDULES[self.name]
        if allowed and self.stages_per_rank != allowed:
            raise ConfigError(
                f"{self.name} doesn't run {self.stages_per_rank} stages on a rank; use "
                f"stages_per_rank={allowed}, or another schedule"
            )
        if self.num_stages % self.stages_per_rank:
            raise ConfigError(
                f"num_stages={self.num_stages} isn't a multiple of "
                f"stages_per_rank={self.stages_per_rank}; give each rank as many stages"
            )
        try:
            _ = self.work
        except ValueError as error:
            takes = [count for count in range(1, 4 * self.num_stages + 1) if self._takes(count)]
            raise ConfigError(
                f"{self.name} can't run {self.num_stages} stages, {self.stages_per_rank} on each "
                f"rank, with num_micro_batches={self.num_micro_batches}; use one of "
                f"{', '.join(map(str, takes))}"
            ) from error

    def _takes(self, num_micro_batches: int) -> bool:
        try:
            self._order(num_micro_batches)
        except ValueError:
            return False
        return True

    @property
    def num_ranks(self) -> int:
        """The number of ranks that run the stages."""
        return self.num_stages // self.stages_per_rank

    def rank_of(self, stage: int) -> int:
        """Return the pipeline rank that runs a stage."""
        turn, place = divmod(stage, self.num_ranks)
        if self.name in _V_SHAPED and turn % 2:
            return self.num_ranks - 1 - place
        return place

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Return the stages that a pipeline rank runs."""
        return tuple(stage for stage in range(self.num_stages) if self.rank_of(stage) == rank)

    @cached_property
    def work(self) -> tuple[tuple[Work, ...], ...]:
        """Each pipeline rank's work, in order."""
        return self._order(self.num_micro_batches)

    @cached_property
    def forwards(self) -> tuple[tuple[Work, ...], ...]:
        """Each rank's forwards, for evaluation."""
        return tuple(
            tuple(work for work in of_rank if work.kind is WorkKind.FORWARD)
            for of_rank in self.work
        )

    def _order(self, num_micro_batches: int) -> tuple[tuple[Work, ...], ...]:
        if self.name not in _MADE_HERE:
            by_rank = order_of_work(
                self.name, self.num_ranks, self.stages_per_rank, num_micro_batches
            )
            return tuple(
                tuple(Work(WorkKind(letter), stage, number) for letter, stage, number in of_rank)
                for of_rank in by_rank
            )
        return tuple(
            _forwards_ahead(stage, self._num_ahead(stage, num_micro_batches), num_micro_batches)
            for stage in range(self.num_stages)
        )

    def _num_ahead(self, stage: int, num_micro_batches: int) -> int:
        """Return the number of a stage's forwards before its first backward."""
        ahead = self.num_stages - stage if self.name == "1F1B" else num_micro_batches
        return min(ahead, num_micro_batches)


def _forwards_ahead(stage: int, num_ahead: int, num_micro_batches: int) -> tuple[Work, ...]:
    """Alternate forwards and backwards, with the forwards ahead."""
    work = [Work(WorkKind.FORWARD, stage, number) for number in range(num_ahead)]
    for number in range(num_micro_batches):
        work.append(Work(WorkKind.BACKWARD, stage, number))
        if number + num_ahead < num_micro_batches:
            work.append(Work(WorkKind.FORWARD, stage, number + num_ahead))
    return tuple(work)
