"""Find the coefficients that explain the measurements. Pure."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from torchrec_2dsp.cost.calibration import BagCost, Calibration, KernelCost
from torchrec_2dsp.cost.collectives import CollectiveCost, Span, Traffic

MAX_MEDIAN_ERROR = 0.4
"""The error that half of a fit's longer measurements may have before it explains nothing."""

MAX_KERNEL_ERROR = 0.6
"""The limit for work on rows is higher: memory is several times slower for many rows."""

_MAX_FITS = 11

_RELATIVE_SCATTER = 0.05
"""The approximate difference between repeats of long work."""


@dataclass(frozen=True)
class Timed:
    """One measurement's repeats."""

    seconds: float
    """The median repeat."""

    scatter_s: float = 0.0
    """The median distance from the median."""

    @classmethod
    def of(cls, repeats: Sequence[float]) -> "Timed":
        """Take the repeats' median, and their scatter."""
        middle = statistics.median(repeats)
        return cls(middle, statistics.median(abs(repeat - middle) for repeat in repeats))


@dataclass(frozen=True)
class CollectiveSample:
    """A timed collective."""

    span: Span
    traffic: Traffic
    timed: Timed


class KernelWork(NamedTuple):
    """A kernel's work on rows."""

    items: float
    num_bytes: float
    vector_bytes: float = 0.0
    """Bytes in the bags' vectors."""

    row_bytes: float = 0.0
    """Bytes in the bags' distinct rows."""


@dataclass(frozen=True)
class KernelSample:
    """Timed work on rows."""

    work: KernelWork
    timed: Timed


def fit_collective(samples: Sequence[CollectiveSample]) -> CollectiveCost:
    """Fit a collective's coefficients; those without samples stay unknown."""
    local = np.array([sample.traffic.local_bytes for sample in samples])
    link = np.array([sample.traffic.link_bytes for sample in samples])
    constant = [[1.0, sample.span.num_ranks - 1] for sample in samples]
    timed = [sample.timed for sample in samples]
    # Which direction is slower isn't known before their speeds are.
    is_link = link > 0
    num_fits = 0
    while True:
        ways = np.where(is_link, 0, local), np.where(is_link, link, 0)
        constants, errors = _fitted(np.column_stack([constant, *ways]), timed)
        num_fits += 1
        was_link, is_link = is_link, (link * constants[3] >= local * constants[2]) & (link > 0)
        if num_fits == _MAX_FITS or (was_link == is_link).all():
            break
    return CollectiveCost(
        base_s=constants[0],
        per_peer_s=constants[1],
        local_s_per_byte=constants[2] if local.any() else None,
        link_s_per_byte=constants[3] if link.any() else None,
        **errors,
    )


def fit_kernel(samples: Sequence[KernelSample]) -> KernelCost:
    """Fit the coefficients for work on rows, or on bags if the samples have bags."""
    work = np.array([[1.0, *sample.work] for sample in samples])
    constants, errors = _fitted(work, [sample.timed for sample in samples])
    cost = {"base_s": constants[0], "per_item_s": constants[1], "per_byte_s": constants[2]} | errors
    if not any(sample.work.vector_bytes for sample in samples):
        return KernelCost(**cost)
    return BagCost(**cost, per_vector_byte_s=constants[3], per_row_byte_s=constants[4])


def _fitted(
    work: NDArray[np.float64], timed: Sequence[Timed]
) -> tuple[list[float], dict[str, float]]:
    """Fit non-negative seconds per unit of each column by weighted least squares.

    Long work counts more than by its relative error, as its seconds make up a step; and less than
    by its absolute error, since every message has a minimum time.
    """
    # The import takes most of a second, which a start with a known calibration needn't wait for.
    from scipy.optimize import nnls

    seconds = np.array([measurement.seconds for measurement in timed])
    scatter = np.array([measurement.scatter_s for measurement in timed])
    uncertain = np.hypot(scatter, _RELATIVE_SCATTER * np.sqrt(seconds * seconds.max()))
    largest = np.maximum(work.max(axis=0), np.finfo(float).tiny)
    scaled = work / largest
    solution, _ = nnls(scaled / uncertain[:, None], seconds / uncertain)
    if not solution[1:].any():
        # A call takes no longer than the shortest one; scatter hid the time added by longer work.
        shortest = seconds.min()
        rest, _ = nnls(scaled[:, 1:] / uncertain[:, None], (seconds - shortest) / uncertain)
        solution = np.array([shortest / scaled[0, 0], *rest])
    errors = np.abs(scaled @ solution / seconds - 1)[seconds >= np.median(seconds)]
    return (
        [float(value) for value in solution / largest],
        {"median_error": float(np.median(errors)), "max_error": float(errors.max())},
    )


def unexplained(calibration: Calibration, tolerance: float) -> str:
    """Describe which constant is far from the measurements, if any is.

    A ``tolerance`` of 2 allows errors twice as large as 1 does.
    """
    for part, limit in (
        (calibration.collectives, MAX_MEDIAN_ERROR),
        (calibration.kernels, MAX_KERNEL_ERROR),
    ):
        for name, cost in part:
            if cost is not None and cost.median_error > tolerance * limit:
                return (
                    f"{name}: the cost model doesn't fit what was measured: the median error of "
                    f"the longer times is {cost.median_error:.0%}. Was something else running? "
                    "Calibrate again on idle machines"
                )
    return ""
