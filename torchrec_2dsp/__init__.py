"""2D sparse parallelism, row exchange and hot rows for TorchRec, by swapping planner and sharders.

Public names are loaded on first use: `Mesh2D` doesn't load TorchRec, `Planner2D` does. Import other
names from their modules, such as `torchrec_2dsp.cost.model.CostModel`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from torchrec_2dsp import errors as errors
from torchrec_2dsp._version import __version__ as __version__

if TYPE_CHECKING:
    from torchrec_2dsp.access.counter import RowCounter as RowCounter
    from torchrec_2dsp.access.stats import AccessStats as AccessStats
    from torchrec_2dsp.access.table_access import HotSet as HotSet
    from torchrec_2dsp.codecs.rows import Transport as Transport
    from torchrec_2dsp.comms.groups import release_groups as release_groups
    from torchrec_2dsp.cost.calibration import Calibration as Calibration
    from torchrec_2dsp.dense.delayed_dense import DelayedDense as DelayedDense
    from torchrec_2dsp.dense.hooked_data_parallel import HookedDataParallel as HookedDataParallel
    from torchrec_2dsp.dense.local_dense import DiLoCo as DiLoCo, LocalDense as LocalDense
    from torchrec_2dsp.dense.pipelined.layer_stack import (
        LayerStack as LayerStack,
        MeasuredCuts as MeasuredCuts,
    )
    from torchrec_2dsp.dense.pipelined.pipelined_dense import PipelinedDense as PipelinedDense
    from torchrec_2dsp.dense.sharded_dense import (
        FullyShardedDense as FullyShardedDense,
        TensorParallelDense as TensorParallelDense,
    )
    from torchrec_2dsp.dense.thresholded import Thresholded as Thresholded
    from torchrec_2dsp.dense.thresholded_data_parallel import (
        ThresholdedDataParallel as ThresholdedDataParallel,
    )
    from torchrec_2dsp.errors import TwoDError as TwoDError
    from torchrec_2dsp.mesh import Mesh2D as Mesh2D, RankLayout as RankLayout
    from torchrec_2dsp.optim import (
        MomentScaledRowWiseAdaGrad as MomentScaledRowWiseAdaGrad,
    )
    from torchrec_2dsp.parallel.checkpoint import (
        load_checkpoint as load_checkpoint,
        save_checkpoint as save_checkpoint,
    )
    from torchrec_2dsp.parallel.checkpoint.save import (
        drop_old_checkpoints as drop_old_checkpoints,
        latest_checkpoint as latest_checkpoint,
    )
    from torchrec_2dsp.parallel.loop import (
        HotSetRefresh as HotSetRefresh,
        accumulate as accumulate,
        failing_together as failing_together,
    )
    from torchrec_2dsp.parallel.model_parallel2d import ModelParallel2D as ModelParallel2D
    from torchrec_2dsp.parallel.parallelize import parallelize as parallelize
    from torchrec_2dsp.parallel.pipelines import (
        TrainPipelineRowPrefetch as TrainPipelineRowPrefetch,
    )
    from torchrec_2dsp.parallel.planning import sampled_constraints as sampled_constraints
    from torchrec_2dsp.parallel.train_state.state import TrainState as TrainState
    from torchrec_2dsp.plan.fits_module import leave_whole as leave_whole
    from torchrec_2dsp.plan.parameter_sharding import (
        Exchange as Exchange,
        ParameterSharding2D as ParameterSharding2D,
        Pipeline as Pipeline,
        RowOwners as RowOwners,
        RowStorage as RowStorage,
    )
    from torchrec_2dsp.plan.plan2d import Plan2D as Plan2D, pin as pin
    from torchrec_2dsp.plan.sync import (
        GradientSync as GradientSync,
        SyncedRows as SyncedRows,
        WeightSync as WeightSync,
        after as after,
        every as every,
        never as never,
    )
    from torchrec_2dsp.planner.planner2d import (
        ParameterConstraints2D as ParameterConstraints2D,
        Planner2D as Planner2D,
    )
    from torchrec_2dsp.planner.torchrec.adapters import (
        BalancedPartitioner as BalancedPartitioner,
    )
    from torchrec_2dsp.planner.torchrec.proposers import (
        ExchangeProposer as ExchangeProposer,
        GroupSizeProposer as GroupSizeProposer,
        HotRowProposer as HotRowProposer,
    )
    from torchrec_2dsp.replicas.sync_action import SyncReport as SyncReport
    from torchrec_2dsp.shard.default_sharders import (
        FeatureProcessedEmbeddingBagCollectionSharder2D as FeatureProcessedEmbeddingBagCollectionSharder2D,  # noqa: E501
        ManagedCollisionEmbeddingBagCollectionSharder2D as ManagedCollisionEmbeddingBagCollectionSharder2D,  # noqa: E501
        ManagedCollisionEmbeddingCollectionSharder2D as ManagedCollisionEmbeddingCollectionSharder2D,  # noqa: E501
        get_default_sharders as get_default_sharders,
    )
    from torchrec_2dsp.shard.sharders import (
        EmbeddingBagCollectionSharder2D as EmbeddingBagCollectionSharder2D,
        EmbeddingCollectionSharder2D as EmbeddingCollectionSharder2D,
    )

_MODULE_OF = {
    "RowCounter": "torchrec_2dsp.access.counter",
    "AccessStats": "torchrec_2dsp.access.stats",
    "HotSet": "torchrec_2dsp.access.table_access",
    "Transport": "torchrec_2dsp.codecs.rows",
    "release_groups": "torchrec_2dsp.comms.groups",
    "Calibration": "torchrec_2dsp.cost.calibration",
    "DelayedDense": "torchrec_2dsp.dense.delayed_dense",
    "HookedDataParallel": "torchrec_2dsp.dense.hooked_data_parallel",
    "DiLoCo": "torchrec_2dsp.dense.local_dense",
    "LocalDense": "torchrec_2dsp.dense.local_dense",
    "LayerStack": "torchrec_2dsp.dense.pipelined.layer_stack",
    "MeasuredCuts": "torchrec_2dsp.dense.pipelined.layer_stack",
    "PipelinedDense": "torchrec_2dsp.dense.pipelined.pipelined_dense",
    "FullyShardedDense": "torchrec_2dsp.dense.sharded_dense",
    "TensorParallelDense": "torchrec_2dsp.dense.sharded_dense",
    "Thresholded": "torchrec_2dsp.dense.thresholded",
    "ThresholdedDataParallel": "torchrec_2dsp.dense.thresholded_data_parallel",
    "TwoDError": "torchrec_2dsp.errors",
    "Mesh2D": "torchrec_2dsp.mesh",
    "RankLayout": "torchrec_2dsp.mesh",
    "MomentScaledRowWiseAdaGrad": "torchrec_2dsp.optim",
    "load_checkpoint": "torchrec_2dsp.parallel.checkpoint",
    "save_checkpoint": "torchrec_2dsp.parallel.checkpoint",
    "drop_old_checkpoints": "torchrec_2dsp.parallel.checkpoint.save",
    "latest_checkpoint": "torchrec_2dsp.parallel.checkpoint.save",
    "HotSetRefresh": "torchrec_2dsp.parallel.loop",
    "accumulate": "torchrec_2dsp.parallel.loop",
    "failing_together": "torchrec_2dsp.parallel.loop",
    "ModelParallel2D": "torchrec_2dsp.parallel.model_parallel2d",
    "TrainPipelineRowPrefetch": "torchrec_2dsp.parallel.pipelines",
    "parallelize": "torchrec_2dsp.parallel.parallelize",
    "sampled_constraints": "torchrec_2dsp.parallel.planning",
    "TrainState": "torchrec_2dsp.parallel.train_state.state",
    "leave_whole": "torchrec_2dsp.plan.fits_module",
    "Exchange": "torchrec_2dsp.plan.parameter_sharding",
    "ParameterSharding2D": "torchrec_2dsp.plan.parameter_sharding",
    "Pipeline": "torchrec_2dsp.plan.parameter_sharding",
    "RowOwners": "torchrec_2dsp.plan.parameter_sharding",
    "RowStorage": "torchrec_2dsp.plan.parameter_sharding",
    "Plan2D": "torchrec_2dsp.plan.plan2d",
    "pin": "torchrec_2dsp.plan.plan2d",
    "GradientSync": "torchrec_2dsp.plan.sync",
    "SyncedRows": "torchrec_2dsp.plan.sync",
    "WeightSync": "torchrec_2dsp.plan.sync",
    "after": "torchrec_2dsp.plan.sync",
    "every": "torchrec_2dsp.plan.sync",
    "never": "torchrec_2dsp.plan.sync",
    "ParameterConstraints2D": "torchrec_2dsp.planner.planner2d",
    "Planner2D": "torchrec_2dsp.planner.planner2d",
    "BalancedPartitioner": "torchrec_2dsp.planner.torchrec.adapters",
    "ExchangeProposer": "torchrec_2dsp.planner.torchrec.proposers",
    "GroupSizeProposer": "torchrec_2dsp.planner.torchrec.proposers",
    "HotRowProposer": "torchrec_2dsp.planner.torchrec.proposers",
    "SyncReport": "torchrec_2dsp.replicas.sync_action",
    "get_default_sharders": "torchrec_2dsp.shard.default_sharders",
    "EmbeddingCollectionSharder2D": "torchrec_2dsp.shard.sharders",
    "FeatureProcessedEmbeddingBagCollectionSharder2D": "torchrec_2dsp.shard.default_sharders",
    "ManagedCollisionEmbeddingBagCollectionSharder2D": "torchrec_2dsp.shard.default_sharders",
    "ManagedCollisionEmbeddingCollectionSharder2D": "torchrec_2dsp.shard.default_sharders",
    "EmbeddingBagCollectionSharder2D": "torchrec_2dsp.shard.sharders",
}
"""The module of each public name."""

__all__ = list(_MODULE_OF)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    """Load a public name. Rooms that need TorchRec refuse incompatible versions."""
    module = _MODULE_OF.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
