"""How the replica peers are kept equal: the class says which way, its fields say how."""

import enum
from dataclasses import dataclass, fields

from torchrec_2dsp.errors import ConfigError
from torchrec_2dsp.plan.sync_policy import After, Every, Never, SyncPolicy

_EVERY_STEP = Every(1)


class SyncedRows(enum.StrEnum):
    """Which rows a `WeightSync` sends."""

    TOUCHED = "touched"
    """Those that have changed since the last sync."""

    ALL = "all"
    """Whole shards, as TorchRec does."""


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

    Example:
        >>> import torchrec_2dsp as tdsp
        >>> sync = tdsp.WeightSync(policy=tdsp.after(1_000, tdsp.every(4)))
        >>> print(sync.policy)
        after(1000, every(4))
    """

    policy: SyncPolicy = _EVERY_STEP
    """At which steps. Beyond those, replicas are synced before they are saved or evaluated."""

    moments_policy: SyncPolicy | None = None
    """The same for the optimizer state; `None` for together with the weights."""

    rows: SyncedRows = SyncedRows.TOUCHED
    """What is sent. Both give the same weights; touched rows cost what has changed."""

    def __post_init__(self) -> None:
        for name in ("policy", "moments_policy"):
            policy = getattr(self, name)
            is_missing = policy is None and name == "moments_policy"
            if not is_missing and not isinstance(policy, Every | After | Never):
                raise ConfigError(f"WeightSync({name}={policy!r}) is no policy; use every(4)")
        try:
            object.__setattr__(self, "rows", SyncedRows(self.rows))
        except ValueError:
            raise ConfigError(
                f"WeightSync(rows={self.rows!r}) is neither 'touched' nor 'all'; use one of them"
            ) from None

    def __str__(self) -> str:
        changed = [
            f"{field.name}={getattr(self, field.name)}"
            for field in fields(self)
            if getattr(self, field.name) != field.default
        ]
        return f"WeightSync({', '.join(changed)})"


SyncConfig = GradientSync | WeightSync
