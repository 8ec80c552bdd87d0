"""The arguments of `ModelParallel2D`, checked before anything is created from them."""

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import nn
from torchrec.distributed.types import ModuleSharder, ShardingPlan

from torchrec_2dsp.errors import ConfigError, PlanError, UnsupportedError
from torchrec_2dsp.plan.plan2d import Plan2D, is_proposed
from torchrec_2dsp.shard.sequence_sharder import EmbeddingCollectionSharder2D
from torchrec_2dsp.shard.sharders import EmbeddingBagCollectionSharder2D


def checked_plan(
    module: nn.Module,
    plan: ShardingPlan | None,
    sharders: Sequence[ModuleSharder[Any]],
    unsupported: dict[str, Any],
) -> Plan2D:
    """The plan, if it fits module, world and sharders."""
    if unsupported:
        raise UnsupportedError(
            f"ModelParallel2D doesn't take {', '.join(sorted(unsupported))}: mesh and sync come "
            "from the plan, submodule configs and FULLY_SHARDED aren't supported"
        )
    if isinstance(plan, ShardingPlan) and is_proposed(plan):
        plan = Plan2D.from_stock(plan)
    if not isinstance(plan, Plan2D):
        raise ConfigError(
            f"plan is a {type(plan).__name__}; pass Planner2D's, or Plan2D.from_stock(plan, "
            "mesh=Mesh2D.for_world(...))"
        )
    plan.mesh.check_world(dist.get_world_size())
    plan.validate()
    by_type = {sharder.module_type: sharder for sharder in sharders}
    for path, _ in plan.modules():
        try:
            part = module.get_submodule(path)
        except AttributeError:
            raise PlanError(
                f"the plan names module {path!r}, which the model doesn't have; make the plan "
                "for this model"
            ) from None
        sharder = by_type.get(type(part))
        if not isinstance(sharder, _SHARDERS):
            raise ConfigError(
                f"module {path!r} ({type(part).__name__}) is in the plan, but its sharder is "
                f"{type(sharder).__name__}; pass one of "
                + ", ".join(kind.__name__ for kind in _SHARDERS)
            )
    return plan


_SHARDERS = (EmbeddingBagCollectionSharder2D, EmbeddingCollectionSharder2D)


def describe_sharder(sharder: ModuleSharder[Any]) -> str:
    """A sharder as text, which is the same on all ranks if the sharders are."""
    params = getattr(sharder, "fused_params", None) or {}
    optimizer = getattr(sharder, "optimizer", None)
    return f"{type(sharder).__name__}({optimizer!r}, {sorted(params.items())!r})"
