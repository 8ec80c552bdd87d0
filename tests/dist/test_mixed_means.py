"""Averaging and summing tables of several sharding types in one collection."""

from dataclasses import dataclass
from itertools import product
from typing import Any, cast

import torch
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection, get_embedding_names_by_table
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import torchrec_2dsp as tdsp
from tests.support.devices import rank_device
from tests.support.loops import shard_tables
from tests.support.parity import LR, TOLERANCE
from tests.support.ranks import RankPool
from tests.support.slices import Deal
from torchrec_2dsp._compat.fbgemm import EmbOptimType

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


def collection(tables: tuple[MixedTable, ...]) -> EmbeddingBagCollection:
    """Build a collection with the same weights on all ranks."""
    torch.manual_seed(0)
    return EmbeddingBagCollection(
        device=rank_device(),
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


def sharded(tables: tuple[MixedTable, ...], mesh: tdsp.Mesh2D) -> tdsp.ModelParallel2D:
    """Shard the collection by its tables' plan, with the weights of `collection`."""
    sharder = tdsp.EmbeddingBagCollectionSharder2D(
        EmbOptimType.EXACT_SGD, fused_params={"learning_rate": LR}
    )
    return shard_tables(
        torch.nn.ModuleDict({"ebc": collection(tables)}),
        mesh,
        [sharder],
        {f"t{index}": table.sharding for index, table in enumerate(tables)},
        {f"t{index}": {"exchange": table.exchange} for index, table in enumerate(tables)},
    )


def make_batch(features: list[str], rank: int, step: int, size: int) -> KeyedJaggedTensor:
    """Draw ``size`` samples with bags of up to three ids."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    lengths = torch.randint(0, 4, (len(features) * size,), generator=generator)
    return KeyedJaggedTensor(
        keys=features,
        values=torch.randint(0, ROWS, (int(lengths.sum()),), generator=generator),
        lengths=lengths,
    ).to(rank_device())


def loss_of(pooled: Any, keys: list[str]) -> torch.Tensor:
    """Return a loss whose gradient differs from element to element."""
    return torch.cat([pooled[key] for key in keys], dim=1).sub(0.5).pow(2).sum()


def largest_gap(
    rank: int,
    world_size: int,
    tables: tuple[MixedTable, ...],
    mesh: tdsp.Mesh2D,
    sizes: tuple[int, ...],
) -> float:
    """Return the largest output gap to the unsharded model in three SGD steps."""
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
    for case in cases:
        assert max(ranks.run(largest_gap, *case)) <= TOLERANCE, case


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
