"""`BalanceConfig`: which rank trains which samples of a global batch."""

from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from torchrec_2dsp.programs.config.section import Section
from torchrec_2dsp.samples.cost import SampleCost
from torchrec_2dsp.samples.shares import check_speeds

MEASURED = "measured"
"""The `rank_speeds` that ranks measure while they train."""


class CostConfig(Section):
    """The cost of a sample, by its length; only the ratio of the two numbers counts."""

    linear: float = Field(default=1.0, ge=0, allow_inf_nan=False)
    """The cost of one more id."""

    quadratic: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """The cost of one more pair of ids, as attention has it."""

    @model_validator(mode="after")
    def _check_cost(self) -> Self:
        if not self.linear and not self.quadratic:
            raise ValueError(
                "linear=0 and quadratic=0 make all samples free, so there is nothing to balance; "
                "set one of them above 0"
            )
        return self

    @property
    def sample_cost(self) -> SampleCost:
        """The cost as `BalancedBatches` takes it."""
        return SampleCost(linear=self.linear, quadratic=self.quadratic)


class BalanceConfig(Section):
    """Samples that are dealt to the ranks by what they cost, so that no rank waits for others."""

    cost: CostConfig = CostConfig()
    """The cost of a sample; by default its length."""

    lengths: tuple[str, ...] = ()
    """The sparse features whose ids are a sample's length. Empty for the items that a sequence
    model uses, and for all features of other models."""

    shared_ids: float = Field(default=0.0, ge=0, lt=1)
    """The share by which a rank's cost may grow so that samples with the same ids come together;
    0 leaves them apart."""

    rank_speeds: Literal["measured"] | tuple[float, ...] = ()
    """A speed for each rank, which gets samples in proportion; or "measured", by the processor time
    that each rank's steps take. Empty for ranks that are equally fast."""

    smoothing: float = Field(default=0.1, gt=0, le=1)
    """The weight of the newest step in measured speeds."""

    mean_over_samples: bool = False
    """Whether the loss of a model of your own is a mean over the samples of a rank's batch. It has
    to be, and nothing but the model knows."""

    @field_validator("rank_speeds", mode="before")
    @classmethod
    def _check_speeds(cls, speeds: Any) -> Any:
        if speeds == MEASURED:
            return speeds
        are_numbers = isinstance(speeds, list | tuple) and all(
            isinstance(speed, int | float) and not isinstance(speed, bool) for speed in speeds
        )
        if not are_numbers:
            raise ValueError(f"give a list with a number for each rank, or {MEASURED!r}")
        check_speeds(speeds)
        return tuple(map(float, speeds))

    @model_validator(mode="after")
    def _check_smoothing(self) -> Self:
        default = type(self).model_fields["smoothing"].default
        if self.smoothing != default and self.rank_speeds != MEASURED:
            raise ValueError(
                f"smoothing={self.smoothing} is for rank_speeds={MEASURED!r}; set that, or leave "
                "smoothing out"
            )
        return self


class SamplesConfig(Section):
    """Which samples of a global batch a rank trains."""

    balance: BalanceConfig | None = None
    """The deal of samples to ranks; without this section each rank trains those that it reads."""

    @property
    def balance_text(self) -> str:
        """The difference from batches as they are read, in words; empty if there is none."""
        if self.balance is None:
            return ""
        by_speed = " and ranks' speeds" if self.balance.rank_speeds else ""
        shared = ", shared ids together" if self.balance.shared_ids else ""
        return f", samples dealt by cost{by_speed}{shared}"
