"""`GradientReport`: what exchanging dense gradients has cost."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class GradientReport:
    """What a rank has sent of its dense gradients.

    Example:
        >>> from torchrec_2dsp.dense.gradient_report import GradientReport
        >>> step = GradientReport(num_steps=1, num_entries=50, num_elements=10_000)
        >>> (step + step).density
        0.005
    """

    num_steps: int = 0
    """How many steps there were."""

    num_thresholded_steps: int = 0
    """How many of them weren't dense."""

    num_bytes: float = 0.0
    """The bytes that the rank has sent to others, if an all-reduce is a ring."""

    dense_bytes: float = 0.0
    """The bytes that an all-reduce in float32 would have sent."""

    num_entries: int = 0
    """How many elements were chosen, of those that are thresholded."""

    num_elements: int = 0
    """From how many elements they were chosen."""

    @property
    def density(self) -> float:
        """The share of elements that were chosen; 0 before any was."""
        return self.num_entries / self.num_elements if self.num_elements else 0.0

    def __add__(self, other: "GradientReport") -> "GradientReport":
        return GradientReport(
            **{name: value + getattr(other, name) for name, value in vars(self).items()}
        )

    def __sub__(self, earlier: "GradientReport") -> "GradientReport":
        return GradientReport(
            **{name: value - getattr(earlier, name) for name, value in vars(self).items()}
        )
