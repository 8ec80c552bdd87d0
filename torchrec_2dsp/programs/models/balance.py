"""Batches whose samples are dealt to the ranks, for the programs' models.

    dealt batch  --with its loss weight-->  pipeline  -->  model  --hook-->  loss x loss weight

Pipelines take batches ahead, so a batch carries its own loss's weight.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torchrec.datasets.utils import Batch

from torchrec_2dsp.errors import ConfigError
from torchrec_2dsp.programs.config.dense import DenseKinds
from torchrec_2dsp.programs.config.sections import MEASURED, BalanceConfig
from torchrec_2dsp.programs.data.dataset import DatasetFeature
from torchrec_2dsp.programs.models.kinds import ModelSection
from torchrec_2dsp.programs.models.own_model import OwnModelConfig
from torchrec_2dsp.programs.models.sequence import SequenceModelConfig
from torchrec_2dsp.programs.models.two_tower import TwoTowerConfig
from torchrec_2dsp.samples.balanced_batches import BalancedBatches


@dataclass
class WeightedBatch(Batch):
    """A batch with the weight of its mean loss."""

    loss_weight: float = 1.0
    """Above 1 on a rank that has more samples than the mean."""

    def to(self, device: torch.device, non_blocking: bool = False) -> "WeightedBatch":
        """Move the batch to a device."""
        return weighted_batch(super().to(device, non_blocking), self.loss_weight)

    def pin_memory(self) -> "WeightedBatch":
        """Copy the batch into pinned memory."""
        return weighted_batch(super().pin_memory(), self.loss_weight)


def weighted_batch(batch: Batch, loss_weight: float) -> WeightedBatch:
    """Add a loss weight to a batch."""
    return WeightedBatch(batch.dense_features, batch.sparse_features, batch.labels, loss_weight)


def weigh_losses_(model: nn.Module) -> None:
    """Let a model multiply a `WeightedBatch`'s loss by its weight in training, in place.

    The mean of such losses over ranks is the mean over all samples, and so are its gradients: for
    the trained loss and for the detached one that is reported.
    """
    model.register_forward_hook(_weighted)


def _weighted(model: nn.Module, inputs: tuple[Any, ...], output: Any) -> Any:
    (batch,) = inputs
    if not (model.training and isinstance(batch, WeightedBatch)) or batch.loss_weight == 1.0:
        return output
    loss, (detached, *others) = output
    return loss * batch.loss_weight, (detached * batch.loss_weight, *others)


def deal_batches(
    batches: Iterator[Batch], balance: BalanceConfig, model: ModelSection
) -> BalancedBatches[Batch]:
    """Return this rank's share of the global batches, each with its loss weight.

    Collectives:
        As in `BalancedBatches`.
    """
    return BalancedBatches(
        batches,
        cost=balance.cost.sample_cost,
        lengths=sample_lengths(balance, model),
        shared_ids=balance.shared_ids,
        rank_speeds=balance.rank_speeds or None,
        smoothing=balance.smoothing,
        add_weight=weighted_batch,
    )


def sample_lengths(
    balance: BalanceConfig, model: ModelSection
) -> Sequence[str] | Callable[[Batch], torch.Tensor]:
    """Return the features that a sample's length counts; a sequence model uses its last items."""
    if balance.lengths or not isinstance(model, SequenceModelConfig):
        return balance.lengths

    def num_used_items(batch: Batch) -> torch.Tensor:
        return batch.sparse_features[model.feature].lengths().clamp(max=model.max_length)

    return num_used_items


def check_balance(
    key: str, balance: BalanceConfig | None, dense: DenseKinds, model: ModelSection, device: str
) -> None:
    """Refuse a balance that would train something else, or can't work."""
    if balance is None:
        return
    if not isinstance(model, OwnModelConfig):
        balance.refuse_unread(
            ["mean_over_samples"],
            "is for a model of your own; leave it out",
            key=f"{key}.balance.",
        )
    reason = _refusal(balance, model, dense, device)
    if reason is not None:
        raise ConfigError(f"{key}.balance deals samples to other ranks, and {reason}")


def _refusal(
    balance: BalanceConfig, model: ModelSection, dense: DenseKinds, device: str
) -> str | None:
    if isinstance(model, TwoTowerConfig) and model.loss == "in_batch":
        return (
            "model.loss='in_batch' tells each item from the others of its rank's batch, so that it "
            "would train something else; set model.loss='bce', or leave the section out"
        )
    if isinstance(model, SequenceModelConfig) and model.loss_mean == "tokens":
        return (
            "model.loss_mean='tokens' is the mean over the items of a rank's batch, whose number "
            "would change; set model.loss_mean='samples', or leave the section out"
        )
    if isinstance(model, OwnModelConfig) and not balance.mean_over_samples:
        return (
            "the loss of a model of your own may depend on which samples come together; set "
            "balance.mean_over_samples=true if it is a mean over samples, or leave the section out"
        )
    if dense.kind == "local":
        return (
            "dense.kind='local' lets each rank learn from its own samples alone; use another kind, "
            "or leave the section out"
        )
    if dense.kind in ("pipelined", "planned") and balance.rank_speeds:
        return (
            f"the losses of all samples of a pipeline count alike, which dense.kind={dense.kind!r} "
            "needs and rank_speeds ends; leave rank_speeds out"
        )
    if device != "cpu" and balance.rank_speeds == MEASURED:
        return (
            f"rank_speeds={MEASURED!r} measures processor time, which says nothing of "
            f"device={device!r}; give a speed for each rank"
        )
    return None


def check_speeds_fit(key: str, balance: BalanceConfig | None, world_size: int) -> None:
    """Refuse speeds that aren't one per rank."""
    speeds = () if balance is None or balance.rank_speeds == MEASURED else balance.rank_speeds
    if speeds and len(speeds) != world_size:
        raise ConfigError(
            f"{key}.balance.rank_speeds has {len(speeds)} speeds for {world_size} ranks; give one "
            f"for each, or {MEASURED!r}"
        )


def check_lengths(
    key: str, balance: BalanceConfig | None, features: Sequence[DatasetFeature]
) -> None:
    """Refuse a length feature that isn't in the data."""
    names = [feature.name for feature in features]
    missing = [name for name in (balance.lengths if balance else ()) if name not in names]
    if missing:
        raise ConfigError(
            f"{key}.balance.lengths names {missing[0]!r}, and the data has "
            f"{', '.join(names) or 'no sparse feature'}; name some of these, or leave it out"
        )
