"""Prefetched rows: weights and losses stay bitwise equal to the plain loop's."""

import itertools
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn
from torchrec.distributed.fbgemm_qcomm_codec import CommType
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.modules.embedding_configs import DataType
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import torchrec_2dsp as tdsp
from tests.support.devices import KERNEL_ROUNDING, rank_device
from tests.support.loops import (
    LossModel,
    all_to_all_bytes,
    drain,
    largest_gap,
    logged,
    make_stream,
    shard,
    snapshot,
)
from tests.support.models import HOT_ROWS, MIXED, SEQUENCES, BagModel, ModelSpec, TableSpec
from tests.support.oracle import local_loss
from tests.support.parity import (
    ONE,
    Cell,
    make_optimizer,
    make_sharder,
)
from tests.support.prefetching import STEPS, Counts, compare, run, sharded
from tests.support.ranks import RankPool
from tests.support.slices import Deal
from torchrec_2dsp.comms.counting import count_collectives
from torchrec_2dsp.rows import update
from torchrec_2dsp.rows.gradients import RowGradients
from torchrec_2dsp.rows.update import DirectUpdater
from torchrec_2dsp.shard import kernels
from torchrec_2dsp.shard.row_exchange.journey import RowJourney
from torchrec_2dsp.shard.row_exchange.lookup import RowKernel
from torchrec_2dsp.shard.row_exchange.requests import RowRequests

pytestmark = pytest.mark.dealt_file

ROWS = Cell(ONE, exchange="row")


HALF_ROUNDING = 500 * KERNEL_ROUNDING
"""Two numbers that are a float32 rounding apart may be rounded to neighbours in half precision."""


def check(ranks: RankPool, cells: list[Cell]) -> None:
    for cell in cells:
        for gap, counts in ranks.run(compare, cell):
            assert gap <= KERNEL_ROUNDING, f"{cell}: {gap}"
            assert min(counts) > 0, f"{cell}: {counts}"


def test_bags_train_as_without(ranks4: RankPool, dealt: Deal) -> None:
    specs = (ModelSpec(), ModelSpec(pooling="mean"), ModelSpec(weighted=True), MIXED)
    cells = [replace(ROWS, spec=spec) for spec in specs]
    cells += [
        replace(ROWS, optimizer=entry, hot_rows=HOT_ROWS) for entry in ("sgd", "adagrad", "adam")
    ]
    cells += [replace(ROWS, owners="hash"), replace(ROWS, sync=tdsp.WeightSync())]
    cells += [replace(ROWS, stock_wrapper=True), replace(ROWS, full_duplex=True)]
    check(ranks4, dealt(cells))


def test_sequences_train_as_without(ranks4: RankPool) -> None:
    check(ranks4, [replace(ROWS, spec=SEQUENCES, hot_rows=hot) for hot in ((), HOT_ROWS[:1])])


def test_rows_that_hosts_ask_for_train_as_without(two_hosts: RankPool) -> None:
    cells = [
        replace(ROWS, exchange="row_per_host", spec=spec, hot_rows=hot)
        for spec, hot in product((ModelSpec(), MIXED), ((), (("t0", (0, 1, 5)),)))
    ]
    check(two_hosts, cells)


def test_tables_of_one_copy_send_rows_early_beside_replicas(ranks4: RankPool) -> None:
    check(ranks4, [replace(ROWS, mesh=tdsp.Mesh2D(2, 2), in_world=("t0",))])


def test_where_others_change_rows_none_come_early(ranks4: RankPool) -> None:
    cells = [
        replace(ROWS, mesh=tdsp.Mesh2D(2, 2)),
        replace(ROWS, accumulates=True),
        Cell(ONE, "table_wise"),
        replace(ROWS, spec=replace(ModelSpec(), tables=(TableSpec("t0", 1, 8, ("f0",)),))),
    ]
    for cell in cells:
        for gap, counts in ranks4.run(compare, cell):
            assert gap <= KERNEL_ROUNDING, cell
            assert counts.early + counts.lagging == 0, cell


def load_after_two_steps(step: int, parallel: Any, pipeline: Any) -> None:
    if step == 2:
        torch.manual_seed(1)
        parallel.load_state_dict(LossModel(ROWS.spec).state_dict())


def refresh_after_two_steps(step: int, parallel: Any, pipeline: Any) -> None:
    if step == 2:
        parallel.refresh_hot_sets({"t0": [2, 3, 4, 7], "t1": [1, 5]})


def train_otherwise_after_two_steps(step: int, parallel: Any, pipeline: Any) -> None:
    """Detach the pipeline after two steps, and train on the next batch's rows."""
    if step == 2:
        model = pipeline.detach()
        loss, _ = model(make_stream(ROWS, STEPS)[3][torch.distributed.get_rank()])
        loss.backward()
        pipeline.attach(model, sparse_dist=False)


def look_up_otherwise_after_two_steps(step: int, parallel: Any, pipeline: Any) -> None:
    """Train on the next batch's rows in another pipeline, without informing this one."""
    if step == 2:
        batch = make_stream(ROWS, STEPS)[3][torch.distributed.get_rank()]
        other = TrainPipelineSparseDist(parallel, make_optimizer(parallel), rank_device())
        other.progress(iter([batch]))


def read_after_each_step(step: int, parallel: Any, pipeline: Any) -> None:
    snapshot(parallel)


def evaluate_after_two_steps(step: int, parallel: Any, pipeline: Any) -> None:
    if step == 2:
        parallel.eval()
    if step == 3:
        parallel.train()


BETWEEN = {
    "load": load_after_two_steps,
    "refresh": refresh_after_two_steps,
    "detach": train_otherwise_after_two_steps,
    "another pipeline": look_up_otherwise_after_two_steps,
    "read": read_after_each_step,
    "evaluate": evaluate_after_two_steps,
}


@pytest.mark.parametrize("owners", ["block", "hash"])
def test_what_is_done_between_steps_is_seen(ranks4: RankPool, owners: str, dealt: Deal) -> None:
    """Results match the plain pipeline if models are loaded, refreshed, trained or read in between.

    With hashed owners, a read moves the rows, and the next batch's late rows leave before its
    lookup.
    """
    for name in dealt(list(BETWEEN)):
        hot_rows = HOT_ROWS if name in ("refresh", "read") else ()
        cell = replace(ROWS, hot_rows=hot_rows, owners=owners)
        for gap, counts in ranks4.run(compare, cell, BETWEEN[name]):
            # Batches that are on their way keep the old hot rows, and here one more is.
            bound = 1e-6 if name == "refresh" else 0.0
            assert gap <= bound + KERNEL_ROUNDING, f"{name}: {gap}"
            assert min(counts.early, counts.late) > 0, f"{name}: {counts}"
            # Who reads after each step waits for all gradients before they can lag.
            assert (counts.lagging > 0) == (name != "read"), f"{name}: {counts}"


def test_rows_in_half_precision_train_as_without(ranks4: RankPool) -> None:
    outputs = [replace(ROWS, output=DataType.FP16, spec=spec) for spec in (ModelSpec(), SEQUENCES)]
    for cell, qcomms in ((ROWS, CommType.FP16), *((cell, None) for cell in outputs)):
        for gap, counts in ranks4.run(compare, cell, None, qcomms):
            assert gap <= HALF_ROUNDING, cell
            assert min(counts) > 0, cell


def bytes_of_exchanges(rank: int, world_size: int, cell: Cell) -> tuple[int, int, int]:
    """Return the all-to-all bytes in TorchRec's pipeline and in ours, and our reported rows."""
    batches = [step[rank] for step in make_stream(cell, STEPS)]
    sent, reported = [], 0
    for kind in (TrainPipelineSparseDist, tdsp.TrainPipelineRowPrefetch):
        parallel = sharded(cell)
        with count_collectives() as seen:
            reported = run(parallel, batches, kind).counts.told
        sent.append(sum(all_to_all_bytes(seen)))
    return sent[0], sent[1], reported


def test_rows_cost_a_byte_more_each_way(ranks4: RankPool) -> None:
    for without, beside, reported in ranks4.run(bytes_of_exchanges, ROWS):
        assert beside - without == reported > 0


def lookups_of_owners(rank: int, world_size: int) -> Counter[int]:
    """Return how many of this rank's lookups ran each FBGEMM kernel."""
    batches, calls = [step[rank] for step in make_stream(ROWS, STEPS)], Counter[int]()
    forward = RowKernel.forward

    def count(self: RowKernel, features: KeyedJaggedTensor) -> torch.Tensor:
        calls[id(self)] += 1
        return forward(self, features)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RowKernel, "forward", count)
        run(sharded(ROWS), batches)
    return calls


def test_rows_that_travel_early_are_read_once(ranks4: RankPool) -> None:
    for calls in ranks4.run(lookups_of_owners):
        assert set(calls.values()) == {1}  # None of the first batch's rows come early.


def updating_by_fbgemm(rank: int, world_size: int, cell: Cell) -> tuple[float, Counts]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "rule_for", lambda tbe: None)
        patch.setattr(update, "rule_for", lambda tbe: None)
        return compare(rank, world_size, cell)


def test_kernels_without_a_rule_apply_lagging_gradients_by_fused_updates(ranks4: RankPool) -> None:
    """Kernels on GPUs are like this."""
    for cell in (ROWS, replace(ROWS, hot_rows=HOT_ROWS), replace(ROWS, optimizer="sgd")):
        for gap, counts in ranks4.run(updating_by_fbgemm, cell):
            assert gap <= KERNEL_ROUNDING, f"{cell}: {gap}"
            assert min(counts) > 0


@contextmanager
def counting_updates() -> Iterator[list[int]]:
    """Record the rows per update."""
    apply, calls = DirectUpdater.apply, []

    def count(self: DirectUpdater, gradients: RowGradients) -> None:
        calls.append(gradients.num_rows)
        apply(self, gradients)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DirectUpdater, "apply", count)
        yield calls


def epochs(rank: int, world_size: int) -> tuple[float, int]:
    """Evaluate, then train two epochs, one a single batch, with each pipeline.

    Returns:
        The gap between the pipelines' results, and how many more rows ours updated.
    """
    batches = [step[rank] for step in make_stream(ROWS, STEPS)]
    ends, num_updates = [], []
    for kind in (TrainPipelineSparseDist, tdsp.TrainPipelineRowPrefetch):
        parallel = sharded(ROWS)
        pipeline: Any = kind(parallel, make_optimizer(parallel), rank_device())
        with torch.no_grad():
            parallel.eval()
            drain(pipeline, batches[:3])
            parallel.train()
        with counting_updates() as calls:
            drain(pipeline, batches)
            drain(pipeline, batches[:1])
            ends.append(snapshot(parallel))
        num_updates.append(sum(calls))
    return largest_gap(*ends), num_updates[1] - num_updates[0]


def test_each_row_is_updated_once_in_all_epochs(ranks4: RankPool) -> None:
    for gap, num_more_updates in ranks4.run(epochs):
        assert gap <= KERNEL_ROUNDING
        # On GPUs other updaters run, and the gap alone would show a second update.
        assert num_more_updates == 0


def heard(rank: int, world_size: int, cell: Cell) -> list[str]:
    """Return the beginnings of the pipeline's log messages."""
    with logged("torchrec_2dsp.parallel.pipelines") as messages:
        run(sharded(cell), [step[rank] for step in make_stream(cell, 3)])
    return [message[:38] for message in messages]


def test_a_pipeline_says_where_no_rows_can_come_early(ranks4: RankPool) -> None:
    assert ranks4.run(heard, ROWS) == [[]] * 4
    for cell in (replace(ROWS, mesh=tdsp.Mesh2D(2, 2)), Cell(ONE, "table_wise")):
        once = ["no rows can travel beside computing: n"]
        assert ranks4.run(heard, cell) == [once, [], [], []], cell


ONE_GROUP_ROWS = Cell(tdsp.Mesh2D(1, 4), exchange="row")
SEEN = {
    (RowJourney, "send_late"): "late rows leave",
    (RowRequests, "forward"): "ids of a later batch leave",
    (RowJourney, "send_gradients"): "row gradients leave",
    (RowJourney, "receive_gradients"): "row gradients are waited for",
}


class ScaledModel(LossModel):
    """Computes a value before the lookup whose gradient comes after it, like a bottom MLP."""

    def __init__(self, spec: Any) -> None:
        super().__init__(spec)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, features: KeyedJaggedTensor) -> tuple[torch.Tensor, torch.Tensor]:
        scale = self.scale * 2
        scores = BagModel.forward(self, features) * scale
        return local_loss(scores), scores.detach()


def events_of_a_step(rank: int, world_size: int) -> list[str]:
    torch.manual_seed(0)
    parallel = shard(ONE_GROUP_ROWS, make_sharder(ONE_GROUP_ROWS), ScaledModel(ONE_GROUP_ROWS.spec))
    pipeline: Any = tdsp.TrainPipelineRowPrefetch(parallel, make_optimizer(parallel), rank_device())
    stream = iter([step[rank] for step in make_stream(ONE_GROUP_ROWS, STEPS)])
    for _ in range(2):
        pipeline.progress(stream)
    events: list[str] = []
    (scale,) = (entry for name, entry in parallel.named_parameters() if name.endswith("scale"))
    scale.register_hook(lambda grad: events.append("dense gradients are there"))
    with pytest.MonkeyPatch.context() as patch:
        for (kind, name), what in SEEN.items():
            patch.setattr(kind, name, _noting(getattr(kind, name), what, events))
        pipeline.progress(stream)
    # With several kernels, each event comes once for each.
    return [event for event, _ in itertools.groupby(events)]


def _noting(method: Any, what: str, events: list[str]) -> Any:
    def noting(*arguments: Any, **named: Any) -> Any:
        events.append(what)
        return method(*arguments, **named)

    return noting


def test_late_rows_leave_first_and_row_gradients_are_waited_for_last(ranks4: RankPool) -> None:
    assert (
        ranks4.run(events_of_a_step)
        == [
            [
                "late rows leave",
                "ids of a later batch leave",
                "row gradients leave",
                "dense gradients are there",
                "row gradients are waited for",
            ]
        ]
        * 4
    )
