"""`LocalMoments`: what the dense optimizer of a rank remembers that trains by itself."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torchrec.optim.keyed import KeyedOptimizer


class LocalMoments:
    """The state of this rank's dense optimizer, for the train state of a run with `LocalDense`.

    Each rank has moments of its own there, of which a checkpoint keeps those of one rank.
    """

    def __init__(self, optimizer: KeyedOptimizer) -> None:
        """
        Args:
            optimizer: the optimizer of this rank's own steps.
        """
        self._optimizer = optimizer

    def state_dict(self) -> dict[str, dict[str, Any]]:
        """The state by the names of the parameters."""
        state = self._optimizer.state
        return {
            name: dict(state[param])
            for name, param in self._optimizer.params.items()
            if param in state
        }

    def load_state_dict(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Take over the state of this rank."""
        self.load_rank_states([state])

    @torch.no_grad()
    def load_rank_states(self, states: Sequence[Mapping[str, Mapping[str, Any]]]) -> None:
        """Take over the state of the first of these ranks; without one, that of the checkpoint."""
        current: Any = self._optimizer.state
        for name, saved in states[0].items() if states else ():
            entries = current[self._optimizer.params[name]]
            for entry, value in saved.items():
                if isinstance(value, torch.Tensor):
                    entries[entry].copy_(value)
                else:
                    entries[entry] = value
