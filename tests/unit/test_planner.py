"""`Planner2D`: its arguments, its plans, its errors without one; groups' topologies."""

import copy
import inspect
from typing import Any

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from hypothesis import given, settings as hypothesis_settings, strategies as st
from torch import nn
from torch.distributed._shard.metadata import ShardMetadata
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.planner.storage_reservations import HeuristicalStorageReservation
from torchrec.distributed.planner.types import (
    BasicCommsBandwidths,
    CustomTopologyData,
    PlannerError,
    Storage,
)
from torchrec.distributed.types import ShardingType
from torchrec.modules.embedding_configs import DataType, EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection

import torchrec_2dsp as tdsp
from tests.support.planning import (
    STOCK_SHARDERS,
    bags,
    bytes_by_rank,
    constrained,
    group_plan_of,
    nothing_reserved,
    plan_of,
    planner,
    planner_for,
    sequences,
    tables,
    tables_in,
    torchrecs_planner,
    ways_in,
    world,
)
from torchrec_2dsp.cost.workload import Workload
from torchrec_2dsp.errors import ConfigError, MeshError, PlanError, UnsupportedError
from torchrec_2dsp.plan.parameter_sharding import ShardingType2D
from torchrec_2dsp.plan.sync import SyncedRows
from torchrec_2dsp.planner.planner2d import NOT_MEASURED, Planner2D
from torchrec_2dsp.planner.search.candidates import candidates_of
from torchrec_2dsp.planner.topology import (
    group_topology,
    peer_bandwidth_bytes_per_ms,
    shortfall_text,
)

OURS = inspect.signature(Planner2D.__init__).parameters
TORCHRECS = inspect.signature(EmbeddingShardingPlanner.__init__).parameters
ALL_2D = [member.value for member in ShardingType2D]


@pytest.mark.parametrize("part", [name for name in TORCHRECS if name not in OURS])
def test_parts_of_torchrecs_search_are_refused_by_name(part: str) -> None:
    settings: dict[str, Any] = {part: None}
    planner_for(tdsp.Mesh2D(2, 2), **settings)
    settings[part] = False
    with pytest.raises(
        ConfigError,
        match=f"searches by cost, which takes no {part}: leave it out, or use TorchRec's "
        "EmbeddingShardingPlanner, which takes this package's proposers, Enumerator2D, and Balanc",
    ):
        planner_for(tdsp.Mesh2D(2, 2), **settings)


def test_one_argument_constrains_the_exchange_of_all_tables() -> None:
    demands = {
        "t0": ParameterConstraints(sharding_types=["table_wise"]),
        "t1": tdsp.ParameterConstraints2D(exchange="nonempty"),
        "t2": ParameterConstraints(pooling_factors=[2.0]),
    }
    ways = ways_in(plan_of(tables(), exchange="row", constraints=demands))
    assert ways["t0"][0] == "2d_table_wise", "it can have no row exchange, and stays free"
    assert ways["t1"][1] == "nonempty"
    assert ways["t2"] == ("2d_row_wise", "row")
    for exchange in tdsp.Exchange:
        plan = plan_of(tables(), exchange=[exchange])
        assert {used for _, used in ways_in(plan).values()} == {exchange.value}
    assert demands["t2"] == ParameterConstraints(pooling_factors=[2.0])


@pytest.mark.parametrize(
    ("module", "settings", "text"),
    [
        (
            tables(),
            {"constraints": constrained("table_wise", num_tables=3), "exchange": ["pooled", "row"]},
            "no table can have exchange='row', which is for row_wise tables; allow such",
        ),
        (
            sequences((40,), dim=8),
            {"exchange": "nonempty"},
            "no table can have exchange='nonempty', which is for table_wise, column_wise",
        ),
        (
            tables(),
            {"exchange": "rows"},
            "exchange='rows' is unknown; use one of 'pooled', 'nonempty'",
        ),
    ],
)
def test_an_exchange_that_no_table_can_have_is_refused(
    module: nn.Module, settings: dict[str, Any], text: str
) -> None:
    sharders: Any = [tdsp.EmbeddingBagCollectionSharder2D(), tdsp.EmbeddingCollectionSharder2D()]
    with pytest.raises(ConfigError, match=text):
        planner(**settings).plan(module, sharders)


def test_without_a_topology_the_mesh_gives_the_world(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    mesh = tdsp.Mesh2D(num_groups=2, group_size=4)

    topology = Planner2D(storage_reservation=nothing_reserved(), mesh=mesh).topology

    assert (topology.world_size, topology.local_world_size) == (8, 4)


@pytest.mark.parametrize("group_size", [2, 4])
@pytest.mark.parametrize("kind", [name.removeprefix("2d_") for name in ALL_2D])
def test_a_group_is_planned_as_torchrec_plans_a_world(kind: str, group_size: int) -> None:
    """Apart from the sync, a group is like a separate world: same shards on same ranks."""
    constraints = constrained("table_wise", num_tables=5) | constrained(kind)
    model = bags(num_tables=5)
    stock = torchrecs_planner(world(group_size, 2), constraints=constraints).plan(
        model, STOCK_SHARDERS
    )

    for mesh in (tdsp.Mesh2D(1, group_size), tdsp.Mesh2D(2, group_size)):
        topology = world(mesh.world_size, 2 * mesh.num_groups)
        plan = group_plan_of(model, mesh, topology, constraints=constraints)
        assert plan == tdsp.Plan2D.from_stock(stock, mesh)
        assert tables_in(plan)["t0"].sharding_type == f"2d_{kind}"


_OPTIMIZERS = [
    EmbOptimType.EXACT_ROWWISE_ADAGRAD,
    EmbOptimType.PARTIAL_ROWWISE_ADAM,
    EmbOptimType.LARS_SGD,
]
_SYNCS = [tdsp.GradientSync(), tdsp.WeightSync(), tdsp.WeightSync(rows=SyncedRows.ALL)]


@pytest.mark.dealt_suite
@hypothesis_settings(max_examples=60)
@given(
    st.sampled_from(_OPTIMIZERS),
    st.sampled_from(_SYNCS),
    st.sampled_from([(2, 1), (4, 2), (8, 8)]),
    st.lists(st.sampled_from([1, 2, 5, 9, 17, 1_000, 90_000]), min_size=1, max_size=5),
    st.sets(st.integers(0, 4)),
    st.sets(st.integers(0, 4)),
)
def test_the_sharders_run_whatever_is_planned(
    optimizer: EmbOptimType,
    sync: Any,
    ranks: tuple[int, int],
    rows: list[int],
    in_8_bits: set[int],
    frozen: set[int],
) -> None:
    is_lars = optimizer is EmbOptimType.LARS_SGD
    model = tables(rows)
    for number, table in enumerate(model.embedding_bags.values()):
        table.requires_grad_(number not in frozen)
    formats = {
        f"t{number}": tdsp.ParameterConstraints2D(stored_as="int8")
        for number in range(len(rows))
        if number in in_8_bits and not is_lars
    }
    topology = Topology(ranks[0], "cuda" if is_lars else "cpu", local_world_size=ranks[1])
    sharder: Any = tdsp.EmbeddingBagCollectionSharder2D(optimizer)

    plan = planner(topology=topology, constraints=formats, sync=sync).plan(model, [sharder])

    sharder.checked_plan(model, plan.plan[""], "", topology.compute_device, ranks[1])


@pytest.mark.parametrize(
    ("constraint", "data_type", "features", "message"),
    [
        ({"stored_as": "int8"}, DataType.FP16, ["a", "b"], "isn't possible with data_type"),
        ({"hot_rows": 2}, DataType.FP32, ["a", "a"], "feature 'a' looks up several tables"),
        ({"hot_rows": 2}, DataType.FP32, ["a a"], "feature 'a' looks up one table twice"),
    ],
)
def test_a_demand_that_no_sharder_meets_is_refused(
    constraint: dict[str, Any], data_type: DataType, features: list[str], message: str
) -> None:
    configs = [
        EmbeddingBagConfig(1_000, 32, f"t{number}", data_type, names.split())
        for number, names in enumerate(features)
    ]
    model = EmbeddingBagCollection(tables=configs, device=torch.device("meta"))

    with pytest.raises(UnsupportedError, match=message):
        plan_of(model, constraints={"t0": tdsp.ParameterConstraints2D(**constraint)})


def test_a_module_that_two_parents_share_is_planned_once() -> None:
    shared = nn.ModuleDict({"tables": tables((1_000,))})
    model = nn.ModuleDict({"first": nn.Sequential(shared), "second": nn.Sequential(shared)})

    assert list(plan_of(model).plan) == ["first.0.tables"]


def test_a_table_within_a_host_begins_at_its_first_rank() -> None:
    constraints = constrained("table_row_wise", num_tables=1)
    model = tables((1_000,))
    plan: Any = plan_of(model, mesh=tdsp.Mesh2D(1, 4), constraints=constraints).plan[""]
    plan["t0"].sharding_spec.shards = [
        ShardMetadata(shard.shard_offsets, shard.shard_sizes, f"rank:{rank}/cpu")
        for rank, shard in enumerate(plan["t0"].sharding_spec.shards, start=1)
    ]
    plan["t0"].ranks = [1, 2]

    with pytest.raises(PlanError, match=r"has rows from ranks \[1\] on, and hosts begin"):
        tdsp.EmbeddingBagCollectionSharder2D().checked_plan(model, plan, "", "cpu", 2)


@pytest.mark.parametrize("argument", [{"device_group": "cuda"}, {"use_virtual_table": True}])
def test_tables_for_other_devices_are_refused(argument: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedError, match="plans stored tables on 'cpu' alone"):
        planner(constraints={"t0": ParameterConstraints(**argument)})


def test_sequences_of_a_lookup_are_cut_into_equal_columns() -> None:
    """The fastest number of parts differs between tables, but TorchRec needs equal widths."""
    model = sequences((200_000, 300), dim=128)
    constraints = constrained("column_wise")
    workload = Workload.of_model(model, batch_size=64, constraints=constraints)
    sharder: Any = tdsp.EmbeddingCollectionSharder2D({"learning_rate": 0.1})
    candidates = candidates_of(model, [sharder], constraints, workload, "cpu")
    assert [{way.column_shards for way in table.choices} for table in candidates] == [{2}, {2}]


@pytest.mark.parametrize(
    ("asked", "text"),
    [
        (
            {"sharding_types": ["grid_shard"], "stored_as": "int8"},
            "stored_as='int8', which table_wise, row_wise, table_row_wise tables can be",
        ),
        ({"compute_kernels": ["key_value"]}, "grid_shard with dense, fused, fused_uvm; loosen"),
    ],
)
def test_the_reason_for_no_choice_is_named(asked: dict[str, Any], text: str) -> None:
    constraints = {"t0": tdsp.ParameterConstraints2D(**asked)}
    with pytest.raises(PlanError, match=text):
        planner_for(tdsp.Mesh2D(1, 4), constraints=constraints).plan(bags(), STOCK_SHARDERS)


@pytest.mark.parametrize(
    "mesh", [tdsp.Mesh2D(1, 2), tdsp.Mesh2D(2, 1), tdsp.Mesh2D(4, 2, tdsp.RankLayout.CONTIGUOUS)]
)
@pytest.mark.parametrize("type_2d", ALL_2D)
def test_a_constraint_may_name_either_form(mesh: tdsp.Mesh2D, type_2d: str) -> None:
    by_stock_name = planner_for(mesh, constraints=constrained(type_2d.removeprefix("2d_")))
    by_2d_name = planner_for(mesh, constraints=constrained(type_2d))

    member: Any = ShardingType(type_2d.removeprefix("2d_"))
    by_member = planner_for(mesh, constraints=constrained(member))

    plan = by_2d_name.plan(bags(), STOCK_SHARDERS)

    assert by_member.plan(bags(), STOCK_SHARDERS) == plan
    assert by_stock_name.plan(bags(), STOCK_SHARDERS) == plan
    assert {table.sharding_type for table in tables_in(plan).values()} == {type_2d}


def test_an_unknown_type_is_refused_with_the_table() -> None:
    with pytest.raises(PlanError, match=r"table 't0'.*'diagonal' has no 2D form; use one of"):
        planner_for(tdsp.Mesh2D(2, 2), constraints=constrained("diagonal"))


def test_nothing_given_is_changed() -> None:
    mesh = tdsp.Mesh2D(num_groups=2, group_size=2)
    topology = world(4, 2)
    constraints = constrained("2d_row_wise")
    model = bags()
    before = repr(topology), copy.deepcopy(constraints), dict(model.named_parameters())

    planner_for(mesh, topology, constraints=constraints).plan(model, STOCK_SHARDERS)

    assert (repr(topology), constraints) == before[:2]
    assert all(dict(model.named_parameters())[name] is value for name, value in before[2].items())


@pytest.mark.parametrize("num_groups", [1, 2, 8])
def test_the_memory_of_a_rank_does_not_depend_on_the_number_of_groups(num_groups: int) -> None:
    mesh = tdsp.Mesh2D(num_groups=num_groups, group_size=2)
    model = bags(num_tables=4, rows=1_000)
    by_torchrec = torchrecs_planner(world(2), constraints=constrained("row_wise", num_tables=4))
    by_torchrec.plan(model, STOCK_SHARDERS)
    needed, other = bytes_by_rank(by_torchrec._best_plan or [], 2)
    assert needed == other > 0

    def planned(num_bytes: int) -> tdsp.Plan2D:
        topology = world(2 * num_groups, 2, ddr_cap=num_bytes)
        return group_plan_of(
            model, mesh, topology, constraints=constrained("row_wise", num_tables=4)
        )

    planned(needed)
    with pytest.raises(PlannerError, match="insufficient storage"):
        planned(needed - 1)


def test_the_default_reservation_asks_for_no_estimate(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.ModuleDict({"sparse": bags(num_tables=1, rows=1_000), "dense": nn.Linear(512, 512)})
    tdsp.Planner2D(world(4), mesh=tdsp.Mesh2D(2, 2)).plan(model, STOCK_SHARDERS)
    assert NOT_MEASURED in caplog.messages
    assert not any("dense_tensor_estimate" in message for message in caplog.messages)


def test_a_dense_part_takes_its_share_of_the_memory_as_in_torchrec() -> None:
    model = nn.ModuleDict({"sparse": bags(num_tables=1, rows=1_000), "dense": nn.Linear(512, 512)})
    cap = 3_000_000  # the table alone takes 0.3 MB; six times the dense part 6.3 MB

    planner_for(tdsp.Mesh2D(2, 2), world(4, ddr_cap=cap)).plan(model, STOCK_SHARDERS)
    with pytest.warns(FutureWarning, match="HeuristicalStorageReservation"):
        reservation = HeuristicalStorageReservation(0.15)
    with pytest.raises(PlanError, match="no plan fits"):
        planner_for(tdsp.Mesh2D(2, 2), world(4, ddr_cap=cap), storage_reservation=reservation).plan(
            model, STOCK_SHARDERS
        )
    gpus = Topology(world_size=4, compute_device="cuda", hbm_cap=cap)
    with pytest.raises(PlanError, match="no plan fits") as raised:
        planner_for(tdsp.Mesh2D(2, 2), gpus, storage_reservation=reservation).plan(
            model, STOCK_SHARDERS
        )
    assert isinstance(raised.value.__cause__, PlannerError)
    assert str(raised.value.__cause__) in str(raised.value)


# ---- nothing fits


def test_the_error_names_the_table_that_fits_no_rank() -> None:
    planner = planner_for(
        tdsp.Mesh2D(2, 2),
        world(4, ddr_cap=1_000_000),
        constraints=constrained("table_wise", num_tables=1),
    )

    with pytest.raises(PlanError) as raised:
        planner.plan(bags(num_tables=1, rows=10_000), STOCK_SHARDERS)

    text = str(raised.value)
    # 10,000 rows with 64 floats, and the exchange's buffers
    assert "Mesh2D(2x2, strided): table 't0' needs 2,5" in text
    assert "more than the 1,000,000 there are" in text
    assert "use a larger group_size, reserve a smaller share of the memory" in text


def test_no_sentence_where_the_sums_explain_nothing() -> None:
    assert shortfall_text("t", 10, 10, 20, 20) == ""
    assert "tables need 21 bytes on a group, 1 more" in shortfall_text("t", 10, 10, 21, 20)


# ---- topologies

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


def test_a_topology_of_a_group_does_not_tell_where_peers_are() -> None:
    mesh, of_group = tdsp.Mesh2D(2, 2, STRIDED), world(2, 2)

    assert group_topology(of_group, mesh) is of_group
    with pytest.raises(ConfigError, match="Pass the topology of the whole world: world_size=4"):
        group_plan_of(bags(), mesh, of_group)


def test_a_topology_of_another_size_is_refused() -> None:
    with pytest.raises(MeshError, match=r"Mesh2D\(2x2, strided\) has 4 ranks but the world has 8"):
        planner_for(tdsp.Mesh2D(2, 2), world(8))


def test_pods_are_refused() -> None:
    topology = Topology(world_size=8, local_world_size=2, pod_size=2, compute_device="cpu")

    with pytest.raises(UnsupportedError, match="pods of 4 ranks on hosts of 2"):
        planner_for(tdsp.Mesh2D(2, 4), topology)
