"""`DenseCost`: what a step takes beside its tables, in named parts that add up."""

from dataclasses import dataclass
from typing import ClassVar

from torchrec_2dsp.cost.named_parts import NamedParts


@dataclass(frozen=True, kw_only=True)
class DenseCost(NamedParts):
    """Seconds of a step's dense part.

    Example:
        >>> from torchrec_2dsp.cost.dense.dense_cost import DenseCost
        >>> cost = DenseCost(compute_s=0.030, waiting_s=0.010)
        >>> round(cost.total_s, 6), cost.busy_share
        (0.04, 0.75)
    """

    unit: ClassVar[str] = "s"

    compute_s: float = 0.0
    """Forward and backward of the mean rank."""

    waiting_s: float = 0.0
    """The time in which the mean rank of a pipeline has nothing to do: its start and its end, and
    stages that are faster than the slowest."""

    gather_s: float = 0.0
    """Parameters that come together before their layers run."""

    gradients_s: float = 0.0
    """Gradients that are added up over ranks."""

    activations_s: float = 0.0
    """What ranks that compute layers together tell each other."""

    hand_off_s: float = 0.0
    """Inputs, targets and activations on their way from stage to stage, and their gradients."""

    update_s: float = 0.0
    """The optimizer's pass over the weights that a rank keeps."""

    hidden_s: float = 0.0
    """The time that is hidden behind computing; not above zero."""

    @property
    def total_s(self) -> float:
        """The sum of all parts."""
        return sum(seconds for _, seconds in self.parts())

    @property
    def busy_share(self) -> float:
        """The share of the time in which the mean rank computes."""
        return self.compute_s / self.total_s if self.total_s else 1.0
