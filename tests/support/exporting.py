"""What an exported model is compared with: tables of eight bits by hand, and a stock model."""

from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from torchrec_2dsp.programs.export.source import ExportSource
from torchrec_2dsp.programs.models.kinds import build_any_model
from torchrec_2dsp.programs.models.splits import split_
from torchrec_2dsp.programs.train.datasets import shape_of


def quantized_by_hand(weight: torch.Tensor) -> torch.Tensor:
    """A table after a round trip through eight bits, written down in plain arithmetic."""
    low = weight.amin(dim=1, keepdim=True).half().float()
    scale = ((weight.amax(dim=1, keepdim=True) - low) / 255).half().float()
    return (torch.round((weight - low) / scale)).clamp(0, 255) * scale + low


def stock_model(source: ExportSource) -> nn.Module:
    """The trained model as TorchRec and torch alone load it."""
    config = source.config
    run = config.runs[source.run]
    model = build_any_model(shape_of(config.data, config.data.dataset()), config.model)
    split_(model, run.splits, run.split_threshold)
    state = {"model": model.state_dict()}
    dcp.load(state, checkpoint_id=source.checkpoint, no_dist=True)
    return model.eval().requires_grad_(False)


def plain_scores(model: nn.Module, batch: Any) -> torch.Tensor:
    """The scores of a batch, by the model's own parts."""
    whole: Any = model
    if hasattr(whole, "user_tower"):
        users, items = whole.vectors(batch.sparse_features, batch.dense_features)
        return (users * items).sum(dim=1)
    return whole.model(batch.dense_features, batch.sparse_features).squeeze(1)
