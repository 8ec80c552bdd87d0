"""2D sparse parallelism, hot rows and exact replica sync for TorchRec, by swapping the planner
and the sharders.

Public names are loaded when they are first used: `Mesh2D` doesn't load TorchRec, `Planner2D` does.
What isn't named here is imported from its room, such as `torchrec_2dsp.cost.model.CostModel`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from torchrec_2dsp import errors as errors
from torchrec_2dsp._version import __version__ as __version__

if TYPE_CHECKING:
    from torchrec_2dsp.access.counter import RowCounter as RowCounter
    from torchrec_2dsp.access.hot_set import HotSet as HotSet
    from torchrec_2dsp.access.stats import AccessStats as AccessStats
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
    from torchrec_2dsp.parallel.accumulate import accumulate as accumulate
    from torchrec_2dsp.parallel.checkpoint import (
        load_checkpoint as load_checkpoint,
        save_checkpoint as save_checkpoint,
    )
    from torchrec_2dsp.parallel.checkpoint.latest import (
        drop_old_checkpoints as drop_old_checkpoints,
        latest_checkpoint as latest_checkpoint,
    )
    from torchrec_2dsp.parallel.failing_together import failing_together as failing_together
    from torchrec_2dsp.parallel.hot_set_refresh import HotSetRefresh as HotSetRefresh
    from torchrec_2dsp.parallel.model_parallel2d import ModelParallel2D as ModelParallel2D
    from torchrec_2dsp.parallel.row_prefetch_pipeline import (
        TrainPipelineRowPrefetch as TrainPipelineRowPrefetch,
    )
    from torchrec_2dsp.parallel.train_state.state import TrainState as TrainState
    from torchrec_2dsp.plan.parameter_sharding import (
        Exchange as Exchange,
        ParameterSharding2D as ParameterSharding2D,
    )
    from torchrec_2dsp.plan.pin import pin as pin
    from torchrec_2dsp.plan.plan2d import Plan2D as Plan2D
    from torchrec_2dsp.plan.row_owners import RowOwners as RowOwners
    from torchrec_2dsp.plan.sync_config import (
        GradientSync as GradientSync,
        SyncedRows as SyncedRows,
        WeightSync as WeightSync,
    )
    from torchrec_2dsp.plan.sync_policy import after as after, every as every, never as never
    from torchrec_2dsp.planner.constraints import ParameterConstraints2D as ParameterConstraints2D
    from torchrec_2dsp.planner.planner2d import Planner2D as Planner2D
    from torchrec_2dsp.planner.torchrec.balanced_partitioner import (
        BalancedPartitioner as BalancedPartitioner,
    )
    from torchrec_2dsp.planner.torchrec.proposers import (
        ExchangeProposer as ExchangeProposer,
        GroupSizeProposer as GroupSizeProposer,
        HotRowProposer as HotRowProposer,
    )
    from torchrec_2dsp.replicas.sync_report import SyncReport as SyncReport
    from torchrec_2dsp.samples.balanced_batches import BalancedBatches as BalancedBatches
    from torchrec_2dsp.samples.deal import SampleCost as SampleCost
    from torchrec_2dsp.shard.default_sharders import get_default_sharders as get_default_sharders
    from torchrec_2dsp.shard.sequence_sharder import (
        EmbeddingCollectionSharder2D as EmbeddingCollectionSharder2D,
    )
    from torchrec_2dsp.shard.sharders import (
        EmbeddingBagCollectionSharder2D as EmbeddingBagCollectionSharder2D,
    )

_ROOMS = {
    "access.counter": ("RowCounter",),
    "access.hot_set": ("HotSet",),
    "access.stats": ("AccessStats",),
    "codecs.rows": ("Transport",),
    "comms.groups": ("release_groups",),
    "cost.calibration": ("Calibration",),
    "dense.delayed_dense": ("DelayedDense",),
    "dense.hooked_data_parallel": ("HookedDataParallel",),
    "dense.local_dense": ("DiLoCo", "LocalDense"),
    "dense.pipelined.layer_stack": ("LayerStack", "MeasuredCuts"),
    "dense.pipelined.pipelined_dense": ("PipelinedDense",),
    "dense.sharded_dense": ("FullyShardedDense", "TensorParallelDense"),
    "dense.thresholded": ("Thresholded",),
    "dense.thresholded_data_parallel": ("ThresholdedDataParallel",),
    "errors": ("TwoDError",),
    "mesh": (
        "Mesh2D",
        "RankLayout",
    ),
    "optim": ("MomentScaledRowWiseAdaGrad",),
    "parallel.accumulate": ("accumulate",),
    "parallel.checkpoint": (
        "load_checkpoint",
        "save_checkpoint",
    ),
    "parallel.checkpoint.latest": (
        "drop_old_checkpoints",
        "latest_checkpoint",
    ),
    "parallel.failing_together": ("failing_together",),
    "parallel.hot_set_refresh": ("HotSetRefresh",),
    "parallel.model_parallel2d": ("ModelParallel2D",),
    "parallel.row_prefetch_pipeline": ("TrainPipelineRowPrefetch",),
    "parallel.train_state.state": ("TrainState",),
    "plan.parameter_sharding": (
        "Exchange",
        "ParameterSharding2D",
    ),
    "plan.pin": ("pin",),
    "plan.plan2d": ("Plan2D",),
    "plan.row_owners": ("RowOwners",),
    "plan.sync_config": (
        "GradientSync",
        "SyncedRows",
        "WeightSync",
    ),
    "plan.sync_policy": (
        "after",
        "every",
        "never",
    ),
    "planner.constraints": ("ParameterConstraints2D",),
    "planner.planner2d": ("Planner2D",),
    "planner.torchrec.balanced_partitioner": ("BalancedPartitioner",),
    "planner.torchrec.proposers": (
        "ExchangeProposer",
        "GroupSizeProposer",
        "HotRowProposer",
    ),
    "replicas.sync_report": ("SyncReport",),
    "samples.balanced_batches": ("BalancedBatches",),
    "samples.deal": ("SampleCost",),
    "shard.default_sharders": ("get_default_sharders",),
    "shard.sequence_sharder": ("EmbeddingCollectionSharder2D",),
    "shard.sharders": ("EmbeddingBagCollectionSharder2D",),
}
"""The public names of each module."""

_MODULE_OF = {name: module for module, names in _ROOMS.items() for name in names}

__all__ = list(_MODULE_OF)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    """Load a public name. Rooms that need TorchRec refuse versions that can't work."""
    module = _MODULE_OF.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{module}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
