"""`NamedParts`: numbers of one unit that add up. Pure."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from typing import ClassVar, Self


@dataclass(frozen=True, kw_only=True)
class NamedParts:
    """A dataclass with nothing but numbers, whose names end with their unit.

    Example:
        >>> from torchrec_2dsp.cost.step_cost import StepCost
        >>> both = StepCost(lookup_s=0.25) + StepCost(lookup_s=0.5, dense_s=1.0)
        >>> [(name, seconds) for name, seconds in both.parts() if seconds]
        [('lookup', 0.75), ('dense', 1.0)]
    """

    unit: ClassVar[str]

    def __add__(self, other: Self) -> Self:
        """The sum, part by part."""
        numbers, others = self.as_dict(), other.as_dict()
        return type(self)(**{name: number + others[name] for name, number in numbers.items()})

    def parts(self) -> Iterator[tuple[str, float]]:
        """Names without the unit, and numbers."""
        for part in fields(self):
            yield part.name.removesuffix(f"_{self.unit}"), getattr(self, part.name)

    def as_dict(self) -> dict[str, float]:
        """The numbers by field."""
        return asdict(self)
