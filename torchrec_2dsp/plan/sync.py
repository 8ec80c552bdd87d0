"""Keep replica peers equal: how (the config's class), and when (its policy)."""

import enum
import math
import re
from dataclasses import dataclass, fields
from typing import Any

from torchrec_2dsp.codecs.rows import Transport
from torchrec_2dsp.errors import ConfigError, check_choice


@dataclass(frozen=True, repr=False)
class every:
    """A sync at every ``n``-th step.

    Example:
        >>> import torchrec_2dsp as tdsp
        >>> [step for step in range(1, 9) if tdsp.every(4).is_due(step)]
        [4, 8]
    """

    n: int
    """The number of steps from one sync to the next; 1 for every step."""

    def __post_init__(self) -> None:
        if not is_count(self.n) or self.n < 1:
            raise ConfigError(f"every({self.n}) is no interval; use every(1) or more")

    def is_due(self, step: int) -> bool:
        """Return whether step ``step``, counted from 1, ends with a sync."""
        return step % self.n == 0

    @property
    def steps_per_sync(self) -> float:
        """The mean number of steps per sync."""
        return self.n

    def __repr__(self) -> str:
        return f"every({self.n})"


@dataclass(frozen=True, repr=False)
class after:
    """No sync in the first steps, then another policy, which counts from there.

    Example:
        >>> import torchrec_2dsp as tdsp
        >>> policy = tdsp.after(2, tdsp.every(3))
        >>> [step for step in range(1, 10) if policy.is_due(step)]
        [5, 8]
    """

    step: int
    """The number of steps without a sync."""

    policy: "SyncPolicy"
    """The policy after the first steps."""

    def __post_init__(self) -> None:
        if not is_count(self.step):
            raise ConfigError(f"after({self.step}, ...) is no number of steps; use 0 or more")
        if not isinstance(self.policy, every | after | never):
            raise ConfigError(
                f"after({self.step}, {self.policy!r}) needs a policy, such as every(4)"
            )

    def is_due(self, step: int) -> bool:
        """Return whether step ``step``, counted from 1, ends with a sync."""
        return step > self.step and self.policy.is_due(step - self.step)

    @property
    def steps_per_sync(self) -> float:
        """The mean number of steps per sync."""
        return self.policy.steps_per_sync

    def __repr__(self) -> str:
        return f"after({self.step}, {self.policy})"


@dataclass(frozen=True, repr=False)
class never:
    """A sync only where replicas must be equal: before a save or an evaluation.

    Example:
        >>> import torchrec_2dsp as tdsp
        >>> tdsp.never().is_due(1_000_000)
        False
    """

    def is_due(self, step: int) -> bool:
        """Return false: no step ends with a sync."""
        return False

    @property
    def steps_per_sync(self) -> float:
        """The mean number of steps per sync: infinite."""
        return math.inf

    def __repr__(self) -> str:
        return "never()"


SyncPolicy = every | after | never
"""A rule for which training steps end with a sync."""


def parse_policy(text: str) -> SyncPolicy:
    """Parse a policy's text, such as ``"after(1000, every(4))"``."""
    squeezed = re.sub(r"[\s_]", "", text)
    if squeezed == "never()":
        return never()
    if match := re.fullmatch(r"every\((\d+)\)", squeezed):
        return every(int(match[1]))
    if match := re.fullmatch(r"after\((\d+),(.+)\)", squeezed):
        return after(int(match[1]), parse_policy(match[2]))
    raise ConfigError(f"{text!r} is no sync policy; use every(4), after(1000, every(4)) or never()")


def is_count(value: object) -> bool:
    """Return whether ``value`` is a step count that fits a 64-bit counter."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


_EVERY_STEP = every(1)


class SyncedRows(enum.StrEnum):
    """The rows that a `WeightSync` sends."""

    TOUCHED = "touched"
    """Rows that have changed since the last sync."""

    ALL = "all"
    """Whole shards, as in TorchRec."""


@dataclass(frozen=True, kw_only=True)
class GradientSync:
    """Exact: merge the peers' row gradients, then every peer applies one fused update.

    Training equals one sharding group on the global batch, for any fused optimizer, up to the
    order of float additions. The fields trade that for speed; replicas stay equal bit for
    bit in any case.

    Example:
        >>> import torchrec_2dsp as tdsp
        >>> print(tdsp.GradientSync(transport="bf16"))
        GradientSync(transport=bf16)
    """

    transport: Transport = Transport.FP32
    """The wire format of row gradients. Formats other than fp32 round each rank's gradients before
    they are added, and sums before they are sent on: the same numbers on all ranks."""

    delay: int = 0
    """The number of steps that an update may lag: with 1, step t's update is applied before the
    lookup of step t + 2, so its exchange overlaps with a whole step."""

    drift_every: int = 0
    """Compare the copies after every n-th sync, and raise if they differ; 0 for never."""

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

    This is the 2D sparse parallelism paper's way, and TorchRec's. It equals one sharding group
    for plain SGD, but not for row-wise AdaGrad: the second moment grows faster than on one
    group, which `MomentScaledRowWiseAdaGrad` corrects on average.

    Example:
        >>> import torchrec_2dsp as tdsp
        >>> sync = tdsp.WeightSync(policy=tdsp.after(1_000, tdsp.every(4)))
        >>> print(sync.policy)
        after(1000, every(4))
    """

    policy: SyncPolicy = _EVERY_STEP
    """The steps at which weights are averaged. Replicas are also synced before they are saved or
    evaluated."""

    moments_policy: SyncPolicy | None = None
    """The steps at which the optimizer state is averaged; `None` for together with the weights."""

    rows: SyncedRows = SyncedRows.TOUCHED
    """The rows that are sent. Both choices give the same weights, as only looked up rows change;
    the cost of touched rows depends on how many have changed."""

    transport: Transport = Transport.FP32
    """The wire format of touched rows. Formats other than fp32 send the change since the last sync,
    so that weights keep their precision; replicas are still equal bit for bit."""

    drift_every: int = 0
    """Compare the copies after every n-th sync, and raise if they differ; 0 for never."""

    dense_above: float | None = None
    """The share of a shard's rows above which the whole shard is averaged, 0 to 1; `None` for
    a share that isn't too high even on the fastest links."""

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
            if not is_missing and not isinstance(policy, every | after | never):
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
    """Replace a text by the enum member that it names, in place."""
    value = getattr(config, name)
    check_choice(name, value, kind, owner=type(config).__name__)
    object.__setattr__(config, name, kind(value))


def _shown(config: Any) -> str:
    """Show the class and the fields that differ from their defaults."""
    changed = [
        f"{field.name}={getattr(config, field.name)}"
        for field in fields(config)
        if getattr(config, field.name) != field.default
    ]
    return f"{type(config).__name__}({', '.join(changed)})"


SyncConfig = GradientSync | WeightSync
"""The sync config."""

EXACT_SYNC = GradientSync()
"""The default: exact, at every step."""
