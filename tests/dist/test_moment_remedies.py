"""A moment that is scaled table by table, and one that is taken from before the step."""

from dataclasses import replace
from typing import Any

import pytest
from torch import nn
from torch.distributed.optim import (
    _apply_optimizer_in_backward as apply_optimizer_in_backward,
)
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

import torchrec_2dsp as tdsp
from tests.support.cells import EPS
from tests.support.loop_oracles import Emulation
from tests.support.loops import make_stream, plain_loop, shard
from tests.support.models import SEQUENCE_TABLES, ModelSpec, build, tables_of
from tests.support.parity import LR, Cell, compare, make_optimizer
from tests.support.ranks import RankPool

pytestmark = pytest.mark.dealt_file

AVERAGED = Cell(tdsp.Mesh2D(2, 2), sync=tdsp.WeightSync())
EXACT = replace(AVERAGED, sync=tdsp.GradientSync())
SEQUENCE = replace(AVERAGED, spec=ModelSpec(SEQUENCE_TABLES, sequence=True))
TABLES = [table.name for table in AVERAGED.spec.tables]
SHARDERS = (tdsp.EmbeddingBagCollectionSharder2D, tdsp.EmbeddingCollectionSharder2D)
STEPS = 4
ROUNDING = 1e-6
"""The emulation adds and scales in another order: some float32 roundings of values below 1."""
DELAYED_ROUNDING = 2e-7 * LR / EPS
"""The first step divides by a moment of nothing, that is by eps: roundings of the gradient, an ulp
or two, are magnified by as much."""


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


DELAYED = tdsp.DelayedMomentRowWiseAdaGrad(lr=LR, eps=EPS)


@pytest.mark.parametrize(
    "cell",
    [
        AVERAGED,
        replace(AVERAGED, sync=tdsp.WeightSync(rows=tdsp.SyncedRows.ALL)),
        replace(AVERAGED, sharding="table_wise"),
        SEQUENCE,
        EXACT,
        replace(AVERAGED, mesh=tdsp.Mesh2D(1, 4)),
        replace(EXACT, mesh=tdsp.Mesh2D(1, 4)),
    ],
    ids=str,
)
def test_a_delayed_moment(ranks4: RankPool, cell: Cell) -> None:
    answers = ranks4.run(train_otherwise, cell, DELAYED, {"delays_moment": True})
    assert max(answers) < DELAYED_ROUNDING


@pytest.mark.parametrize("cell", [AVERAGED, SEQUENCE], ids=str)
def test_each_table_has_a_scale_of_its_own(ranks4: RankPool, cell: Cell) -> None:
    scales = {table.name: 1.5 + number for number, table in enumerate(cell.spec.tables)}
    optimizer = scaled(scales)
    answers = ranks4.run(train_otherwise, cell, optimizer, {"moment_scale": scales})
    assert max(answers) < ROUNDING


def refused(cell: Cell, optimizer: Any, model: nn.Module | None = None) -> str:
    with pytest.raises(tdsp.TwoDError) as caught:
        shard(cell, SHARDERS[cell.spec.sequence](optimizer), model)
    return str(caught.value)


def refusals(rank: int, world_size: int) -> list[str]:
    model = build(AVERAGED.spec)
    apply_optimizer_in_backward(RowWiseAdagrad, tables_of(model).parameters(), {"lr": LR})
    return [
        refused(AVERAGED, DELAYED, model),
        refused(replace(AVERAGED, hot_rows=(("t0", (0, 1)),)), DELAYED),
        refused(AVERAGED, scaled({"t0": 2.0})),
        refused(EXACT, scaled(dict.fromkeys(TABLES, 2.0))),
    ]


def test_rules_that_would_not_hold_for_all_rows_are_refused(ranks4: RankPool) -> None:
    for in_backward, hot, missing, exact in ranks4.run(refusals):
        assert in_backward.startswith("apply_optimizer_in_backward gives tables")
        assert hot.startswith("table 't0' has hot rows")
        assert missing.startswith(f"moment_scale has nothing for table '{TABLES[1]}'")
        assert exact.startswith("moment_scale=2.0 with GradientSync")
