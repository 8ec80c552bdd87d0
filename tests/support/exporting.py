"""What an exported model is compared with: tables of eight bits by hand, and a stock model."""

import math
from collections.abc import Sequence
from itertools import islice
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from tests.support.train_runs import plain_metrics
from torchrec_2dsp.programs.data.dataset import Split
from torchrec_2dsp.programs.export.source import ExportSource
from torchrec_2dsp.programs.models.kinds import build_any_model, dataset_for, has_clicks
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


def thresholds_of(model: nn.Module) -> list[torch.Tensor]:
    """The running thresholds of a model's splits by "laplace", in the model's order."""
    return [value for name, value in model.named_buffers() if name.endswith("running_threshold")]


def plain_evaluation(
    source: ExportSource, *, num_ranks: int, thresholds: Sequence[Sequence[float]] = ()
) -> dict[str, float]:
    """The metrics of the trained model, by their definitions, each rank's part of a batch apart.

    Args:
        source: the checkpoint.
        num_ranks: into how many parts a batch is cut.
        thresholds: those of each rank's splits; without them those of the checkpoint.
    """
    config, model = source.config, stock_model(source)
    dataset = dataset_for(config.model, config.data.dataset())
    losses, scores, labels = [], [], []
    for rank in range(num_ranks):
        if thresholds:
            for buffer, value in zip(thresholds_of(model), thresholds[rank], strict=True):
                buffer.fill_(value)
        batches = dataset.batches(
            Split.EVAL, global_batch_size=config.loop.batch_size, rank=rank, world_size=num_ranks
        )
        for batch in islice(batches, config.loop.eval_steps):
            outputs = zip((losses, scores, labels), model(batch)[1], strict=True)
            for values, value in outputs:
                values.append(value)
    if has_clicks(config.model):
        return plain_metrics(torch.cat(scores).reshape(-1), torch.cat(labels))
    # With another loss, scores are the places of items; parts have as many samples.
    places = [place for place in torch.cat(scores).tolist() if place]
    gains = [1 / math.log2(place + 1) for place in places if place <= 10]
    return {
        "loss": torch.stack(losses).double().mean().item(),
        "recall@10": len(gains) / len(places),
        "ndcg@10": sum(gains) / len(places),
    }
