"""A table of the faults that training must survive: what happens, when, in which program."""

from collections.abc import Iterator
from dataclasses import dataclass

import torchrec_2dsp as tdsp
from tests.support.models import HOT_ROWS
from tests.support.parity import FOUR, ONE, TWO, Cell

FAULTY_RANK, FAULTY_STEP, NUM_STEPS = 1, 3, 5
"""The failing rank, the step at which it fails, and the number of steps; steps count from 1."""


@dataclass(frozen=True)
class Program:
    """A way to train."""

    cell: Cell
    loop: str = "plain"
    ranks_per_host: int = 4


PROGRAMS = {
    "2x2 exact": Program(Cell(TWO)),
    "2x2 delayed": Program(
        Cell(TWO, sync=tdsp.GradientSync(delay=1), exchange="row", hot_rows=HOT_ROWS)
    ),
    "2x2 averaged": Program(Cell(TWO, sync=tdsp.WeightSync())),
    "4x1 two hosts": Program(Cell(FOUR), ranks_per_host=2),
    "1x4 hash": Program(Cell(ONE, exchange="row", owners="hash")),
    "1x4 prefetch": Program(
        Cell(ONE, exchange="row", owners="hash", full_duplex=True), loop="prefetch"
    ),
    "1x4 pipeline": Program(
        Cell(ONE, exchange="row_per_host", hot_rows=HOT_ROWS), loop="pipeline", ranks_per_host=2
    ),
    "2x2 accumulated": Program(Cell(TWO, accumulates=True, exchange="row"), loop="accumulate"),
    "1x4 nonempty": Program(
        Cell(ONE, "table_wise", exchange="nonempty", hot_rows=HOT_ROWS, full_duplex=True)
    ),
}
"""All programs by their names."""

RAISES, KILLED, STOPPED, ENDS, DIFFERS, NAN, SKIPS, ALONE = (
    "raises",
    "killed",
    "stopped",
    "ends",
    "differs",
    "nan",
    "skips",
    "alone",
)


@dataclass(frozen=True)
class Fault:
    """An event on the faulty rank."""

    kind: str
    """`RAISES`, `KILLED`, `STOPPED`, `ENDS` (out of batches), `DIFFERS` (another config), `NAN`,
    `SKIPS` (no backward comes to the tables), `ALONE` (a call that all ranks should make)."""
    moment: str
    """The moment, or the rank's action alone, or next: out of batches, or without a backward."""
    in_context: bool = True
    """True if the loop stands in `failing_together`."""

    def __str__(self) -> str:
        texts = {
            RAISES: f"raises in the {self.moment}",
            KILLED: f"kill -9 in the {self.moment}",
            STOPPED: f"SIGSTOP in the {self.moment}",
            ENDS: f"out of batches, then {self.moment}",
            DIFFERS: f"another {self.moment}",
            NAN: f"NaN in the {self.moment}",
            SKIPS: f"no backward of tables, then {self.moment}",
            ALONE: f"alone {self.moment}",
        }
        return texts[self.kind] + ("" if self.in_context else ", without the context")


@dataclass(frozen=True)
class Case:
    """A fault in a program."""

    program: str
    fault: Fault

    def __str__(self) -> str:
        return f"{self.program}: {self.fault}"


EVALUATES, EVALUATES_EARLY = "evaluates", "evaluates before its backward"
READS, READS_EARLY = "reads the state", "reads the state before its backward"
AFTER = "save after the loop"
MOMENTS = ("loader", "forward", "backward", "sync", "optimizer", "save", "refresh", AFTER)
FAULTS = (
    *(Fault(RAISES, moment) for moment in ("loader", "forward", "loss", "backward", "optimizer")),
    *(Fault(KILLED, moment) for moment in MOMENTS),
    *(Fault(STOPPED, moment) for moment in ("loader", "forward", "backward", "save")),
    *(Fault(ENDS, then) for then in ("ends", "waits at a barrier", "saves", "is told")),
    Fault(DIFFERS, "plan"),
    Fault(DIFFERS, "learning rate"),
    *(Fault(NAN, where) for where in ("loss", "weights")),
    *(Fault(SKIPS, then) for then in ("steps", "takes the next batch")),
    Fault(SKIPS, "leaves a batch out"),
    *(Fault(ALONE, does) for does in (EVALUATES, EVALUATES_EARLY, READS, READS_EARLY)),
    *(Fault(RAISES, moment, in_context=False) for moment in ("forward", "backward")),
    Fault(KILLED, "forward", in_context=False),
    Fault(ENDS, "ends", in_context=False),
)


def can_happen(program: Program, fault: Fault) -> bool:
    """Tell whether a program reaches the fault's moment."""
    is_pipeline = program.loop not in ("plain", "accumulate")
    if fault.moment == "refresh" and not program.cell.hot_rows:
        return False
    if fault.kind == NAN and program.cell.mesh.num_groups == 1:
        return False
    if fault.moment in (READS, READS_EARLY) and program.cell.owners != "hash":
        return False  # Nothing has to move, so a rank may read alone.
    if fault.moment == "leaves a batch out":
        return program.loop == "accumulate"
    # A pipeline computes the loss in the forward, and syncs and steps by itself.
    inside = ("loss", "sync", "takes the next batch", EVALUATES, EVALUATES_EARLY, READS_EARLY)
    return not (is_pipeline and fault.moment in inside)


def all_cases() -> Iterator[Case]:
    for name, program in PROGRAMS.items():
        for fault in FAULTS:
            if can_happen(program, fault):
                yield Case(name, fault)


def chosen_cases() -> list[Case]:
    """Return selected cases of every kind; tests run some per commit."""
    chosen = (
        ("2x2 exact", Fault(RAISES, "loss")),
        ("2x2 exact", Fault(KILLED, "backward")),
        ("2x2 exact", Fault(ENDS, "ends")),
        ("2x2 exact", Fault(NAN, "loss")),
        ("2x2 delayed", Fault(KILLED, "refresh")),
        ("2x2 averaged", Fault(KILLED, "save")),
        ("1x4 pipeline", Fault(KILLED, AFTER)),
        ("4x1 two hosts", Fault(RAISES, "backward")),
        ("1x4 prefetch", Fault(ENDS, "waits at a barrier")),
        ("1x4 prefetch", Fault(KILLED, "forward")),
        ("1x4 pipeline", Fault(RAISES, "loader")),
        ("1x4 nonempty", Fault(ENDS, "saves")),
        ("1x4 nonempty", Fault(DIFFERS, "plan")),
        ("1x4 nonempty", Fault(SKIPS, "takes the next batch")),
        ("2x2 exact", Fault(SKIPS, "steps")),
        ("2x2 averaged", Fault(SKIPS, "takes the next batch")),
        ("1x4 prefetch", Fault(SKIPS, "steps")),
        ("2x2 accumulated", Fault(SKIPS, "leaves a batch out")),
        ("2x2 accumulated", Fault(ENDS, "waits at a barrier")),
        ("1x4 prefetch", Fault(ALONE, READS)),
        ("1x4 hash", Fault(ALONE, READS_EARLY)),
        ("2x2 exact", Fault(ALONE, EVALUATES)),
        ("1x4 nonempty", Fault(ALONE, EVALUATES_EARLY)),
    )
    return [Case(program, fault) for program, fault in chosen]
