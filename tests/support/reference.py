"""Eager update rules on plain tensors, which fused and distributed runs must match.

Each function takes the weight of a table, or of some of its rows, the gradient of the *global*
batch and the state, and changes weight and state in place. Rows with a zero gradient don't move.
"""

import torch


@torch.no_grad()
def sgd_(weight: torch.Tensor, grad: torch.Tensor, *, lr: float) -> None:
    """``w <- w - lr * g``."""
    weight -= lr * grad


@torch.no_grad()
def row_wise_adagrad_(
    weight: torch.Tensor,
    grad: torch.Tensor,
    moment: torch.Tensor,
    *,
    lr: float,
    eps: float = 1e-8,
    moment_scale: float = 1.0,
) -> None:
    """``v <- v + mean(g^2)``, ``w <- w - lr * g / (sqrt(v / c) + eps)``, one v per row."""
    moment += grad.pow(2).mean(dim=1)
    weight -= lr * grad / ((moment / moment_scale).sqrt() + eps)[:, None]


@torch.no_grad()
def adagrad_(
    weight: torch.Tensor,
    grad: torch.Tensor,
    moment: torch.Tensor,
    *,
    lr: float,
    eps: float = 1e-8,
) -> None:
    """``v <- v + g^2``, ``w <- w - lr * g / (sqrt(v) + eps)``, one v per element."""
    moment += grad.pow(2)
    weight -= lr * grad / (moment.sqrt() + eps)
