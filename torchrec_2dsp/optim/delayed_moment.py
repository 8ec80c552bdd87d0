"""`DelayedMomentRowWiseAdaGrad`: row-wise AdaGrad that divides by the moment before the step.

    w <- w - lr * g / (sqrt(v) + eps)        with v as it was before
    v <- v + mean(g^2)

After a sync all groups have the same moment, so with this rule they all divide by the same number,
where the plain rule lets each divide by what its own gradient has just added. A row without a
moment yet has nothing to divide by; its first step divides by its own, as the plain rule does.

FBGEMM has no such kernel, so the plugin captures the row gradients and updates the rows itself.
"""

from dataclasses import dataclass

from torchrec_2dsp.optim.moment_scaled import check_hyperparameters


@dataclass(frozen=True)
class DelayedMomentRowWiseAdaGrad:
    """The optimizer of a sharder: ``EmbeddingBagCollectionSharder2D(optimizer=...)``.

    Example:
        >>> import torchrec_2dsp as tdsp
        >>> tdsp.DelayedMomentRowWiseAdaGrad(lr=0.02)
        DelayedMomentRowWiseAdaGrad(lr=0.02, eps=1e-08)
    """

    lr: float
    """The learning rate."""

    eps: float = 1e-8
    """Added to the root of the moment."""

    def __post_init__(self) -> None:
        check_hyperparameters(self.lr, self.eps, 1.0)
