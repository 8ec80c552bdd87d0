"""Plans by hand, on machines where only what a test names costs anything."""

import numpy as np
from torchrec.distributed.types import ShardingType

import torchrec_2dsp as tdsp
from torchrec_2dsp.access.table_access import TableAccess
from torchrec_2dsp.cost.calibration import BagCost, Calibration, KernelCost
from torchrec_2dsp.cost.collectives import CollectiveCost
from torchrec_2dsp.cost.loads import Placed, Shards
from torchrec_2dsp.cost.model import CostSetting
from torchrec_2dsp.cost.step_cost import StepCost
from torchrec_2dsp.cost.workload import TableWork, Workload

LINK = 1e-8
DIM, BATCH, ROWS = 64, 100, 10_000
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
    return TableAccess.of_counts(1e6 / np.arange(1, ROWS + 1) ** skew, num_samples=1e6)


def table(kind: ShardingType, ranks: list[int], **more: object) -> Placed:
    rows_each = ROWS // len(ranks) if kind is ShardingType.ROW_WISE else ROWS
    columns = DIM // len(ranks) if kind is ShardingType.COLUMN_WISE else DIM
    work = TableWork(name="t", num_rows=ROWS, dim=DIM, ids_per_sample=1.0)
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
    **workload: object,
) -> StepCost:
    known = {"batch_size": BATCH, "tables": {}, "is_pipelined": False}
    known_workload = Workload(**(known | workload))  # type: ignore[arg-type]
    setting = CostSetting(calibration or only_the_link(), known_workload, mesh, sync, 2)
    return setting.step_cost(setting.loads(tables))
