"""`Preconditioner`: an adaptive optimizer's updates, computed before they are sent."""

import enum
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist


class Preconditioning(enum.StrEnum):
    """Rules that turn gradients into updates."""

    NONE = "none"
    ADAGRAD = "adagrad"
    ADAM = "adam"


class Preconditioner:
    r"""Keeps a rank's moments by parameter and computes updates, for an SGD to apply.

    A rank's own gradient varies more than the mean over all :math:`N` ranks, which an optimizer
    behind DDP sees. So :math:`g^2 / N` is used as its square, as if ranks only differed by noise.
    """

    def __init__(self, rule: Preconditioning) -> None:
        self._rule = rule
        self._moments: dict[str, dict[str, Any]] = {}

    def update(self, name: str, gradient: torch.Tensor, num_ranks: int) -> torch.Tensor:
        """Return a parameter's update, flat and in float32, and update its moments.

        ``num_ranks`` are the ranks over which the update will still be averaged.
        """
        gradient = gradient.float()
        first = second = torch.zeros_like(gradient)
        moments = self._moments.get(name, {"first": first, "second": second, "num_steps": 0})
        num_steps = moments["num_steps"] + 1
        first, second = (moments[key].to(gradient.device) for key in ("first", "second"))
        square = gradient.square() / num_ranks
        if self._rule is Preconditioning.ADAGRAD:
            first, second = gradient.new_empty(0), second + square
            update = gradient / (second.sqrt() + 1e-10)
        else:
            first, second = first.lerp(gradient, 0.1), second.lerp(square, 0.001)
            root = (second / (1 - 0.999**num_steps)).sqrt_()
            update = first / (1 - 0.9**num_steps) / root.add_(1e-8)
        self._moments[name] = {"first": first, "second": second, "num_steps": num_steps}
        return update

    def level(self, name: str, gradient: torch.Tensor, group: dist.ProcessGroup) -> None:
        """Give all ranks the mean of the moments that ranks have; ``gradient`` gives the size.

        Collectives:
            An all-reduce of the moments.
        """
        size = gradient.numel()
        num_first = 0 if self._rule is Preconditioning.ADAGRAD else size
        flat = torch.zeros(num_first + size + 2, device=gradient.device)
        moments = self._moments.pop(name, None)
        if moments is not None:
            flat[:num_first], flat[num_first:-2] = moments["first"], moments["second"]
            flat[-2], flat[-1] = moments["num_steps"], 1.0
        dist.all_reduce(flat, group=group)
        if flat[-1]:
            first, second, steps = (flat / flat[-1])[:-1].split([num_first, size, 1])
            self._moments[name] = {
                "first": first,
                "second": second,
                "num_steps": round(float(steps)),
            }

    def state_dict(self) -> dict[str, Any]:
        """Return the moments by name; later steps replace them instead of changing them."""
        return {name: dict(moments) for name, moments in self._moments.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore moments."""
        self._moments = {name: dict(moments) for name, moments in state.items()}
