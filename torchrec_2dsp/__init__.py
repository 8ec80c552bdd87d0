"""2D sparse parallelism, hot rows and exact replica sync for TorchRec, by swapping the planner
and the sharders."""

import sys

from torchrec_2dsp._compat.upstream_names import require_upstream_names
from torchrec_2dsp._compat.versions import is_doctor_command, require_supported_versions

# The doctor has to run where everything else would fail, so it alone starts without the rest.
if not is_doctor_command(sys.orig_argv, sys.argv):
    require_supported_versions()
    require_upstream_names()

    from torchrec_2dsp.access.counter import RowCounter
    from torchrec_2dsp.access.hot_set import HotSet
    from torchrec_2dsp.access.stats import AccessStats
    from torchrec_2dsp.access.table_access import TableAccess
    from torchrec_2dsp.cost.calibration import Calibration
    from torchrec_2dsp.cost.memory import MemoryCost
    from torchrec_2dsp.cost.model import CostModel
    from torchrec_2dsp.cost.step_cost import StepCost
    from torchrec_2dsp.cost.workload import DenseWork, TableWork, Workload
    from torchrec_2dsp.errors import (
        CalibrationError,
        CheckpointError,
        ConfigError,
        InputError,
        MeshError,
        PlanError,
        RankError,
        SyncError,
        TwoDError,
        UnsupportedError,
        VersionError,
    )
    from torchrec_2dsp.mesh.groups import MeshGroups
    from torchrec_2dsp.mesh.mesh2d import Mesh2D, RankLayout
    from torchrec_2dsp.optim.delayed_moment import DelayedMomentRowWiseAdaGrad
    from torchrec_2dsp.optim.moment_scaled import (
        FROM_MESH,
        MomentScaledRowWiseAdaGrad,
        MomentScaledRowWiseAdaGradOptimizer,
    )
    from torchrec_2dsp.parallel.checkpoint import PendingSave, load_checkpoint, save_checkpoint
    from torchrec_2dsp.parallel.checkpoint.latest import drop_old_checkpoints, latest_checkpoint
    from torchrec_2dsp.parallel.failing_together import failing_together
    from torchrec_2dsp.parallel.hot_set_refresh import HotSetRefresh
    from torchrec_2dsp.parallel.model_parallel2d import ModelParallel2D
    from torchrec_2dsp.parallel.row_prefetch_pipeline import TrainPipelineRowPrefetch
    from torchrec_2dsp.parallel.train_state.state import TrainState
    from torchrec_2dsp.plan.parameter_sharding import (
        Exchange,
        ParameterSharding2D,
        RowOwners,
        ShardingType2D,
    )
    from torchrec_2dsp.plan.pin import pin
    from torchrec_2dsp.plan.plan2d import Plan2D
    from torchrec_2dsp.plan.remap import plan_for_rank
    from torchrec_2dsp.plan.sync_config import GradientSync, SyncedRows, Transport, WeightSync
    from torchrec_2dsp.plan.sync_policy import after, every, never
    from torchrec_2dsp.planner.balanced_partitioner import BalancedPartitioner
    from torchrec_2dsp.planner.constraints import ParameterConstraints2D
    from torchrec_2dsp.planner.enumerator import Enumerator2D
    from torchrec_2dsp.planner.partitioner import Partitioner2D
    from torchrec_2dsp.planner.planner2d import Planner2D
    from torchrec_2dsp.planner.proposers import (
        ExchangeProposer,
        GroupSizeProposer,
        HotRowProposer,
    )
    from torchrec_2dsp.planner.stats import Stats2D
    from torchrec_2dsp.planner.topology import group_topology
    from torchrec_2dsp.shard.default_sharders import get_default_sharders
    from torchrec_2dsp.shard.sequence_sharder import EmbeddingCollectionSharder2D
    from torchrec_2dsp.shard.sharders import EmbeddingBagCollectionSharder2D
    from torchrec_2dsp.sync.report import SyncReport

__version__ = "0.1.0"
__all__ = [
    "FROM_MESH",
    "AccessStats",
    "BalancedPartitioner",
    "Calibration",
    "CalibrationError",
    "CheckpointError",
    "ConfigError",
    "CostModel",
    "DelayedMomentRowWiseAdaGrad",
    "DenseWork",
    "EmbeddingBagCollectionSharder2D",
    "EmbeddingCollectionSharder2D",
    "Enumerator2D",
    "Exchange",
    "ExchangeProposer",
    "GradientSync",
    "GroupSizeProposer",
    "HotRowProposer",
    "HotSet",
    "HotSetRefresh",
    "InputError",
    "MemoryCost",
    "Mesh2D",
    "MeshError",
    "MeshGroups",
    "ModelParallel2D",
    "MomentScaledRowWiseAdaGrad",
    "MomentScaledRowWiseAdaGradOptimizer",
    "ParameterConstraints2D",
    "ParameterSharding2D",
    "Partitioner2D",
    "PendingSave",
    "Plan2D",
    "PlanError",
    "Planner2D",
    "RankError",
    "RankLayout",
    "RowCounter",
    "RowOwners",
    "ShardingType2D",
    "Stats2D",
    "StepCost",
    "SyncError",
    "SyncReport",
    "SyncedRows",
    "TableAccess",
    "TableWork",
    "TrainPipelineRowPrefetch",
    "TrainState",
    "Transport",
    "TwoDError",
    "UnsupportedError",
    "VersionError",
    "WeightSync",
    "Workload",
    "after",
    "drop_old_checkpoints",
    "every",
    "failing_together",
    "get_default_sharders",
    "group_topology",
    "latest_checkpoint",
    "load_checkpoint",
    "never",
    "pin",
    "plan_for_rank",
    "save_checkpoint",
]
