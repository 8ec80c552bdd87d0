"""Coefficients that were planted are found again; what explains nothing is refused."""

from itertools import product

import numpy as np
import pytest

from torchrec_2dsp.cost.calibration import BagCost, KernelCost
from torchrec_2dsp.cost.collectives import CollectiveCost, Span, Traffic, all_to_all
from torchrec_2dsp.errors import CalibrationError
from torchrec_2dsp.programs.calibrate.fit import (
    CollectiveSample,
    KernelSample,
    Timed,
    fit_collective,
    fit_kernel,
)

IN_HOST, ACROSS, ALL = Span(2, 2, 1), Span(2, 1, 2), Span(4, 2, 1)
TRUTH = CollectiveCost(
    base_s=0.0004, per_peer_s=0.0002, local_s_per_byte=2e-9, link_s_per_byte=8e-9
)
SIZES = [2.0**power for power in range(12, 25, 3)]


def samples(truth: CollectiveCost, spans: list[Span], noise: float = 0.0) -> list[CollectiveSample]:
    generator = np.random.default_rng(3)
    found = []
    for span in spans:
        for size in SIZES:
            moved = all_to_all(span, size / span.num_ranks)
            seconds = truth.seconds(span, moved) * (1 + noise * generator.standard_normal())
            found.append(CollectiveSample(span, moved, Timed(seconds, noise * seconds)))
    return found


@pytest.mark.parametrize("link", [8e-9, 2e-10], ids=["slow link", "link faster than the host"])
def test_planted_coefficients_are_found(link: float) -> None:
    truth = TRUTH.model_copy(update={"link_s_per_byte": link})
    found = fit_collective("all_to_all", samples(truth, [IN_HOST, ACROSS, ALL]))
    for name in ("base_s", "per_peer_s", "local_s_per_byte", "link_s_per_byte"):
        assert getattr(found, name) == pytest.approx(getattr(truth, name), rel=0.02), name
    assert found.median_error < 1e-3


def test_noise_leaves_the_bytes_known() -> None:
    found = fit_collective("all_to_all", samples(TRUTH, [IN_HOST, ACROSS, ALL], noise=0.1))
    assert found.link_s_per_byte == pytest.approx(8e-9, rel=0.15)
    assert found.local_s_per_byte == pytest.approx(2e-9, rel=0.3)
    assert 0.01 < found.median_error < 0.2


def test_what_no_sample_tells_of_stays_unknown_and_is_refused_when_used() -> None:
    found = fit_collective("all_to_all", samples(TRUTH, [IN_HOST]))
    assert found.link_s_per_byte is None
    assert found.seconds(IN_HOST, all_to_all(IN_HOST, 1e6)) > 0.001
    with pytest.raises(CalibrationError, match="nothing travels across hosts"):
        found.seconds(ALL, all_to_all(ALL, 1e6))


def test_one_rank_sends_nothing() -> None:
    assert TRUTH.seconds(Span(1, 1, 4), Traffic(0.0, 0.0)) == 0.0


def test_the_slower_way_counts() -> None:
    """Ranks send inside their host and across hosts at the same time."""
    constant = TRUTH.base_s + 3 * TRUTH.per_peer_s
    assert TRUTH.seconds(ALL, Traffic(1e6, 1e6)) == pytest.approx(constant + 8e-3)
    assert TRUTH.seconds(ALL, Traffic(1e7, 1e6)) == pytest.approx(constant + 2e-2)


def test_kernels_are_found() -> None:
    truth = KernelCost(base_s=1e-4, per_item_s=5e-8, per_byte_s=1e-9)
    found = fit_kernel(
        "lookup",
        [
            KernelSample(
                items, items * dim * 4, Timed(1e-4 + truth.seconds(items, items * dim * 4))
            )
            for items in (4_096.0, 16_384.0, 65_536.0)
            for dim in (16, 64, 128)
        ],
    )
    assert found.base_s == pytest.approx(1e-4, rel=0.01)
    assert found.per_item_s == pytest.approx(5e-8, rel=0.01)
    assert found.per_byte_s == pytest.approx(1e-9, rel=0.01)


def test_work_on_bags_is_told_apart() -> None:
    """Bags of one id and of sixteen, whose ids are all of one row or all of different ones."""
    truth = BagCost(
        base_s=1e-4,
        per_item_s=5e-9,
        per_byte_s=1e-11,
        per_vector_byte_s=3e-10,
        per_row_byte_s=4e-10,
    )
    samples: list[KernelSample] = []
    for ids, dim, bag, distinct in product((4_096.0, 65_536.0), (16, 64, 128), (1, 16), (1, 0)):
        row = dim * 4.0
        bags = {"vector_bytes": ids / bag * row, "row_bytes": distinct * ids * row}
        seconds = truth.base_s + truth.of_bags(ids, ids * row, **bags)
        samples.append(KernelSample(ids, ids * row, Timed(seconds), **bags))
    found = fit_kernel("lookup", samples)
    assert isinstance(found, BagCost)
    for name in ("base_s", "per_item_s", "per_byte_s", "per_vector_byte_s", "per_row_byte_s"):
        assert getattr(found, name) == pytest.approx(getattr(truth, name), rel=0.01), name


def test_times_that_nothing_explains_are_refused() -> None:
    generator = np.random.default_rng(1)
    wild = [
        CollectiveSample(ALL, Traffic(size, size), Timed(float(10 ** generator.uniform(-3, 0))))
        for size in SIZES * 4
    ]
    with pytest.raises(CalibrationError, match=r"^all_reduce: no constants explain .* idle"):
        fit_collective("all_reduce", wild)
    with pytest.raises(CalibrationError, match=r"^sort: no constants explain"):
        fit_kernel("sort", [KernelSample(1.0, 0.0, sample.timed) for sample in wild])


def test_the_median_of_repeats_counts_and_half_of_them_scatter() -> None:
    assert Timed.of([3.0, 1.0, 2.0, 9.0, 2.0]) == Timed(2.0, 1.0)
