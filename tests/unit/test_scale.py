"""Predictions for worlds of thousands of GPUs, against what is published of them."""

from pathlib import Path

import pytest

from torchrec_2dsp.programs.config.config_file import load_config
from torchrec_2dsp.programs.plan import PlanConfig, planning

CONFIG = Path("configs/runs/scale.toml")
REPORTED = {512: 1.01, 1_024: 0.96, 2_048: 0.95, 4_096: 0.90}
"""Samples per second and GPU in 2D, compared with 256 GPUs (arXiv 2508.03854)."""


def samples_per_rank(num_ranks: int, *more: str) -> float:
    """Of a second."""
    config = load_config(PlanConfig, CONFIG, [f"machines.num_ranks={num_ranks}", *more])
    made = planning(config)
    best = made.planner.search(made.model, made.sharders).found[0]
    return config.batch_size / best.cost.total_s


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_efficiencies_in_2d_are_those_that_are_reported() -> None:
    """Of a model of that size on machines of which only data sheets are known."""
    start = samples_per_rank(256)
    # Fitted, by the length of the dense part.
    assert 256 * start == pytest.approx(176_000, rel=0.03)
    for num_ranks, reported in REPORTED.items():
        assert samples_per_rank(num_ranks) / start == pytest.approx(reported, abs=0.05)
    exact = samples_per_rank(4_096, "replicas.sync=GradientSync", "replicas.synced_rows=touched")
    assert exact / start > 0.95
