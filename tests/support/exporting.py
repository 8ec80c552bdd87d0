"""Trained models to export, and references for their exports: int8 tables and a stock model."""

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
)
from torchrec.datasets.utils import Batch

from tests.support.programs import python
from tests.support.train_runs import plain_metrics, train_in_folder
from torchrec_2dsp.programs.config.config_file import make_config
from torchrec_2dsp.programs.data.dataset import DatasetFeature, Split
from torchrec_2dsp.programs.export.export import ExportRecord, export_model
from torchrec_2dsp.programs.export.source import ExportSource
from torchrec_2dsp.programs.launch import only_rank
from torchrec_2dsp.programs.models.kinds import build_any_model, dataset_for, has_clicks
from torchrec_2dsp.programs.models.model import split_
from torchrec_2dsp.programs.train import program as trainer
from torchrec_2dsp.programs.train.config import TrainConfig

DATA = {
    "num_dense": 2,
    "features": [
        {"name": "user", "num_rows": 40},
        {"name": "item", "num_rows": 30, "min_ids": 0, "max_ids": 3},
    ],
}
LAYERS = {"dim": 8, "dense_layers": [4], "over_layers": [4]}
TOWERS = {"kind": "two_tower", "user_features": ["user"], "item_features": ["item"], "dim": 8}
SPLITS = {"splits": {"dense": 0.5, "over": 0.5}, "split_threshold": "laplace"}
OWN = {"kind": "module:factory", "factory": f"{__name__}:make_model"}
CELLS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "dlrm": (LAYERS, {}),
    "dcn": ({**LAYERS, "kind": "dcn"}, {}),
    "split": (LAYERS, SPLITS),
    "towers": ({**TOWERS, "normalized": True}, {}),
    "towers_in_a_batch": (
        {**TOWERS, "loss": "in_batch", "temperature": 0.5, "ranking": {"among": "sampled"}},
        {},
    ),
    "own": (OWN, {}),
}
MOST_IDS = 3
"""The most items of a sample."""
HALF_PRECISION = 2.0**-11
"""The rounding of a row's scale and offset, which FBGEMM keeps in half precision."""
ALONE = """
import runpy, sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torchrec_2dsp", "torchrec"):
            raise ImportError(f"{name} is blocked")
sys.meta_path.insert(0, Blocker())
try:
    import torchrec_2dsp
except ImportError:
    print("blocked")
script, *sys.argv[1:] = sys.argv[1:]
sys.argv[0] = script
runpy.run_path(script, run_name="__main__")
"""
"""Runs a script where nothing but torch and FBGEMM can be imported."""


class OwnModel(nn.Module):
    """User bags and item sequences, in a model that isn't one of the built-in kinds."""

    def __init__(self) -> None:
        super().__init__()
        bags = EmbeddingBagConfig(40, 8, name="t_user", feature_names=["user"])
        rows = EmbeddingConfig(30, 8, name="t_item", feature_names=["item"])
        self.bags = EmbeddingBagCollection([bags])
        self.items = EmbeddingCollection([rows])
        self.over = nn.Linear(2 + (1 + MOST_IDS) * 8, 1)

    def forward(self, batch: Batch) -> Any:
        users = self.bags(batch.sparse_features)["user"]
        items = self.items(batch.sparse_features)["item"].to_padded_dense(MOST_IDS)
        inputs = torch.cat([batch.dense_features, users, items.flatten(1)], dim=1)
        logits = self.over(torch.relu(inputs)).squeeze(1)
        loss = nn.functional.binary_cross_entropy_with_logits(logits, batch.labels)
        return loss, (loss.detach(), logits.detach(), batch.labels)


def make_model(
    features: Sequence[DatasetFeature], num_dense: int, options: Mapping[str, Any]
) -> nn.Module:
    return OwnModel()


def run_config(
    folder: Path,
    data: Mapping[str, Any],
    model: Mapping[str, Any],
    run: Mapping[str, Any] | None = None,
    *,
    lr: float = 0.02,
    **loop: int,
) -> TrainConfig:
    """Return a config whose only run writes everything that an export needs to a folder."""
    tree = {
        "data": data,
        "model": model,
        "optimizer": {"lr": lr},
        "loop": {"steps": 4, "global_batch_size": 16, "eval_steps": 2, **loop},
        "checkpoint": {"folder": str(folder / "checkpoints")},
        "output": {"folder": str(folder / "out")},
        "runs": {"main": {"num_groups": 2, **(run or {})}},
    }
    return make_config(TrainConfig, tree)


class Exported(NamedTuple):
    """An exported model."""

    source: ExportSource
    folder: Path
    record: ExportRecord


def exported(folder: Path, *, max_loss: float = 0.01) -> Exported:
    """Export the model that a `run_config` has trained in a folder."""
    source, output = ExportSource.find(folder / "out"), folder / "served"
    with only_rank("export"):
        return Exported(source, output, export_model(source, output, max_loss=max_loss))


@dataclass(frozen=True)
class Trained:
    """A rank's results for a trained cell."""

    metrics: dict[str, float]
    """Metrics over all ranks."""

    thresholds: list[float]
    """The rank's own split thresholds during evaluation."""


def train_all(rank: int, world_size: int, folder: Path) -> dict[str, Trained]:
    """Train all cells; return their metrics and thresholds."""
    done: dict[str, Trained] = {}
    thresholds: list[float] = []
    evaluate = trainer.evaluated

    def evaluated(config: TrainConfig, model: Any, *args: Any) -> Any:
        thresholds[:] = [threshold.item() for threshold in thresholds_of(model.module)]
        return evaluate(config, model, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer, "evaluated", evaluated)
        for cell in CELLS:
            model, run = CELLS[cell]
            config = run_config(folder / cell, DATA, model, run)
            (result,) = train_in_folder(rank, world_size, config).runs
            metrics = dict(result.evaluated.metrics)
            done[cell] = Trained(metrics, list(thresholds))
    return done


def printed_alone(example: str, folder: Path) -> list[str]:
    """Return an example's output for an export, in a process without this package."""
    done = python("-c", ALONE, f"docs/examples/{example}", str(folder))
    assert done.returncode == 0, done.stderr[-3000:]
    first, *lines, last = done.stdout.splitlines()
    assert (first, last) == ("blocked", "done")
    return lines


def as_views(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """Return equal tensors that aren't contiguous in memory."""
    views = [torch.stack([tensor, torch.ones_like(tensor)], dim=-1)[..., 0] for tensor in tensors]
    assert not any(view.is_contiguous() for view in views if view.numel() > 1)
    return views


def quantized_by_hand(weight: torch.Tensor) -> torch.Tensor:
    """Return a table after a round trip through eight bits, in plain arithmetic."""
    low = weight.amin(dim=1, keepdim=True).half().float()
    scale = ((weight.amax(dim=1, keepdim=True) - low) / 255).half().float()
    return (torch.round((weight - low) / scale)).clamp(0, 255) * scale + low


def round_rows_(weight: torch.Tensor) -> None:
    """Round a table in place as `quantized_by_hand` does, by no more than half a step."""
    rounded = quantized_by_hand(weight)
    assert ((rounded - weight).abs() <= half_step(weight)).all()
    weight.copy_(rounded)


def half_step(weight: torch.Tensor) -> torch.Tensor:
    """Return how far eight bits may move each row's numbers."""
    span = weight.amax(dim=1, keepdim=True) - weight.amin(dim=1, keepdim=True)
    return span / 510 + 2 * HALF_PRECISION * weight.abs().amax(dim=1, keepdim=True)


def stock_model(source: ExportSource) -> nn.Module:
    """Return the trained model as TorchRec and torch alone load it."""
    config = source.config
    run = config.runs[source.run]
    model = build_any_model(config.data.dataset(), config.model)
    split_(model, run.splits, run.split_threshold)
    state = {"model": model.state_dict()}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        dcp.load(state, checkpoint_id=source.checkpoint, no_dist=True)
    return model.eval().requires_grad_(False)


def plain_scores(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Return a batch's scores, computed by the model's own parts."""
    whole: Any = model
    if isinstance(model, OwnModel):
        return model(batch)[1][1]
    if hasattr(whole, "user_tower"):
        users, items = whole.vectors(batch.sparse_features, batch.dense_features)
        return (users * items).sum(dim=1)
    return whole.model(batch.dense_features, batch.sparse_features).squeeze(1)


def thresholds_of(model: nn.Module) -> list[torch.Tensor]:
    """Return the running thresholds of a model's "laplace" splits, in the model's order."""
    return [value for name, value in model.named_buffers() if name.endswith("running_threshold")]


def plain_evaluation(
    source: ExportSource, *, num_ranks: int, thresholds: Sequence[Sequence[float]] = ()
) -> dict[str, float]:
    """Return metrics by their definitions, with each rank's part of a batch scored separately.

    ``thresholds`` are each rank's split thresholds; by default, the checkpoint's are used.
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
    # With another loss, scores are items' ranks; parts have equally many samples.
    rankings = plain_rankings([place for place in torch.cat(scores).tolist() if place])
    return {"loss": torch.stack(losses).double().mean().item(), **rankings}


def plain_rankings(places: Sequence[int]) -> dict[str, float]:
    """Return recall and NDCG among the first ten, for items at these ranks."""
    gains = [1 / math.log2(place + 1) for place in places if place <= 10]
    return {"recall@10": len(gains) / len(places), "ndcg@10": sum(gains) / len(places)}
