"""`StepCost`: what a step is expected to take, in named parts that add up."""

from dataclasses import dataclass
from typing import ClassVar

from torchrec_2dsp.cost.named_parts import NamedParts


@dataclass(frozen=True, kw_only=True)
class StepCost(NamedParts):
    """Seconds of a step, of the mean rank; `imbalance` is what the slowest one adds.

    Example:
        >>> from torchrec_2dsp.cost.step_cost import StepCost
        >>> cost = StepCost(lookup_s=0.010, forward_exchange_s=0.030, imbalance_s=0.005)
        >>> round(cost.total_s, 6)
        0.045
        >>> max(cost.parts(), key=lambda part: part[1])
        ('forward_exchange', 0.03)
    """

    unit: ClassVar[str] = "s"

    input_exchange_s: float = 0.0
    """Ids on their way to the ranks that look them up."""

    lookup_s: float = 0.0
    """Reading rows from tables."""

    rows_s: float = 0.0
    """The local work of row exchange: finding distinct ids, putting rows where they are wanted,
    adding up their gradients."""

    forward_exchange_s: float = 0.0
    """Rows, or sums of rows, on their way to the samples."""

    dense_s: float = 0.0
    """The rest of the model, forward and backward."""

    backward_exchange_s: float = 0.0
    """Gradients of rows, or of sums of rows, on their way back."""

    dense_exchange_s: float = 0.0
    """The all-reduce of dense gradients, and of data-parallel tables."""

    update_s: float = 0.0
    """Applying gradients to rows."""

    hot_rows_s: float = 0.0
    """Merging and applying the gradients of hot rows."""

    sync_s: float = 0.0
    """Keeping replica peers equal, in the mean of all steps."""

    imbalance_s: float = 0.0
    """The time of the slowest rank of each phase beyond the mean one."""

    hidden_s: float = 0.0
    """The time that is hidden behind other parts; not above zero."""

    @property
    def total_s(self) -> float:
        """The sum of all parts."""
        return sum(seconds for _, seconds in self.parts())

    @property
    def tables_s(self) -> float:
        """The part that tables have in the total: what the step takes beyond the dense part."""
        return self.total_s - self.dense_s
