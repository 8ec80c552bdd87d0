"""`ScheduledOptimizerConfig`: optimizers whose learning rates change while a run trains."""

import math
from typing import Literal, Self

from pydantic import Field, model_validator

from torchrec_2dsp.programs.config.section import Section
from torchrec_2dsp.programs.config.sections import OptimizerConfig


class RateSchedule(Section):
    """A learning rate that grows in the first steps, and then stays or decays.

    Example:
        >>> from torchrec_2dsp.programs.config.schedule import RateSchedule
        >>> schedule = RateSchedule(kind="linear", warm_up=2, final=0.5)
        >>> [schedule.multiplier(step, num_steps=6) for step in range(6)]
        [0.5, 1.0, 1.0, 0.875, 0.75, 0.625]
    """

    kind: Literal["constant", "linear", "cosine", "step"] = "constant"
    """How the rate goes on after the warm-up: it stays, falls on a line, falls as a cosine from its
    top to its bottom, or is multiplied by `factor` every few steps."""

    warm_up: int = Field(default=0, ge=0)
    """How many first steps the rate takes to grow to the optimizer's, by as much in each."""

    decay_steps: int = Field(default=0, ge=0)
    """How many steps after the warm-up "linear" and "cosine" take to fall; 0 for all that are
    left."""

    final: float = Field(default=0.0, ge=0, le=1)
    """The share of the rate that "linear" and "cosine" end with."""

    step_every: int = Field(default=0, ge=0)
    """After how many steps "step" multiplies the rate."""

    factor: float = Field(default=0.1, gt=0, le=1)
    """The factor by which "step" multiplies the rate."""

    @model_validator(mode="after")
    def _check_kind(self) -> Self:
        fields = type(self).model_fields
        of_kinds = {
            "decay_steps": ("linear", "cosine"),
            "final": ("linear", "cosine"),
            "step_every": ("step",),
            "factor": ("step",),
        }
        for name, kinds in of_kinds.items():
            value = getattr(self, name)
            if self.kind not in kinds and value != fields[name].default:
                raise ValueError(
                    f"{name}={value} is for kind={' or '.join(map(repr, kinds))}, and the schedule "
                    f"is {self.kind!r}; set the kind, or leave {name} out"
                )
        if self.kind == "step" and not self.step_every:
            raise ValueError("kind='step' needs step_every, the steps between two of its changes")
        return self

    @property
    def is_constant(self) -> bool:
        """Whether the rate never changes."""
        return self.kind == "constant" and not self.warm_up

    @property
    def depends_on_length(self) -> bool:
        """Whether the rates are others in a longer run."""
        return self.kind in ("linear", "cosine") and not self.decay_steps

    def multiplier(self, step: int, num_steps: int) -> float:
        """The rate of a step as a share of the optimizer's.

        Args:
            step: how many steps were trained before.
            num_steps: how many steps the run has.
        """
        if step < self.warm_up:
            return (step + 1) / self.warm_up
        after = step - self.warm_up
        if self.kind == "step":
            return self.factor ** (after // self.step_every)
        if self.kind == "constant":
            return 1.0
        length = self.decay_steps or max(1, num_steps - self.warm_up)
        share = min(1.0, after / length)
        if self.kind == "cosine":
            share = (1 - math.cos(math.pi * share)) / 2
        return 1.0 - (1.0 - self.final) * share


class ScheduledOptimizerConfig(OptimizerConfig):
    """The optimizers of a training program, the schedules of their rates, and clipping."""

    schedule: RateSchedule = RateSchedule()
    """The schedule of the tables' learning rate."""

    dense_schedule: RateSchedule | None = None
    """The schedule of the other parameters' learning rate, if it isn't that of the tables."""

    dense_clip_norm: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """The largest Euclidean norm of the gradient of all other parameters together, to which a
    larger one is scaled down; 0 for no bound."""

    @property
    def schedules(self) -> tuple[RateSchedule, RateSchedule]:
        """The schedules of the tables and of the other parameters."""
        return self.schedule, self.dense_schedule or self.schedule
