"""Stochastically rounded 16- and 8-bit tables equal the unsharded model's, wherever rows are.

The gradients here are small integers, whose sums are exact in any order. So only updates round,
and every shard, copy and hot row must be bitwise equal to a plain oracle.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torchrec.modules.embedding_configs import DataType

import torchrec_2dsp as tdsp
from tests.support.devices import rank_device
from tests.support.models import HOT_ROWS, BagModel, ModelSpec, build
from tests.support.oracle import batch_of, float32
from tests.support.parity import (
    FOUR,
    FUSED,
    LR,
    ONE,
    TWO,
    Cell,
    local_shards,
    make_sharder,
    shard,
    shards_of,
)
from tests.support.prefetching import counting_rows
from tests.support.ranks import RankPool
from tests.support.rounding import draw, rounded_rows
from torchrec_2dsp.optim import RuleArguments
from torchrec_2dsp.plan.parameter_sharding import Pipeline
from torchrec_2dsp.rows.eight_bits import decoded, encoded, plain
from torchrec_2dsp.rows.update import RULES, RULES_WITHOUT_KERNEL

pytestmark = pytest.mark.dealt_file

SPEC, IN_BF16, IN_INT8 = (
    ModelSpec(data_type=kind) for kind in (DataType.FP16, DataType.BF16, DataType.FP32)
)
DTYPES = {SPEC: torch.float16, IN_BF16: torch.bfloat16, IN_INT8: torch.float32}
STEPS, SIZES, MAX_LENGTH, SEED = 4, (6, 5, 3, 6), 4, 17
ROUNDED = Cell(ONE, spec=SPEC, rounding_seed=SEED)
EIGHT_BITS = replace(ROUNDED, spec=IN_INT8, stored_as="int8")
RATE = LR / 16
"""So small that most updates are less than float16's rounding."""


def integer_model(spec: ModelSpec) -> BagModel:
    """Build a model whose scores are integer combinations of looked up numbers."""
    model = build(spec)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        draws = torch.randint(1, 4, model.over.weight.shape, generator=generator)
        model.over.weight.copy_(draws)
    assert isinstance(model, BagModel)
    return model


def gradients(rank: int, step: int) -> dict[str, dict[int, torch.Tensor]]:
    """Return the gradients of a rank's score sum, by table and row."""
    model = integer_model(SPEC)
    batch = batch_of(SPEC, 0, SIZES, MAX_LENGTH, step, rank=rank)
    sums: dict[str, dict[int, torch.Tensor]] = {table.name: {} for table in SPEC.tables}
    parts = model.over.weight.detach()[0].split([table.dim for _, table in SPEC.features])
    for (feature, table), part in zip(SPEC.features, parts, strict=True):
        for row in batch[feature].values().tolist():
            sums[table.name][row] = sums[table.name].get(row, torch.zeros(table.dim)) + part
    return sums


class Twin:
    """The unsharded tables, trained on whole batches and rounded number by number."""

    def __init__(
        self,
        optimizer: str,
        eps: float,
        seed: int | None,
        spec: ModelSpec = SPEC,
        hot_rows: tuple[tuple[str, tuple[int, ...]], ...] = (),
    ) -> None:
        """Keep float32 tables in 8 bits, except for their hot rows."""
        kind = FUSED[optimizer]
        self._rule, self._seed = (RULES | RULES_WITHOUT_KERNEL)[kind], seed
        self._eps, self._num_steps = float32(eps), 0
        model, self.dtype = build(spec), DTYPES[spec]
        self.weights = {
            table.name: model.state_dict()[f"ebc.embedding_bags.{table.name}.weight"].to(self.dtype)
            for table in SPEC.tables
        }
        self._hot_rows = {name: torch.tensor(rows) for name, rows in hot_rows}
        if self.dtype is torch.float32:
            self.weights = {
                name: self._in_8_bits(name, list(range(len(rows))), rows, seed=None)
                for name, rows in self.weights.items()
            }
        has_average = optimizer in ("adam", "partial_adam")
        row_wise = optimizer in ("rowwise_adagrad", "partial_adam")
        self.states = {
            name: [torch.zeros(weight.shape)] * has_average
            + [torch.zeros(weight.shape[:1] if row_wise else weight.shape)] * (optimizer != "sgd")
            for name, weight in self.weights.items()
        }

    def step(self, ranks: Sequence[int]) -> None:
        """Update once by these ranks' mean gradient."""
        self._num_steps += 1
        for name, weight in self.weights.items():
            total: dict[int, torch.Tensor] = {}
            for rank in ranks:
                for row, grad in gradients(rank, self._num_steps - 1)[name].items():
                    total[row] = total.get(row, torch.zeros(grad.shape)) + grad
            rows = sorted(total)
            if not rows:
                continue
            grad = torch.stack([total[row] for row in rows]) / len(ranks)
            states = [state[rows] for state in self.states[name]]
            old = weight[rows].float()
            args = RuleArguments(
                lr=float32(RATE),
                eps=self._eps,
                beta1=float32(0.9),
                beta2=float32(0.999),
                weight_decay=0.0,
                iteration=self._num_steps,
            )
            change = self._rule(grad, *states, weights=lambda old=old: old, args=args)
            for state, of_rows in zip(self.states[name], states, strict=True):
                state[rows] = of_rows
            key = {"seed": self._seed, "step": self._num_steps, "table": name, "rows": rows}
            new = old - change
            if self.dtype is torch.float32:
                weight[rows] = self._in_8_bits(name, rows, new, seed=self._seed)
            elif self._seed is None:
                weight[rows] = new.to(self.dtype)
            else:
                weight[rows] = rounded_rows(new, self.dtype, **key)

    def make_hot(self, hot_rows: tuple[tuple[str, tuple[int, ...]], ...]) -> None:
        """Round formerly hot rows, and keep the new hot rows exact."""
        self._hot_rows = {name: torch.tensor(rows) for name, rows in hot_rows}
        for name, rows in self.weights.items():
            rows.copy_(self._in_8_bits(name, list(range(len(rows))), rows, seed=None))

    def _in_8_bits(
        self, table: str, rows: list[int], values: torch.Tensor, *, seed: int | None
    ) -> torch.Tensor:
        draws = None
        if seed is not None:
            key = seed, self._num_steps, table
            columns = range(values.shape[1])
            drawn = [[draw(*key, row, column) for column in columns] for row in rows]
            draws = torch.tensor(drawn).to(torch.int16)
        hot = self._hot_rows.get(table, torch.empty(0))
        is_hot = torch.isin(torch.tensor(rows), hot)[:, None]
        return torch.where(is_hot, values, decoded(encoded(values, draws)))


def trained_twin(cell: Cell) -> Twin:
    """Return the unsharded tables after all steps."""
    hot_rows = cell.hot_rows if cell.spec == IN_INT8 else ()
    return _trained_twin(cell.optimizer, cell.eps, cell.rounding_seed, cell.spec, hot_rows)


@lru_cache
def _trained_twin(*key: Any) -> Twin:
    twin = Twin(*key)
    for _ in range(STEPS):
        twin.step(range(4))
    return twin


def sharded(cell: Cell) -> Any:
    sharder = make_sharder(cell)
    sharder.fused_params["learning_rate"] = RATE
    return shard(cell, sharder, integer_model(cell.spec))


def train(parallel: Any, rank: int, steps: range) -> None:
    for step in steps:
        parallel(batch_of(SPEC, 0, SIZES, MAX_LENGTH, step, rank=rank)).sum().backward()
        parallel.fused_optimizer.step()


def check(parallel: Any, twin: Twin) -> int:
    """Compare this rank's shards and moments; count the numbers that differ from the start."""
    spec = next(spec for spec, dtype in DTYPES.items() if dtype is twin.dtype)
    start, num_moved = Twin("sgd", 0.0, None, spec).weights, 0
    for name, value in parallel.state_dict().items():
        if not name.startswith("ebc"):
            continue
        table = name.split(".")[-2]
        for weight, (row, column) in local_shards(value):
            place = slice(row, row + weight.shape[0]), slice(column, column + weight.shape[1])
            assert weight.dtype is twin.dtype
            assert torch.equal(plain(weight).cpu(), twin.weights[table][place]), name
            num_moved += int((plain(weight).cpu() != start[table][place]).sum())
    for of_table in shards_of(parallel):
        states = [state for name, state in of_table.tensors.items() if name != "weight"]
        for state, wanted in zip(states, twin.states[of_table.table], strict=True):
            part = wanted[of_table.row : of_table.row + state.shape[0]]
            if state.dim() == 2:
                part = part[:, of_table.column : of_table.column + state.shape[1]]
            assert torch.equal(state.cpu(), part), of_table.table
    return num_moved


def bits_after_training(rank: int, world_size: int, cell: Cell) -> int:
    parallel = sharded(cell)
    train(parallel, rank, range(STEPS))
    return check(parallel, trained_twin(cell))


WAYS: tuple[dict[str, Any], ...] = (
    {"sharding": "table_wise"},
    {"sharding": "row_wise", "hot_rows": HOT_ROWS},
    {"sharding": "row_wise", "exchange": "row"},
    {"sharding": "row_wise", "exchange": "row", "owners": "hash", "hot_rows": HOT_ROWS},
    {"sharding": "data_parallel"},
)
IN_8_BITS: tuple[dict[str, Any], ...] = (
    {"sharding": "table_wise", "optimizer": "sgd"},
    {"hot_rows": HOT_ROWS},
    {"exchange": "row", "optimizer": "adagrad"},
    {"exchange": "row", "hot_rows": HOT_ROWS, "optimizer": "sgd"},
    {"exchange": "row_per_host", "hot_rows": HOT_ROWS, "sync": tdsp.GradientSync(delay=1)},
    {"exchange": "nonempty", "optimizer": "adam"},
    {"sharding": "table_row_wise", "accumulates": True},
)
LATE = tdsp.GradientSync(delay=1)
OTHER_WAYS: tuple[dict[str, Any], ...] = (
    {"sharding": "column_wise", "optimizer": "adagrad"},
    {"sharding": "table_row_wise", "optimizer": "adagrad"},
    {"exchange": "nonempty", "hot_rows": HOT_ROWS},
    {"exchange": "row", "owners": "hash", "accumulates": True},
    {"sync": LATE, "exchange": "row_per_host", "hot_rows": HOT_ROWS},
    {"in_world": ("t1",), "sync": LATE},
    {"rounding_seed": 0, "optimizer": "partial_adam"},
)
IN_TURN = ("sgd", "rowwise_adagrad", "adagrad", "adam", "sgd")
TRAINED: dict[str, list[Cell]] = {
    **{
        name: [replace(ROUNDED, optimizer=name, **way) for way in WAYS]
        for name in ("sgd", "rowwise_adagrad", "adagrad", "adam")
    },
    "BF16": [
        replace(ROUNDED, spec=IN_BF16, optimizer=name, **way)
        for name, way in zip(IN_TURN, WAYS, strict=True)
    ],
    "8 bits": [replace(EIGHT_BITS, **way) for way in IN_8_BITS],
    "others": [replace(ROUNDED, **way) for way in OTHER_WAYS],
}
"""Cells of one group; rounded at random, those in BF16 and in 8 bits also to the nearest."""
TRAINED |= {
    f"{name} to the nearest": [replace(cell, rounding_seed=None) for cell in TRAINED[name]]
    for name in ("BF16", "8 bits")
}


@pytest.mark.parametrize("mesh", [ONE, TWO, FOUR], ids=str)
@pytest.mark.parametrize("name", TRAINED)
def test_all_copies_have_the_bits_of_the_unsharded_model(
    ranks4: RankPool, mesh: tdsp.Mesh2D, name: str
) -> None:
    for cell in TRAINED[name]:
        if mesh.num_groups > 1 or not cell.in_world:
            assert sum(ranks4.run(bits_after_training, replace(cell, mesh=mesh))) > 0, cell


def bits_after_averages(rank: int, world_size: int, cell: Cell) -> int:
    parallel, groups = sharded(cell), cell.mesh.rank_matrix()
    twins = [Twin(cell.optimizer, cell.eps, cell.rounding_seed) for _ in groups]
    for step in range(STEPS):
        train(parallel, rank, range(step, step + 1))
        parallel.sync()
        for twin, ranks in zip(twins, groups, strict=True):
            twin.step(ranks)
        for name in twins[0].weights:
            copies = torch.stack([twin.weights[name].double() for twin in twins])
            for twin in twins:
                twin.weights[name] = copies.mean(dim=0).to(twin.dtype)
    return check(parallel, twins[0])


@pytest.mark.parametrize("rows", list(tdsp.SyncedRows))
def test_groups_round_alike_between_averages_to_the_nearest(
    ranks4: RankPool, rows: tdsp.SyncedRows
) -> None:
    """This needs two groups: averages over more sum numbers or changes in fp16, and round there."""
    sync = tdsp.WeightSync(rows=rows)
    for exchange in ("pooled", "row"):
        cell = replace(ROUNDED, mesh=TWO, optimizer="sgd", sync=sync, exchange=exchange)
        assert sum(ranks4.run(bits_after_averages, cell)) > 0, cell


class SumModel(BagModel):
    """Returns the sum of scores as the loss, as pipelines want it."""

    def forward(self, features: Any) -> Any:
        loss = super().forward(features).sum()
        return loss, loss.detach()


def bits_after_a_pipeline(rank: int, world_size: int, cell: Cell) -> int:
    model = SumModel(cell.spec)
    model.load_state_dict(integer_model(cell.spec).state_dict())
    sharder = make_sharder(cell)
    sharder.fused_params["learning_rate"] = RATE
    parallel: Any = shard(cell, sharder, model)
    pipeline = tdsp.TrainPipelineRowPrefetch(parallel, parallel.fused_optimizer, rank_device())
    batches = [batch_of(SPEC, 0, SIZES, MAX_LENGTH, step, rank=rank) for step in range(STEPS)]
    with counting_rows() as seen:
        stream = iter(batches)
        for _ in batches:
            pipeline.progress(stream)
    assert check(parallel, trained_twin(cell)) > 0
    return sum(counts.lagging for counts in seen)


def test_lagging_gradients_are_rounded_as_of_their_step(ranks4: RankPool) -> None:
    for tables in (ROUNDED, EIGHT_BITS):
        cell = replace(tables, exchange="row", pipeline=Pipeline.ROW_PREFETCH)
        assert sum(ranks4.run(bits_after_a_pipeline, cell)) > 0


def bits_after_a_resume(
    rank: int, world_size: int, saved: Cell, resumed: Cell, folder: Path
) -> int:
    parallel = sharded(saved)
    train(parallel, rank, range(2))
    tdsp.save_checkpoint(
        folder, parallel, parallel.fused_optimizer, train_state=tdsp.TrainState(parallel, None)
    )
    parallel = sharded(resumed)
    train(parallel, rank, range(1))
    tdsp.load_checkpoint(
        folder, parallel, parallel.fused_optimizer, train_state=tdsp.TrainState(parallel, None)
    )
    train(parallel, rank, range(2, STEPS))
    return check(parallel, trained_twin(resumed))


def test_a_resumed_run_goes_on_with_the_same_bits_on_any_mesh(
    ranks4: RankPool, tmp_path: Path
) -> None:
    cells = [
        replace(ROUNDED, mesh=TWO, hot_rows=HOT_ROWS),
        replace(ROUNDED, exchange="row"),
        replace(ROUNDED, mesh=TWO, sharding="table_wise"),
        replace(ROUNDED, mesh=FOUR, exchange="row", owners="hash", hot_rows=HOT_ROWS),
    ]
    in_8_bits = [
        replace(EIGHT_BITS, mesh=TWO, hot_rows=HOT_ROWS),
        replace(EIGHT_BITS, exchange="row", hot_rows=HOT_ROWS),
    ]
    pairs = [*product(cells, cells), *product(in_8_bits, in_8_bits)]
    for number, (saved, resumed) in enumerate(pairs):
        ends = ranks4.run(bits_after_a_resume, saved, resumed, tmp_path / str(number))
        assert sum(ends) > 0, (saved, resumed)


OTHERS = (("t0", (1, 7)), ("t1", (3,)))


def bits_after_a_refresh(rank: int, world_size: int, cell: Cell) -> int:
    parallel = sharded(cell)
    train(parallel, rank, range(2))
    parallel.refresh_hot_sets({name: tdsp.HotSet(rows) for name, rows in OTHERS})
    train(parallel, rank, range(2, STEPS))
    twin = Twin(cell.optimizer, cell.eps, cell.rounding_seed, cell.spec, cell.hot_rows)
    for step in range(STEPS):
        if step == 2:
            twin.make_hot(OTHERS)
        twin.step(range(4))
    return check(parallel, twin)


def test_rows_that_cease_to_be_hot_are_rounded(ranks4: RankPool) -> None:
    cell = replace(EIGHT_BITS, mesh=TWO, exchange="row", hot_rows=HOT_ROWS)
    assert sum(ranks4.run(bits_after_a_refresh, cell)) > 0


def test_another_seed_or_none_gives_other_bits() -> None:
    cells = [replace(ROUNDED, optimizer="sgd", eps=0.0, rounding_seed=n) for n in (0, 1, None)]
    twins = [trained_twin(cell).weights for cell in cells]
    for first, second in ((0, 1), (1, 2), (0, 2)):
        assert not torch.equal(twins[first]["t1"], twins[second]["t1"])
