"""Tiny training configs, and the plain model's results with them on the global batches."""

import math
from collections.abc import Callable, Iterator, Mapping
from itertools import chain, compress, islice
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn
from torchrec.datasets.utils import Batch

from torchrec_2dsp.errors import TwoDError
from torchrec_2dsp.optim import MomentScaledRowWiseAdaGradOptimizer
from torchrec_2dsp.programs.config.config_file import make_config
from torchrec_2dsp.programs.config.sections import ModelConfig, SplitPlace
from torchrec_2dsp.programs.data.dataset import Split
from torchrec_2dsp.programs.data.synthetic import SyntheticConfig
from torchrec_2dsp.programs.models.kinds import (
    build_any_model,
    dataset_for,
    has_clicks,
    ranking_of,
)
from torchrec_2dsp.programs.models.model import split_
from torchrec_2dsp.programs.models.ranking import ranking_metrics
from torchrec_2dsp.programs.train.config import TrainConfig
from torchrec_2dsp.programs.train.program import train
from torchrec_2dsp.programs.train.results import RunFolder, TrainResult

TREE: dict[str, Any] = {
    "data": {
        "num_dense": 3,
        "features": [
            {"name": "user", "num_rows": 100},
            {"name": "page", "num_rows": 33, "min_ids": 0, "max_ids": 3},
        ],
    },
    "model": {"dim": 8, "dense_layers": [4], "over_layers": [4]},
    "loop": {"steps": 8, "global_batch_size": 32, "eval_steps": 3, "report_every": 3},
    "runs": {"one_group": {}},
}


def config_with(tree: Mapping[str, Any] = TREE, **sections: Any) -> TrainConfig:
    """Return the tiny config, or another one, with some sections' values and runs replaced."""
    runs = sections.pop("runs", tree.get("runs"))
    changed = {name: tree.get(name, {}) | values for name, values in sections.items()}
    return make_config(TrainConfig, {**tree, **changed, "runs": runs})


def train_in_folder(rank: int, world_size: int, config: TrainConfig, **options: Any) -> TrainResult:
    """Train a config's runs, which leave their output in the config's folder."""
    watchers = [RunFolder(config.output.folder, config)] if rank == 0 else []
    return train(config, watchers, **options)


def refusal(rank: int, world_size: int, config: TrainConfig, **options: Any) -> str:
    """Return the error text of a training program that can't run."""
    with pytest.raises(TwoDError) as raised:
        train(config, **options)
    return str(raised.value)


def scalars_in(folder: Path) -> dict[str, dict[int, float]]:
    """Return the scalars that TensorBoard reads from a run's folder: by tag, values by step."""
    events = EventAccumulator(str(folder)).Reload()
    return {
        tag: {event.step: event.value for event in events.Scalars(tag)}
        for tag in events.Tags()["scalars"]
    }


def share_of_rate(schedule: dict[str, Any], step: int, num_steps: int) -> float:
    """Return a step's learning rate as a share of the full one, implemented independently."""
    warm_up = schedule.get("warm_up", 0)
    if step < warm_up:
        return (step + 1) / warm_up
    done = (step - warm_up) / (num_steps - warm_up)
    final = schedule.get("final", 0.0)
    match schedule["kind"]:
        case "cosine":
            return final + (1 - final) * (1 + math.cos(math.pi * done)) / 2
        case "linear":
            return final + (1 - final) * (1 - done)
        case "step":
            return schedule["factor"] ** int((step - warm_up) / schedule["step_every"])
        case kind:
            raise AssertionError(kind)


FLAT = {"kind": "linear", "final": 1.0}
"""A schedule that changes no rate."""


class PlainRun:
    """The unsharded model, trained by torch's optimizers on the global batches.

    Where a loss isn't a mean over samples, the batches of ``num_parts`` ranks count equally.
    """

    def __init__(
        self,
        config: TrainConfig,
        make_dense: Callable[..., torch.optim.Optimizer],
        splits: Mapping[SplitPlace, float] | None = None,
        num_parts: int = 1,
    ) -> None:
        self.config, self._num_parts = config, num_parts
        self._data = dataset_for(config.model, config.data.dataset())
        self.model = build_any_model(self._data, config.model)
        split_(self.model, splits or {}, "exact")
        named = dict(self.model.named_parameters())
        is_table = [".embedding_bags." in name or ".embeddings." in name for name in named]
        tables = list(compress(named.values(), is_table))
        self.others = [value for value, of in zip(named.values(), is_table, strict=True) if not of]
        rule = config.optimizer
        self.tables = MomentScaledRowWiseAdaGradOptimizer(
            tables, lr=rule.lr, eps=rule.eps, moment_scale=1.0
        )
        self.dense = make_dense(self.others, lr=rule.dense_lr)
        self.clipped_steps = 0

    def batches(self, split: Split, num_steps: int) -> Iterator[tuple[Batch, ...]]:
        """Yield each step's batch, split into its parts."""
        size = self.config.loop.global_batch_size
        options = {"global_batch_size": size, "world_size": self._num_parts}
        parts = [self._data.batches(split, rank=n, **options) for n in range(self._num_parts)]
        return islice(zip(*parts, strict=True), num_steps)

    def loss(self, batch: Batch) -> torch.Tensor:
        """Return the training loss."""
        return self.model(batch)[0]

    def train(
        self,
        schedule: dict[str, Any] = FLAT,
        dense_schedule: dict[str, Any] = FLAT,
        clip_norm: float = math.inf,
    ) -> list[float]:
        """Train all steps; return their losses."""
        losses, num_steps = [], self.config.loop.steps
        for step, parts in enumerate(self.batches(Split.TRAIN, num_steps)):
            share = share_of_rate(schedule, step, num_steps)
            dense_share = share_of_rate(dense_schedule, step, num_steps)
            self.tables.param_groups[0]["lr"] = self.config.optimizer.lr * share
            self.dense.param_groups[0]["lr"] = self.config.optimizer.dense_lr * dense_share
            loss = torch.stack([self.loss(batch) for batch in parts]).mean()
            losses.append(loss.item())
            self.model.zero_grad()
            loss.backward()
            norm = nn.utils.clip_grad_norm_(self.others, clip_norm)
            self.clipped_steps += int(norm > clip_norm)
            self.tables.step()
            self.dense.step()
        return losses

    def held_out(self) -> tuple[list[float], torch.Tensor, torch.Tensor]:
        """Return held-out batches' losses, and their samples' logits and labels."""
        batches = list(self.batches(Split.EVAL, self.config.loop.eval_steps))
        self.model.eval()
        with torch.no_grad():
            outputs = [self.model(batch)[1] for parts in batches for batch in parts]
        self.model.train()
        losses, logits, labels = zip(*outputs, strict=True)
        by_batch = torch.stack(losses).view(len(batches), -1).mean(dim=1)
        return by_batch.tolist(), torch.cat(logits), torch.cat(labels)

    def metrics(self) -> dict[str, float]:
        """Return the metrics on held-out batches."""
        losses, logits, labels = self.held_out()
        is_ranked = not has_clicks(self.config.model)
        metrics = {"loss": fmean(losses)} if is_ranked else plain_metrics(logits, labels)
        batches = chain(*self.batches(Split.EVAL, self.config.loop.eval_steps))
        ranking = ranking_of(self.config.model)
        return metrics | ranking_metrics(self.model.eval(), batches, ranking, None)


def plain_metrics(logits: torch.Tensor, labels: torch.Tensor) -> dict[str, float]:
    """Return the metrics on held-out samples, by their definitions."""
    predicted, labels = torch.sigmoid(logits.double()), labels.double()
    loss = nn.functional.binary_cross_entropy(predicted, labels).item()
    rate = labels.mean().item()
    entropy = -(rate * math.log(rate) + (1 - rate) * math.log(1 - rate))
    clicks, others = logits[labels == 1], logits[labels == 0]
    above = (clicks[:, None] > others[None]).double() + 0.5 * (clicks[:, None] == others[None])
    return {
        "loss": loss,
        "ne": loss / entropy,
        "auc": above.mean().item(),
        "calibration": (predicted.sum() / labels.sum()).item(),
    }


def click_data(config: Any) -> SyntheticConfig:
    """Return a training or benchmark config's synthetic clicks."""
    assert isinstance(config.data, SyntheticConfig)
    return config.data


def click_model(config: Any) -> ModelConfig:
    """Return a training or benchmark config's DLRM or DCN."""
    assert isinstance(config.model, ModelConfig)
    return config.model


SEQUENCES: dict[str, Any] = {
    "data": {"kind": "synthetic_sequences", "num_items": 60, "num_clusters": 5, "max_length": 12},
    "model": {
        "kind": "sequence",
        "dim": 8,
        "max_length": 8,
        "num_blocks": 1,
        "num_negatives": 4,
        "loss_mean": "samples",
    },
}
"""The data, and a model of one block."""
