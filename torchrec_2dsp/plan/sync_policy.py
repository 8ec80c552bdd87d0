"""When replicas are averaged: plain data that a plan carries, and its text form."""

import math
import re
from dataclasses import dataclass

from torchrec_2dsp.errors import ConfigError


@dataclass(frozen=True, repr=False)
class Every:
    """A sync at every ``n``-th step."""

    n: int
    """The number of steps from one sync to the next; 1 for every step."""

    def __post_init__(self) -> None:
        if not is_count(self.n) or self.n < 1:
            raise ConfigError(f"every({self.n}) is no interval; use every(1) or more")

    def is_due(self, step: int) -> bool:
        """Whether step ``step``, counted from 1, ends with a sync."""
        return step % self.n == 0

    @property
    def steps_per_sync(self) -> float:
        """How many steps there are for each sync, in the long run."""
        return self.n

    def __repr__(self) -> str:
        return f"every({self.n})"


@dataclass(frozen=True, repr=False)
class After:
    """No sync in the first steps, and then another policy, which counts from there."""

    step: int
    """How many steps have no sync."""

    policy: "SyncPolicy"
    """The policy after the first steps."""

    def __post_init__(self) -> None:
        if not is_count(self.step):
            raise ConfigError(f"after({self.step}, ...) is no number of steps; use 0 or more")
        if not isinstance(self.policy, Every | After | Never):
            raise ConfigError(
                f"after({self.step}, {self.policy!r}) needs a policy, such as every(4)"
            )

    def is_due(self, step: int) -> bool:
        """Whether step ``step``, counted from 1, ends with a sync."""
        return step > self.step and self.policy.is_due(step - self.step)

    @property
    def steps_per_sync(self) -> float:
        """How many steps there are for each sync, in the long run."""
        return self.policy.steps_per_sync

    def __repr__(self) -> str:
        return f"after({self.step}, {self.policy})"


@dataclass(frozen=True, repr=False)
class Never:
    """A sync only where replicas must be equal: before they are saved, and before an evaluation."""

    def is_due(self, step: int) -> bool:
        """Whether step ``step`` ends with a sync, which it never does."""
        return False

    @property
    def steps_per_sync(self) -> float:
        """How many steps there are for each sync: no number of them."""
        return math.inf

    def __repr__(self) -> str:
        return "never()"


SyncPolicy = Every | After | Never
"""When a training step ends with a sync."""


def every(n: int) -> Every:
    """Sync at every ``n``-th step.

    Example:
        >>> import torchrec_2dsp as tdsp
        >>> [step for step in range(1, 9) if tdsp.every(4).is_due(step)]
        [4, 8]
    """
    return Every(n)


def after(step: int, policy: SyncPolicy) -> After:
    """Don't sync in the first ``step`` steps, then follow ``policy``.

    Example:
        >>> import torchrec_2dsp as tdsp
        >>> policy = tdsp.after(2, tdsp.every(3))
        >>> [step for step in range(1, 10) if policy.is_due(step)]
        [5, 8]
    """
    return After(step, policy)


def never() -> Never:
    """Sync only where replicas must be equal: before they are saved, and before an evaluation.

    Example:
        >>> import torchrec_2dsp as tdsp
        >>> tdsp.never().is_due(1_000_000)
        False
    """
    return Never()


def parse_policy(text: str) -> SyncPolicy:
    """The policy that a text such as ``"after(1000, every(4))"`` stands for.

    Example:
        >>> from torchrec_2dsp.plan.sync_policy import parse_policy
        >>> parse_policy("after(1000, every(4))")
        after(1000, every(4))
    """
    squeezed = re.sub(r"[\s_]", "", text)
    if squeezed == "never()":
        return Never()
    if match := re.fullmatch(r"every\((\d+)\)", squeezed):
        return Every(int(match[1]))
    if match := re.fullmatch(r"after\((\d+),(.+)\)", squeezed):
        return After(int(match[1]), parse_policy(match[2]))
    raise ConfigError(f"{text!r} is no sync policy; use every(4), after(1000, every(4)) or never()")


def is_count(value: object) -> bool:
    """Return whether ``value`` is a number of steps that a counter holds."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63
