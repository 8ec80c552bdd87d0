"""`ErrorFeedback`: what messages have left out, added to later ones."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch


class ErrorFeedback:
    """Keeps a *residual* for each tensor: all that was to be sent, less all that was.

    Example:
        >>> import torch
        >>> from torchrec_2dsp.codecs.error_feedback import ErrorFeedback
        >>> feedback = ErrorFeedback()
        >>> due = feedback.add("layer", torch.tensor([5.0, 1.0]))
        >>> feedback.take_off("layer", torch.tensor([0]), torch.tensor([5.0]))
        >>> feedback.add("layer", torch.tensor([5.0, 1.0]))
        tensor([5., 2.])
    """

    def __init__(self) -> None:
        self._residuals: dict[str, torch.Tensor] = {}

    def add(self, name: str, values: torch.Tensor) -> torch.Tensor:
        """The residual after new values were added to it.

        Args:
            name: of the tensor.
            values: what is to be sent from now on, of the same shape each time.

        Returns:
            The residual itself, which the next call changes.
        """
        residual = self.drain(name, values.device)
        if residual is None:
            residual = torch.zeros_like(values, dtype=torch.float32)
        self._residuals[name] = residual
        return residual.add_(values)

    def take_off(self, name: str, positions: torch.Tensor, sent: torch.Tensor) -> None:
        """Take what was sent off the residual.

        Args:
            name: of the tensor.
            positions: where, along its first dimension, each once: elements, or rows.
            sent: the values as the receivers have them.
        """
        self._residuals[name].index_add_(0, positions, sent, alpha=-1)

    def give_back(self, name: str, positions: torch.Tensor, values: torch.Tensor) -> None:
        """Add what had been sent, and wasn't used after all."""
        self._residuals[name].index_add_(0, positions, values)

    def drain(self, name: str, device: torch.device) -> torch.Tensor | None:
        """The residual of a tensor, which is zero from now on; `None` if there is none.

        Args:
            name: of the tensor.
            device: where the tensor is; a residual that was loaded may be elsewhere.
        """
        residual = self._residuals.pop(name, None)
        return None if residual is None else residual.to(device)

    def square_norm(self) -> float:
        """The sum of the squares of all residuals."""
        return sum(float(residual.square().sum()) for residual in self._residuals.values())

    def state_dict(self) -> dict[str, Any]:
        """The residuals by name."""
        return {name: residual.clone() for name, residual in self._residuals.items()}

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Take over residuals."""
        self.load_sum([state])

    def load_sum(self, states: Sequence[Mapping[str, torch.Tensor]]) -> None:
        """Take over the sum of the residuals of several ranks."""
        self._residuals = {}
        for state in states:
            for name, residual in state.items():
                self.add(name, residual)
