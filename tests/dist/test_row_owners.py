"""Rows spread over their owners train the same; only the work is distributed differently."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import torchrec_2dsp as tdsp
from tests.support.loops import all_to_all_bytes, make_stream, plain_loop, shard, shard_tables
from tests.support.models import HOT_ROWS, ModelSpec, TableSpec, build
from tests.support.parity import (
    ONE,
    TWO,
    Cell,
    compare,
    local_loss,
    make_optimizer,
    make_oracle,
    make_sharder,
    relative_gap,
    shards_of,
)
from tests.support.ranks import RankPool
from tests.support.trips import full_state
from torchrec_2dsp.comms.counting import count_collectives
from torchrec_2dsp.parallel.checkpoint import load_checkpoint, save_checkpoint
from torchrec_2dsp.programs.data.draws import Zipf
from torchrec_2dsp.shard.initial_tables import draw_whole_tables_

pytestmark = pytest.mark.dealt_file

TOLERANCE = 1e-6
HASH = Cell(ONE, exchange="row", owners="hash")


def read_at_every_moment(rank: int, world_size: int, cell: Cell) -> float:
    """Read the state at different moments while training; return the final gap to the oracle."""
    parallel = shard(cell)
    assert isinstance(parallel, tdsp.ModelParallel2D)
    optimizer, oracle = make_optimizer(parallel), make_oracle(cell)
    for step, batches in enumerate(make_stream(cell, 8)):
        reads: list[Callable[[], object]] = [lambda: None] * 4
        reads[step % 4] = parallel.fused_optimizer.state_dict if step % 2 else parallel.state_dict
        optimizer.zero_grad()
        reads[0]()
        loss = local_loss(parallel(batches[rank]))
        reads[1]()
        loss.backward()
        reads[2]()
        optimizer.step()
        with torch.no_grad():
            parallel(batches[rank])
        reads[3]()
        if step in (1, 4):
            parallel.broadcast_replicas()
        if step in (2, 5):
            parallel.load_state_dict(cast(Any, {}), strict=False)
        oracle.step(batches)
    return compare(parallel, oracle).worst


@pytest.mark.parametrize("mesh", [ONE, TWO], ids=str)
def test_the_state_may_be_read_at_any_moment(ranks4: RankPool, mesh: tdsp.Mesh2D) -> None:
    """This includes reads between a forward and its backward, which updates moved rows."""
    cell = replace(HASH, mesh=mesh, hot_rows=HOT_ROWS)
    assert max(ranks4.run(read_at_every_moment, cell)) <= TOLERANCE


def write_by_hand(rank: int, world_size: int, cell: Cell) -> tuple[float, torch.Tensor]:
    """Read shards directly after some training steps, then overwrite them in the first group only.

    Returns:
        The gap between read and oracle weights, and a lookup's result after each row was set
        to its number.
    """
    parallel = shard(cell)
    assert isinstance(parallel, tdsp.ModelParallel2D)
    optimizer, oracle = make_optimizer(parallel), make_oracle(cell)
    stream = make_stream(cell, 3)
    plain_loop(parallel, optimizer, [batches[rank] for batches in stream])
    for batches in stream:
        oracle.step(batches)
    parallel.sync_now()
    (part,) = parallel.sharded_tables()
    gap = 0.0
    for entry in shards_of(parallel):
        weight = entry.tensors["weight"]
        expected = oracle.weights[entry.table][entry.row : entry.row + entry.num_rows]
        gap = max(gap, (weight - expected).abs().max().item())
        numbers = torch.arange(entry.row, entry.row + entry.num_rows).float()
        weight.copy_((numbers if rank < 2 else torch.zeros_like(numbers))[:, None])
    parallel.broadcast_replicas()
    ids = KeyedJaggedTensor.from_lengths_sync(
        keys=["f0"], values=torch.arange(40), lengths=torch.ones(40).int()
    )
    with torch.no_grad():
        return gap, part.module(ids).wait().values()[:, 0]


def test_tables_may_be_written_by_hand(ranks4: RankPool) -> None:
    spec = ModelSpec((TableSpec("t0", 40, 8, ("f0",)),))
    contiguous = tdsp.Mesh2D(2, 2, tdsp.RankLayout.CONTIGUOUS)
    cell = replace(HASH, mesh=contiguous, spec=spec, hot_rows=HOT_ROWS[:1])
    for gap, actual in ranks4.run(write_by_hand, cell):
        assert gap <= TOLERANCE
        assert actual.tolist() == list(range(40))


def write_on_the_first_rank(rank: int, world_size: int, cell: Cell) -> tuple[float, ...]:
    """Write a row in a table-wise shard that two ranks hold, on rank 0 only."""
    types = {"t0": "row_wise", "t1": "table_wise"}
    pins = {"t0": {"exchange": "row", "owners": "hash"}}
    model = build(cell.spec, device="meta")
    sharders = [make_sharder(cell)]
    parallel = shard_tables(model, cell.mesh, sharders, types, pins, load=False)
    shards = [entry.tensors["weight"] for entry in shards_of(parallel) if entry.table == "t1"]
    if rank == 0:
        shards[0][0] = 7.0
    parallel(make_stream(cell, 1)[0][rank])
    return tuple(shard[0, 0].item() for shard in shards)


def test_ranks_agree_that_copies_start_unequal(ranks4: RankPool) -> None:
    spec = ModelSpec((TableSpec("t0", 40, 8, ("f0",)), TableSpec("t1", 24, 8, ("f1",))))
    answers = ranks4.run(write_on_the_first_rank, replace(HASH, mesh=TWO, spec=spec), timeout_s=30)
    assert answers == [(7.0,), (7.0,), (), ()]


def drawn(
    cell: Cell, init_fn: Callable[[torch.Tensor], None] | None = None, init_seed: int | None = None
) -> tdsp.ModelParallel2D:
    """Shard a model built on the meta device; each rank draws the same rows each time."""
    model: Any = build(cell.spec, device="meta")
    for config in model.ebc.embedding_bag_configs():
        config.init_fn = init_fn or config.init_fn
    sharder: Any = make_sharder(cell)
    sharder.init_seed = init_seed
    torch.manual_seed(dist.get_rank())
    return cast(tdsp.ModelParallel2D, shard(cell, sharder, model, load=False))


def whole_state(parallel: tdsp.ModelParallel2D) -> dict[str, torch.Tensor]:
    """Gather the state dict; all copies of a row must be equal."""
    return {
        name.removeprefix("model."): value
        for name, value in full_state(parallel).items()
        if name.startswith("model.")
    }


def bytes_of_lookup(parallel: tdsp.ModelParallel2D, batch: KeyedJaggedTensor) -> int:
    """Return the bytes in a lookup's all-to-alls; nothing is trained."""
    with count_collectives() as seen, torch.no_grad():
        parallel(batch)
    return sum(all_to_all_bytes(seen))


def train_drawn(rank: int, world_size: int, cell: Cell, reads: bool) -> tuple[float, list[int]]:
    """Train drawn tables beside an unsharded model that has a twin's initial state.

    Returns:
        The gap, and the bytes in the twin's first lookup and the model's first two.
    """
    twin, parallel = drawn(cell), drawn(cell)
    oracle, start = make_oracle(cell), whole_state(twin)
    oracle.model.load_state_dict(start)
    stream = make_stream(cell, 4)
    num_bytes = [bytes_of_lookup(model, stream[0][rank]) for model in (twin, parallel, parallel)]
    if reads:
        for name, value in whole_state(parallel).items():
            assert torch.equal(value, start[name])
    losses = plain_loop(parallel, make_optimizer(parallel), [batches[rank] for batches in stream])
    expected = [oracle.step(batches)[rank] for batches in stream]
    return compare(parallel, oracle, relative_gap(losses, expected)).worst, num_bytes


@pytest.mark.parametrize("mesh", [ONE, TWO], ids=str)
@pytest.mark.parametrize("reads", [False, True])
def test_drawn_rows_stay_where_they_are(ranks4: RankPool, mesh: tdsp.Mesh2D, reads: bool) -> None:
    for gap, (moving, first, second) in ranks4.run(train_drawn, replace(HASH, mesh=mesh), reads):
        assert gap <= TOLERANCE
        assert first == second < moving


def test_drawn_rows_move_where_some_are_hot(ranks4: RankPool) -> None:
    """Hot rows' replicas are filled by row number."""
    for gap, (moving, first, second) in ranks4.run(
        train_drawn, replace(HASH, hot_rows=HOT_ROWS), False
    ):
        assert gap <= TOLERANCE
        assert first == moving > second


def number_rows(weight: torch.Tensor) -> None:
    """Set each row to its number in the shard, as a table's init function may do."""
    weight.data.copy_(torch.arange(float(len(weight)))[:, None])


def known_rows(
    cell: Cell, folder: str
) -> Iterator[tuple[str, tdsp.ModelParallel2D, dict[str, torch.Tensor]]]:
    """Yield models whose rows are known by number, and their tables."""
    model, by_seed = build(cell.spec, seed=3), build(cell.spec)
    draw_whole_tables_(by_seed, seed=5)
    given: Any = model.state_dict()
    tables, seeded = (
        {name: value for name, value in source.state_dict().items() if name.startswith("ebc")}
        for source in (model, by_seed)
    )
    loaded = drawn(cell)
    loaded.load_state_dict(given)
    yield "loaded", loaded, tables
    sharder = make_sharder(cell)
    sharder.keep_weights = True
    kept: Any = shard(cell, sharder, build(cell.spec, seed=3), load=False)
    yield "kept", kept, tables
    save_checkpoint(folder, kept, make_optimizer(kept))
    resumed = drawn(cell)
    with count_collectives() as seen:
        load_checkpoint(folder, resumed, make_optimizer(resumed))
    assert not all_to_all_bytes(seen)
    yield "resumed", resumed, tables
    yield "seed", drawn(cell, init_seed=5), seeded
    by_number = drawn(cell)
    by_number.load_state_dict(cast(Any, {}), strict=False)
    first_rank = whole_state(by_number)
    numbered = {}
    for name in tables:
        num_rows = -(-len(tables[name]) // cell.mesh.group_size)
        numbers = torch.arange(len(tables[name])) % num_rows
        numbered[name] = numbers.float()[:, None].expand_as(tables[name])
        first_rank[name][:num_rows] = tables[name][:num_rows]
    yield "init_fn", drawn(cell, init_fn=number_rows), numbered
    loaded = drawn(cell)
    if dist.get_rank() == 0:
        loaded.load_state_dict(cast(Any, dict(tables)), strict=False)
    yield "loaded on one rank", loaded, first_rank
    written = drawn(cell)
    if dist.get_rank() == 0:
        for part in shards_of(written):
            weight = part.tensors["weight"]
            weight.copy_(tables[f"ebc.embedding_bags.{part.table}.weight"][: len(weight)])
    yield "written on one rank", written, first_rank


def look_up_known_rows(
    rank: int, world_size: int, cell: Cell, folder: str
) -> list[tuple[str, bool, bool]]:
    """Return for each model whether a first lookup moved rows, and whether they stayed right."""
    batch = make_stream(cell, 1)[0][rank]
    results = []
    for name, parallel, tables in known_rows(cell, folder):
        first, second = (bytes_of_lookup(parallel, batch) for _ in range(2))
        state = whole_state(parallel)
        is_right = all(torch.equal(state[table], tables[table]) for table in tables)
        results.append((name, first > second, is_right))
    return results


@pytest.mark.parametrize("mesh", [ONE, TWO], ids=str)
def test_known_rows_keep_their_numbers(ranks4: RankPool, mesh: tdsp.Mesh2D, tmp_path: Path) -> None:
    for results in ranks4.run(look_up_known_rows, replace(HASH, mesh=mesh), str(tmp_path / "0")):
        assert len(results) == 7
        assert all(moved and is_right for _, moved, is_right in results), results


SORTED = ModelSpec((TableSpec("t0", 4_000, 8, ("f0",)),))


def rows_sent(rank: int, world_size: int, cell: Cell) -> tuple[float, int]:
    """Return the row bytes that this rank sends in a step, ids by frequency, and the loss."""
    ranks = Zipf(4_000, 1.05).sample_ranks(7, torch.arange(1_000).numpy() + 1_000 * rank)
    batch = KeyedJaggedTensor.from_lengths_sync(
        keys=["f0"], values=torch.from_numpy(ranks - 1), lengths=torch.ones(1_000).int()
    )
    parallel = shard(cell)
    optimizer = make_optimizer(parallel)
    plain_loop(parallel, optimizer, [batch])
    with count_collectives() as seen:
        (loss,) = plain_loop(parallel, optimizer, [batch])
    _, _, _, rows, _ = all_to_all_bytes(seen)
    return loss, rows


def test_owners_of_sorted_ids_do_equal_work(ranks4: RankPool) -> None:
    losses, blocks = zip(
        *ranks4.run(rows_sent, replace(HASH, spec=SORTED, owners="block")), strict=True
    )
    same, spread = zip(*ranks4.run(rows_sent, replace(HASH, spec=SORTED)), strict=True)
    assert same == pytest.approx(losses, rel=1e-5)
    assert max(blocks) > 2.5 * sum(blocks) / 4
    assert max(spread) < 1.1 * sum(spread) / 4
    assert sum(spread) == sum(blocks)
