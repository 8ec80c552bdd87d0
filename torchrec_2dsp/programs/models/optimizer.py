"""The tables' optimizer, and the dense part's."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torchrec.distributed.model_parallel import DataParallelWrapper
from torchrec.optim import SemisyncOptimizer
from torchrec.optim.keyed import KeyedOptimizer, KeyedOptimizerWrapper

from torchrec_2dsp._compat.ddp import data_parallel_wrapper
from torchrec_2dsp.dense.local_dense import DiLoCo, LocalDense
from torchrec_2dsp.dense.pipelined.pipelined_dense import PipelinedDense
from torchrec_2dsp.optim import (
    FROM_MESH,
    MomentScaledRowWiseAdaGrad,
)
from torchrec_2dsp.programs.config.dense import DenseKinds, LocalConfig
from torchrec_2dsp.programs.config.sections import OptimizerConfig, ReplicationConfig

STATE_PER_WEIGHT = {"sgd": 0.0, "adagrad": 1.0, "adam": 2.0, "adamw": 2.0}
"""Numbers that each dense optimizer keeps per weight."""


def table_optimizer(
    optimizer: OptimizerConfig, replication: ReplicationConfig
) -> MomentScaledRowWiseAdaGrad:
    """Build the optimizer for a sharder."""
    scale = replication.moment_scale
    return MomentScaledRowWiseAdaGrad(
        optimizer.lr, optimizer.eps, moment_scale=FROM_MESH if scale == "from_mesh" else scale
    )


def dense_optimizer(
    optimizer: OptimizerConfig,
    parameters: Mapping[str, Any],
    *,
    clip_norm: float = 0.0,
    wrapper: DataParallelWrapper | None = None,
) -> KeyedOptimizerWrapper:
    """Build the dense part's optimizer, by parameter name.

    With a ``clip_norm`` above 0, each step begins by clipping all gradients together, by the norm
    of all shards of a sharded part, and of all stages of a pipeline.

    Collectives:
        With clipping, in each step of a fully sharded dense part, a one-number all-reduce over its
        ranks; of a pipelined one, the same as `PipelinedDense.clip_grad_norm_`.
    """

    def clip(stepped: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if isinstance(wrapper, PipelinedDense):
            # A rank's optimizer has its own stage's parameters alone.
            wrapper.clip_grad_norm_(clip_norm)
            return
        params = [param for group in stepped.param_groups for param in group["params"]]
        clip_([param.grad for param in params if param.grad is not None], clip_norm)

    def made_for(unnamed: list[Any]) -> torch.optim.Optimizer:
        plain = plain_dense_optimizer(optimizer, unnamed)
        if clip_norm:
            plain.register_step_pre_hook(clip)
        return plain

    return KeyedOptimizerWrapper(dict(parameters), made_for)


def with_meetings(
    local: KeyedOptimizerWrapper, dense: DenseKinds, model: nn.Module
) -> KeyedOptimizer:
    """Wrap the optimizer for ranks that train apart and meet now and then; else return it."""
    wrapper = data_parallel_wrapper(model)
    if not isinstance(wrapper, LocalDense) or not isinstance(dense, LocalConfig):
        return local
    params: dict[str, Any] = dict(local.params)
    outer = KeyedOptimizerWrapper(
        params,
        lambda unnamed: DiLoCo(unnamed, wrapper, dense.outer_lr, momentum=dense.outer_momentum),
    )
    return SemisyncOptimizer(params.values(), local, outer, num_local_steps=dense.local_steps)


def plain_dense_optimizer(
    optimizer: OptimizerConfig, parameters: Iterable[Any]
) -> torch.optim.Optimizer:
    """Build torch's optimizer, which knows no names."""
    rates: dict[str, Any] = {"lr": optimizer.dense_lr, "weight_decay": optimizer.dense_weight_decay}
    kinds: dict[str, Any] = {
        "sgd": torch.optim.SGD,
        "adagrad": torch.optim.Adagrad,
        "adam": torch.optim.Adam,
        "adamw": torch.optim.AdamW,
    }
    return kinds[optimizer.dense_optimizer](parameters, **rates)


@torch.no_grad()
def clip_(gradients: Sequence[torch.Tensor], max_norm: float) -> torch.Tensor:
    """Scale gradients down to a largest norm, in place, and return their former norm.

    Collectives:
        If some are sharded, a one-number all-reduce over the ranks of their mesh.
    """
    sharded = [gradient for gradient in gradients if isinstance(gradient, DTensor)]
    whole = [gradient for gradient in gradients if not isinstance(gradient, DTensor)]
    norm = torch.nn.utils.get_total_norm(whole)
    if sharded:
        norm_of_shards: Any = torch.nn.utils.get_total_norm(sharded)
        norm = torch.hypot(norm, norm_of_shards.full_tensor().to(norm.device))
    # As torch does it: the small number keeps a gradient of zero as it is.
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for gradient in [*whole, *(part.to_local() for part in sharded)]:
        gradient.mul_(factor)
    return norm
