"""How many bytes of optimizer state a row has."""

from collections.abc import Mapping
from typing import Any

import torch
import torchrec.optim
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch.optim import Optimizer

from torchrec_2dsp._compat.torchrec import in_backward_optimizers
from torchrec_2dsp.optim import MomentScaledRowWiseAdaGradOptimizer

STATE_BYTES = 4
"""Bytes of a number of the optimizer state, which is fp32."""


def optimizer_of(weight: Any, fused_params: Mapping[str, Any]) -> EmbOptimType | type[Optimizer]:
    """The optimizer that a table's fused kernel will run: plain SGD unless told.

    Args:
        weight: the unsharded table, which may have one by ``apply_optimizer_in_backward``.
        fused_params: of its sharder.
    """
    applied = in_backward_optimizers(weight)
    return applied.classes[0] if applied else fused_params.get("optimizer", EmbOptimType.EXACT_SGD)


def state_bytes_per_row(optimizer: EmbOptimType | type[Optimizer], dim: int) -> int:
    """Bytes of optimizer state that one row of a shard of width ``dim`` has.

    Args:
        optimizer: the fused kernel's name of it, or the class that it was applied by. One that
            isn't known here counts as one number per element.
        dim: the shard's columns.

    Example:
        >>> from fbgemm_gpu.split_embedding_configs import EmbOptimType
        >>> from torchrec_2dsp.cost.optimizer_state import state_bytes_per_row
        >>> state_bytes_per_row(EmbOptimType.EXACT_ROWWISE_ADAGRAD, dim=64)
        4
        >>> state_bytes_per_row(EmbOptimType.EXACT_ADAGRAD, dim=64)
        256
    """
    if optimizer in _STATELESS:
        return 0
    if optimizer in _ONE_PER_ROW:
        return STATE_BYTES
    if optimizer in _TWO_PER_ELEMENT:
        return 2 * dim * STATE_BYTES
    return dim * STATE_BYTES


_STATELESS = (
    EmbOptimType.SGD,
    EmbOptimType.EXACT_SGD,
    EmbOptimType.NONE,
    torch.optim.SGD,
    torchrec.optim.SGD,
)
_ONE_PER_ROW = (
    EmbOptimType.ROWWISE_ADAGRAD,
    EmbOptimType.EXACT_ROWWISE_ADAGRAD,
    EmbOptimType.EMAINPLACE_ROWWISE_ADAGRAD,
    torchrec.optim.RowWiseAdagrad,
    MomentScaledRowWiseAdaGradOptimizer,
)
_TWO_PER_ELEMENT = (
    EmbOptimType.ADAM,
    EmbOptimType.LAMB,
    torch.optim.Adam,
    torchrec.optim.Adam,
    torchrec.optim.LAMB,
)
