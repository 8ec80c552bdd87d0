"""Numbers that travel in fewer bits, and updates that travel behind a whole step."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import torchrec_2dsp as tdsp
from tests.fuzz.case import Case, ModuleCase, TableCase
from tests.fuzz.judge import judge
from tests.fuzz.run import run_case
from tests.fuzz.seen import RankReport
from tests.support.loop_oracles import ROUNDING, train_late
from tests.support.loops import Tensors, largest_gap, make_stream, plain_loop, shard, snapshot
from tests.support.models import HOT_ROWS, ModelSpec, TableSpec
from tests.support.parity import FOUR, LR, TWO, Cell, make_optimizer
from tests.support.ranks import RankPool

pytestmark = pytest.mark.dealt_file

LARGE = ModelSpec((TableSpec("t0", 1600, 8, ("f0",)), TableSpec("t1", 960, 16, ("f1", "f2"))))
"""Few of its rows are in a batch, so that they travel alone under `WeightSync`, too."""

SHORT = [transport for transport in tdsp.Transport if transport is not tdsp.Transport.FP32]
STEP_ROUNDING = {
    tdsp.Transport.BF16: 2**-8,
    tdsp.Transport.FP16: 2**-11,
    tdsp.Transport.INT8: 0.51 / 127,
    tdsp.Transport.INT4: 0.51 / 7,
}
"""Of a rounding to nearest, relative to the number, or of integers to a row's largest one."""
NUM_STEPS = 4


def train(rank: int, world_size: int, cell: Cell) -> tuple[list[Tensors], int]:
    """Return this rank's state after every second step, and its sent bytes."""
    parallel, seen = shard(cell), []
    assert isinstance(parallel, tdsp.ModelParallel2D)
    optimizer = make_optimizer(parallel)
    batches = [step[rank] for step in make_stream(cell, NUM_STEPS)]
    for pair in zip(batches[::2], batches[1::2], strict=True):
        plain_loop(parallel, optimizer, pair)
        seen.append(snapshot(parallel))
    return seen, parallel.sync_total.num_bytes


def weights_of(state: Tensors) -> Tensors:
    return {name: value for name, value in state.items() if "/" not in name}


def check(ranks4: RankPool, cell: Cell, exact: Cell, transport: tdsp.Transport) -> None:
    """Replicas are equal bit for bit, near the exact ones, and less was sent."""
    short, full = ranks4.run(train, cell), ranks4.run(train, exact)
    for rank, (states, _) in enumerate(short):
        first = cell.mesh.replica_peers(rank)[0]
        for state, other in zip(states, short[first][0], strict=True):
            assert largest_gap(state, other) == 0.0
    # Each step moves a weight by less than lr, with a relative error of one rounding or two.
    bound = 4 * NUM_STEPS * LR * STEP_ROUNDING[transport]
    for (states, sent), (expected, fully_sent) in zip(short, full, strict=True):
        gap = largest_gap(*(weights_of(state[-1]) for state in (states, expected)))
        assert 0.0 < gap < bound
        assert 0 < sent < 0.75 * fully_sent


@pytest.mark.parametrize("transport", SHORT)
def test_short_gradients(ranks4: RankPool, transport: tdsp.Transport) -> None:
    sync = tdsp.GradientSync(transport=transport)
    for exact in (Cell(FOUR, "table_wise", LARGE), Cell(TWO, spec=LARGE, hot_rows=HOT_ROWS)):
        check(ranks4, replace(exact, sync=sync), exact, transport)


@pytest.mark.parametrize("transport", SHORT)
def test_short_changes(ranks4: RankPool, transport: tdsp.Transport) -> None:
    sync = tdsp.WeightSync(transport=transport, policy=tdsp.every(2), dense_above=0.5)
    for mesh in (FOUR, TWO):
        exact = Cell(mesh, spec=LARGE, sync=tdsp.WeightSync(policy=tdsp.every(2)))
        check(ranks4, replace(exact, sync=sync), exact, transport)


def test_late_updates_equal_the_late_oracle(ranks4: RankPool) -> None:
    late = tdsp.GradientSync(delay=1)
    cells = [
        Cell(mesh, sharding, hot_rows=hot_rows, optimizer=optimizer, sync=late)
        for mesh, sharding in ((TWO, "row_wise"), (FOUR, "table_wise"))
        for hot_rows in ((), HOT_ROWS)
        for optimizer in ("sgd", "rowwise_adagrad")
    ]
    for cell in cells:
        for loss_gap, gap, change in ranks4.run(train_late, cell):
            assert loss_gap < ROUNDING
            assert gap < ROUNDING
            assert change > 1e-2
        in_time = replace(cell, sync=tdsp.GradientSync())
        assert min(gap for _, gap, _ in ranks4.run(train_late, in_time)) > 1e-4


TABLES = (
    TableCase(rows=40, dim=8, features=(0,)),
    TableCase(rows=24, dim=16, features=(1, 2)),
    TableCase(rows=33, dim=8, features=(3,)),
)


def case_of(
    transport: str,
    sharding: str,
    exchange: str = "pooled",
    *,
    groups: int = 1,
    hosts: int = 1,
    kind: str = "bags",
    optimizer: str = "sgd",
    sizes: tuple[int, ...] = (6, 6, 6, 6),
    **of_tables: Any,
) -> Case:
    """Return a random case without randomness: four ranks, whose rows or bags are rounded."""
    # Sequences have one dim.
    tables = TABLES[::2] if kind == "sequences" else TABLES
    sharded = [
        replace(
            table,
            sharding=sharding,
            exchange=exchange,
            transport=transport,
            place=place,
            **of_tables,
        )
        for place, table in enumerate(tables)
    ]
    return Case(
        groups=groups,
        size=4 // groups,
        layout="strided" if hosts == 1 else "contiguous",
        local=4 // hosts,
        modules=(ModuleCase(kind=kind, tables=tuple(sharded)),),
        optimizer=optimizer,
        sizes=sizes,
        max_length=4,
        # After one step the oracle's numbers are those of the ranks, rounded where they are.
        steps=1,
    )


def check_rounding(ranks: RankPool, cases: Sequence[Case], folder: Path) -> None:
    """Compare with an oracle that rounds where ranks do: one rounding more or less shows."""
    for number, case in enumerate(cases):
        seen = ranks.run(run_case, case, folder / str(number))
        verdict = judge(case, [RankReport("returned", of_rank) for of_rank in seen])
        assert verdict.outcome == "ok", f"{case.to_json()}: {verdict.text}"
        assert verdict.counts.rounded > 0


@pytest.mark.parametrize("transport", SHORT)
def test_rows_are_rounded_once_each_way(
    ranks4: RankPool, transport: tdsp.Transport, tmp_path: Path
) -> None:
    more: list[dict[str, Any]] = [
        {},
        {"groups": 2},
        {"kind": "weighted"},
        {"pooling": "mean"},
        {"kind": "sequences"},
        {"hot": "some"},
        {"owners": "hash"},
        {"exchange": "row_per_host"},
        {"optimizer": "adagrad"},
    ]
    rows: dict[str, Any] = {"exchange": "row"}
    cases = [case_of(transport.value, "row_wise", **rows | options) for options in more]
    check_rounding(ranks4, cases, tmp_path)


@pytest.mark.parametrize("transport", SHORT)
def test_bags_are_rounded_once_each_way(
    ranks4: RankPool, transport: tdsp.Transport, tmp_path: Path
) -> None:
    uneven = (5, 0, 2, 1)
    cases = [
        case_of(transport.value, sharding, exchange, groups=groups)
        for groups in (1, 2)
        for sharding in ("table_wise", "column_wise", "row_wise")
        for exchange in ("pooled", "nonempty")
    ]
    cases += [
        case_of(transport.value, "table_wise", kind="weighted"),
        case_of(transport.value, "table_wise", kind="sequences"),
        case_of(transport.value, "row_wise", kind="sequences"),
        case_of(transport.value, "column_wise", kind="sequences"),
        case_of(transport.value, "table_wise", sizes=uneven),
        case_of(transport.value, "row_wise", sizes=uneven),
    ]
    check_rounding(ranks4, cases, tmp_path)


@pytest.mark.parametrize("transport", SHORT)
def test_bags_are_rounded_again_between_hosts(
    two_hosts: RankPool, transport: tdsp.Transport, tmp_path: Path
) -> None:
    """A host's sums travel to the other one, and gradients from host to host, then inside."""
    cases = [
        case_of(transport.value, sharding, groups=groups, hosts=2)
        for groups in (1, 2)
        for sharding in ("table_row_wise", "grid_shard", "table_column_wise")
    ]
    cases.append(case_of(transport.value, "grid_shard", hosts=2, kind="weighted"))
    check_rounding(two_hosts, cases, tmp_path)
