"""Changing hot rows while a model trains loses nothing and leaves losses unchanged."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import pytest
import torch
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import torchrec_2dsp as tdsp
from tests.support.loops import (
    PIPELINES,
    make_stream,
    pipeline_loop,
    plain_loop,
    shard,
    shard_loss_model,
    shard_tables,
    snapshot,
)
from tests.support.models import HOT_ROWS, SEQUENCES, ModelSpec
from tests.support.oracle import local_loss
from tests.support.parity import (
    ONE,
    TOLERANCE,
    TWO,
    Cell,
    compare,
    make_optimizer,
    make_oracle,
)
from tests.support.ranks import RankPool, error_text

pytestmark = pytest.mark.dealt_file

HOT = Cell(ONE, "table_wise", hot_rows=HOT_ROWS)
HOT_SEQUENCES = replace(HOT, spec=SEQUENCES)
SETS = [
    {"t0": tdsp.HotSet((1, 2, 3)), "t1": tdsp.HotSet((1, 23))},
    {"t1": tdsp.HotSet((0, 22))},
    {"t0": tdsp.HotSet((0, 1, 5, 38)), "t1": tdsp.HotSet((0,))},
]
CELLS = [
    HOT,
    replace(HOT, sharding="column_wise", optimizer="adagrad"),
    replace(HOT, sharding="row_wise", mesh=TWO, exchange="nonempty", spec=ModelSpec(weighted=True)),
    replace(HOT, sharding="row_wise", exchange="row", spec=ModelSpec(pooling="mean")),
    replace(HOT, sharding="row_wise", mesh=TWO, exchange="row", owners="hash"),
    replace(HOT, mesh=TWO, optimizer="sgd", sync=tdsp.WeightSync()),
    replace(HOT, sharding="row_wise", mesh=TWO, exchange="row", in_world=("t0",)),
    HOT_SEQUENCES,
    replace(HOT_SEQUENCES, mesh=TWO, sharding="row_wise", exchange="row"),
]


def sharded(cell: Cell) -> tdsp.ModelParallel2D:
    return cast(tdsp.ModelParallel2D, shard(cell))


def gap_after_refreshes(rank: int, world_size: int, cell: Cell) -> float:
    """Return the gap to the unsharded model after steps with changing hot rows."""
    parallel, oracle = sharded(cell), make_oracle(cell)
    optimizer = make_optimizer(parallel)
    for step, batches in enumerate(make_stream(cell, 7)):
        plain_loop(parallel, optimizer, [batches[rank]])
        oracle.step(batches)
        if step % 2:
            # As ids in any order, which is as good.
            ids = {name: hot_set.row_ids[::-1] for name, hot_set in SETS[step // 2].items()}
            parallel.refresh_hot_sets(ids if step == 3 else SETS[step // 2])
            assert parallel.hot_sets["t1"] == SETS[step // 2]["t1"]
        (part,) = [
            sharded_table
            for sharded_table in parallel.sharded_tables()
            if "t1" in sharded_table.hot_sets.by_table
        ]
        held = part.hot_sets.held.by_table["t1"]
        # The previous step's hot rows, which this step has looked up.
        expected = SETS[step // 2 - 1]["t1"] if step > 1 else tdsp.HotSet((0, 2))
        assert held.tolist() == list(expected.row_ids)
    return compare(parallel, oracle).worst


def test_refreshes_change_nothing(ranks4: RankPool) -> None:
    for cell in CELLS:
        assert max(ranks4.run(gap_after_refreshes, cell)) <= TOLERANCE, cell


class Refreshing(Sequence[KeyedJaggedTensor]):
    """Batches that refresh a model's hot rows on the way, as a pipeline reads ahead."""

    def __init__(self, batches: list[KeyedJaggedTensor], parallel: tdsp.ModelParallel2D) -> None:
        self._batches, self._parallel = batches, parallel

    def __len__(self) -> int:
        return len(self._batches)

    def __getitem__(self, index: Any) -> Any:
        if index and index % 2 == 0:
            self._parallel.refresh_hot_sets(SETS[index // 2 - 1])
        return self._batches[index]


def refreshed_in_pipelines(rank: int, world_size: int, cell: Cell) -> list[list[float]]:
    """Return all pipelines' losses with refreshes during older batches, then without."""
    batches = [step[rank] for step in make_stream(cell, 8)]
    losses = []
    for kind in PIPELINES:
        parallel = shard_loss_model(cell)
        refreshing = Refreshing(batches, cast(tdsp.ModelParallel2D, parallel))
        losses.append(pipeline_loop(kind, parallel, make_optimizer(parallel), refreshing))
    quiet = shard_loss_model(cell)
    return [*losses, plain_loop(quiet, make_optimizer(quiet), batches)]


def test_batches_in_flight_keep_their_hot_rows(ranks4: RankPool) -> None:
    for cell in (HOT, replace(HOT, sharding="row_wise", mesh=TWO, exchange="row")):
        for *refreshed, expected in ranks4.run(refreshed_in_pipelines, cell):
            for losses in refreshed:
                assert losses == pytest.approx(expected, rel=1e-5)


def backwards_after_a_refresh(rank: int, world_size: int, cell: Cell) -> float:
    """Return the gap between two forwards and backwards with and without a refresh in between."""
    ends = []
    for refreshes in (True, False):
        parallel = sharded(cell)
        optimizer = make_optimizer(parallel)
        stream = make_stream(cell, 6)
        for step, pair in enumerate(zip(stream[::2], stream[1::2], strict=True)):
            first = local_loss(parallel(pair[0][rank]))
            if refreshes:
                parallel.refresh_hot_sets(SETS[step])
            second = local_loss(parallel(pair[1][rank]))
            optimizer.zero_grad()
            first.backward()
            second.backward()
            optimizer.step()
        ends.append(snapshot(parallel))
    left, right = ends
    return max((left[name] - right[name]).abs().max().item() for name in left if left[name].numel())


def test_a_backward_finds_the_hot_rows_of_its_forward(ranks4: RankPool) -> None:
    spread = replace(HOT, sharding="row_wise", exchange="row", owners="hash")
    for cell in (HOT, spread, HOT_SEQUENCES):
        assert max(ranks4.run(backwards_after_a_refresh, cell)) <= 1e-5


def refused(rank: int, world_size: int, cell: Cell) -> list[str]:
    parallel = sharded(cell)
    wrong: list[Any] = [
        {"t2": tdsp.HotSet((0,))},
        {"t1": tdsp.HotSet((0, 1, 2))},
        {"t0": tdsp.HotSet((40,))},
        {"t0": tdsp.HotSet((rank,))},
        {"t0": []},
    ]
    messages = [
        error_text(partial(parallel.refresh_hot_sets, hot_sets), tdsp.TwoDError)
        for hot_sets in wrong
    ]
    assert parallel.hot_sets == {name: tdsp.HotSet(rows) for name, rows in HOT_ROWS}
    return messages


def test_what_has_no_room_is_refused_by_all_ranks(ranks4: RankPool) -> None:
    for unknown, many, outside, different, nothing in ranks4.run(refused, HOT):
        assert unknown == (
            "table 't2' has no hot rows to refresh: pin some when you plan; t0, t1 have them"
        )
        assert "'t1' was planned with 2 hot rows and has no room for 3" in many
        assert "hot row 40 of table 't0' is out of range" in outside
        assert "rank 0 has t0: (0,), rank 1 has t0: (1,)" in different
        assert "a HotSet needs at least one row id" in nothing


def follow_the_log(rank: int, world_size: int, cell: Cell) -> tuple[list[bool], list[Any]]:
    """Return the hot rows after each step where each rank looks up its own rows."""
    parallel = sharded(cell)
    optimizer = make_optimizer(parallel)
    tables = [
        EmbeddingBagConfig(num_embeddings=rows, embedding_dim=8, name=name, feature_names=[feature])
        for name, rows, feature in (("t0", 40, "f0"), ("t1", 24, "never"))
    ]
    counter = tdsp.RowCounter(tables, half_life=2)
    refresh = tdsp.HotSetRefresh(parallel, counter, every=2)
    changed, hot = [], []
    for step, batches in enumerate(make_stream(cell, 6)):
        used = rank + (10 if step > 1 else 0)
        counter.update(
            KeyedJaggedTensor(["f0"], torch.tensor([used] * 9), lengths=torch.tensor([9]))
        )
        plain_loop(parallel, optimizer, [batches[rank]])
        changed.append(refresh.step())
        hot.append(parallel.hot_sets)
    return changed, hot


def test_hot_sets_follow_the_log(ranks4: RankPool) -> None:
    planned = {name: tdsp.HotSet(rows) for name, rows in HOT_ROWS}
    first = {**planned, "t0": tdsp.HotSet((0, 1, 2, 3))}
    later = {**planned, "t0": tdsp.HotSet((10, 11, 12, 13))}
    for changed, hot in ranks4.run(follow_the_log, HOT):
        assert changed == [False, True, False, True, False, False]
        assert hot == [planned, first, first, later, later, later]


def wrong_counters(rank: int, world_size: int, cell: Cell) -> None:
    parallel = sharded(cell)
    other = tdsp.RowCounter([EmbeddingBagConfig(9, 8, name="t9", feature_names=["f9"])])
    with pytest.raises(tdsp.errors.ConfigError, match="doesn't count table 't0', whose hot rows"):
        tdsp.HotSetRefresh(parallel, other, every=2)
    with pytest.raises(tdsp.errors.ConfigError, match="every=0 must be at least one step"):
        tdsp.HotSetRefresh(parallel, other, every=0)
    with pytest.raises(
        tdsp.errors.ConfigError, match="no hot rows to refresh; pin some when you plan"
    ):
        tdsp.HotSetRefresh(sharded(replace(cell, hot_rows=())), other, every=2)


def test_a_refresh_says_what_it_needs(ranks4: RankPool) -> None:
    ranks4.run(wrong_counters, HOT)


def sequences(rank: int, world_size: int) -> list[tuple[list[float], list[int], list[int]]]:
    """Look up rows that hold their number; return values, lengths and ids by feature."""
    model = cast(Any, torch.nn.Module())
    model.ec = EmbeddingCollection(
        tables=[
            EmbeddingConfig(40, 8, name="t0", feature_names=["f0", "f1"]),
            EmbeddingConfig(40, 8, name="t1", feature_names=["f2"]),
        ],
        need_indices=True,
    )
    weight = torch.arange(40.0)[:, None].expand(40, 8)
    for table in cast(Any, model.ec).embeddings.values():
        table.weight.data.copy_(weight)
    sharders = [tdsp.EmbeddingCollectionSharder2D(fused_params={"learning_rate": 0.1})]
    # Their replicas have different widths.
    types = {"t0": "column_wise", "t1": "row_wise"}
    pins = {table: {"hot_rows": [1, 7, 20]} for table in types}
    parallel = shard_tables(model, tdsp.Mesh2D(1, 2), sharders, types, pins)
    batch = KeyedJaggedTensor(
        ["f0", "f1", "f2"],
        torch.tensor([7, 3, 1, 1, 39, 20, 7, 7, 38, 7]),
        lengths=torch.tensor([3, 0, 3, 0, 2, 0, 1, 0, 1]),
    )
    with torch.no_grad():
        actual = parallel.module.ec(batch)
    return [
        (
            entry.values()[:, 3].tolist(),
            entry.lengths().tolist(),
            cast(Any, entry.weights()).tolist(),
        )
        for entry in (actual["f0"], actual["f1"], actual["f2"])
    ]


def test_sequences_keep_their_order(ranks2: RankPool) -> None:
    expected = [([7, 3, 1, 1, 39, 20], [3, 0, 3]), ([7, 7], [0, 2, 0]), ([38, 7], [1, 0, 1])]
    for answer in ranks2.run(sequences):
        for (values, lengths, ids), (rows, expected_lengths) in zip(answer, expected, strict=True):
            assert (values, lengths, ids) == (rows, expected_lengths, rows)
