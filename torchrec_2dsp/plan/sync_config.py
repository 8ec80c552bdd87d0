"""How the replica peers are kept equal: the class says which way, its fields say how."""

import enum
from dataclasses import dataclass, fields
from typing import Any

from torchrec_2dsp.codecs.rows import Transport
from torchrec_2dsp.errors import ConfigError
from torchrec_2dsp.plan.sync_policy import After, Every, Never, SyncPolicy, is_count

_EVERY_STEP = Every(1)


class SyncedRows(enum.StrEnum):
    """The rows that a `WeightSync` sends."""

    TOUCHED = "touched"
    """Rows that have changed since the last sync."""

    ALL = "all"
    """Whole shards, as TorchRec does."""


@dataclass(frozen=True, kw_only=True)
class GradientSync:
    """Exact: merge the peers' row gradients, then every peer applies one fused update.

    Training equals one sharding group on the global batch, for any fused optimizer, up to the
    order in which floats are added. The fields give that up for speed; replicas stay equal bit for
    bit in any case.

    Example:
        >>> import torchrec_2dsp as tdsp
        >>> print(tdsp.GradientSync(transport="bf16"))
        GradientSync(transport=bf16)
    """

    transport: Transport = Transport.FP32
    """How row gradients travel. In any way but fp32, each rank's gradients are rounded before they
    are added, and sums again where they travel on: the same numbers on all ranks."""

    delay: int = 0
    """How many steps an update may be late: with 1, that of step t is applied before the lookup of
    step t + 2, and travels behind a whole step."""

    drift_every: int = 0
    """Compare the copies after every n-th sync, and raise where they differ; 0 for never."""

    def __post_init__(self) -> None:
        _check_interval(self)
        _set_choice(self, "transport", Transport)
        if not isinstance(self.delay, int) or self.delay not in (0, 1):
            raise ConfigError(f"GradientSync(delay={self.delay!r}) is neither 0 nor 1")

    def __str__(self) -> str:
        return _shown(self)


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
    """The steps at which weights are averaged. Replicas are synced, too, before they are saved or
    evaluated."""

    moments_policy: SyncPolicy | None = None
    """The steps at which the optimizer state is averaged; `None` for together with the weights."""

    rows: SyncedRows = SyncedRows.TOUCHED
    """The rows that are sent. Both give the same weights; touched rows cost what has changed."""

    transport: Transport = Transport.FP32
    """How touched rows travel. In any way but fp32, what travels is their change since the last
    sync, so that weights keep their precision; replicas are equal bit for bit all the same."""

    drift_every: int = 0
    """Compare the copies after every n-th sync, and raise where they differ; 0 for never."""

    dense_above: float | None = None
    """The share of a shard's rows from which on the whole shard is averaged, 0 to 1; `None` for
    one that is not too high on the fastest of links. `bench-sync` finds it for a network."""

    def __post_init__(self) -> None:
        _check_interval(self)
        if self.dense_above is not None and not 0 <= self.dense_above <= 1:
            raise ConfigError(
                f"WeightSync(dense_above={self.dense_above}) is no share of rows; use 0 to 1, or "
                "None"
            )
        for name in ("policy", "moments_policy"):
            policy = getattr(self, name)
            is_missing = policy is None and name == "moments_policy"
            if not is_missing and not isinstance(policy, Every | After | Never):
                raise ConfigError(f"WeightSync({name}={policy!r}) is no policy; use every(4)")
        _set_choice(self, "rows", SyncedRows)
        _set_choice(self, "transport", Transport)
        if self.rows is SyncedRows.ALL and self.transport is not Transport.FP32:
            raise ConfigError(
                f"WeightSync(rows='all', transport={self.transport.value!r}): whole shards are "
                "all-reduced as they are; send touched rows, or leave out the transport"
            )
        if self.rows is SyncedRows.ALL and self.dense_above is not None:
            raise ConfigError(
                f"WeightSync(rows='all', dense_above={self.dense_above}): all rows are averaged "
                "anyway; leave one of the two out"
            )

    def __str__(self) -> str:
        return _shown(self)


def _check_interval(config: "GradientSync | WeightSync") -> None:
    if not is_count(config.drift_every):
        raise ConfigError(
            f"{type(config).__name__}(drift_every={config.drift_every!r}) is no number of syncs; "
            "use 1 or more, or 0 for never"
        )


def _set_choice(config: object, name: str, kind: type[enum.StrEnum]) -> None:
    """Turn a text into the choice that it names, in place."""
    value = getattr(config, name)
    try:
        object.__setattr__(config, name, kind(value))
    except ValueError:
        choices = ", ".join(repr(choice.value) for choice in kind)
        raise ConfigError(
            f"{type(config).__name__}({name}={value!r}) is none of {choices}; use one of them"
        ) from None


def _shown(config: Any) -> str:
    """The class and the fields that aren't as by default."""
    changed = [
        f"{field.name}={getattr(config, field.name)}"
        for field in fields(config)
        if getattr(config, field.name) != field.default
    ]
    return f"{type(config).__name__}({', '.join(changed)})"


SyncConfig = GradientSync | WeightSync
"""How replicas are kept equal."""

EXACT_SYNC = GradientSync()
"""The default: exact, at every step."""
