"""The train pipeline of a config."""

from typing import Any

import torch
from torch import nn
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist

from torchrec_2dsp.parallel.row_prefetch_pipeline import TrainPipelineRowPrefetch


def make_pipeline(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    device: torch.device,
    *,
    prefetch_rows: bool = False,
) -> TrainPipelineSparseDist[Any, Any]:
    """TorchRec's pipeline, or the one that fetches rows ahead."""
    kind = TrainPipelineRowPrefetch if prefetch_rows else TrainPipelineSparseDist
    return kind(model, optimizer, device)
