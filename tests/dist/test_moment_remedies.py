"""Moments that are scaled table by table."""

from dataclasses import replace
from typing import Any

import pytest

import torchrec_2dsp as tdsp
from tests.support.cells import EPS
from tests.support.loop_oracles import Emulation
from tests.support.loops import make_stream, plain_loop, shard
from tests.support.models import SEQUENCES
from tests.support.parity import LR, Cell, compare, make_optimizer
from tests.support.ranks import RankPool

pytestmark = pytest.mark.dealt_file

AVERAGED = Cell(tdsp.Mesh2D(2, 2), sync=tdsp.WeightSync())
EXACT = replace(AVERAGED, sync=tdsp.GradientSync())
SEQUENCE = replace(AVERAGED, spec=SEQUENCES)
TABLES = [table.name for table in AVERAGED.spec.tables]
SHARDERS = (tdsp.EmbeddingBagCollectionSharder2D, tdsp.EmbeddingCollectionSharder2D)
STEPS = 4
ROUNDING = 1e-6
"""The emulation adds and scales in another order: some float32 roundings of values below 1."""


def scaled(scales: dict[str, float]) -> tdsp.MomentScaledRowWiseAdaGrad:
    return tdsp.MomentScaledRowWiseAdaGrad(lr=LR, eps=EPS, moment_scale=scales)


def train_otherwise(
    rank: int, world_size: int, cell: Cell, optimizer: Any, way: dict[str, Any]
) -> float:
    """Another optimizer of ours on the sharder, against the emulation."""
    parallel = shard(cell, SHARDERS[cell.spec.sequence](optimizer))
    stream = make_stream(cell, STEPS)
    plain_loop(parallel, make_optimizer(parallel), [step[rank] for step in stream])
    if isinstance(cell.sync, tdsp.GradientSync):
        cell = replace(cell, mesh=tdsp.Mesh2D(1, 4))
    emulation = Emulation(cell, **way)
    for batches in stream:
        emulation.step(batches)
    return compare(parallel, emulation.groups[0]).worst


@pytest.mark.parametrize("cell", [AVERAGED, SEQUENCE], ids=str)
def test_each_table_has_a_scale_of_its_own(ranks4: RankPool, cell: Cell) -> None:
    scales = {table.name: 1.5 + number for number, table in enumerate(cell.spec.tables)}
    optimizer = scaled(scales)
    answers = ranks4.run(train_otherwise, cell, optimizer, {"moment_scale": scales})
    assert max(answers) < ROUNDING


def refused(cell: Cell, optimizer: Any) -> str:
    with pytest.raises(tdsp.TwoDError) as caught:
        shard(cell, SHARDERS[cell.spec.sequence](optimizer))
    return str(caught.value)


def refusals(rank: int, world_size: int) -> list[str]:
    return [
        refused(AVERAGED, scaled({"t0": 2.0})),
        refused(EXACT, scaled(dict.fromkeys(TABLES, 2.0))),
    ]


def test_rules_that_would_not_hold_for_all_rows_are_refused(ranks4: RankPool) -> None:
    for missing, exact in ranks4.run(refusals):
        assert missing.startswith(f"moment_scale has nothing for table '{TABLES[1]}'")
        assert exact.startswith("moment_scale=2.0 with GradientSync")
