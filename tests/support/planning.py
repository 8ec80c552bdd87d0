"""Tables, skewed logs, planners by cost, and plans by hand on machines with few costs."""

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import ParameterConstraints, Topology
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
from torchrec.distributed.types import (
    EmbeddingModuleShardingPlan,
    ModuleSharder,
    ShardingPlan,
    ShardingType,
)
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection

import torchrec_2dsp as tdsp
from torchrec_2dsp.access.table_access import TableAccess
from torchrec_2dsp.cost.calibration import BagCost, Calibration, KernelCost
from torchrec_2dsp.cost.collectives import CollectiveCost
from torchrec_2dsp.cost.loads import Placed, Shards
from torchrec_2dsp.cost.model import CostSetting, table_bytes
from torchrec_2dsp.cost.step_cost import StepCost
from torchrec_2dsp.cost.table_loads import message_type
from torchrec_2dsp.cost.workload import DenseWork, TableWork, Workload
from torchrec_2dsp.plan.parameter_sharding import Pipeline
from torchrec_2dsp.planner.planner2d import Planner2D
from torchrec_2dsp.planner.search.choices import Candidate, candidates_of, rated
from torchrec_2dsp.planner.topology import world_topology
from torchrec_2dsp.planner.torchrec.enumerator import search_as_torchrec

ENOUGH = 1e12
ROWS = (40, 1_000, 9_000)
SHARDERS: list[ModuleSharder[nn.Module]] = [
    tdsp.EmbeddingBagCollectionSharder2D(tdsp.MomentScaledRowWiseAdaGrad(lr=0.1))  # type: ignore[list-item]
]


class AnyTypeSharder(EmbeddingBagCollectionSharder):
    """Allows every type on the CPU as well."""

    def sharding_types(self, compute_device_type: str) -> list[str]:
        return [member.value for member in ShardingType]


STOCK_SHARDERS: list[ModuleSharder[nn.Module]] = [AnyTypeSharder()]  # pyright: ignore[reportAssignmentType]


def bags(num_tables: int = 2, rows: int = 40, dim: int = 64) -> EmbeddingBagCollection:
    return EmbeddingBagCollection(
        device=torch.device("meta"),
        tables=[
            EmbeddingBagConfig(
                name=f"t{index}",
                num_embeddings=rows,
                embedding_dim=dim,
                feature_names=[f"f{index}"],
            )
            for index in range(num_tables)
        ],
    )


def world(world_size: int, local_world_size: int | None = None, **figures: float) -> Topology:
    return Topology(
        world_size=world_size,
        local_world_size=local_world_size,
        compute_device="cpu",
        **figures,  # pyright: ignore[reportArgumentType]
    )


def nothing_reserved() -> FixedPercentageStorageReservation:
    return FixedPercentageStorageReservation(0.0)


def constrained(
    sharding_type: str, num_tables: int = 2, min_partition: int = 32
) -> dict[str, ParameterConstraints]:
    return {
        f"t{index}": ParameterConstraints(
            sharding_types=[sharding_type], min_partition=min_partition
        )
        for index in range(num_tables)
    }


def planner_for(
    mesh: tdsp.Mesh2D, topology: Topology | None = None, **settings: object
) -> Planner2D:
    """Return a planner of small batches that reserves nothing."""
    given = {"batch_size": 8, "storage_reservation": nothing_reserved(), **settings}
    return Planner2D(
        topology=topology or world(mesh.world_size),
        mesh=mesh,
        **given,  # pyright: ignore[reportArgumentType]
    )


def group_plan_of(
    model: nn.Module,
    mesh: tdsp.Mesh2D,
    topology: Topology | None = None,
    sharders: list[ModuleSharder[nn.Module]] = STOCK_SHARDERS,
    **settings: object,
) -> tdsp.Plan2D:
    """Plan one group by TorchRec's search, for the same batches and memory as `planner_for`.

    Every rank plans by itself, and gets the same.
    """
    given = {"batch_size": 8, "storage_reservation": nothing_reserved(), **settings}
    return search_as_torchrec(
        model,
        sharders,
        topology=topology or world_topology(mesh),
        mesh=mesh,
        **given,  # pyright: ignore[reportArgumentType]
    )


def layout(plan: ShardingPlan, table: str) -> list[tuple[int, list[int], list[int]]]:
    """Rank, offset and size of every shard."""
    module_plan = plan.plan[""]
    assert isinstance(module_plan, EmbeddingModuleShardingPlan)
    shards = getattr(module_plan[table].sharding_spec, "shards", [])
    return [
        (shard.placement.rank(), list(shard.shard_offsets), list(shard.shard_sizes))
        for shard in shards
    ]


def calibration(link: str = "1gbit") -> tdsp.Calibration:
    """Not one of those that are shipped, which change whenever machines are measured again."""
    return tdsp.Calibration.load(Path(__file__).parent / "hardware" / f"{link}.toml")


def tables(rows: tuple[int, ...] = ROWS) -> EmbeddingBagCollection:
    return EmbeddingBagCollection(
        device=torch.device("meta"),
        tables=[
            EmbeddingBagConfig(
                name=f"t{number}",
                num_embeddings=num_rows,
                embedding_dim=32,
                feature_names=[f"f{number}"],
            )
            for number, num_rows in enumerate(rows)
        ],
    )


def skewed(rows: tuple[int, ...] = ROWS) -> tdsp.AccessStats:
    counts = {
        f"t{number}": TableAccess.of_counts(
            1e6 / np.arange(1, num_rows + 1) ** 1.1, num_samples=1e6
        )
        for number, num_rows in enumerate(rows)
    }
    return tdsp.AccessStats(counts)


def planner(world_size: int = 4, link: str = "1gbit", **settings: object) -> tdsp.Planner2D:
    given = {"batch_size": 512, "storage_reservation": nothing_reserved(), **settings}
    given.setdefault("topology", world(world_size, 2))
    return tdsp.Planner2D(calibration=calibration(link), **given)  # type: ignore[arg-type]


def plan_of(module: nn.Module, **settings: object) -> tdsp.Plan2D:
    return planner(**settings).plan(module, SHARDERS)  # type: ignore[arg-type]


def problem(
    link: str, mesh: tdsp.Mesh2D, *, with_access: bool = True
) -> tuple[list[Candidate], CostSetting]:
    workload = Workload.of_model(tables(), batch_size=512, access=skewed() if with_access else None)
    workload = replace(workload, dense=DenseWork(forward_s=0.01, backward_s=0.01))
    candidates = candidates_of(tables(), SHARDERS, None, workload, "cpu")
    return candidates, CostSetting(calibration(link), workload, mesh, tdsp.GradientSync(), 2)


def best_of_all(candidates: list[Candidate], setting: CostSetting, room: float = ENOUGH) -> float:
    """Return the best step of all choices of all tables, with all ranks for table-wise ones."""
    group = setting.group
    ways = []
    for candidate in candidates:
        results = []
        for choice in candidate.choices:
            if choice.kind is ShardingType.TABLE_WISE:
                there = [(rank,) for rank in range(group.num_ranks)]
            elif choice.is_on_host:
                size = group.ranks_per_host
                there = [tuple(range(h * size, (h + 1) * size)) for h in range(group.num_hosts)]
            else:
                there = [()]
            results += [candidate.placed(choice, ranks, group) for ranks in there]
        ways.append(results)
    buffers = setting.buffer_bytes
    best = np.inf
    for placed in itertools.product(*ways):
        loads = setting.loads(placed)
        kept = sum(
            (table_bytes(entry, group.num_ranks) for entry in placed), buffers @ loads.values
        )
        if kept.max() <= room:
            types = {message_type(entry.kind, entry.exchange, entry.transport) for entry in placed}
            best = min(best, rated(setting.step_cost(loads), types))
    return best


LINK = 1e-8
DIM, BATCH, NUM_ROWS = 64, 100, 10_000
NOTHING = BagCost(base_s=0, per_item_s=0, per_byte_s=0, per_vector_byte_s=0, per_row_byte_s=0)
WIRE = CollectiveCost(base_s=0, per_peer_s=0, local_s_per_byte=0, link_s_per_byte=LINK)
ONE, TWO = tdsp.Mesh2D(1, 4), tdsp.Mesh2D(2, 2, tdsp.RankLayout.CONTIGUOUS)
EXACT = tdsp.GradientSync()


def only_the_link(**kernels: KernelCost | None) -> Calibration:
    """Nothing costs anything but bytes between hosts, and what is named."""
    known = Calibration.load("configs/hardware/emulated_1gbit.toml")
    collectives = dict.fromkeys(type(known.collectives).model_fields, WIRE)
    work = dict.fromkeys(type(known.kernels).model_fields, NOTHING) | kernels
    return known.model_copy(
        update={
            "collectives": known.collectives.model_copy(update=collectives),
            "kernels": known.kernels.model_copy(update=work),
            "turn_s": 0.0,
            "hidden_share": 1.0,
        }
    )


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


def slow_fetch() -> tdsp.Calibration:
    """Return costs of bytes between hosts alone, thrice as high in a sharding group."""
    known = only_the_link()
    slow = known.collectives.all_to_all.model_copy(update={"link_s_per_byte": 3 * LINK})
    collectives = known.collectives.model_copy(update={"all_to_all": slow})
    return known.model_copy(update={"collectives": collectives})
