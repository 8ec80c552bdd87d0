"""What the replica sync is taken to cost."""

import pytest
import torch
import torchrec.optim
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from hypothesis import given, strategies as st
from torch import nn
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.planner import ParameterConstraints
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.types import ModuleSharder, ShardingType
from torchrec.modules.embedding_configs import EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingCollection

import torchrec_2dsp as tdsp
from tests.unit.test_planner import AnyTypeSharder, bags, world
from torchrec_2dsp.cost.workload import state_bytes_per_row
from torchrec_2dsp.optim import MomentScaledRowWiseAdaGradOptimizer
from torchrec_2dsp.planner.topology import group_topology
from torchrec_2dsp.planner.torchrec.enumerator import (
    Enumerator2D,
    data_parallel_ms,
    expected_touched_rows,
    row_sync_ms,
    weight_sync_ms,
)

INTRA, INTER = 1_000.0, 10.0
STRIDED, CONTIGUOUS = tdsp.RankLayout.STRIDED, tdsp.RankLayout.CONTIGUOUS

positive = st.integers(1, 10_000)


def costs_ms(num_groups: int, rows: int, dim: int) -> list[float]:
    """What each kind of sync costs for one shard of a table of its own."""
    table_bytes = rows * dim * 4
    return [
        row_sync_ms(
            num_groups=num_groups,
            touched_rows=rows,
            row_bytes=4 * dim,
            bandwidth_bytes_per_ms=INTER,
        ),
        weight_sync_ms(
            num_groups=num_groups, shard_bytes=table_bytes, bandwidth_bytes_per_ms=INTER
        ),
        data_parallel_ms(
            num_groups=num_groups,
            group_size=2,
            table_bytes=table_bytes,
            bandwidth_bytes_per_ms=INTER,
        ),
    ]


@given(rows=positive, dim=positive)
def test_one_group_has_nothing_to_sync(rows: int, dim: int) -> None:
    assert costs_ms(1, rows, dim) == [0.0, 0.0, 0.0]


@given(num_groups=st.integers(1, 500), rows=positive, dim=positive)
def test_more_groups_cost_more(num_groups: int, rows: int, dim: int) -> None:
    fewer, more = costs_ms(num_groups, rows, dim), costs_ms(num_groups + 1, rows, dim)

    assert all(low < high for low, high in zip(fewer, more, strict=True))


@given(
    cuts=st.lists(st.integers(0, 100), min_size=1, max_size=8),
    lookups=st.floats(0, 1_000),
    group_size=st.integers(1, 8),
)
def test_row_shards_share_the_touched_rows(
    cuts: list[int], lookups: float, group_size: int
) -> None:
    table_rows = sum(cuts)
    touched = [
        expected_touched_rows(
            shard_rows=rows, table_rows=table_rows, lookups_per_rank=lookups, group_size=group_size
        )
        for rows in cuts
    ]

    assert all(found <= rows for found, rows in zip(touched, cuts, strict=True))
    whole = expected_touched_rows(
        shard_rows=table_rows,
        table_rows=table_rows,
        lookups_per_rank=lookups,
        group_size=group_size,
    )
    assert sum(touched) == pytest.approx(whole)


@pytest.mark.parametrize(
    ("optimizer", "expected_bytes"),
    [
        (EmbOptimType.EXACT_SGD, 0),
        (torch.optim.SGD, 0),
        (EmbOptimType.EXACT_ROWWISE_ADAGRAD, 4),
        (torchrec.optim.RowWiseAdagrad, 4),
        (MomentScaledRowWiseAdaGradOptimizer, 4),
        (EmbOptimType.EXACT_ADAGRAD, 64),
        (torch.optim.Adam, 128),
        (EmbOptimType.PARTIAL_ROWWISE_ADAM, 64),
    ],
)
def test_the_state_of_an_optimizer(optimizer: EmbOptimType | type, expected_bytes: int) -> None:
    assert state_bytes_per_row(optimizer, dim=16) == expected_bytes


# ---- per shard


def sync_ms(
    sharding_type: str,
    *,
    sync: tdsp.GradientSync | tdsp.WeightSync,
    mesh: tdsp.Mesh2D | None = None,
    sharder: ModuleSharder[nn.Module] | None = None,
    model: nn.Module | None = None,
    rows: int = 40,
    batch_size: int = 8,
    **constraint: object,
) -> list[float]:
    """What the enumerator adds to each shard of t0, of width 32, for several groups."""
    model = bags(1, rows=rows) if model is None else model
    sharders = [sharder or AnyTypeSharder()]
    constraints = {
        "t0": ParameterConstraints(
            sharding_types=[sharding_type],
            min_partition=32,
            **constraint,  # pyright: ignore[reportArgumentType]
        )
    }

    mesh = mesh or tdsp.Mesh2D(4, 2, CONTIGUOUS)
    topology = world(mesh.world_size, 2, intra_host_bw=INTRA, inter_host_bw=INTER)
    stock = EmbeddingEnumerator(group_topology(topology, mesh), batch_size, constraints)
    ours = Enumerator2D(topology, batch_size, constraints, mesh=mesh, sync=sync)

    def backward_ms(enumerator: EmbeddingEnumerator) -> list[float]:
        (option,) = enumerator.enumerate(model, sharders)  # pyright: ignore[reportArgumentType]
        return [shard.perf.bwd_comms for shard in option.shards]  # pyright: ignore

    both = zip(backward_ms(ours), backward_ms(stock), strict=True)
    return [with_sync - without for with_sync, without in both]


def test_the_gradients_of_touched_rows() -> None:
    def cost(touched_rows: float, dim: int, num_bytes: int = 4) -> float:
        return touched_rows * (dim * num_bytes + 4) * 3 / INTER

    def ms(sharding_type: str, **settings: object) -> list[float]:
        return pytest.approx(sync_ms(sharding_type, sync=tdsp.GradientSync(), **settings))  # pyright: ignore

    # 8 samples on 2 ranks look up 16 rows, all of them on the owner of the table
    assert ms("table_wise") == [cost(16, 64)]
    assert ms("column_wise") == [cost(16, 32)] * 2
    assert ms("row_wise") == [cost(8, 64)] * 2
    assert ms("grid_shard") == [cost(8, 32)] * 4
    assert ms("table_wise", rows=10) == [cost(10, 64)]
    assert ms("table_wise", rows=400, pooling_factors=[3.0]) == [cost(48, 64)]
    half = sync_ms("table_wise", sync=tdsp.GradientSync(transport=tdsp.Transport.BF16))
    assert half == pytest.approx([cost(16, 64, num_bytes=2)])
    assert ms("table_wise", rows=400, batch_sizes=[20]) == [cost(40, 64)]
    assert ms("table_wise", rows=400, num_poolings=[2.0]) == [cost(32, 64)]


def test_the_weights_and_their_state() -> None:
    def cost(shard_bytes: int) -> float:
        return 2 * 3 / 4 * shard_bytes / INTER

    adagrad = AnyTypeSharder(fused_params={"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD})
    applied = bags(1)
    for weight in applied.parameters():
        weight._optimizer_classes = [torch.optim.Adam]  # pyright: ignore[reportAttributeAccessIssue]

    def ms(sharding_type: str, **settings: object) -> list[float]:
        sync = tdsp.WeightSync(rows=tdsp.SyncedRows.ALL)
        return pytest.approx(sync_ms(sharding_type, sync=sync, **settings))  # pyright: ignore

    assert ms("table_wise") == [cost(40 * 64 * 4)]
    assert ms("row_wise") == [cost(20 * 64 * 4)] * 2
    assert ms("table_wise", batch_size=80) == [cost(40 * 64 * 4)]
    assert ms("table_wise", sharder=adagrad) == [cost(40 * 64 * 4 + 40 * 4)]
    assert ms("table_wise", model=applied) == [cost(3 * 40 * 64 * 4)]


def test_the_weights_of_touched_rows() -> None:
    def cost(touched_rows: float, row_bytes: int) -> float:
        return touched_rows * (row_bytes + 4) * 3 / INTER

    adagrad = AnyTypeSharder(fused_params={"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD})

    def ms(sync: tdsp.WeightSync, **settings: object) -> list[float]:
        return pytest.approx(sync_ms("table_wise", sync=sync, sharder=adagrad, **settings))  # pyright: ignore

    # 8 samples on 2 ranks look up 16 rows in a step
    assert ms(tdsp.WeightSync(), rows=400) == [cost(16, 260)]
    assert ms(tdsp.WeightSync(policy=tdsp.every(5)), rows=400) == [cost(80, 260) / 5]
    assert ms(tdsp.WeightSync(policy=tdsp.after(9, tdsp.every(2))), rows=400) == [cost(32, 260) / 2]
    assert ms(tdsp.WeightSync(policy=tdsp.never()), rows=400) == [0.0]
    rare_moments = tdsp.WeightSync(moments_policy=tdsp.every(4))
    assert ms(rare_moments, rows=400) == [cost(16, 256) + cost(64, 4) / 4]
    # Where more would be sent than the shard has, the shard is averaged.
    assert ms(tdsp.WeightSync(), rows=16) == [2 * 3 / 4 * 16 * 260 / INTER]


@pytest.mark.parametrize("sync", [tdsp.GradientSync(), tdsp.WeightSync()])
def test_a_data_parallel_table_is_reduced_over_the_world(
    sync: tdsp.GradientSync | tdsp.WeightSync,
) -> None:
    table_bytes = 40 * 64 * 4
    expected_ms = 2 * 3 / 4 * table_bytes / 2 / INTER

    assert sync_ms("data_parallel", sync=sync) == pytest.approx([expected_ms] * 2)


def test_sequence_tables_have_a_cost_too() -> None:
    class AnySequenceSharder(EmbeddingCollectionSharder):
        def sharding_types(self, compute_device_type: str) -> list[str]:
            return [member.value for member in ShardingType]

    config = EmbeddingConfig(name="t0", num_embeddings=40, embedding_dim=64, feature_names=["f0"])
    model = EmbeddingCollection(tables=[config], device=torch.device("meta"))
    found = sync_ms(
        "table_wise",
        sync=tdsp.GradientSync(),
        model=model,
        sharder=AnySequenceSharder(),  # pyright: ignore[reportArgumentType]
    )

    assert found == pytest.approx([16 * (64 * 4 + 4) * 3 / INTER])


def test_replica_peers_in_one_host_sync_faster() -> None:
    within = sync_ms("table_wise", sync=tdsp.GradientSync(), mesh=tdsp.Mesh2D(2, 2, STRIDED))
    across = sync_ms("table_wise", sync=tdsp.GradientSync(), mesh=tdsp.Mesh2D(2, 2, CONTIGUOUS))

    assert across == pytest.approx([within[0] * INTRA / INTER])
