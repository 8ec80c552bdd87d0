"""Find the plan for the running ranks: measure them, search, and report the result.

Loaded only where no plan is given: a model with a plan doesn't need the planner's modules.
"""

import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.distributed.types import ModuleSharder
from torchrec.modules.embedding_modules import (
    EmbeddingBagCollectionInterface,
    EmbeddingCollectionInterface,
)
from torchrec.modules.mc_embedding_modules import BaseManagedCollisionEmbeddingCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_2dsp._compat.torchrec import get_local_size
from torchrec_2dsp._compat.wrapped_collections import table_configs as map_configs
from torchrec_2dsp.comms.alarm import agreeing
from torchrec_2dsp.comms.groups import world_group
from torchrec_2dsp.cost.calibration import Calibration
from torchrec_2dsp.cost.measuring.cache import calibration_of_world
from torchrec_2dsp.cost.workload import fitted_skew
from torchrec_2dsp.errors import ConfigError
from torchrec_2dsp.plan.plan2d import Plan2D
from torchrec_2dsp.planner.explanation import Explanation
from torchrec_2dsp.planner.planner2d import ParameterConstraints2D, Planner2D
from torchrec_2dsp.shard.initial_tables import configs_of


def find_plan(
    module: nn.Module,
    sharders: Sequence[ModuleSharder[Any]],
    device: torch.device,
    *,
    sample: KeyedJaggedTensor | Sequence[KeyedJaggedTensor] | None = None,
    calibration: Calibration | str | Path | None = None,
    has_small_buckets: bool = False,
    **arguments: Any,
) -> tuple[Plan2D, Explanation | None]:
    """Search the plan on rank 0, and print the result there.

    Only rank 0 gets the reasons. A ``sample`` of batches is for `sampled_constraints`; without a
    calibration, or its file's name, these machines are measured. ``has_small_buckets`` tells the
    search that dense gradients are reduced as in `parallelize`. ``arguments`` are `Planner2D`'s,
    except the topology. Errors are the same on all ranks.

    Collectives:
        Two agreements of all ranks, `calibration_of_world`'s without a calibration,
        `sampled_constraints`' with a sample, and one broadcast of the plan.
    """
    world = world_group()
    local_world_size = get_local_size(world.size())
    with agreeing(world) as facts:
        facts["whether there is a calibration"] = str(calibration is not None)
        facts["whether there is a sample"] = str(sample is not None)
        for name in ("precision", "exchange", "mesh", "constraints"):
            facts[name] = _in_any_order(arguments.get(name))
        if isinstance(calibration, str | Path):
            calibration = Calibration.load(calibration)
    if calibration is None:
        calibration = calibration_of_world(world, local_world_size=local_world_size, device=device)
    if sample is not None:
        given, counted = arguments.get("constraints") or {}, arguments.get("access") or {}
        sampled = sampled_constraints(module, sample, given)
        of_counted = {
            name: given.get(name, ParameterConstraints()) for name in counted if name in sampled
        }
        arguments["constraints"] = sampled | of_counted
    with agreeing(world):
        # The planner warns of a calibration for other devices.
        device_type = "cpu" if device.type == "cpu" else "cuda"
        topology = calibration.topology(world.size(), local_world_size, device=device_type)
        planner = Planner2D(topology, calibration=calibration, **arguments)
        if has_small_buckets:
            planner.expect_small_buckets()
    plan = planner.collective_plan(module, list(sharders), world)
    if dist.get_rank(world):
        return plan, None
    explanation = planner.explain()
    print(*explanation.summary(), sep="\n", file=sys.stderr, flush=True)
    return plan, explanation


def _in_any_order(allowed: Any) -> str:
    """Return a text that doesn't depend on order, because sets' order differs between processes."""
    if isinstance(allowed, ParameterConstraints):
        return ", ".join(f"{name}={_in_any_order(part)}" for name, part in vars(allowed).items())
    if isinstance(allowed, Mapping):
        return "\n".join(sorted(f"{key}: {_in_any_order(part)}" for key, part in allowed.items()))
    if isinstance(allowed, Collection) and not isinstance(allowed, str):
        return f"[{', '.join(sorted(map(_in_any_order, allowed)))}]"
    return str(allowed)


def sampled_constraints(
    module: nn.Module,
    sample: KeyedJaggedTensor | Sequence[KeyedJaggedTensor],
    constraints: Mapping[str, ParameterConstraints] | None = None,
    group: dist.ProcessGroup | None = None,
) -> dict[str, ParameterConstraints]:
    """Add to a planner's constraints how many ids bags have, and how unevenly rows are used.

    Example::

        constraints = tdsp.sampled_constraints(model, next(iter(loader)).sparse_features)
        planner = tdsp.Planner2D(topology, batch_size, constraints=constraints)

    Args:
        module: the unsharded model.
        sample: the features of one or several batches on this rank, of the same size on all
            ranks. Features without a table are ignored; tables stay unchanged unless a batch has
            all their features. For tables behind id maps, only the ids per bag are known.
        constraints: constraints to keep, except skews and pooling factors of 1 (unknown).
        group: the ranks, by default all of them.

    Raises:
        TwoDError: the same on all ranks.

    Collectives:
        An agreement of all ranks and one all-gather of objects.
    """
    group = group or world_group()
    batches = list(sample) if isinstance(sample, Sequence) else [sample]
    kinds = EmbeddingBagCollectionInterface, EmbeddingCollectionInterface
    parts = [part for part in module.modules() if isinstance(part, kinds)]
    tables = {config.name: config for part in parts for config in configs_of(part)}
    behind_maps = {
        config.name
        for part in module.modules()
        if isinstance(part, BaseManagedCollisionEmbeddingCollection)
        for config in map_configs(part)
    }
    with agreeing(group) as facts:
        facts["the tables"] = ", ".join(tables)
        has_samples = [isinstance(batch, KeyedJaggedTensor) and batch.stride() for batch in batches]
        if not (batches and all(has_samples)):
            raise ConfigError(
                "sample has no batch, or one without samples: give KeyedJaggedTensors, such as "
                "sample=batch.sparse_features"
            )
        own = {
            name: [
                _counted(batch, config.feature_names)
                for batch in batches
                if set(config.feature_names) <= set(batch.keys())
            ]
            for name, config in tables.items()
        }
        if not any(own.values()):
            raise ConfigError(
                f"sample has the features {', '.join(batches[0].keys())}, with which no table is "
                "complete; give the features that the model looks up"
            )
    of_ranks: list[dict[str, list[list[float]]]] = [{}] * dist.get_world_size(group)
    dist.all_gather_object(of_ranks, own, group=group)
    by_table = dict(constraints or {})
    for name, config in tables.items():
        if counted := [counts for of_rank in of_ranks for counts in of_rank.get(name, [])]:
            num_samples, num_distinct, *num_ids = np.mean(counted, axis=0).tolist()
            constraint = _as_2d(by_table.get(name))
            if constraint.pooling_factors == [1.0] and constraint.num_poolings is None:
                ids = [max(number, 1.0) / num_samples for number in num_ids]
                constraint = replace(constraint, pooling_factors=ids)
            # Id maps change how often rows are used.
            if constraint.skew is None and name not in behind_maps:
                skew = fitted_skew(config.num_embeddings, sum(num_ids), num_distinct)
                constraint = replace(constraint, skew=skew)
            by_table[name] = constraint
    return by_table


def _counted(batch: KeyedJaggedTensor, features: Sequence[str]) -> list[float]:
    """Count a batch's samples, a table's distinct rows in it, and each feature's ids."""
    ids = [batch[feature].values() for feature in features]
    distinct = torch.cat(ids).unique().numel()
    return [float(batch.stride()), float(distinct), *(float(part.numel()) for part in ids)]


def _as_2d(constraint: ParameterConstraints | None) -> ParameterConstraints2D:
    if isinstance(constraint, ParameterConstraints2D):
        return constraint
    constraint = constraint or ParameterConstraints()
    return ParameterConstraints2D(
        **{field.name: getattr(constraint, field.name) for field in fields(ParameterConstraints)}
    )
