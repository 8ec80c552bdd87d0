"""`Preconditioner`: an adaptive optimizer's updates, computed before they are sent.

Adam and AdaGrad divide by the root of their gradients' mean square. Fed with what arrives, few
large sums now and then, they would divide by the wrong numbers, and their steps be too short. So
each rank divides its own gradients, and what hasn't been sent is part of an update.
"""

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

_EPS = {"adagrad": 1e-10, "adam": 1e-8}
"""As in torch's optimizers."""


class Preconditioning(enum.StrEnum):
    """Rules that turn gradients into updates."""

    NONE = "none"
    """The update is the gradient."""

    ADAGRAD = "adagrad"
    """The gradient, divided by the root of all squares' sum."""

    ADAM = "adam"
    """The gradients' moving mean, divided by the root of their squares' moving mean."""


@dataclass
class _Moments:
    first: torch.Tensor
    second: torch.Tensor
    num_steps: int = 0


@dataclass
class Preconditioner:
    r"""Keeps a rank's moments by parameter and computes updates, for an SGD to apply.

    A rank's own gradient varies more than the mean over all :math:`N` ranks, which an optimizer
    behind DDP sees. So :math:`g^2 / N` counts for its square, as if ranks only differed by noise.

    Example:
        >>> import torch
        >>> from torchrec_2dsp.dense.preconditioner import Preconditioner, Preconditioning
        >>> adagrad = Preconditioner(Preconditioning.ADAGRAD, (0.9, 0.999))
        >>> adagrad.update("layer", torch.tensor([3.0]), num_ranks=1)
        tensor([1.])
        >>> adagrad.update("layer", torch.tensor([4.0]), num_ranks=1)
        tensor([0.8000])
    """

    rule: Preconditioning
    betas: tuple[float, float]
    """Adam's."""

    _moments: dict[str, _Moments] = field(default_factory=dict)

    def update(self, name: str, gradient: torch.Tensor, *, num_ranks: int) -> torch.Tensor:
        """Return a parameter's update, in float32, and move its moments.

        Args:
            name: the parameter.
            gradient: its flat gradient.
            num_ranks: the ranks over which an average has still to be taken.
        """
        gradient = gradient.float()
        moments = self._moments.get(name)
        if moments is not None and moments.second.device != gradient.device:
            # Loaded ones come on the CPU.
            moments.first = moments.first.to(gradient.device)
            moments.second = moments.second.to(gradient.device)
        if moments is None:
            moments = _Moments(torch.zeros_like(gradient), torch.zeros_like(gradient))
            if self.rule is Preconditioning.ADAGRAD:
                moments.first = moments.first[:0]
            self._moments[name] = moments
        moments.num_steps += 1
        if self.rule is Preconditioning.ADAGRAD:
            moments.second.addcmul_(gradient, gradient, value=1 / num_ranks)
            return gradient / moments.second.sqrt().add_(_EPS[self.rule])
        beta1, beta2 = self.betas
        moments.first.lerp_(gradient, 1 - beta1)
        moments.second.mul_(beta2).addcmul_(gradient, gradient, value=(1 - beta2) / num_ranks)
        mean = moments.first / (1 - beta1**moments.num_steps)
        root = (moments.second / (1 - beta2**moments.num_steps)).sqrt_()
        return mean.div_(root.add_(_EPS[self.rule]))

    def level(self, name: str, gradient: torch.Tensor, group: dist.ProcessGroup) -> None:
        """Give all ranks the mean moments of those that have some; ``gradient`` tells the size.

        Collectives:
            An all-reduce of the moments, and one of the number of steps.
        """
        moments = self._moments.pop(name, None)
        flat = torch.zeros(2 * gradient.numel() + 1, device=gradient.device)
        num_steps = torch.zeros(1, dtype=torch.int64, device=gradient.device)
        num_first = 0 if self.rule is Preconditioning.ADAGRAD else gradient.numel()
        if moments is not None:
            flat[0], num_steps[0] = 1.0, moments.num_steps
            flat[1 : 1 + num_first] = moments.first
            flat[1 + gradient.numel() :] = moments.second
        dist.all_reduce(flat, group=group)
        dist.all_reduce(num_steps, dist.ReduceOp.MAX, group=group)
        if flat[0]:
            first, second = (flat[1:] / flat[0]).view(2, -1).unbind()
            self._moments[name] = _Moments(
                first[:num_first].clone(), second.clone(), int(num_steps)
            )

    def state_dict(self) -> dict[str, Any]:
        """Return the moments by name."""
        return {
            name: {
                "first": moments.first.clone(),
                "second": moments.second.clone(),
                "num_steps": moments.num_steps,
            }
            for name, moments in self._moments.items()
        }

    def load_mean(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Restore the mean of several ranks' moments."""
        self._moments = {}
        for name in {name: None for state in states for name in state}:
            own = [state[name] for state in states if name in state]
            self._moments[name] = _Moments(
                *(
                    torch.stack([moments[key] for moments in own]).mean(dim=0)
                    for key in ("first", "second")
                ),
                num_steps=max(moments["num_steps"] for moments in own),
            )
