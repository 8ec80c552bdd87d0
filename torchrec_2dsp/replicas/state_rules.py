"""`StateRule`: what becomes of each kind of optimizer state when replicas are averaged."""

import enum
from collections.abc import Sequence

import torch

from torchrec_2dsp.errors import UnsupportedError


class StateRule(enum.Enum):
    """How the copies of a tensor become one."""

    AVERAGE = "average"
    """The mean of the copies, for what accumulates or decays along with the gradients."""

    MAX = "max"
    """The largest of the copies, for when a row was last seen, and how often."""

    def combine(self, copies: Sequence[torch.Tensor]) -> torch.Tensor:
        """One tensor from the copies of all peers; a mean adds them in the order of peers.

        Example:
            >>> import torch
            >>> from torchrec_2dsp.replicas.state_rules import StateRule
            >>> StateRule.AVERAGE.combine([torch.tensor([1.0]), torch.tensor([2.0])])
            tensor([1.5000])
        """
        if self is StateRule.MAX:
            return torch.stack(tuple(copies)).amax(dim=0)
        total = copies[0].float()
        for copy in copies[1:]:
            total = total + copy
        return (total / len(copies)).to(copies[0].dtype)


STATE_RULES = {
    "weight": StateRule.AVERAGE,
    "sum": StateRule.AVERAGE,
    "exp_avg": StateRule.AVERAGE,
    "exp_avg_sq": StateRule.AVERAGE,
    "momentum_buffer": StateRule.AVERAGE,
    "sparse_ema": StateRule.AVERAGE,
    "prev_iter": StateRule.MAX,
    "row_counter": StateRule.MAX,
}
"""The rule of each state, by the name that TorchRec gives it."""

UNSYNCED_STATES = frozenset({"iter"})
"""States that are never averaged: they count forwards, of which all replicas run equally many."""


def state_rule_for(state: str, table: str) -> StateRule:
    """The rule for a state of a table; an unknown state is refused, never left out."""
    if state not in STATE_RULES:
        raise UnsupportedError(
            f"WeightSync has no rule for the optimizer state {state!r} of table {table!r}; use "
            "GradientSync, which needs none"
        )
    return STATE_RULES[state]
