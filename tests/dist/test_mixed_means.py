"""Averaging and summing tables of several sharding types in one collection."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, cast

import pytest
import torch
from torchrec.distributed.planner import ParameterConstraints
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import (
    EmbeddingBagCollection,
    get_embedding_names_by_table,
)
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import torchrec_2dsp as tdsp
from tests.dist.test_transport import HOT_ROWS, ROUNDING, train_late
from tests.support.models import SEQUENCE_TABLES, ModelSpec
from tests.support.parity import LR, TOLERANCE, Cell, run_cells
from tests.support.rank_device import rank_device
from tests.support.ranks import RankPool
from tests.support.slices import Deal
from torchrec_2dsp._compat.fbgemm import EmbOptimType
from torchrec_2dsp.comms.counting import count_collectives
from torchrec_2dsp.comms.mesh_groups import MeshGroups
from torchrec_2dsp.replicas.exchange import (
    GradientExchange,
    GradientState,
    PendingGradients,
    TrackedLookup,
)
from torchrec_2dsp.rows.gradients import Block, BlockGradients

ROWS = 8
TYPES = ("row_wise", "table_wise", "data_parallel", "column_wise", "table_row_wise", "grid_shard")


@dataclass(frozen=True)
class MixedTable:
    """One table of a collection: its pooling and its sharding."""

    pooling: str
    sharding: str
    exchange: str = "pooled"
    feature: str = ""
    """The feature that it looks up; empty for one of its own."""


def features_of(tables: tuple[MixedTable, ...]) -> list[str]:
    """Return each table's feature."""
    return [table.feature or f"f{index}" for index, table in enumerate(tables)]


def collection(tables: tuple[MixedTable, ...], weighted: bool = False) -> EmbeddingBagCollection:
    """Build a collection with the same weights on all ranks."""
    torch.manual_seed(0)
    return EmbeddingBagCollection(
        device=rank_device(),
        is_weighted=weighted,
        tables=[
            EmbeddingBagConfig(
                name=f"t{index}",
                num_embeddings=ROWS,
                embedding_dim=8,
                feature_names=[features_of(tables)[index]],
                pooling=PoolingType(table.pooling.upper()),
            )
            for index, table in enumerate(tables)
        ],
    )


def planned(
    tables: tuple[MixedTable, ...], mesh: tdsp.Mesh2D, weighted: bool = False
) -> tuple[torch.nn.ModuleDict, Any, tdsp.Plan2D]:
    """Return the collection in a model, its sharder, and the tables' plan."""
    model = torch.nn.ModuleDict({"ebc": collection(tables, weighted)})
    sharder: Any = tdsp.EmbeddingBagCollectionSharder2D(
        EmbOptimType.EXACT_SGD, fused_params={"learning_rate": LR}
    )
    constraints = {
        f"t{index}": ParameterConstraints(sharding_types=[table.sharding], min_partition=4)
        for index, table in enumerate(tables)
    }
    planner = tdsp.Planner2D(
        batch_size=8, constraints=constraints, mesh=mesh, sync=tdsp.GradientSync()
    )
    plan = planner.collective_plan(model, [sharder])
    for index, table in enumerate(tables):
        plan = tdsp.pin(plan, f"t{index}", exchange=table.exchange)
    return model, sharder, plan


def sharded(tables: tuple[MixedTable, ...], mesh: tdsp.Mesh2D) -> tdsp.ModelParallel2D:
    """Shard the collection by its tables' plan, with the weights of `collection`."""
    model, sharder, plan = planned(tables, mesh)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    parallel = tdsp.ModelParallel2D(model, plan=plan, sharders=[sharder])
    parallel.load_state_dict(cast(Any, weights))
    return parallel


def make_batch(features: list[str], rank: int, step: int, size: int) -> KeyedJaggedTensor:
    """Draw ``size`` samples with bags of up to three ids."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    lengths = torch.randint(0, 4, (len(features) * size,), generator=generator)
    return KeyedJaggedTensor(
        keys=features,
        values=torch.randint(0, ROWS, (int(lengths.sum()),), generator=generator),
        lengths=lengths,
    )


def loss_of(pooled: Any, keys: list[str]) -> torch.Tensor:
    """Return a loss whose gradient differs from element to element."""
    return torch.cat([pooled[key] for key in keys], dim=1).sub(0.5).pow(2).sum()


def gaps(
    rank: int,
    world_size: int,
    cases: list[tuple[tuple[MixedTable, ...], tdsp.Mesh2D, tuple[int, ...]]],
) -> list[float]:
    """For each case the largest gap of an output in three steps of SGD to the unsharded model."""
    return [largest_gap(rank, tables, mesh, sizes) for tables, mesh, sizes in cases]


def largest_gap(
    rank: int, tables: tuple[MixedTable, ...], mesh: tdsp.Mesh2D, sizes: tuple[int, ...]
) -> float:
    parallel, oracle = sharded(tables, mesh), collection(tables)
    configs: list[Any] = oracle.embedding_bag_configs()
    dense = dict(in_backward_optimizer_filter(parallel.named_parameters()))
    dense_sgd = torch.optim.SGD(dense.values(), lr=LR) if dense else None
    keys = [name for names in get_embedding_names_by_table(configs) for name in names]
    features, largest = sorted(set(features_of(tables))), 0.0
    for step in range(3):
        batches = [make_batch(features, peer, step, size) for peer, size in enumerate(sizes)]
        pooled = cast(Any, parallel.module)["ebc"](batches[rank])
        loss_of(pooled, keys).backward()
        parallel.sync()
        if dense_sgd is not None:
            dense_sgd.step()
            dense_sgd.zero_grad()
        expected = [oracle(batch) if batch.stride() else None for batch in batches]
        (
            sum(
                (loss_of(output, keys) for output in expected if output is not None),
                torch.zeros(()),
            )
            / len(batches)
        ).backward()
        own_part = expected[rank]
        if own_part is not None:
            largest = max(
                largest, *((pooled[key] - own_part[key]).abs().max().item() for key in keys)
            )
        with torch.no_grad():
            for param in oracle.parameters():
                param -= LR * cast(torch.Tensor, param.grad)
                param.grad = None
    return largest


def check(ranks: RankPool, cases: list[Any]) -> None:
    for by_rank in ranks.run(gaps, cases, timeout_s=200):
        for case, gap in zip(cases, by_rank, strict=True):
            assert gap <= TOLERANCE, f"{case}: {gap}"


def test_tables_average_whatever_types_stand_beside_them(ranks4: RankPool, dealt: Deal) -> None:
    mesh, even = tdsp.Mesh2D(1, 4), (6,) * 4
    pairs = [(first, second) for first, second in product(TYPES, TYPES) if first < second]
    cases: list[Any] = [
        ((MixedTable("mean", first), MixedTable(pooling, second)), mesh, even)
        for first, second in pairs
        for pooling in ("mean", "sum")
    ]
    cases += [
        ((MixedTable("mean", "row_wise"), MixedTable("mean", "row_wise", exchange)), mesh, even)
        for exchange in ("row", "nonempty")
    ]
    cases += [
        ((MixedTable("mean", first, feature="f"), MixedTable(pooling, second, feature="f")), *rest)
        for first, second in pairs
        for pooling, rest in (("sum", (mesh, even)), ("mean", (tdsp.Mesh2D(2, 2), even)))
    ]
    cases += [(tuple(MixedTable("mean", kind) for kind in TYPES), tdsp.Mesh2D(2, 2), even)]
    check(ranks4, dealt(cases))


def test_ranks_without_samples_average_too(ranks4: RankPool, dealt: Deal) -> None:
    uneven = [(0, 6, 6, 3), (5, 0, 0, 1)]
    meshes = [tdsp.Mesh2D(2, 2), tdsp.Mesh2D(1, 4)]
    cases = [
        ((MixedTable("mean", kind), MixedTable("sum", "row_wise")), mesh, sizes)
        for kind, mesh, sizes in product(TYPES, meshes, uneven)
    ]
    check(ranks4, dealt(cases))


def refusals(rank: int, world_size: int) -> list[str]:
    """Return the errors for a planned weighted mean, and for one with a plan of sums."""
    mesh, tables = tdsp.Mesh2D(2, 2), (MixedTable("mean", "table_wise"),)
    message = []
    with pytest.raises(tdsp.errors.UnsupportedError) as when_planned:
        planned(tables, mesh, weighted=True)
    message.append(str(when_planned.value))
    _, sharder, plan = planned(tables, mesh)
    model = torch.nn.ModuleDict({"ebc": collection(tables, weighted=True)})
    with pytest.raises(tdsp.errors.UnsupportedError) as when_sharded:
        tdsp.ModelParallel2D(model, plan=plan, sharders=[sharder])
    message.append(str(when_sharded.value))
    return message


def test_weighted_means_are_refused(ranks4: RankPool) -> None:
    for texts in ranks4.run(refusals):
        assert len(set(texts)) == 1, texts
        assert texts[0].startswith("table 't0' averages weighted bags"), texts


pytestmark = pytest.mark.dealt_file

BLOCKS = (Block(8, (0,), (0,), (0,), 1000), Block(4, (1,), (1,), (0,), 50))
NUM_ROWS = 40
"""Touched by a rank, of each block."""

Rows = Sequence[BlockGradients]
Sent = Counter[tuple[str, str]]
"""Bytes by process group and operation."""


@dataclass(frozen=True)
class Shape:
    """The rows that ranks touch."""

    name: str
    share_in_common: float
    """The share of rows that all ranks touch."""
    idle_ranks: tuple[int, ...] = ()
    """They touch nothing."""

    def __str__(self) -> str:
        return self.name


ALIKE, APART = Shape("alike", 1.0), Shape("apart", 0.0)
SHAPES = [ALIKE, APART, Shape("one idle", 0.5, (1,)), Shape("all idle", 0.0, tuple(range(8)))]


def rows_of(rank: int, step: int, shape: Shape) -> Rows:
    """Whole numbers, which any order adds up to the same."""
    actual = []
    for block in BLOCKS:
        common = torch.Generator().manual_seed(step)
        own = torch.Generator().manual_seed(1000 * step + rank + 1)
        count = 0 if rank in shape.idle_ranks else NUM_ROWS
        num_shared = int(shape.share_in_common * count)
        keys = torch.cat(
            [
                torch.randperm(block.num_rows, generator=common)[:num_shared],
                torch.randperm(block.num_rows // 9, generator=own)[: count - num_shared] * 9 + rank,
            ]
        ).unique()
        grads = torch.randint(-8, 9, (keys.numel(), block.dim), generator=own)
        actual.append(BlockGradients(keys, grads.float()))
    return actual


def dense(rows: Rows) -> list[torch.Tensor]:
    """Every row of every block."""
    tables = [torch.zeros(block.num_rows, block.dim) for block in BLOCKS]
    for table, entry in zip(tables, rows, strict=True):
        table[entry.keys] += entry.grads
    return tables


def exchange_rows(
    rank: int, world_size: int, shape: Shape, transport: str = "fp32"
) -> list[tuple[bool, Sent]]:
    """For each of three steps, whether the sums are those of all ranks, and what was sent."""
    groups = MeshGroups.for_mesh(tdsp.Mesh2D(world_size, 1), "cpu")
    codec = tdsp.Transport(transport).codec
    exchange = GradientExchange(BLOCKS, rank_device(), groups.replica_rows, codec)
    answers = []
    for step in range(3):
        by_rank = [rows_of(peer, step, shape) for peer in range(world_size)]
        own_part = by_rank[rank]
        with count_collectives() as seen:
            announcement = exchange.announce([block.keys for block in own_part], 0.5)
            lookup = TrackedLookup(None, 1, announcement)  # pyright: ignore[reportArgumentType]
            pending = PendingGradients(own_part, lookup, divisor=world_size)
            assert pending.state is GradientState.CAPTURED
            exchange.send(pending)
            pending.send_to_other_hosts()
            assert pending.state is GradientState.ON_OTHER_HOSTS
            merged = pending.gradients().blocks
            assert pending.state is GradientState.ARRIVED
        sent: Sent = Counter()
        for entry in seen.records:
            sent[entry.group, entry.op] += entry.num_bytes
        is_sum = [
            bool((actual.keys.diff() > 0).all())
            and torch.equal(table, torch.stack(tables).sum(dim=0) / world_size)
            for actual, table, tables in zip(
                merged, dense(merged), zip(*map(dense, by_rank), strict=True), strict=True
            )
        ]
        answers.append((all(is_sum) and pending.learning_rate == 0.5, sent))
    groups.close()
    return answers


@pytest.mark.parametrize("transport", ["fp32", "bf16"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("pool", ["ranks2", "ranks4", "two_hosts", "ranks8"])
def test_all_ranks_get_the_sum(
    request: pytest.FixtureRequest, pool: str, shape: Shape, transport: str
) -> None:
    ranks: RankPool = request.getfixturevalue(pool)
    for answers in ranks.run(exchange_rows, shape, transport):
        assert [is_right for is_right, _ in answers] == [True] * 3


def bytes_of(num_rows: int) -> int:
    """Count the bytes of both blocks' rows: 4 for a key, 4 for each number."""
    return sum(min(num_rows, block.num_rows) * (4 + 4 * block.dim) for block in BLOCKS)


A2A = "all_to_all_single"


def test_a_row_leaves_its_host_once(two_hosts: RankPool) -> None:
    by_rank = two_hosts.run(exchange_rows, ALIKE)
    for step in range(3):
        for host in (by_rank[:2], by_rank[2:]):
            sent = sum((answers[step][1] for answers in host), Counter())
            assert sent["replica_rows_across", A2A] == bytes_of(NUM_ROWS)
            # One half is added up by each rank; then each tells the other of its half.
            assert sent["replica_rows_in_host", A2A] == 2 * bytes_of(NUM_ROWS)
            assert sent["replica_rows", A2A] == 0


@pytest.mark.parametrize(("pool", "group"), [("ranks4", ""), ("ranks8", "_across")])
def test_rows_that_all_ranks_have_go_to_owners(
    request: pytest.FixtureRequest, pool: str, group: str
) -> None:
    """Owners sum from the second step on: before, nobody knows the overlap."""
    ranks: RankPool = request.getfixturevalue(pool)
    by_rank = ranks.run(exchange_rows, ALIKE)
    sent = [
        sum(answers[step][1][f"replica_rows{group}", A2A] for answers in by_rank)
        for step in range(3)
    ]
    # All to three others; to the owners three quarters, and from each owner to three others.
    assert sent == [bytes_of(NUM_ROWS) * times for times in (4 * 3, 3 + 3, 3 + 3)]


def test_owners_share_the_work(ranks8: RankPool) -> None:
    """The host's rows are dealt to owners on all hosts, too."""
    answers = ranks8.run(exchange_rows, ALIKE)
    sent = [steps[1][1]["replica_rows_across", A2A] for steps in answers]
    assert max(sent) < 1.2 * sum(sent) / len(sent)


def test_rows_of_one_rank_each_are_gathered(ranks4: RankPool) -> None:
    for rank, answers in enumerate(ranks4.run(exchange_rows, APART)):
        for step, (_, sent) in enumerate(answers):
            assert sent["replica_rows", A2A] == 3 * sum(
                entry.keys.nbytes // 2 + entry.grads.nbytes for entry in rows_of(rank, step, APART)
            )


EXACT = [
    Cell(mesh, sharding, optimizer=optimizer, hot_rows=hot_rows)
    for mesh, hot_rows in ((tdsp.Mesh2D(4, 1), ()), (tdsp.Mesh2D(2, 2), HOT_ROWS))
    for sharding in ("table_wise", "column_wise", "row_wise")
    for optimizer in ("sgd", "rowwise_adagrad")
]
SEQUENCE = Cell(tdsp.Mesh2D(4, 1), spec=ModelSpec(SEQUENCE_TABLES, sequence=True))


def test_training_over_hosts_equals_the_unsharded_model(two_hosts: RankPool, dealt: Deal) -> None:
    cells = dealt([*EXACT, replace(EXACT[1], batch_sizes=(3, 0, 5, 2)), SEQUENCE])
    for gaps in two_hosts.run(run_cells, cells):
        for cell, gap in zip(cells, gaps, strict=True):
            assert gap.worst <= TOLERANCE, cell
            assert gap.synced_rows > 0, cell


def test_training_on_four_hosts_equals_the_unsharded_model(ranks8: RankPool, dealt: Deal) -> None:
    """With peers in one host, on all hosts, and hot rows on all ranks."""
    cells = [
        Cell(mesh, "row_wise", hot_rows=hot_rows)
        for mesh in (tdsp.Mesh2D(8, 1), tdsp.Mesh2D(4, 2), tdsp.Mesh2D(2, 4))
        for hot_rows in ((), HOT_ROWS)
    ]
    for gaps in ranks8.run(run_cells, dealt(cells), 6):
        assert max(gap.worst for gap in gaps) <= TOLERANCE


def test_late_updates_over_hosts_equal_the_late_oracle(two_hosts: RankPool) -> None:
    late = [replace(cell, sync=tdsp.GradientSync(delay=1)) for cell in EXACT[1::6]]
    for gaps in two_hosts.run(train_late, late):
        for loss_gap, gap, change in gaps:
            assert max(loss_gap, gap) < ROUNDING < change
