"""Tables, skewed logs, cost planners, and handmade plans on machines with few costs."""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
from torchrec.distributed.planner.types import ShardingOption
from torchrec.distributed.types import ModuleSharder, ShardingType
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection

import torchrec_2dsp as tdsp
from torchrec_2dsp.access.table_access import TableAccess
from torchrec_2dsp.cost.calibration import BagCost, Calibration, KernelCost
from torchrec_2dsp.cost.collectives import CollectiveCost, Span
from torchrec_2dsp.cost.loads import Placed, Shards
from torchrec_2dsp.cost.model import CostSetting, kept_bytes
from torchrec_2dsp.cost.step_cost import StepCost, rated
from torchrec_2dsp.cost.table_loads import message_type
from torchrec_2dsp.cost.workload import DenseWork, TableWork, Workload
from torchrec_2dsp.plan.parameter_sharding import Pipeline
from torchrec_2dsp.planner.planner2d import Planner2D
from torchrec_2dsp.planner.search.candidates import candidates_of
from torchrec_2dsp.planner.search.choices import Candidate, Choice
from torchrec_2dsp.planner.search.space import Room
from torchrec_2dsp.planner.topology import world_topology
from torchrec_2dsp.planner.torchrec.enumerator import search_as_torchrec

ENOUGH = Room(1e12)
ROWS = (40, 1_000, 9_000)
EXACT = tdsp.GradientSync()
SHARDERS: list[ModuleSharder[nn.Module]] = [
    tdsp.EmbeddingBagCollectionSharder2D(tdsp.MomentScaledRowWiseAdaGrad(lr=0.1))  # type: ignore[list-item]
]


class AnyTypeSharder(EmbeddingBagCollectionSharder):
    """Allows every type on the CPU as well."""

    def sharding_types(self, compute_device_type: str) -> list[str]:
        return [member.value for member in ShardingType]


STOCK_SHARDERS: list[ModuleSharder[nn.Module]] = [AnyTypeSharder()]  # pyright: ignore[reportAssignmentType]


def tables(rows: Sequence[int] = ROWS, dims: int | Sequence[int] = 32) -> EmbeddingBagCollection:
    """Return a collection with tables `t0`, `t1` and so on, each with its own feature."""
    of_tables = [dims] * len(rows) if isinstance(dims, int) else dims
    return EmbeddingBagCollection(
        device=torch.device("meta"),
        tables=[
            EmbeddingBagConfig(
                name=f"t{number}",
                num_embeddings=int(num_rows),
                embedding_dim=int(dim),
                feature_names=[f"f{number}"],
            )
            for number, (num_rows, dim) in enumerate(zip(rows, of_tables, strict=True))
        ],
    )


def sequences(rows: Sequence[int], dim: int = 32) -> EmbeddingCollection:
    """Return a collection of sequence tables, named like the bag tables."""
    return EmbeddingCollection(
        device=torch.device("meta"),
        tables=[
            EmbeddingConfig(num_rows, dim, name=f"t{number}", feature_names=[f"f{number}"])
            for number, num_rows in enumerate(rows)
        ],
    )


def bags(num_tables: int = 2, rows: int = 40, dim: int = 64) -> EmbeddingBagCollection:
    return tables((rows,) * num_tables, dim)


def world(world_size: int, local_world_size: int | None = None, **figures: float) -> Topology:
    return Topology(
        world_size=world_size,
        local_world_size=local_world_size,
        compute_device="cpu",
        **figures,  # pyright: ignore[reportArgumentType]
    )


def nothing_reserved() -> FixedPercentageStorageReservation:
    return FixedPercentageStorageReservation(0.0)


def constrained(*sharding_types: str, num_tables: int = 2) -> dict[str, ParameterConstraints]:
    """Return the same constraint for ``num_tables`` tables: only these sharding types."""
    constraint = ParameterConstraints(sharding_types=list(sharding_types), min_partition=32)
    return {f"t{number}": constraint for number in range(num_tables)}


def small(settings: dict[str, Any]) -> dict[str, Any]:
    """Return planner settings for small batches with nothing reserved, plus other settings."""
    return {"batch_size": 8, "storage_reservation": nothing_reserved()} | settings


def planner_for(
    mesh: tdsp.Mesh2D | None, topology: Topology | None = None, **settings: Any
) -> Planner2D:
    """Return a planner for `small` batches; the mesh or topology determines the world."""
    if topology is None and mesh is not None:
        topology = world(mesh.world_size)
    return Planner2D(topology=topology, mesh=mesh, **small(settings))


def torchrecs_planner(topology: Topology, **settings: Any) -> EmbeddingShardingPlanner:
    """Return TorchRec's planner for `small` batches."""
    return EmbeddingShardingPlanner(topology=topology, **small(settings))


def group_plan_of(
    model: nn.Module,
    mesh: tdsp.Mesh2D,
    topology: Topology | None = None,
    sharders: list[ModuleSharder[nn.Module]] = STOCK_SHARDERS,
    **settings: Any,
) -> tdsp.Plan2D:
    """Plan one group by TorchRec's search, for `small` batches.

    Every rank plans on its own, with the same result.
    """
    topology = topology or world_topology(mesh)
    return search_as_torchrec(model, sharders, topology=topology, mesh=mesh, **small(settings))


def tables_in(plan: tdsp.Plan2D) -> dict[str, tdsp.ParameterSharding2D]:
    """Return a plan's tables, by name."""
    return {name: table for _, module in plan.modules() for name, table in module.tables()}


def ways_in(plan: tdsp.Plan2D) -> dict[str, tuple[str, str]]:
    """Return each table's sharding type and exchange."""
    return {
        name: (table.sharding_type, table.exchange.value) for name, table in tables_in(plan).items()
    }


def calibration(link: str | Calibration = "1gbit") -> Calibration:
    """Return a calibration that never changes; shipped ones follow new measurements."""
    if isinstance(link, Calibration):
        return link
    return Calibration.load(Path(__file__).parent / "hardware" / f"{link}.toml")


def skewed(rows: tuple[int, ...] = ROWS) -> tdsp.AccessStats:
    counts = {
        f"t{number}": TableAccess.of_counts(
            1e6 / np.arange(1, num_rows + 1) ** 1.1, num_samples=1e6
        )
        for number, num_rows in enumerate(rows)
    }
    return tdsp.AccessStats(counts)


def planner(link: str | Calibration = "1gbit", **settings: Any) -> Planner2D:
    """Return a planner for two hosts with two ranks each, unless settings say otherwise."""
    given = small({"topology": world(4, 2), "batch_size": 512} | settings)
    return Planner2D(calibration=calibration(link), **given)


def plan_of(module: nn.Module, **settings: Any) -> tdsp.Plan2D:
    return planner(**settings).plan(module, SHARDERS)


def problem(
    mesh: tdsp.Mesh2D,
    rows: Sequence[int] = ROWS,
    constraints: Mapping[str, ParameterConstraints] | None = None,
    *,
    link: str | Calibration = "1gbit",
    sync: "tdsp.GradientSync | tdsp.WeightSync" = EXACT,
    local_world_size: int = 2,
    dense: DenseWork | None = None,
    batch_size: int = 512,
    **work: Any,
) -> tuple[list[Candidate], CostSetting]:
    """Return tables with their choices, and the other settings that a step depends on.

    ``work`` are arguments for `Workload.of_model`.
    """
    workload = Workload.of_model(tables(rows), batch_size=batch_size, **work)
    workload = replace(workload, dense=dense or DenseWork())
    candidates = candidates_of(tables(rows), SHARDERS, constraints, workload, "cpu")
    return candidates, CostSetting(calibration(link), workload, mesh, sync, local_world_size)


def bytes_by_rank(options: list[ShardingOption], num_ranks: int) -> list[int]:
    """Sum the options' bytes in each rank's host memory."""
    stored = [0] * num_ranks
    for option in options:
        for shard in option.shards:
            assert shard.rank is not None
            assert shard.storage is not None
            stored[shard.rank] += shard.storage.ddr
    return stored


def best_of_all(
    candidates: list[Candidate], setting: CostSetting, room: float = ENOUGH.device
) -> float:
    """Return the best step's rating over all choices for all tables on all ranks."""
    group = setting.group
    ways = []
    for candidate in candidates:
        ways.append(
            [
                candidate.placed(choice, ranks, group)
                for choice in candidate.choices
                for ranks in _all_ranks(choice, group)
            ]
        )
    buffers = setting.buffer_bytes
    best = np.inf
    for placed in itertools.product(*ways):
        loads = setting.loads(placed)
        kept = sum(
            (kept_bytes(entry, group.num_ranks)[0] for entry in placed), buffers @ loads.values
        )
        if kept.max() <= room:
            types = {message_type(entry.kind, entry.exchange, entry.transport) for entry in placed}
            best = min(best, rated(setting.step_cost(loads), types))
    return best


def _all_ranks(choice: Choice, group: Span) -> Iterable[tuple[int, ...]]:
    """Return all possible ranks for a choice's shards, where it leaves them free."""
    if not choice.is_free:
        return [()]
    size, parts = group.ranks_per_host, choice.column_shards
    hosts = [range(host * size, (host + 1) * size) for host in range(group.num_hosts)]
    if choice.kind is ShardingType.TABLE_COLUMN_WISE:
        return itertools.chain(*(itertools.product(host, repeat=parts) for host in hosts))
    if choice.is_on_host:
        on_hosts = itertools.product(hosts, repeat=parts)
        return (tuple(itertools.chain(*of_parts)) for of_parts in on_hosts)
    return itertools.product(range(group.num_ranks), repeat=parts)


LINK = 1e-8
DIM, BATCH, NUM_ROWS = 64, 100, 10_000
NOTHING = BagCost(base_s=0, per_item_s=0, per_byte_s=0, per_vector_byte_s=0, per_row_byte_s=0)
WIRE = CollectiveCost(base_s=0, per_peer_s=0, local_s_per_byte=0, link_s_per_byte=LINK)
ONE, TWO = tdsp.Mesh2D(1, 4), tdsp.Mesh2D(2, 2, tdsp.RankLayout.CONTIGUOUS)


def with_part(known: Calibration, part: str, **changes: Any) -> Calibration:
    """Return a calibration with other fields in its collectives, kernels or hardware."""
    return known.model_copy(update={part: getattr(known, part).model_copy(update=changes)})


def only_the_link(**kernels: KernelCost | None) -> Calibration:
    """Return a calibration where only bytes between hosts and the named kernels cost time."""
    known = Calibration.load("configs/hardware/emulated_1gbit.toml")
    collectives = dict.fromkeys(type(known.collectives).model_fields, WIRE)
    work = dict.fromkeys(type(known.kernels).model_fields, NOTHING) | kernels
    free = with_part(with_part(known, "collectives", **collectives), "kernels", **work)
    return free.model_copy(update={"turn_s": 0.0, "hidden_share": 1.0})


def counted(skew: float = 1.0) -> TableAccess:
    return TableAccess.of_counts(1e6 / np.arange(1, NUM_ROWS + 1) ** skew, num_samples=1e6)


def table(kind: ShardingType, ranks: list[int], **more: object) -> Placed:
    rows_each = NUM_ROWS // len(ranks) if kind is ShardingType.ROW_WISE else NUM_ROWS
    columns = DIM // len(ranks) if kind is ShardingType.COLUMN_WISE else DIM
    work = TableWork(name="t", num_rows=NUM_ROWS, dim=DIM, ids_per_sample=1.0)
    known = {"exchange": tdsp.Exchange.POOLED, "owners": tdsp.RowOwners.BLOCK, "work": work}
    is_everywhere = kind is ShardingType.DATA_PARALLEL
    shards = Shards.of([] if is_everywhere else [(rank, rows_each, columns) for rank in ranks])
    return Placed(kind=kind, shards=shards, **(known | more))  # type: ignore[arg-type]


ROW = table(ShardingType.ROW_WISE, [0, 1, 2, 3], exchange=tdsp.Exchange.ROW)
TABLE_WISE = table(ShardingType.TABLE_WISE, [0])
VECTORS = BATCH * DIM * 4
"""Bytes of the vectors that one rank gets."""


def cost(
    *tables: Placed,
    mesh: tdsp.Mesh2D = ONE,
    sync: "tdsp.GradientSync | tdsp.WeightSync" = EXACT,
    calibration: Calibration | None = None,
    pipeline: Pipeline = Pipeline.BASE,
    **workload: object,
) -> StepCost:
    known = {"batch_size": BATCH, "tables": {}}
    known_workload = Workload(**(known | workload))  # type: ignore[arg-type]
    of_machines = calibration or only_the_link()
    setting = CostSetting(of_machines, known_workload, mesh, sync, 2, pipeline)
    return setting.step_cost(setting.loads(tables))


def slow_fetch() -> Calibration:
    """Return a calibration where only bytes between hosts cost time, tripled in all-to-alls."""
    slow = WIRE.model_copy(update={"link_s_per_byte": 3 * LINK})
    return with_part(only_the_link(), "collectives", all_to_all=slow)
