"""`SettledAdam`: Adam whose second moment comes from its first steps.

    t <= n:  as Adam: the second moment v takes the square of each gradient
    t == n:  v is raised to a hundredth of its mean over the parameter, where it is below
    t >  n:  v stays as it is

For gradients that arrive rarely and in one lump, such as those of `ThresholdedDataParallel`. Their
squares say little about the gradients' own: the square of a hundred steps' sum is up to a hundred
times the sum of the hundred squares. With a second moment that has settled, what is left of the
rule is linear in the gradients. Elements without a gradient in the first steps, such as those
behind a ReLU that was off, would otherwise be divided by next to nothing for ever.

Reference: H. Tang et al., 1-bit Adam: communication efficient large-scale training with Adam's
convergence speed, 2021 (arXiv 2102.02888), which lets the moment settle, too.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from torchrec_2dsp.errors import ConfigError

_LEAST_OF_MEAN = 0.01
"""The share of a parameter's mean second moment that each of its elements has at least."""


class SettledAdam(Optimizer):
    """Adam whose second moment is that of its first ``settle_after`` steps.

    Until then it is `torch.optim.Adam`.

    Example::

        dense = tdsp.ThresholdedDataParallel(density=0.05, warm_up=500)
        optimizer = tdsp.SettledAdam(dense_parameters, lr=1e-3, settle_after=500)
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        *,
        settle_after: int,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        """
        Args:
            params: as for `torch.optim.Adam`, like all others.
            lr: the learning rate.
            settle_after: how many first steps make the second moment.
            betas: what is left of both moments in a step.
            eps: added to the root of the second moment.
            weight_decay: how much of a weight joins its gradient.
        """
        if isinstance(settle_after, bool) or not isinstance(settle_after, int) or settle_after < 1:
            raise ConfigError(
                f"SettledAdam(settle_after={settle_after!r}) is no number of steps; use 1 or more, "
                "such as the wrapper's warm_up"
            )
        if lr < 0 or eps < 0 or weight_decay < 0:
            raise ConfigError(
                f"SettledAdam(lr={lr}, eps={eps}, weight_decay={weight_decay}): none of them may "
                "be below 0"
            )
        if not all(0 <= beta < 1 for beta in betas):
            raise ConfigError(f"SettledAdam(betas={betas}) can't be; use two of 0 or more, below 1")
        super().__init__(
            params,
            {
                "lr": lr,
                "settle_after": settle_after,
                "betas": betas,
                "eps": eps,
                "weight_decay": weight_decay,
            },
        )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters that have a gradient.

        Args:
            closure: computes the loss anew; it is called first, as by torch's optimizers.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self._update_(param, group)
        return loss

    def _update_(self, param: torch.Tensor, group: dict[str, Any]) -> None:
        """Update a parameter in place."""
        state, grad = self.state[param], param.grad
        assert grad is not None
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            state["exp_avg"] = torch.zeros_like(param)
            state["exp_avg_sq"] = torch.zeros_like(param)
        if group["weight_decay"]:
            grad = grad.add(param, alpha=group["weight_decay"])
        state["step"] += 1
        num_steps, settle_after = int(state["step"]), group["settle_after"]
        beta1, beta2 = group["betas"]
        square = state["exp_avg_sq"]
        state["exp_avg"].lerp_(grad, 1 - beta1)
        if num_steps <= settle_after:
            square.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        root = (square / (1 - beta2 ** min(num_steps, settle_after))).sqrt_().add_(group["eps"])
        param.addcdiv_(state["exp_avg"], root, value=-group["lr"] / (1 - beta1**num_steps))
        if num_steps == settle_after:
            mean = square.mean()
            mean = mean.full_tensor() if isinstance(mean, DTensor) else mean
            square.clamp_(min=_LEAST_OF_MEAN * mean.item())
