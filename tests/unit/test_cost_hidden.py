"""What of a step happens behind computing, by the cost model."""

from dataclasses import replace

import numpy as np
import pytest
from torchrec.distributed.types import ShardingType

import torchrec_2dsp as tdsp
from tests.support.costs import (
    BATCH,
    LINK,
    ROW,
    ROWS,
    TWO,
    cost,
    counted,
    only_the_link,
    table,
)
from torchrec_2dsp.cost.workload import DenseWork


def test_late_gradients_are_hidden_behind_the_step() -> None:
    group = table(ShardingType.ROW_WISE, [0, 1], exchange=tdsp.Exchange.ROW)
    dense = DenseWork(forward_s=1.0, backward_s=1.0)
    late = cost(group, mesh=TWO, sync=tdsp.GradientSync(delay=1), dense=dense)
    assert late.hidden_s == pytest.approx(-late.sync_s)
    assert cost(group, mesh=TWO, dense=dense).hidden_s == 0.0
    busy = only_the_link().model_copy(update={"hidden_share": 0.25})
    partly = cost(group, mesh=TWO, sync=tdsp.GradientSync(delay=1), dense=dense, calibration=busy)
    assert partly == replace(late, hidden_s=late.hidden_s / 4)


def test_a_pipeline_hides_ids_behind_compute() -> None:
    dense = DenseWork(forward_s=1.0)
    found = cost(ROW, dense=dense, is_pipelined=True)
    assert found.hidden_s == pytest.approx(-found.input_exchange_s)
    # Nothing hides behind nothing.
    assert cost(ROW, is_pipelined=True).hidden_s == 0.0


@pytest.mark.parametrize(("gradient_mib", "hidden_share"), [(20, 0.0), (99, 0.75)])
def test_dense_gradients_hide_behind_the_backward_bucket_by_bucket(
    gradient_mib: int, hidden_share: float
) -> None:
    dense = DenseWork(backward_s=100.0, gradient_bytes=gradient_mib * 2.0**20)
    found = cost(dense=dense)
    assert found.dense_exchange_s == pytest.approx(1.5 * dense.gradient_bytes * LINK)
    assert found.hidden_s == pytest.approx(-hidden_share * found.dense_exchange_s)


def test_data_parallel_tables_have_an_all_reduce_of_their_own() -> None:
    """Ranks come to both from computing, and that of the tables hides behind nothing."""
    dense = DenseWork(backward_s=100.0, gradient_bytes=99 * 2.0**20)
    copied = table(ShardingType.DATA_PARALLEL, [0])
    slow = only_the_link().model_copy(update={"turn_s": 1e-3})
    alone, beside, both = (
        cost(*tables, calibration=slow, dense=part)
        for tables, part in (((), dense), ((copied,), DenseWork()), ((copied,), dense))
    )
    assert both.dense_exchange_s == pytest.approx(alone.dense_exchange_s + beside.dense_exchange_s)
    assert alone.dense_exchange_s == pytest.approx(1.5 * dense.gradient_bytes * LINK + 1e-3)
    assert both.hidden_s == pytest.approx(alone.hidden_s, rel=1e-3)
    assert beside.hidden_s == 0.0


def rows_beside(skew: float, num_batches: int) -> tuple[float, float]:
    """Drawn: how many distinct rows a rank's batch has, and how many of them aren't in so many
    batches of all ranks."""
    draw = np.random.default_rng(0)
    shares = 1 / np.arange(1, ROWS + 1) ** skew
    distinct, beside = 0, 0
    for _ in range(200):
        own = np.unique(draw.choice(ROWS, BATCH, p=shares / shares.sum()))
        others = draw.choice(ROWS, 4 * BATCH * num_batches, p=shares / shares.sum())
        distinct += own.size
        beside += np.setdiff1d(own, others).size
    return distinct / 200, beside / 200


def test_rows_that_others_leave_alone_hide_behind_the_dense_part() -> None:
    work = replace(ROW.work, access=counted())
    rows, dense = replace(ROW, work=work), DenseWork(forward_s=1.0)
    found = cost(rows, dense=dense, prefetches_rows=True)
    distinct, early = rows_beside(1.0, num_batches=2)
    _, lagging = rows_beside(1.0, num_batches=1)
    visible = cost(rows, dense=dense)
    moved_s = visible.forward_exchange_s + visible.backward_exchange_s + visible.imbalance_s
    expected = (early + lagging) / distinct * moved_s / 2
    assert visible.hidden_s == 0.0
    assert found.hidden_s == pytest.approx(-expected, rel=0.05)
    assert replace(found, hidden_s=0.0) == visible
    # On a GPU rows are updated all at once.
    link = only_the_link()
    gpus = link.model_copy(update={"hardware": link.hardware.model_copy(update={"device": "cuda"})})
    only_early = cost(rows, dense=dense, prefetches_rows=True, calibration=gpus)
    assert only_early.hidden_s == pytest.approx(-early / distinct * moved_s / 2, rel=0.05)
    # So their gradients take no messages more; only the rows do.
    late = gpus.collectives.all_to_all.model_copy(update={"base_s": 1e-3})
    collectives = gpus.collectives.model_copy(update={"all_to_all": late})
    gpus = gpus.model_copy(update={"collectives": collectives})
    without, beside = (cost(rows, prefetches_rows=so, calibration=gpus) for so in (False, True))
    assert beside.backward_exchange_s == without.backward_exchange_s
    assert beside.forward_exchange_s == pytest.approx(without.forward_exchange_s + 2e-3)
    # Nothing hides behind nothing, nor where replicas change the rows, too.
    assert cost(rows, prefetches_rows=True).hidden_s == 0.0
    in_groups = table(ShardingType.ROW_WISE, [0, 1], exchange=tdsp.Exchange.ROW)
    assert cost(in_groups, mesh=TWO, dense=dense, prefetches_rows=True).hidden_s == 0.0
