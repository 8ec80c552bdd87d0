"""`Planner2D` takes what TorchRec's planner takes, and uses it."""

import copy
import inspect

import pytest
from hypothesis import given, strategies as st
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.partitioners import MemoryBalancedPartitioner
from torchrec.distributed.planner.perf_models import NoopPerfModel
from torchrec.distributed.planner.proposers import GreedyProposer
from torchrec.distributed.planner.stats import NoopEmbeddingStats
from torchrec.distributed.planner.types import (
    BasicCommsBandwidths,
    CustomTopologyData,
    Partitioner,
    PlanLoader,
    ShardingOption,
    Storage,
)

import torchrec_2dsp as tdsp
from tests.support.planning import (
    STOCK_SHARDERS,
    AnyTypeSharder,
    bags,
    constrained,
    layout,
    nothing_reserved,
    planner_for,
    world,
)
from torchrec_2dsp.planner.planner2d import Planner2D
from torchrec_2dsp.planner.topology import group_topology, peer_bandwidth_bytes_per_ms


def test_it_takes_what_the_stock_planner_takes() -> None:
    stock = inspect.signature(EmbeddingShardingPlanner.__init__).parameters
    ours = inspect.signature(Planner2D.__init__).parameters

    assert [(name, known.default) for name, known in stock.items()] == [
        (name, known.default)
        for name, known in ours.items()
        if known.kind is not inspect.Parameter.KEYWORD_ONLY
    ]
    assert set(ours) - set(stock) == {
        *("mesh", "sync", "calibration", "access", "workload", "transports")
    }


class RecordingPartitioner(Partitioner):
    def __init__(self) -> None:
        self.types: set[str] = set()
        self.inner = MemoryBalancedPartitioner()

    def partition(
        self, proposal: list[ShardingOption], storage_constraint: Topology
    ) -> list[ShardingOption]:
        self.types |= {option.sharding_type for option in proposal}
        return copy.deepcopy(self.inner.partition(proposal, storage_constraint))


class RecordingPerfModel(NoopPerfModel):
    num_rated = 0

    def rate(self, plan: list[ShardingOption]) -> float:
        self.num_rated += 1
        return super().rate(plan)


class RecordingStats(NoopEmbeddingStats):
    types: set[str]

    def log(self, *args: object, **kwargs: object) -> None:
        options = kwargs["best_plan"]
        assert isinstance(options, list)
        self.types = {option.sharding_type for option in options}


def test_the_parts_that_a_user_gives_are_used() -> None:
    seen: list[str] = []

    def callback(options: list[ShardingOption]) -> list[ShardingOption]:
        seen.extend(option.sharding_type for option in options)
        return options

    partitioner, stats = RecordingPartitioner(), RecordingStats()
    perf_model = RecordingPerfModel(world(2))
    planner = planner_for(
        tdsp.Mesh2D(2, 2),
        proposer=GreedyProposer(),
        partitioner=partitioner,
        performance_model=perf_model,
        stats=[stats],
        callbacks=[callback],
        constraints=constrained("table_row_wise"),
        debug=False,
        timeout_seconds=60,
    )

    plan = planner.plan(bags(), STOCK_SHARDERS)

    assert partitioner.types == {"table_row_wise"}
    assert seen == ["2d_table_row_wise"] * 2
    assert stats.types == {"2d_table_row_wise"}
    assert perf_model.num_rated > 0
    assert len(layout(plan, "t0")) == 2


class StoredPlan(PlanLoader):
    def __init__(self, options: list[ShardingOption], context: str) -> None:
        self._options = {option.storage_hash(): option for option in options}
        self._context = context

    def load(self) -> dict[int, ShardingOption]:
        return self._options

    def plan_context_hash(self) -> str:
        return self._context

    def get_plan_id(self) -> str:
        return "stored"


def test_a_stored_plan_is_taken_instead_of_a_search() -> None:
    stored: list[ShardingOption] = []

    def keep(options: list[ShardingOption]) -> list[ShardingOption]:
        stored.extend(copy.deepcopy(options))
        return options

    mesh, constraints = tdsp.Mesh2D(2, 2), constrained("table_wise")
    first = planner_for(mesh, constraints=constraints, callbacks=[keep])
    searched = first.plan(bags(), STOCK_SHARDERS)
    for option in stored:
        option.shards[0].rank = 1
    loader = StoredPlan(stored, first.hash_planner_context_inputs_str())

    loaded = planner_for(mesh, constraints=constraints, plan_loader=loader).plan(
        bags(), STOCK_SHARDERS
    )

    assert [rank for rank, _, _ in layout(searched, "t0") + layout(searched, "t1")] == [0, 1]
    assert [rank for rank, _, _ in layout(loaded, "t0") + layout(loaded, "t1")] == [1, 1]


def test_without_a_topology_the_mesh_gives_the_world(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    mesh = tdsp.Mesh2D(num_groups=2, group_size=4)
    planner = Planner2D(
        storage_reservation=nothing_reserved(), constraints=constrained("table_row_wise"), mesh=mesh
    )

    plan = planner.plan(bags(), STOCK_SHARDERS)

    # Half of each host belongs to a group.
    assert [rank for rank, _, _ in layout(plan, "t0") + layout(plan, "t1")] == [0, 1, 2, 3]


def test_a_group_is_planned_as_torchrec_plans_a_world() -> None:
    """Apart from the sync, one group is a world of its own: same shards on same ranks."""
    constraints = constrained("table_wise", 5) | constrained("row_wise", 2)
    model = bags(num_tables=5)
    stock = EmbeddingShardingPlanner(
        topology=world(4, 2),
        batch_size=8,
        storage_reservation=nothing_reserved(),
        constraints=constraints,
    ).plan(model, STOCK_SHARDERS)

    for mesh in (tdsp.Mesh2D(1, 4), tdsp.Mesh2D(2, 4)):
        planner = planner_for(
            mesh, world(4 * mesh.num_groups, 2 * mesh.num_groups), constraints=constraints
        )
        assert planner.plan(model, STOCK_SHARDERS) == tdsp.Plan2D.from_stock(stock, mesh)


def test_the_defaults_are_torchrecs() -> None:
    mesh = tdsp.Mesh2D(num_groups=2, group_size=2)

    plan = Planner2D(topology=world(4), mesh=mesh).plan(bags(), STOCK_SHARDERS)

    assert {len(layout(plan, name)) > 0 for name in ("t0", "t1")} == {True}


INTRA, INTER = 1_000.0, 10.0
STRIDED, CONTIGUOUS = tdsp.RankLayout.STRIDED, tdsp.RankLayout.CONTIGUOUS


@given(
    num_groups=st.sampled_from([1, 2, 4]),
    group_size=st.sampled_from([1, 2, 4]),
    local_world_size=st.sampled_from([1, 2, 4, 8, 16]),
    layout=st.sampled_from(tdsp.RankLayout),
)
def test_a_groups_topology_is_the_worlds_but_for_the_ranks(
    num_groups: int, group_size: int, local_world_size: int, layout: tdsp.RankLayout
) -> None:
    mesh = tdsp.Mesh2D(num_groups, group_size, layout)
    topology = Topology(
        world_size=mesh.world_size,
        local_world_size=min(local_world_size, mesh.world_size),
        compute_device="cuda",
        hbm_cap=11,
        ddr_cap=12,
        ssd_cap=13,
        hbm_mem_bw=21.0,
        ddr_mem_bw=22.0,
        ssd_mem_bw=23.0,
        hbm_to_ddr_mem_bw=24.0,
        bwd_compute_multiplier=31.0,
        weighted_feature_bwd_compute_multiplier=32.0,
        uneven_sharding_perf_multiplier=33.0,
        generalized_comms_bandwidths=BasicCommsBandwidths(inter_host_bw=41.0, intra_host_bw=42.0),
    )

    group = group_topology(topology, mesh)

    assert group.world_size == len(group.devices) == group_size
    assert group.local_world_size == mesh.node_group_size(topology.local_world_size)
    assert all(device.storage == Storage(hbm=11, ddr=12, ssd=13) for device in group.devices)
    assert [device.rank for device in group.devices] == list(range(group_size))
    for name in (
        "compute_device",
        "hbm_mem_bw",
        "ddr_mem_bw",
        "ssd_mem_bw",
        "hbm_to_ddr_mem_bw",
        "bwd_compute_multiplier",
        "weighted_feature_bwd_compute_multiplier",
        "uneven_sharding_perf_multiplier",
        "comms_bandwidths",
    ):
        assert getattr(group, name) == getattr(topology, name), name


def test_a_rank_of_a_group_has_the_memory_of_the_smallest_peer() -> None:
    topology = Topology(
        world_size=4,
        compute_device="cpu",
        custom_topology_data=CustomTopologyData({"ddr_cap": [40, 30, 20, 50]}, world_size=4),
    )

    strided = group_topology(topology, tdsp.Mesh2D(2, 2, STRIDED))
    contiguous = group_topology(topology, tdsp.Mesh2D(2, 2, CONTIGUOUS))

    assert [device.storage.ddr for device in strided.devices] == [30, 20]
    assert [device.storage.ddr for device in contiguous.devices] == [20, 30]


@pytest.mark.parametrize(
    ("mesh", "local_world_size", "expected"),
    [
        (tdsp.Mesh2D(2, 4, STRIDED), 4, INTRA),
        (tdsp.Mesh2D(2, 4, CONTIGUOUS), 4, INTER),
        (tdsp.Mesh2D(2, 4, CONTIGUOUS), 8, INTRA),
        (tdsp.Mesh2D(4, 2, STRIDED), 2, INTER),
        (tdsp.Mesh2D(3, 2, STRIDED), 2, INTER),  # some peers share a host, not all
        (tdsp.Mesh2D(2, 1), 1, INTER),
    ],
)
def test_the_bandwidth_between_peers(
    mesh: tdsp.Mesh2D, local_world_size: int, expected: float
) -> None:
    topology = world(mesh.world_size, local_world_size, intra_host_bw=INTRA, inter_host_bw=INTER)

    assert peer_bandwidth_bytes_per_ms(topology, mesh) == expected


def test_a_topology_of_a_group_is_taken_where_it_tells_enough() -> None:
    mesh = tdsp.Mesh2D(2, 2, STRIDED)
    of_group = world(2, 2)
    constraints = constrained("table_row_wise")

    # Two ranks of a group on one host leave only one host size, that of the world.
    assert group_topology(of_group, mesh) is of_group
    by_group = planner_for(mesh, of_group, constraints=constraints)
    by_world = planner_for(mesh, world(4, 4), constraints=constraints)
    sharders = [AnyTypeSharder()]
    assert by_group.plan(bags(), sharders) == by_world.plan(bags(), sharders)  # pyright: ignore

    with pytest.raises(
        tdsp.errors.ConfigError, match="Pass the topology of the whole world: world_size=4"
    ):
        planner_for(mesh, world(2, 1))


def test_a_topology_of_another_size_is_refused() -> None:
    with pytest.raises(
        tdsp.errors.ConfigError, match=r"world_size=8, but Mesh2D\(2x2, strided\) has 4 ranks; pass"
    ):
        planner_for(tdsp.Mesh2D(2, 2), world(8))


def test_pods_are_refused() -> None:
    topology = Topology(world_size=8, local_world_size=2, pod_size=2, compute_device="cpu")

    with pytest.raises(tdsp.errors.UnsupportedError, match="pods of 4 ranks on hosts of 2"):
        planner_for(tdsp.Mesh2D(2, 4), topology)
