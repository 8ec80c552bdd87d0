"""The inflated moment: measured on the eager optimizer, against the formulas."""

import pytest
import torch

from tests.support.reference import row_wise_adagrad_
from torchrec_2dsp.errors import ConfigError
from torchrec_2dsp.optim import (
    expected_moment_inflation,
    expected_moment_scale,
    moment_inflation,
)

NUM_ROWS, DIM, NUM_STEPS = 500, 8, 30
TOLERANCE = 0.05


def measured(num_groups: int, rho: float, hits: torch.Tensor, seed: int) -> float:
    """The averaged moment over one group's, of many rows over some steps.

    Args:
        hits: lookups of each row, by step: `[steps, rows]`.
    """
    generator = torch.Generator().manual_seed(seed)
    weight = torch.zeros(NUM_ROWS, DIM)
    moment, averaged = torch.zeros(NUM_ROWS), torch.zeros(NUM_ROWS)
    mean = rho**0.5 * torch.ones(DIM)
    for count in hits:
        most = int(count.max())
        draws = mean + torch.randn((NUM_ROWS, most, DIM), generator=generator)
        draws = draws * (torch.arange(most) < count[:, None])[:, :, None]
        group_of = torch.randint(0, num_groups, (NUM_ROWS, most), generator=generator)
        row_wise_adagrad_(weight, draws.sum(dim=1), moment, lr=0.1)
        copies = [averaged.clone() for _ in range(num_groups)]
        for group, copy in enumerate(copies):
            # Divided by a batch that is so many times smaller.
            grad = num_groups * (draws * (group_of == group)[:, :, None]).sum(dim=1)
            row_wise_adagrad_(weight, grad, copy, lr=0.1)
        averaged = torch.stack(copies).mean(dim=0)
    return (averaged.sum() / moment.sum()).item()


@pytest.mark.parametrize("num_groups", [2, 4, 8])
@pytest.mark.parametrize("rho", [0.0, 0.05, 0.5, 3.0])
@pytest.mark.parametrize("hits", [1, 3, 20])
def test_a_row_that_is_always_looked_up_as_often(num_groups: int, rho: float, hits: int) -> None:
    found = measured(num_groups, rho, torch.full((NUM_STEPS, NUM_ROWS), hits), seed=hits)
    expected = moment_inflation(num_groups=num_groups, hits=hits, rho=rho)
    assert found == pytest.approx(expected, rel=TOLERANCE)


@pytest.mark.parametrize("num_groups", [2, 8])
@pytest.mark.parametrize("rho", [0.0, 0.3, 3.0])
@pytest.mark.parametrize("hits", [0.2, 4.0])
def test_a_row_that_is_looked_up_at_random(num_groups: int, rho: float, hits: float) -> None:
    generator = torch.Generator().manual_seed(1)
    counts = torch.poisson(torch.full((NUM_STEPS, NUM_ROWS), hits), generator=generator)
    found = measured(num_groups, rho, counts.long(), seed=2)
    expected = expected_moment_inflation(num_groups=num_groups, hits=hits, rho=rho)
    assert found == pytest.approx(expected, rel=TOLERANCE)


def test_a_tables_scale_is_the_mean_inflation_of_its_lookups() -> None:
    def inflation(hits: float) -> float:
        return expected_moment_inflation(num_groups=4, hits=hits, rho=0.5)

    scale = expected_moment_scale([8.0, 2.0, 0.0], num_groups=4, rho=0.5)
    assert scale == pytest.approx(0.8 * inflation(8.0) + 0.2 * inflation(2.0))
    assert expected_moment_scale([3.0, 3.0], num_groups=4, rho=0.5) == pytest.approx(inflation(3.0))
    assert expected_moment_scale([5.0, 1e-9], num_groups=8, rho=0.0) == pytest.approx(8.0)
    assert expected_moment_scale([0.0, 0.0], num_groups=8, rho=0.5) == 8.0, "nothing to average"


@pytest.mark.parametrize(
    ("hits", "rho"), [([-1.0], 0.1), ([float("nan")], 0.1), ([float("inf")], 0.1), ([1.0], -0.5)]
)
def test_numbers_that_mean_nothing_are_refused(hits: list[float], rho: float) -> None:
    with pytest.raises(ConfigError, match=f"hits and rho={rho} must be numbers >= 0"):
        expected_moment_scale(hits, num_groups=4, rho=rho)
