"""A rank's report on a run."""

from dataclasses import dataclass, field

import torch

from tests.fuzz.case import Case
from torchrec_2dsp.dense.gradient_sums import GradientReport


@dataclass(frozen=True)
class Piece:
    """A part of a table on a rank."""

    table: str
    row: int
    column: int
    values: torch.Tensor


@dataclass(frozen=True)
class StateSeen:
    """A rank's state when it is read."""

    weights: list[Piece]
    moments: list[Piece]
    hot_copies: dict[str, torch.Tensor]
    """Hot rows' weights and states, by table, column and name."""
    dense: torch.Tensor
    id_maps: dict[str, torch.Tensor] = field(default_factory=dict)
    """The buffers of id maps, by table and name."""


@dataclass
class Seen:
    """A rank's results, by action number."""

    scores: dict[int, torch.Tensor] = field(default_factory=dict)
    losses: dict[int, torch.Tensor] = field(default_factory=dict)
    """Samples' losses, where pipelined layers return nothing else."""
    states: dict[int, StateSeen] = field(default_factory=dict)
    refusals: dict[int, str] = field(default_factory=dict)
    """Errors for batches that had to be refused."""
    applied: dict[int, torch.Tensor] = field(default_factory=dict)
    """Updates' mean dense gradients, where ranks choose what they send."""
    sent: dict[int, GradientReport] = field(default_factory=dict)
    """This rank's reports on the dense gradients that it sent, by update."""
    left_out: dict[int, torch.Tensor] = field(default_factory=dict)
    """This rank's unsent residuals when the state is read, as its share in a mean."""
    num_synced_rows: int = 0
    chosen: Case | None = None
    """The case with the plan that was searched for it."""


@dataclass(frozen=True)
class RankReport:
    """A rank's ending, and its results if it returned."""

    outcome: str
    """``"returned"``, ``"raised"``, ``"died"`` or ``"hung"``."""
    seen: Seen | None = None
    error: str = ""
    """The type of error it raised."""
    is_ours: bool = False
    """True if that is a `TwoDError`."""
    message: str = ""
    """The error's message, or the way the process ended."""
    trace: str = ""
    """A traceback, or the end of the process's output."""
