"""What one update subtracts from rows, in few passes over their gradients.

Each function takes the gradients of some rows and their state, which it changes in place, and
returns the step.
"""

import torch


@torch.no_grad()
def sgd_step(grad: torch.Tensor, *, lr: float, eps: float) -> torch.Tensor:
    """``lr * g``; there is nothing to keep from being zero."""
    return lr * grad


@torch.no_grad()
def adagrad_step(
    grad: torch.Tensor, moment: torch.Tensor, *, lr: float, eps: float
) -> torch.Tensor:
    """``v <- v + g^2``, then ``lr * g / (sqrt(v) + eps)``, one v per element."""
    moment.addcmul_(grad, grad)
    return moment.sqrt().add_(eps).reciprocal_().mul_(grad).mul_(lr)


@torch.no_grad()
def row_wise_adagrad_step(
    grad: torch.Tensor, moment: torch.Tensor, *, lr: float, eps: float
) -> torch.Tensor:
    """``v <- v + mean(g^2)``, then ``lr * g / (sqrt(v) + eps)``, one v per row."""
    moment += grad.pow(2).mean(dim=1)
    return grad * (lr / (moment.sqrt() + eps))[:, None]
