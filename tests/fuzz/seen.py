"""A rank's report on a run."""

from dataclasses import dataclass, field

import torch

from tests.fuzz.case import Case
from torchrec_2dsp.dense.gradient_sums import GradientReport


@dataclass(frozen=True)
class Piece:
    """A part of a table that a rank holds."""

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
    """Weights and states of hot rows, whose names say of what."""
    dense: torch.Tensor
    id_maps: dict[str, torch.Tensor] = field(default_factory=dict)
    """The buffers of id maps, by table and name."""


@dataclass
class Seen:
    """A rank's results, by the number of the action."""

    scores: dict[int, torch.Tensor] = field(default_factory=dict)
    losses: dict[int, torch.Tensor] = field(default_factory=dict)
    """Losses of samples, where a pipeline of layers gives nothing else."""
    states: dict[int, StateSeen] = field(default_factory=dict)
    refusals: dict[int, str] = field(default_factory=dict)
    """Errors of batches that had to be refused."""
    applied: dict[int, torch.Tensor] = field(default_factory=dict)
    """The mean dense gradients of updates, where ranks choose what they send."""
    sent: dict[int, GradientReport] = field(default_factory=dict)
    """This rank's reports on the dense gradients that it sent, by update."""
    left_out: dict[int, torch.Tensor] = field(default_factory=dict)
    """The rest that this rank hasn't sent yet when the state is read, as its share in a mean."""
    num_synced_rows: int = 0
    chosen: Case | None = None
    """The case with the plan that was searched for it."""


@dataclass(frozen=True)
class RankReport:
    """A rank's end."""

    outcome: str
    """``"returned"``, ``"raised"``, ``"died"`` or ``"hung"``."""
    seen: Seen | None = None
    error: str = ""
    """The type of what it raised."""
    is_ours: bool = False
    """True if that is a `TwoDError`."""
    message: str = ""
    """The error's message, or the way the process ended."""
    trace: str = ""
    """A traceback, or the end of what the process wrote."""
