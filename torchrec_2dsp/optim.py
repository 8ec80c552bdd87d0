"""The arithmetic of update rules, independent of where they run.

With M sharding groups each group divides its gradient by its own size only, so the averaged second
moment of a rarely hit row is up to M times one group's. `MomentScaledRowWiseAdaGrad` divides
it back:

    v <- v + mean(g^2)
    w <- w - lr * g / (sqrt(v / c) + eps)        with c = moment_scale

This is stock row-wise AdaGrad with ``lr * sqrt(c)`` and ``eps * sqrt(c)``, so the fused kernel runs
it at full speed, the stored state is the plain second moment, and a checkpoint loads into stock
row-wise AdaGrad.
"""

import enum
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, overload

import torch

from torchrec_2dsp.errors import ConfigError


class FromMesh(enum.Enum):
    """A value that follows from the mesh and the sync config when the model is sharded."""

    FROM_MESH = "from_mesh"

    def __repr__(self) -> str:
        return "FROM_MESH"


FROM_MESH = FromMesh.FROM_MESH
"""The number of groups with `WeightSync`, 1 with `GradientSync` (whose moments are exact)."""


@dataclass(frozen=True)
class MomentScaledRowWiseAdaGrad:
    """The optimizer to give a sharder: ``EmbeddingBagCollectionSharder2D(optimizer=...)``.

    Example:
        >>> import torchrec_2dsp as tdsp
        >>> tdsp.MomentScaledRowWiseAdaGrad(lr=0.02)
        MomentScaledRowWiseAdaGrad(lr=0.02, eps=1e-08, moment_scale=FROM_MESH)

    Reference: Two-dimensional sparse parallelism, arXiv 2508.03854.
    """

    lr: float
    """Learning rate, in plain row-wise AdaGrad's units; schedulers see and set it in them."""

    eps: float = 1e-8
    """Added to the root of the scaled moment."""

    moment_scale: float | FromMesh = FROM_MESH
    """The c above: a number, or what the mesh and the sync config imply."""

    def __post_init__(self) -> None:
        check_hyperparameters(self.lr, self.eps, self.moment_scale)


class MomentScaledRowWiseAdaGradOptimizer(torch.optim.Optimizer):
    """Moment-scaled row-wise AdaGrad as an optimizer class, for ``apply_optimizer_in_backward``.

    The sharders recognise it and run it fused. Stepped directly it is the eager twin, which
    needs a number as ``moment_scale``.

    Example:
        >>> import torch
        >>> from torchrec_2dsp.optim import MomentScaledRowWiseAdaGradOptimizer
        >>> weight = torch.nn.Parameter(torch.zeros(2, 4))
        >>> optimizer = MomentScaledRowWiseAdaGradOptimizer([weight], lr=0.1, moment_scale=4.0)
        >>> weight.grad = torch.ones(2, 4)
        >>> optimizer.step()
        >>> round(weight[0, 0].item(), 4)
        -0.2
    """

    def __init__(
        self,
        params: Iterable[torch.nn.Parameter],
        lr: float,
        eps: float = 1e-8,
        moment_scale: float | FromMesh = FROM_MESH,
    ) -> None:
        check_hyperparameters(lr, eps, moment_scale)
        super().__init__(params, {"lr": lr, "eps": eps, "moment_scale": moment_scale})

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update every parameter that has a gradient, eagerly."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self._update_(param, param.grad.float(), group)
        return loss

    def _update_(self, param: torch.Tensor, grad: torch.Tensor, group: dict[str, Any]) -> None:
        scale = group["moment_scale"]
        if isinstance(scale, FromMesh):
            raise ConfigError(
                "an eager step has no mesh to take moment_scale from; pass a number, such as the "
                "mesh's num_groups"
            )
        state = self.state[param]
        if not state:
            state["sum"] = param.new_zeros(param.shape[0], dtype=torch.float32)
        state["sum"] += grad.pow(2).mean(dim=1)
        scaled_root = (state["sum"] / scale).sqrt() + group["eps"]
        param -= (group["lr"] * grad / scaled_root[:, None]).to(param.dtype)


def check_hyperparameters(lr: float, eps: float, moment_scale: float | FromMesh) -> None:
    """Raise `ConfigError` for hyper-parameters that make no sense in training."""
    if not (math.isfinite(lr) and lr >= 0):
        raise ConfigError(f"lr={lr} must be a finite number >= 0")
    if not (math.isfinite(eps) and eps >= 0):
        raise ConfigError(f"eps={eps} must be a finite number >= 0")
    if not isinstance(moment_scale, FromMesh) and not (
        isinstance(moment_scale, float | int) and math.isfinite(moment_scale) and moment_scale > 0
    ):
        raise ConfigError(f"moment_scale={moment_scale} must be a finite number > 0, or FROM_MESH")


def to_kernel_units(value: float, moment_scale: float) -> float:
    """Convert a learning rate or eps so that stock row-wise AdaGrad runs the scaled rule.

    Example:
        >>> from torchrec_2dsp.optim import to_kernel_units
        >>> to_kernel_units(0.1, moment_scale=4.0)
        0.2
    """
    return value * math.sqrt(moment_scale)


@dataclass(frozen=True)
class RuleArguments:
    """The numbers in a rule's formula, rounded as float32 kernels read them."""

    lr: float
    eps: float
    beta1: float
    beta2: float
    weight_decay: float
    iteration: int
    """The number of training lookups so far, this one included."""


Rows = Callable[[], torch.Tensor]
"""Returns the weights of the rows that a rule updates, in float32."""


@torch.no_grad()
def sgd_step(grad: torch.Tensor, *, weights: Rows, args: RuleArguments) -> torch.Tensor:
    """Return ``lr * g``."""
    return args.lr * grad


@torch.no_grad()
def adagrad_step(
    grad: torch.Tensor, moment: torch.Tensor, *, weights: Rows, args: RuleArguments
) -> torch.Tensor:
    """Update ``v <- v + g^2`` in place; return ``lr * g / (sqrt(v) + eps)``, one v per element."""
    moment.addcmul_(grad, grad)
    return moment.sqrt().add_(args.eps).reciprocal_().mul_(grad).mul_(args.lr)


@torch.no_grad()
def row_wise_adagrad_step(
    grad: torch.Tensor, moment: torch.Tensor, *, weights: Rows, args: RuleArguments
) -> torch.Tensor:
    """Update ``v <- v + mean(g^2)`` in place; return ``lr * g / (sqrt(v) + eps)``.

    There is one v per row.
    """
    moment += grad.pow(2).mean(dim=1)
    return grad * (args.lr / (moment.sqrt() + args.eps))[:, None]


@torch.no_grad()
def adam_step(
    grad: torch.Tensor, *moments: torch.Tensor, weights: Rows, args: RuleArguments
) -> torch.Tensor:
    """Update Adam's moments in place; return ``lr * (m^ / (sqrt(v^) + eps) + decay * w)``.

    ``m <- beta1 m + (1 - beta1) g``, ``v <- beta2 v + (1 - beta2) g^2``; ``m^`` and ``v^`` are
    divided by ``1 - beta^iteration``. A ``v`` with one number per row takes the mean of ``g^2``.
    """
    return _adam_direction(grad, moments, weights, args).mul_(args.lr)


@torch.no_grad()
def lamb_step(
    grad: torch.Tensor, *moments: torch.Tensor, weights: Rows, args: RuleArguments
) -> torch.Tensor:
    """Update Adam's moments in place; return Adam's step times ``|w| / |step|``, row by row.

    A row of zeros keeps its value. So does a row with a zero step, which FBGEMM turns into NaN.
    """
    direction = _adam_direction(grad, moments, weights, args)
    lengths = direction.norm(dim=1)
    ratios = weights().norm(dim=1) / lengths
    return direction.mul_(torch.where(lengths > 0, args.lr * ratios, 0.0)[:, None])


def _adam_direction(
    grad: torch.Tensor, moments: tuple[torch.Tensor, ...], weights: Rows, args: RuleArguments
) -> torch.Tensor:
    exp_avg, exp_avg_sq = moments
    squares = grad.square() if exp_avg_sq.dim() == 2 else grad.square().mean(dim=1)
    exp_avg.mul_(args.beta1).add_(grad, alpha=1 - args.beta1)
    exp_avg_sq.mul_(args.beta2).add_(squares, alpha=1 - args.beta2)
    roots = (exp_avg_sq / (1 - args.beta2**args.iteration)).sqrt_().add_(args.eps)
    if roots.dim() == 1:
        roots = roots[:, None]
    direction = (exp_avg / (1 - args.beta1**args.iteration)).div_(roots)
    if args.weight_decay:
        direction.add_(weights(), alpha=args.weight_decay)
    return direction
