"""How long large plans take: `pytest -m slow -s tests/unit/test_planning_time.py` shows it."""

import resource
import time

import numpy as np
import pytest
import torch
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection

import torchrec_2dsp as tdsp
from tests.support.planning import SHARDERS


def random_tables(num_tables: int) -> EmbeddingBagCollection:
    """From 100 to 20 million rows, most of them small."""
    generator = np.random.default_rng(0)
    rows = np.exp(generator.uniform(np.log(100), np.log(2e7), num_tables)).astype(int)
    dims = generator.choice([32, 64, 128], num_tables)
    return EmbeddingBagCollection(
        device=torch.device("meta"),
        tables=[
            EmbeddingBagConfig(
                name=f"t{number}",
                num_embeddings=int(num_rows),
                embedding_dim=int(dim),
                feature_names=[f"f{number}"],
            )
            for number, (num_rows, dim) in enumerate(zip(rows, dims, strict=True))
        ],
    )


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.parametrize(
    ("num_tables", "num_ranks", "most_s"), [(1_000, 1_024, 10.0), (10_000, 4_096, 120.0)]
)
def test_large_plans_take_seconds(num_tables: int, num_ranks: int, most_s: float) -> None:
    model = random_tables(num_tables)
    calibration = tdsp.Calibration.load("configs/hardware/emulated_1gbit.toml")
    start = time.perf_counter()
    planner = tdsp.Planner2D(
        topology=calibration.topology(num_ranks, 8, ddr_cap_bytes=80 * 2**30),
        batch_size=512,
        storage_reservation=FixedPercentageStorageReservation(0.15),
        calibration=calibration,
        debug=False,
    )
    plan = planner.plan(model, SHARDERS)
    seconds = time.perf_counter() - start
    peak_gib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(
        f"{num_tables:,} tables, {num_ranks:,} ranks: {seconds:.1f} s, {peak_gib:.1f} GiB at the "
        f"peak, {plan.mesh}"
    )
    assert sum(len(list(module.tables())) for _, module in plan.modules()) == num_tables
    assert seconds <= most_s
    assert peak_gib <= 4
