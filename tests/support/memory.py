"""Measure plans' memory beside the cost model's prediction.

    python -m tests.support.memory [CASE ...]

prints a row for each case. A rank's growth is its peak resident memory while it trains, minus the
resident memory before the model is sharded. Everything ran once before, with tiny tables, so that
code, connections and threads don't count.
"""

import gc
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

import torchrec_2dsp as tdsp
from tests.support.models import ModelSpec, TableSpec, build
from tests.support.parity import ONE, TWO, Cell, group_plan, make_sharder
from tests.support.ranks import RankPool
from torchrec_2dsp.cost.model import CostModel, MemoryCost
from torchrec_2dsp.cost.workload import Workload
from torchrec_2dsp.plan.parameter_sharding import Pipeline
from torchrec_2dsp.planner.search.candidates import candidates_of
from torchrec_2dsp.programs.bench.machine import give_back_memory, peak_bytes, resident_bytes

DIM, STEPS = 64, 6
LARGE = (800_000, 800_000, *[200_000] * 6)
SMALL = (64,) * 8


@dataclass(frozen=True)
class Case:
    """A plan, and how it is trained."""

    cell: Cell
    ids_per_bag: int = 1
    prefetches: bool = False
    batch_size: int = 8_192


HOT = tuple((f"t{number}", tuple(range(20_000))) for number in range(8))
CASES = {
    "table_wise": Case(Cell(ONE, "table_wise")),
    "row_wise": Case(Cell(ONE, "row_wise")),
    "column_wise": Case(Cell(ONE, "column_wise")),
    "table_row_wise": Case(Cell(ONE, "table_row_wise")),
    "adagrad": Case(Cell(ONE, "table_wise", optimizer="adagrad")),
    "bags of eight": Case(Cell(ONE, "table_wise"), ids_per_bag=8),
    "rows": Case(Cell(ONE, "row_wise", exchange="row")),
    "rows per host": Case(Cell(ONE, "row_wise", exchange="row_per_host")),
    "rows prefetched": Case(Cell(ONE, "row_wise", exchange="row"), prefetches=True),
    "nonempty": Case(Cell(ONE, "table_wise", exchange="nonempty")),
    "hot rows": Case(Cell(ONE, "row_wise", exchange="row", hot_rows=HOT)),
    "exact": Case(Cell(TWO, "row_wise")),
    "exact, few samples": Case(Cell(TWO, "row_wise"), batch_size=512),
    "averaged": Case(Cell(TWO, "row_wise", sync=tdsp.WeightSync())),
    "averaged whole": Case(Cell(TWO, "row_wise", sync=tdsp.WeightSync(rows=tdsp.SyncedRows.ALL))),
}


class Tables(nn.Module):
    """Tables and nothing else: their outputs are just summed."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.bags = build(spec, device="meta").ebc

    def forward(self, features: KeyedJaggedTensor) -> tuple[torch.Tensor, torch.Tensor]:
        bags: KeyedTensor = self.bags(features)  # pyright: ignore[reportCallIssue]
        loss = bags.values().sum()
        return loss, loss.detach()


def grown(rank: int, world_size: int, case: Case) -> tuple[int, MemoryCost]:
    """Return the bytes by which this rank grew, and the cost predicted for the fullest rank."""
    gc.freeze()
    _train(rank, case, SMALL, batch_size=4)
    give_back_memory()
    before = resident_bytes()
    # Resets the peak.
    Path("/proc/self/clear_refs").write_text("5")
    expected = _train(rank, case, LARGE, case.batch_size)
    highest = peak_bytes()
    assert before is not None
    assert highest is not None
    return highest - before, expected


def _train(rank: int, case: Case, num_rows: tuple[int, ...], batch_size: int) -> MemoryCost:
    spec = ModelSpec(
        tuple(TableSpec(f"t{n}", rows, DIM, (f"f{n}",)) for n, rows in enumerate(num_rows))
    )
    hot_rows = tuple(
        (name, tuple(row for row in chosen if row < num_rows[number]))
        for number, (name, chosen) in enumerate(case.cell.hot_rows)
    )
    cell = replace(case.cell, spec=spec, hot_rows=hot_rows)
    model, sharder = Tables(spec), make_sharder(cell)
    local_world_size = int(os.environ["LOCAL_WORLD_SIZE"])
    plan = group_plan(cell, model, sharder)
    expected = _expected(case, model, sharder, plan, batch_size, local_world_size)
    parallel = tdsp.ModelParallel2D(
        module=model,
        device=torch.device("cpu"),
        plan=plan,
        sharders=[sharder],  # type: ignore[list-item]
    )
    kind = tdsp.TrainPipelineRowPrefetch if case.prefetches else TrainPipelineSparseDist
    pipeline = kind(parallel, parallel.fused_optimizer, torch.device("cpu"))
    batches = _batches(rank, spec, batch_size, case.ids_per_bag)
    while True:
        try:
            pipeline.progress(batches)
        except StopIteration:
            return expected
        parallel.sync()


def _expected(
    case: Case,
    model: nn.Module,
    sharder: object,
    plan: tdsp.Plan2D,
    batch_size: int,
    local_world_size: int,
) -> MemoryCost:
    workload = Workload.of_model(model, batch_size=batch_size)
    # With the optimizer's state, which a sharder knows about.
    candidates = candidates_of(model, [sharder], None, workload, "cpu")  # type: ignore[list-item]
    tables = {
        candidate.name: replace(candidate.work, ids_per_sample=float(case.ids_per_bag))
        for candidate in candidates
    }
    pipeline = Pipeline.ROW_PREFETCH if case.prefetches else Pipeline.SPARSE_DIST
    plan, workload = replace(plan, pipeline=pipeline), replace(workload, tables=tables)
    calibration = tdsp.Calibration.load("configs/hardware/emulated_1gbit.toml")
    return CostModel(calibration, local_world_size).memory_cost(plan, workload)


def _batches(
    rank: int, spec: ModelSpec, batch_size: int, ids_per_bag: int
) -> Iterator[KeyedJaggedTensor]:
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(1_000 * rank + step)
        count = batch_size * ids_per_bag
        ids = [
            torch.randint(table.num_rows, (count,), generator=generator) for table in spec.tables
        ]
        lengths = torch.full((len(ids) * batch_size,), ids_per_bag)
        keys = [feature for feature, _ in spec.features]
        yield KeyedJaggedTensor(keys=keys, values=torch.cat(ids), lengths=lengths)


def measured(name: str) -> tuple[int, MemoryCost]:
    """Return the growth of the fullest among four ranks on two hosts, and the prediction."""
    # New processes each time: memory that earlier cases freed would be there already.
    with RankPool(4, local_world_size=2) as ranks:
        actual = ranks.run(grown, CASES[name], timeout_s=200)
    return max(size for size, _ in actual), actual[0][1]


def main(names: list[str]) -> None:
    """Print the table of measurements."""
    print("| plan | expected MB | grown MB | expected / grown | largest parts |")
    print("| --- | ---: | ---: | ---: | --- |")
    for name in names or list(CASES):
        size, cost = measured(name)
        parts = sorted(cost.parts(), key=lambda part: -part[1])[:3]
        message = ", ".join(
            f"{part.replace('_', ' ')} {num / 1e6:.1f}" for part, num in parts if num
        )
        total = cost.total_bytes
        print(f"| {name} | {total / 1e6:.1f} | {size / 1e6:.1f} | {total / size:.2f} | {message} |")


if __name__ == "__main__":
    main(sys.argv[1:])
