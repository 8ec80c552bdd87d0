"""`parallelize`: one call from a plain model to the fastest training that the rules allow."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.fp_embeddingbag import FeatureProcessedEmbeddingBagCollectionSharder
from torchrec.distributed.mc_embedding import ManagedCollisionEmbeddingCollectionSharder
from torchrec.distributed.mc_embeddingbag import ManagedCollisionEmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DataParallelWrapper
from torchrec.distributed.planner.types import ParameterConstraints, StorageReservation
from torchrec.distributed.types import ModuleSharder, ShardingPlan
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_2dsp._compat.ddp import DefaultDataParallelWrapper
from torchrec_2dsp._compat.shardings import dedups_ids
from torchrec_2dsp._compat.torchrec import get_local_size, in_backward_optimizers
from torchrec_2dsp._compat.wrapped_collections import bag_sharder_of, table_sharder_of
from torchrec_2dsp.access.stats import AccessStats
from torchrec_2dsp.codecs.rows import Transport
from torchrec_2dsp.comms.alarm import agreeing
from torchrec_2dsp.comms.groups import world_group
from torchrec_2dsp.cost.calibration import Calibration
from torchrec_2dsp.cost.workload import has_small_buckets, small_bucket_bytes, table_weights
from torchrec_2dsp.errors import ConfigError
from torchrec_2dsp.mesh import Mesh2D
from torchrec_2dsp.parallel.model_parallel2d import ModelParallel2D
from torchrec_2dsp.plan.parameter_sharding import Exchange
from torchrec_2dsp.plan.serialize import load
from torchrec_2dsp.plan.sync import SyncConfig
from torchrec_2dsp.shard.default_sharders import (
    FeatureProcessedEmbeddingBagCollectionSharder2D,
    ManagedCollisionEmbeddingBagCollectionSharder2D,
    ManagedCollisionEmbeddingCollectionSharder2D,
    all_sharders,
)
from torchrec_2dsp.shard.optimizers import Optimizer
from torchrec_2dsp.shard.parted import check_can_start
from torchrec_2dsp.shard.sharders import (
    EmbeddingBagCollectionSharder2D,
    EmbeddingCollectionSharder2D,
)


def parallelize(
    module: nn.Module,
    *,
    batch_size: int,
    device: torch.device | str | None = None,
    optimizer: Optimizer | None = None,
    precision: "Transport | str | Sequence[Transport | str] | None" = None,
    exchange: "Exchange | str | Sequence[Exchange | str] | None" = None,
    calibration: Calibration | str | Path | None = None,
    mesh: Mesh2D | None = None,
    sync: SyncConfig | None = None,
    sample: KeyedJaggedTensor | Sequence[KeyedJaggedTensor] | None = None,
    constraints: Mapping[str, ParameterConstraints] | None = None,
    access: AccessStats | None = None,
    storage_reservation: StorageReservation | None = None,
    plan: ShardingPlan | str | Path | None = None,
    sharders: Sequence[ModuleSharder[Any]] | None = None,
    data_parallel_wrapper: DataParallelWrapper | None = None,
) -> ModelParallel2D:
    """Shard a model by the plan that is predicted to be fastest on these ranks.

    Rank 0 prints the choice, a step's predicted time, the next best plan, and the disallowed option
    that would help most; `ModelParallel2D.explain` has the reasons. Tables that aren't on the
    meta device keep their weights; with your own ``sharders`` their ``keep_weights`` decides.

    Example::

        model = tdsp.parallelize(
            model,
            device=device,
            batch_size=4096,
            optimizer=tdsp.MomentScaledRowWiseAdaGrad(lr=0.02),
            sample=next(iter(loader)).sparse_features,
        )
        pipeline = model.pipeline(torch.optim.Adam(model.dense_parameters(), lr=1e-3))
        for _ in range(num_steps):
            output = pipeline.progress(batches)

    Args:
        module: the model; embedding modules may be on the meta device.
        batch_size: samples per rank and step.
        device: this rank's device, CPU by default.
        optimizer: the tables' optimizer; not needed with ``sharders``, or where
            ``apply_optimizer_in_backward`` gave each table one.
        precision: "exact", the default, trains as the unsharded model; "any" lets the search round
            rows and gradients on the wire; a list allows only its transports.
        exchange: the allowed exchanges, by default all.
        calibration: these machines' calibration, its file or name. By default they are measured,
            in 20 s at most, and the result is kept in the user's cache folder for the next start.
        mesh: the ranks that repeat the plan; by default the best mesh.
        sync: how replicas stay equal, by default exactly: `GradientSync`.
        sample: the sparse features of one or several batches on this rank, from which the search
            learns how many ids bags have and how unevenly rows are used. Without it, bags have one
            id, and rows are used as in public click logs.
        constraints: per table, as in TorchRec's planner; they override the sample.
        access: row frequencies, which also override the sample. Without them no rows are hot.
        storage_reservation: the memory that isn't available for tables, as in TorchRec.
        plan: run this plan, or the plan in this file, instead of searching one.
        sharders: shard by these instead of one for each kind of module. TorchRec's own are
            replaced by this package's, with their parameters.
        data_parallel_wrapper: as in `ModelParallel2D`. By default DDP, on CPUs of several hosts
            with smaller buckets than TorchRec's, the first of which are reduced in the backward.

    Raises:
        TwoDError: the same on all ranks.

    Collectives:
        An agreement of all ranks, `find_plan`'s unless there is a plan, and
        `ModelParallel2D`'s.
    """
    demands = {
        "precision": precision,
        "sync": sync,
        "exchange": exchange,
        "calibration": calibration,
        "mesh": mesh,
        "sample": sample,
        "constraints": constraints,
        "access": access,
        "storage_reservation": storage_reservation,
    }
    given = {name: demand for name, demand in demands.items() if demand is not None}
    with agreeing(world_group()) as facts:
        device = torch.device(device or "cpu")
        check_can_start(module)
        sharders = _sharders(module, optimizer, sharders)
        _check_wrapper(data_parallel_wrapper)
        if plan is not None and given:
            raise ConfigError(
                f"plan and {next(iter(given))} are both given, and a plan is run as it is: leave "
                "one of them out"
            )
        if isinstance(plan, str | Path):
            plan = load(plan)
        facts["whether there is a plan"] = str(plan is not None)
        facts["batch_size"] = str(batch_size)
    explanation = None
    in_small = data_parallel_wrapper is None and _makes_small_buckets(device)
    if plan is None:
        # Loaded only here: with a plan, the planner's modules aren't needed.
        from torchrec_2dsp.parallel.planning import find_plan

        given["has_small_buckets"] = in_small
        plan, explanation = find_plan(module, sharders, device, batch_size=batch_size, **given)
    if in_small:
        data_parallel_wrapper = _in_small_buckets(module)
    model = ModelParallel2D(
        module, device, plan, sharders, data_parallel_wrapper=data_parallel_wrapper
    )
    model.explanation = explanation
    return model


def _check_wrapper(wrapper: object) -> None:
    if not isinstance(wrapper, DataParallelWrapper | None):
        raise ConfigError(
            f"data_parallel_wrapper={wrapper!r} is no DataParallelWrapper; give an instance, such "
            "as tdsp.FullyShardedDense()"
        )


def _makes_small_buckets(device: torch.device) -> bool:
    num_ranks = world_group().size()
    return has_small_buckets(device.type, num_ranks, get_local_size(num_ranks))


def _in_small_buckets(module: nn.Module) -> DataParallelWrapper:
    """Return TorchRec's wrapper, whose first buckets leave before the backward ends."""
    of_tables = {id(weight) for weight in table_weights(module)}
    trained = [param for param in module.parameters() if param.requires_grad]
    num_bytes = sum(param.nbytes for param in trained if id(param) not in of_tables)
    # DDP also accepts fractions of a MiB.
    bucket_mb = cast(int, small_bucket_bytes(num_bytes) / 2**20)
    return DefaultDataParallelWrapper(bucket_cap_mb=bucket_mb)


def _sharders(
    module: nn.Module,
    optimizer: Optimizer | None,
    sharders: Sequence[ModuleSharder[Any]] | None,
) -> list[ModuleSharder[Any]]:
    """Return the user's sharders, or one sharder for each kind of module."""
    if sharders is not None:
        if optimizer is not None:
            raise ConfigError("optimizer and sharders are both given: give the optimizer to them")
        return [_as_ours(sharder) for sharder in sharders]
    trained = [table for table in table_weights(module) if table.requires_grad]
    if optimizer is None and not all(in_backward_optimizers(table) for table in trained):
        raise ConfigError(
            "nothing says how tables are trained: give optimizer=..., such as "
            "tdsp.MomentScaledRowWiseAdaGrad(lr=0.02)"
        )
    return all_sharders(
        EmbeddingBagCollectionSharder2D(optimizer, keep_weights=True),
        EmbeddingCollectionSharder2D(optimizer),
    )


def _as_ours(sharder: Any) -> Any:
    """Replace TorchRec's sharder by this package's, with its parameters."""
    if type(sharder) is EmbeddingBagCollectionSharder:
        return EmbeddingBagCollectionSharder2D(
            sharder.fused_params, sharder.qcomm_codecs_registry, keep_weights=True
        )
    if type(sharder) is EmbeddingCollectionSharder:
        return EmbeddingCollectionSharder2D(
            sharder.fused_params, sharder.qcomm_codecs_registry, dedups_ids(sharder)
        )
    if type(sharder) is FeatureProcessedEmbeddingBagCollectionSharder:
        return FeatureProcessedEmbeddingBagCollectionSharder2D(_as_ours(bag_sharder_of(sharder)))
    if type(sharder) is ManagedCollisionEmbeddingBagCollectionSharder:
        return ManagedCollisionEmbeddingBagCollectionSharder2D(_as_ours(table_sharder_of(sharder)))
    if type(sharder) is ManagedCollisionEmbeddingCollectionSharder:
        return ManagedCollisionEmbeddingCollectionSharder2D(_as_ours(table_sharder_of(sharder)))
    return sharder
