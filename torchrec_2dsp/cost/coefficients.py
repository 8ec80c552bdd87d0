"""The time of a collective and of a kernel: a constant, and so much for each unit of work."""

from typing import Any, overload

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from torchrec_2dsp.cost.span import Span
from torchrec_2dsp.cost.traffic import Traffic
from torchrec_2dsp.errors import CalibrationError


class CalibrationPart(BaseModel):
    """A part of a calibration, as strict as its file has to be."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
    )


class Coefficients(CalibrationPart):
    """Seconds for each unit of some kinds of work, none below zero, all finite."""

    base_s: float = Field(ge=0)
    """Seconds that a call takes, whatever the work."""

    median_error: float = Field(default=0.0, ge=0)
    """How far the longer half of the measurements is from these constants, by the median."""

    max_error: float = Field(default=0.0, ge=0)
    """How far the furthest measurement is from these constants."""


class CollectiveCost(Coefficients):
    """Seconds of a collective, whose bytes travel inside hosts and across them at the same time.

    Example:
        >>> from torchrec_2dsp.cost.coefficients import CollectiveCost
        >>> from torchrec_2dsp.cost.span import Span
        >>> from torchrec_2dsp.cost.traffic import all_to_all
        >>> cost = CollectiveCost(
        ...     base_s=0.001, per_peer_s=0, local_s_per_byte=0, link_s_per_byte=1e-9
        ... )
        >>> span = Span.of_world(4, 2)
        >>> cost.seconds(span, all_to_all(span, to_each=1e6))
        0.005
    """

    per_peer_s: float = Field(ge=0)
    """Seconds for each other rank of the group."""

    local_s_per_byte: float | None = Field(default=None, ge=0)
    """Seconds for each byte that a rank sends inside its host; ``None`` with one rank per host."""

    link_s_per_byte: float | None = Field(default=None, ge=0)
    """Seconds for each byte that a host sends to others; ``None`` where there was one host."""

    def seconds(self, span: Span, traffic: Traffic) -> float:
        """The seconds that a group of ``span`` takes."""
        if span.num_ranks == 1:
            return 0.0
        moved_s = max(
            traffic.local_bytes * _known(self.local_s_per_byte, traffic.local_bytes, "in a host"),
            traffic.link_bytes * _known(self.link_s_per_byte, traffic.link_bytes, "across hosts"),
        )
        return self.base_s + (span.num_ranks - 1) * self.per_peer_s + moved_s


class KernelCost(Coefficients):
    """Seconds of work on a rank's rows, while the other ranks do the same."""

    per_item_s: float = Field(ge=0)
    """Seconds for each id or row."""

    per_byte_s: float = Field(ge=0)
    """Seconds for each byte of rows."""

    @overload
    def seconds(self, items: float, num_bytes: float) -> float: ...

    @overload
    def seconds(
        self, items: NDArray[np.float64], num_bytes: NDArray[np.float64] | float
    ) -> NDArray[np.float64]: ...

    def seconds(self, items: Any, num_bytes: Any) -> Any:
        """Seconds of the work without the constant, which is per call."""
        return self.per_item_s * items + self.per_byte_s * num_bytes


class BagCost(KernelCost):
    """The time of bags, by their ids, the vectors that come out, and their distinct rows.

    Ids that repeat read what caches hold; so a row costs more by its first id than by the others.

    Example:
        A thousand ids of ten rows, in bags of ten.

        >>> from torchrec_2dsp.cost.coefficients import BagCost
        >>> cost = BagCost(
        ...     base_s=0, per_item_s=1e-9, per_byte_s=0, per_vector_byte_s=1e-9, per_row_byte_s=1e-8
        ... )
        >>> round(cost.of_bags(1_000, 256e3, vector_bytes=25.6e3, row_bytes=2_560) * 1e6, 3)
        52.2
    """

    per_vector_byte_s: float = Field(ge=0)
    """Seconds for each byte of the vectors that bags give."""

    per_row_byte_s: float = Field(ge=0)
    """Seconds for each byte of the distinct rows."""

    def of_bags(self, items: Any, num_bytes: Any, *, vector_bytes: Any, row_bytes: Any) -> Any:
        """Seconds of bags without the constant, for numbers or arrays of them.

        Args:
            items: ids.
            num_bytes: of their rows, counted for each id.
            vector_bytes: of the bags' vectors.
            row_bytes: of their rows, counted once.
        """
        bags = self.per_vector_byte_s * vector_bytes + self.per_row_byte_s * row_bytes
        return self.seconds(items, num_bytes) + bags


def _known(value: float | None, num_bytes: float, where: str) -> float:
    if value is None and num_bytes:
        raise CalibrationError(
            f"the calibration was made where nothing travels {where}, so it can't say what that "
            "takes; calibrate on hosts like those that the plan is for"
        )
    return value or 0.0
