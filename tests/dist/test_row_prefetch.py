"""Rows that come early: weights and losses stay those of the plain loop, bit for bit."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import pytest
import torch
from torchrec.distributed.fbgemm_qcomm_codec import (
    CommType,
    QCommsConfig,
    get_qcomm_codecs_registry,
)
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import torchrec_2dsp as tdsp
from tests.support.loops import LossModel, Tensors, largest_gap, make_stream, shard, snapshot
from tests.support.models import MIXED, SEQUENCE_TABLES, ModelSpec, SequenceModel, TableSpec
from tests.support.parity import Cell, make_optimizer, make_sharder
from tests.support.ranks import RankPool
from torchrec_2dsp.comms.counting import count_collectives
from torchrec_2dsp.shard.early_rows import RowJourney

ONE = tdsp.Mesh2D(1, 4)
ROWS = Cell(ONE, exchange="row")
SEQUENCE = ModelSpec(SEQUENCE_TABLES, sequence=True)
HOT_ROWS = (("t0", (0, 1, 5, 39)), ("t1", (0, 2)))
STEPS = 6


class SequenceLossModel(SequenceModel):
    """What pipelines can trace."""

    def forward(self, features: KeyedJaggedTensor) -> Any:
        sequences = self.ec(features)
        loss = sum(sequences[name].values().tanh().pow(2).sum() for name in self.features)
        return loss, loss.detach()


@dataclass(frozen=True)
class Trained:
    """What one loop has made of a cell."""

    tensors: Tensors
    losses: list[float]
    num_early: int
    """Rows that came to this rank early, in all steps."""
    num_late: int
    """Rows that came late, of the steps that had early ones."""


def sharded(cell: Cell, qcomms: CommType | None = None) -> DistributedModelParallel:
    sharder: Any = make_sharder(cell)
    if qcomms is not None:
        sharder._qcomm_codecs_registry = get_qcomm_codecs_registry(
            QCommsConfig(qcomms, qcomms), device=torch.device("cpu")
        )
    torch.manual_seed(0)
    model = (SequenceLossModel if cell.spec.sequence else LossModel)(cell.spec)
    return shard(cell, sharder, model)


@contextmanager
def counting_rows() -> Iterator[list[tuple[int, int]]]:
    """How many rows came early and late, journey by journey that began."""
    seen: list[tuple[int, int]] = []
    fetch = RowJourney.fetch

    def counted(self: RowJourney, owned: torch.Tensor) -> Any:
        early, late = self._num_wanted
        seen.append((sum(early), sum(late)))
        return fetch(self, owned)

    RowJourney.fetch = counted  # type: ignore[method-assign]
    try:
        yield seen
    finally:
        RowJourney.fetch = fetch  # type: ignore[method-assign]


def run(
    parallel: DistributedModelParallel,
    batches: Sequence[KeyedJaggedTensor],
    kind: type[TrainPipelineSparseDist] = tdsp.TrainPipelineRowPrefetch,
    between: Any = None,
) -> Trained:
    """Train all batches; ``between(step, parallel, pipeline)`` is called after each step."""
    pipeline: Any = kind(parallel, make_optimizer(parallel), torch.device("cpu"))
    stream, losses = iter(batches), []
    with counting_rows() as seen:
        for step in range(len(batches)):
            losses.append(float(pipeline.progress(stream).sum()))
            if between is not None:
                between(step, parallel, pipeline)
    with pytest.raises(StopIteration):
        pipeline.progress(stream)
    early, late = (sum(counts) for counts in zip(*seen, strict=True)) if seen else (0, 0)
    return Trained(snapshot(parallel), losses, early, late)


def compare(
    rank: int, cell: Cell, between: Any = None, qcomms: CommType | None = None
) -> tuple[float, int, int]:
    """The largest gap of a weight or a loss to TorchRec's pipeline; early and late rows."""
    batches = [step[rank] for step in make_stream(cell, STEPS)]
    expected = run(sharded(cell, qcomms), batches, TrainPipelineSparseDist, between)
    found = run(sharded(cell, qcomms), batches, between=between)
    assert expected.num_early == 0
    losses = zip(found.losses, expected.losses, strict=True)
    gap = max(largest_gap(found.tensors, expected.tensors), *(abs(a - b) for a, b in losses))
    return gap, found.num_early, found.num_late


def compare_all(rank: int, world_size: int, cells: list[Cell]) -> list[tuple[float, int, int]]:
    return [compare(rank, cell) for cell in cells]


def check(ranks: RankPool, cells: list[Cell]) -> None:
    answers = ranks.run(compare_all, cells, timeout_s=200)
    for cell, by_rank in zip(cells, zip(*answers, strict=True), strict=True):
        for gap, num_early, num_late in by_rank:
            assert gap == 0.0, f"{cell}: {gap}"
            assert num_early > 0, f"{cell}: no row came early"
            assert num_late > 0, f"{cell}: no row came late"


def test_bags_train_as_without(ranks4: RankPool) -> None:
    specs = (ModelSpec(), ModelSpec(pooling="mean"), ModelSpec(weighted=True), MIXED)
    cells = [replace(ROWS, spec=spec) for spec in specs]
    cells += [replace(ROWS, optimizer=one, hot_rows=HOT_ROWS) for one in ("sgd", "adagrad")]
    cells += [replace(ROWS, owners="hash"), replace(ROWS, sync=tdsp.WeightSync())]
    check(ranks4, cells)


def test_sequences_train_as_without(ranks4: RankPool) -> None:
    check(ranks4, [replace(ROWS, spec=SEQUENCE, hot_rows=hot) for hot in ((), HOT_ROWS[:1])])


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
        replace(ROWS, always_capture=True),
        Cell(ONE, "table_wise"),
        replace(ROWS, spec=replace(ModelSpec(), tables=(TableSpec("t0", 1, 8, ("f0",)),))),
    ]
    for answers in ranks4.run(compare_all, cells, timeout_s=200):
        assert [gap for gap, _, _ in answers] == [0.0] * len(cells)
        assert [num_early for _, num_early, _ in answers] == [0] * len(cells)


def load_after_two_steps(step: int, parallel: Any, pipeline: Any) -> None:
    if step == 2:
        state = {name: value for name, value in parallel.state_dict().items()}
        for value in state.values():
            shards = value.local_shards() if hasattr(value, "local_shards") else []
            for one in shards:
                one.tensor = one.tensor * 2
        parallel.load_state_dict(state)


def refresh_after_two_steps(step: int, parallel: Any, pipeline: Any) -> None:
    if step == 2:
        parallel.refresh_hot_sets({"t0": [2, 3, 4, 7], "t1": [1, 5]})


def train_otherwise_after_two_steps(step: int, parallel: Any, pipeline: Any) -> None:
    if step == 2:
        model = pipeline.detach()
        cell = replace(ROWS, seed=1)
        rank = torch.distributed.get_rank()
        (batch,) = (step[rank] for step in make_stream(cell, 1))
        loss, _ = model(batch)
        loss.backward()
        pipeline.attach(model)


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
    "read": read_after_each_step,
    "evaluate": evaluate_after_two_steps,
}


def interrupted(rank: int, world_size: int, names: list[str]) -> list[tuple[float, int, int]]:
    hot = {"refresh": HOT_ROWS, "read": HOT_ROWS}
    return [
        compare(rank, replace(ROWS, hot_rows=hot.get(name, ())), BETWEEN[name]) for name in names
    ]


def test_what_is_done_between_steps_is_seen(ranks4: RankPool) -> None:
    """Weights are loaded, hot sets renewed, other loops train, tables are read."""
    for answers in ranks4.run(interrupted, list(BETWEEN), timeout_s=200):
        for name, (gap, num_early, _) in zip(BETWEEN, answers, strict=True):
            # Batches that are on their way keep the old hot rows, and here one more is.
            assert gap <= (1e-6 if name == "refresh" else 0.0), f"{name}: {gap}"
            assert num_early > 0, name


def quantised(rank: int, world_size: int, qcomms: CommType) -> tuple[float, int, int]:
    return compare(rank, ROWS, qcomms=qcomms)


def test_quantised_rows_train_as_without(ranks4: RankPool) -> None:
    for gap, num_early, _ in ranks4.run(quantised, CommType.FP16):
        assert gap == 0.0
        assert num_early > 0


def bytes_of_exchanges(rank: int, world_size: int, cell: Cell) -> tuple[int, int, int]:
    """All that all-to-alls send from this rank: with TorchRec's pipeline and with this one; and
    the rows that it is asked for in the steps that have early ones."""
    batches = [step[rank] for step in make_stream(cell, STEPS)]
    sent = []
    for kind in (TrainPipelineSparseDist, tdsp.TrainPipelineRowPrefetch):
        parallel = sharded(cell)
        with count_collectives() as seen:
            trained = run(parallel, batches, kind)
        exchanges = [one for one in seen.records if one.op == "all_to_all_single"]
        sent.append(sum(one.num_bytes for one in exchanges))
    return sent[0], sent[1], trained.num_early + trained.num_late


def test_a_row_costs_one_byte_more(ranks4: RankPool) -> None:
    answers = ranks4.run(bytes_of_exchanges, ROWS)
    without, with_early, rows = (sum(of_ranks) for of_ranks in zip(*answers, strict=True))
    assert with_early - without == rows > 0
