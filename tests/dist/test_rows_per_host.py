"""Row exchange of groups over several hosts: ranks of a host ask together, nothing else changes."""

from dataclasses import replace
from itertools import product

import pytest
from torchrec.distributed.fbgemm_qcomm_codec import CommType

import torchrec_2dsp as tdsp
from tests.dist.test_row_exchange import IDS, ONE_TABLE, bytes_of_a_step, quantised
from tests.support.loops import PIPELINES, by_pipelines
from tests.support.models import ALL_ROWS, HOT_ROWS, MIXED, SEQUENCES, ModelSpec
from tests.support.parity import LR, Cell, check_cells
from tests.support.ranks import RankPool

pytestmark = pytest.mark.dealt_file

ROWS = Cell(tdsp.Mesh2D(1, 4), exchange="row_per_host")
BAGS = (ModelSpec(), ModelSpec(pooling="mean"), ModelSpec(weighted=True), MIXED)


def test_bags_equal_the_unsharded_model(two_hosts: RankPool) -> None:
    cells = [
        replace(ROWS, spec=spec, optimizer=optimizer)
        for spec, optimizer in product(BAGS, ("sgd", "adagrad", "rowwise_adagrad"))
    ]
    check_cells(cells, two_hosts)


def test_hot_rows_and_unusual_batches_equal_the_unsharded_model(two_hosts: RankPool) -> None:
    """Ranks and hosts without samples, or with hot rows alone."""
    cells = [
        replace(ROWS, hot_rows=hot_rows, batch_sizes=sizes)
        for hot_rows, sizes in product(
            ((), HOT_ROWS, ALL_ROWS), ((3, 0, 5, 2), (0, 0, 1, 0), (2, 2, 2, 2))
        )
    ]
    check_cells(cells, two_hosts)


def test_sequences_equal_the_unsharded_model(two_hosts: RankPool) -> None:
    cells = [
        replace(ROWS, spec=SEQUENCES, optimizer=optimizer)
        for optimizer in ("sgd", "adagrad", "rowwise_adagrad")
    ]
    check_cells(cells, two_hosts)


def test_groups_over_many_hosts_equal_the_unsharded_model(ranks8: RankPool) -> None:
    """Four hosts of two; then two groups of two hosts of two each."""
    inside = tdsp.Mesh2D(2, 4, tdsp.RankLayout.CONTIGUOUS)
    cells = [
        replace(ROWS, mesh=mesh, spec=spec)
        for mesh, spec in product((tdsp.Mesh2D(1, 8), inside), (ModelSpec(), SEQUENCES))
    ]
    check_cells(cells, ranks8)


def test_pipelines_change_nothing(two_hosts: RankPool) -> None:
    for gaps in two_hosts.run(by_pipelines, replace(ROWS, hot_rows=HOT_ROWS)):
        assert gaps == [0.0] * len(PIPELINES)


def test_averaged_replicas_equal_the_unsharded_model(ranks8: RankPool) -> None:
    """With SGD an average of replicas is exact, and it needs to know which rows change."""
    inside = tdsp.Mesh2D(2, 4, tdsp.RankLayout.CONTIGUOUS)
    sync = tdsp.WeightSync(dense_above=1.0)
    check_cells([replace(ROWS, mesh=inside, optimizer="sgd", sync=sync)], ranks8)


def test_a_row_comes_to_a_host_once(two_hosts: RankPool) -> None:
    """Owners 0 and 2 are asked by ranks 0 and 2, owners 1 and 3 by the others."""
    rows = [{*first, *second} for first, second in IDS]
    asks = [[{row for row in mine if row // 10 % 2 == place} for place in (0, 1)] for mine in rows]
    together = [
        asks[rank // 2 * 2][rank % 2] | asks[rank // 2 * 2 + 1][rank % 2] for rank in range(4)
    ]
    answers = two_hosts.run(bytes_of_a_step, replace(ROWS, spec=ONE_TABLE))
    for rank, (counts, keys, splits, lengths, ids, fetched, given, back, gradients) in enumerate(
        answers
    ):
        host, place = divmod(rank, 2)
        num_given = sum(len(asks[2 * host + other][place]) for other in (0, 1))
        num_owned = sum(
            sum(row // 10 == rank for row in together[2 * other + place]) for other in (0, 1)
        )
        assert (counts, keys) == (2 * 8, len(rows[rank]) * 4)
        # For each host: how many lengths, ids and samples come, 8 bytes each; one length.
        assert (splits, lengths, ids) == (2 * 3 * 8, 2 * 8, len(together[rank]) * 4)
        assert (fetched, given) == (num_owned * 8 * 4, num_given * 8 * 4)
        assert (back, gradients) == (len(rows[rank]) * 8 * 4, len(together[rank]) * 8 * 4)


def test_quantised_communication_halves_the_bytes_between_hosts(two_hosts: RankPool) -> None:
    short, full = (two_hosts.run(quantised, ROWS, one) for one in (CommType.FP16, CommType.FP32))
    for (gap, sent), (no_gap, fully_sent) in zip(short, full, strict=True):
        assert no_gap == 0.0 < gap < 10 * LR * 2**-8
        assert fully_sent / 2 < sent < fully_sent


def test_inside_one_host_nothing_is_asked_twice(ranks4: RankPool) -> None:
    alone, together = (
        ranks4.run(bytes_of_a_step, replace(ROWS, spec=ONE_TABLE, exchange=exchange))
        for exchange in ("row", "row_per_host")
    )
    assert alone == together
