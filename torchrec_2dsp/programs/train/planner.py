"""Plan a run by predicted cost, for ranks that run or for machines that needn't be there."""

from dataclasses import replace
from typing import Any

from torch import nn
from torchrec.distributed.planner.types import Topology

from torchrec_2dsp.access.counter import RowCounter
from torchrec_2dsp.access.stats import AccessStats
from torchrec_2dsp.codecs.rows import Transport
from torchrec_2dsp.cost.calibration import Calibration
from torchrec_2dsp.cost.workload import DenseWork, Workload
from torchrec_2dsp.plan.parameter_sharding import Exchange
from torchrec_2dsp.planner.planner2d import ParameterConstraints2D, Planner2D
from torchrec_2dsp.programs.config.sections import ModelConfig
from torchrec_2dsp.programs.data.dataset import (
    BatchShape,
    Dataset,
    Progress,
    Split,
    closing_batches,
)
from torchrec_2dsp.programs.data.synthetic import SyntheticConfig
from torchrec_2dsp.programs.models.kinds import transformer_of
from torchrec_2dsp.programs.models.model import tables_of
from torchrec_2dsp.programs.models.planned import (
    RESERVED,
    ReservedShare,
    planner_arguments,
    true_access,
)
from torchrec_2dsp.programs.train.config import RunConfig, TrainConfig

_COUNTED_IDS, _COUNTED_BATCHES = 2**21, 8
"""The lookups, or samples, to count at least, and the batches."""
_EXACT_ROWS = 2**22
"""The largest table of which each row is counted; of larger ones, the most used rows are."""


def arguments_of(
    config: TrainConfig, run: RunConfig, shape: BatchShape, model: nn.Module, topology: Topology
) -> dict[str, Any]:
    """Return the arguments that TorchRec's planner and this package's share."""
    return planner_arguments(
        model,
        shape,
        run.sharding_types or config.model.sharding_types,
        topology,
        batch_size=config.loop.batch_size // topology.world_size,
    )


def planner_by_cost(
    config: TrainConfig,
    name: str,
    shape: BatchShape,
    model: nn.Module,
    topology: Topology,
    calibration: Calibration,
    access: AccessStats | None,
    *,
    reserved: float = RESERVED,
) -> Planner2D:
    """Build the planner for a run on calibrated machines, which needn't be there.

    Args:
        config: the training program's.
        name: the run's; what it says of mesh, exchange and hot rows is demanded of the plan.
        shape: the data's features.
        model: the unsharded model.
        topology: the calibration's, for the ranks that train.
        calibration: the machines.
        access: row frequencies; `None` on ranks that don't search.
        reserved: the share of memory that isn't for tables.
    """
    run = config.runs[name]
    arguments = arguments_of(config, run, shape, model, topology)
    arguments["storage_reservation"] = ReservedShare(reserved)
    batch_size, types = arguments["batch_size"], run.sharding_types or config.model.sharding_types
    # Counts know better how many ids a sample has, and alone if the data lacks a feature.
    is_counted = access is not None and not run.access
    described = set() if is_counted else {feature.name for feature in shape.features}
    by_features = arguments["constraints"]
    arguments["constraints"] = constraints = {
        table.name: ParameterConstraints2D(
            sharding_types=list(types),
            pooling_factors=by_features[table.name].pooling_factors
            if described.issuperset(table.feature_names)
            else [1.0],
            exchange=[run.exchange] if run.exchange is not Exchange.POOLED else None,
            transport=[run.row_transport] if run.row_transport is not Transport.FP32 else None,
            stored_as=run.stored_as,
            hot_rows=run.hot_rows or None,
        )
        for table in tables_of(model)
    }
    kernels, transformer = calibration.kernels, transformer_of(config.model)
    if transformer is None or kernels.matmul is None:
        arguments["access"] = access
    else:
        # A weight is used for each item of a sample, not once.
        layers = transformer.layers(kernels).layers
        forward_s = batch_size * sum(layer.forward_s for layer in layers)
        workload = Workload.of_model(
            model, batch_size=batch_size, constraints=constraints, access=access
        )
        dense = DenseWork.of_model(model, workload, kernels)
        arguments["workload"] = replace(
            workload, dense=replace(dense, forward_s=forward_s, backward_s=2 * forward_s)
        )
    return Planner2D(
        **arguments,
        mesh=config.mesh(name, topology.world_size),
        sync=run.sync_config,
        calibration=calibration,
    )


def access_of(
    config: TrainConfig,
    run: RunConfig,
    model: nn.Module,
    dataset: Dataset,
    progress: Progress | None = None,
) -> AccessStats:
    """Return a run's row frequencies: by its file, its data's probabilities, or counted.

    Args:
        config: the training program's.
        run: one of its runs.
        model: the unsharded model.
        dataset: the model's batches; the first are counted if nothing else is known.
        progress: called while they are.
    """
    if run.access:
        return AccessStats.load(run.access)
    if isinstance(config.data, SyntheticConfig) and isinstance(config.model, ModelConfig):
        return true_access(config.data)
    counter = RowCounter.for_model(model, exact_rows=_EXACT_ROWS)
    num_counted, batch_size = 0, config.loop.batch_size
    own = dataset.batches(Split.TRAIN, global_batch_size=batch_size, rank=0, world_size=1)
    with closing_batches(own) as batches:
        for number, batch in enumerate(batches):
            if num_counted >= _COUNTED_IDS and number >= _COUNTED_BATCHES:
                break
            counter.update(batch.sparse_features)
            num_counted += max(batch.sparse_features.values().numel(), batch_size)
            if progress is not None:
                progress("counting lookups", num_counted, _COUNTED_IDS)
    return counter.stats()
