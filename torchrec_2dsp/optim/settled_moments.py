"""`SettledAdam` and `SettledAdagrad`: optimizers whose second moments come from the first steps.

    t <= n:  as Adam and AdaGrad: the second moment v takes the square of each gradient
    t == n:  v is raised to a hundredth of its mean over the parameter, where it is below
    t >  n:  v stays as it is (Adam), or goes on growing as it grew (AdaGrad: v * t / n)

For gradients that arrive rarely and in one lump, such as those of `ThresholdedDataParallel`. Their
squares say little about the gradients' own: the square of a hundred steps' sum is up to a hundred
times the sum of the hundred squares. With a second moment that has settled, what is left of the
rule is linear in the gradients, and a linear rule loses nothing when they come late. Elements
without a gradient in the first steps, such as those behind a ReLU that was off, would otherwise be
divided by next to nothing for ever.

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


class _Settled(Optimizer):
    """Counts the steps of each parameter, whose first ones make the second moment."""

    def __init__(self, params: Iterable[Any], settle_after: int, **defaults: Any) -> None:
        name = type(self).__name__
        if isinstance(settle_after, bool) or not isinstance(settle_after, int) or settle_after < 1:
            raise ConfigError(
                f"{name}(settle_after={settle_after!r}) is no number of steps; use 1 or more, such "
                "as the wrapper's warm_up"
            )
        if defaults["lr"] < 0 or defaults["eps"] < 0 or defaults["weight_decay"] < 0:
            raise ConfigError(f"{name}: lr, eps and weight_decay must not be below 0: {defaults}")
        super().__init__(params, {"settle_after": settle_after, **defaults})

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
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state["step"] = torch.zeros((), dtype=torch.float32)
                state["step"] += 1
                grad = param.grad
                if group["weight_decay"]:
                    grad = grad.add(param, alpha=group["weight_decay"])
                self._update_(param, grad, state, group)
        return loss

    def _update_(
        self, param: torch.Tensor, grad: torch.Tensor, state: dict[str, Any], group: dict[str, Any]
    ) -> None:
        """Update a parameter in place."""
        raise NotImplementedError

    @staticmethod
    def _settle_(moment: torch.Tensor, num_steps: int, settle_after: int) -> None:
        """Raise the smallest elements of a second moment in place, once it has settled."""
        if num_steps == settle_after:
            mean = moment.mean()
            mean = mean.full_tensor() if isinstance(mean, DTensor) else mean
            moment.clamp_(min=_LEAST_OF_MEAN * mean.item())


class SettledAdam(_Settled):
    """Adam whose second moment is that of its first ``settle_after`` steps.

    Until then it is `torch.optim.Adam`.

    Example::

        dense = tdsp.ThresholdedDataParallel(density=0.005, warm_up=500)
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
        if not all(0 <= beta < 1 for beta in betas):
            raise ConfigError(f"SettledAdam(betas={betas}) can't be; use two of 0 or more, below 1")
        super().__init__(
            params, settle_after, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay
        )

    def _update_(
        self, param: torch.Tensor, grad: torch.Tensor, state: dict[str, Any], group: dict[str, Any]
    ) -> None:
        if "exp_avg" not in state:
            state["exp_avg"] = torch.zeros_like(param)
            state["exp_avg_sq"] = torch.zeros_like(param)
        beta1, beta2 = group["betas"]
        num_steps = int(state["step"])
        state["exp_avg"].lerp_(grad, 1 - beta1)
        if num_steps <= group["settle_after"]:
            state["exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        root = (state["exp_avg_sq"] / (1 - beta2 ** min(num_steps, group["settle_after"]))).sqrt_()
        self._settle_(state["exp_avg_sq"], num_steps, group["settle_after"])
        param.addcdiv_(
            state["exp_avg"], root.add_(group["eps"]), value=-group["lr"] / (1 - beta1**num_steps)
        )


class SettledAdagrad(_Settled):
    """AdaGrad whose second moment grows on as it grew in its first ``settle_after`` steps.

    Until then it is `torch.optim.Adagrad`.

    Example::

        dense = tdsp.ThresholdedDataParallel(density=0.005, warm_up=500)
        optimizer = tdsp.SettledAdagrad(dense_parameters, lr=0.02, settle_after=500)
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-2,
        *,
        settle_after: int,
        eps: float = 1e-10,
        weight_decay: float = 0.0,
    ) -> None:
        """
        Args:
            params: as for `torch.optim.Adagrad`, like all others.
            lr: the learning rate.
            settle_after: how many first steps say how the second moment grows.
            eps: added to the root of the second moment.
            weight_decay: how much of a weight joins its gradient.
        """
        super().__init__(params, settle_after, lr=lr, eps=eps, weight_decay=weight_decay)

    def _update_(
        self, param: torch.Tensor, grad: torch.Tensor, state: dict[str, Any], group: dict[str, Any]
    ) -> None:
        if "sum" not in state:
            state["sum"] = torch.zeros_like(param)
        num_steps, settled = int(state["step"]), group["settle_after"]
        if num_steps <= settled:
            state["sum"].addcmul_(grad, grad)
        growth = max(1.0, num_steps / settled)
        root = (state["sum"] * growth).sqrt_().add_(group["eps"])
        self._settle_(state["sum"], num_steps, settled)
        param.addcdiv_(grad, root, value=-group["lr"])
