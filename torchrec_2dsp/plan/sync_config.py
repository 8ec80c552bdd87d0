"""How the replica peers are kept equal: the class says which way, its fields say how."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class GradientSync:
    """Exact: merge the peers' row gradients, then every peer applies one fused update.

    Training equals one sharding group on the global batch, for any fused optimizer, up to the
    order in which floats are added.
    """


@dataclass(frozen=True, kw_only=True)
class WeightSync:
    """Local updates, then the average of weights and optimizer state over the peers.

    The way of the 2D sparse parallelism paper, and of TorchRec. Equals one sharding group for
    plain SGD. For row-wise AdaGrad it doesn't: the second moment grows faster than on one
    group, which `MomentScaledRowWiseAdaGrad` corrects on average.
    """


SyncConfig = GradientSync | WeightSync
