"""A model with a dense part large enough for thresholds, its training, and `ThresholdOracle`."""

import hashlib
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.optim.optimizers import in_backward_optimizer_filter

import torchrec_2dsp as tdsp
from tests.support.devices import copied
from tests.support.loops import shard
from tests.support.models import BagModel, make_batch
from tests.support.parity import Cell
from torchrec_2dsp.codecs.rows import FlatCodec, Transport
from torchrec_2dsp.comms.counting import count_collectives

LR = 0.05
WIDTH = 48
NUM_STEPS = 5


class TowerModel(BagModel):
    """Bags under three dense layers; the first two are large enough for thresholds."""

    def __init__(self, spec: Any) -> None:
        super().__init__(spec)
        width = sum(table.dim for _, table in spec.features)
        self.over = nn.Identity()
        self.tower = nn.Sequential(
            nn.Linear(width, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh()
        )
        self.last = nn.Linear(WIDTH, 1)

    def forward(self, features: Any) -> torch.Tensor:
        joined = self.joined(features)
        return (self.last(self.tower(joined)).squeeze(1) - 1.0).pow(2).mean()


@dataclass
class Trained:
    """A rank's dense weights after each step, and its reports on traffic."""

    weights: list[dict[str, torch.Tensor]] = field(default_factory=list)
    reports: list[Any] = field(default_factory=list)
    counts: list[dict[str, int]] = field(default_factory=list)
    residual_norm: float = 0.0

    @property
    def digest(self) -> str:
        """A hash over all steps' weights."""
        parts = [value.numpy().tobytes() for step in self.weights for value in step.values()]
        return hashlib.sha256(b"".join(parts)).hexdigest()


def cell_of(world_size: int, *, groups: int = 1, stock: bool = False) -> Cell:
    return Cell(tdsp.Mesh2D(groups, world_size // groups), stock_wrapper=stock)


def model_of(cell: Cell, wrapper: Any) -> DistributedModelParallel:
    """Build the tower with seed 0; its tables learn nothing, so that only dense gradients count."""
    torch.manual_seed(0)
    model = shard(cell, model=TowerModel(cell.spec), data_parallel_wrapper=wrapper)
    for group in cast(Any, model.fused_optimizer.param_groups):
        group["lr"] = 0.0
    model.fused_optimizer.step()
    return model


def unsharded(cell: Cell) -> tuple[TowerModel, dict[str, torch.Tensor]]:
    """Build the tower with seed 0; return its dense parameters, too."""
    torch.manual_seed(0)
    model = TowerModel(cell.spec)
    return model, {name: value for name, value in model.named_parameters() if "ebc" not in name}


def dense_of(model: Any) -> dict[str, torch.Tensor]:
    return dict(in_backward_optimizer_filter(model.named_parameters()))


def copied_weights(dense: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copy dense weights, by their names in a model without a wrapper."""
    return {name.removeprefix("module."): copied(value) for name, value in dense.items()}


def with_nan(gradient: torch.Tensor) -> torch.Tensor:
    """Return a gradient with one non-finite row."""
    return gradient.index_fill(0, torch.tensor([3], device=gradient.device), torch.nan)


def batch_of(cell: Cell, step: int, rank: int) -> Any:
    return make_batch(cell.spec, seed=100 * step + rank, batch_size=8)


def train(
    rank: int,
    world_size: int,
    cell: Cell,
    make_wrapper: Callable[[], Any] | None = None,
    num_steps: int = NUM_STEPS,
    flush_at: int = -1,
    optimizer_class: type[torch.optim.Optimizer] = torch.optim.SGD,
) -> Trained:
    """Train with a wrapper, or with TorchRec's default one."""
    wrapper = None if make_wrapper is None else make_wrapper()
    model = model_of(cell, wrapper)
    dense = dense_of(model)
    optimizer: Any = optimizer_class(dense.values(), lr=LR)  # pyright: ignore[reportCallIssue]
    trained = Trained()
    for step in range(num_steps):
        loss = model(batch_of(cell, step, rank))
        # Many loops drop the last step's gradients only now.
        optimizer.zero_grad()
        if wrapper is not None and step == flush_at and rank == 1:
            wrapper.flush()
        with count_collectives() as seen:
            loss.backward()
        trained.counts.append(seen.counts())
        optimizer.step()
        trained.weights.append(copied_weights(dense))
        if isinstance(wrapper, tdsp.ThresholdedDataParallel):
            trained.reports.append(wrapper.total)
    if isinstance(wrapper, tdsp.ThresholdedDataParallel):
        trained.residual_norm = wrapper.residual_norm()
    return trained


def whole(value: Any) -> torch.Tensor:
    """Return a full copy of a parameter; if it is sharded, on all ranks."""
    with warnings.catch_warnings():
        # FSDP2 over tensor-parallel shards gathers twice, and says so.
        warnings.simplefilter("ignore")
        return copied(value.full_tensor() if isinstance(value, DTensor) else value)


@dataclass
class ThresholdOracle:
    """Computes the mean gradients of ranks that send their largest elements, by sorting."""

    density: float
    values: Transport
    dense_below: int
    warm_up: int
    preconditioner: str = "none"
    residuals: dict[tuple[int, str], torch.Tensor] = field(default_factory=dict)
    """The elements that each rank hasn't sent yet, by rank and parameter."""
    moments: dict[tuple[int, str], tuple[Any, Any, int]] = field(default_factory=dict)
    num_steps: int = 0

    def mean(
        self, gradients: Sequence[dict[str, torch.Tensor]], *, flush: bool = False
    ) -> dict[str, torch.Tensor]:
        """Return the mean gradients that all ranks get, from each rank's gradients."""
        is_dense = flush or self.num_steps < self.warm_up
        is_warm = self.num_steps >= self.warm_up
        self.num_steps += 1
        num_ranks = len(gradients)
        means = {}
        for name, first in gradients[0].items():
            is_small = first.numel() < self.dense_below or self.density == 1
            is_whole = is_dense or is_small
            is_divided = is_warm and not is_small
            total = torch.zeros(first.numel(), dtype=torch.float64)
            for rank, by_name in enumerate(gradients):
                none = torch.zeros(first.numel())
                own = by_name[name].reshape(-1)
                if is_divided:
                    own = self._update(rank, name, own.double(), num_ranks).float()
                due = own + self.residuals.get((rank, name), none)
                sent = due if is_whole else self._largest(due)
                self.residuals[rank, name] = due - sent
                total += sent
            total /= num_ranks
            if not is_divided:
                updates = [self._update(rank, name, total, 1) for rank in range(num_ranks)]
                total = updates[0]
            means[name] = total.float().view_as(first)
        return means

    def _update(self, rank: int, name: str, mean: torch.Tensor, num_ranks: int) -> torch.Tensor:
        """Return Adam's or AdaGrad's direction for a rank's gradient."""
        if self.preconditioner == "none":
            return mean
        first, second, steps = self.moments.get((rank, name), (0.0, 0.0, 0))
        steps += 1
        square = mean**2 / num_ranks
        if self.preconditioner == "adagrad":
            second = second + square
            update = mean / (second**0.5 + 1e-10)
        else:
            first, second = 0.9 * first + 0.1 * mean, 0.999 * second + 0.001 * square
            update = first / (1 - 0.9**steps) / ((second / (1 - 0.999**steps)) ** 0.5 + 1e-8)
        self.moments[rank, name] = first, second, steps
        return update

    def _largest(self, due: torch.Tensor) -> torch.Tensor:
        """Return the tensor with all but its largest elements set to zero."""
        capacity = -int(-self.density * due.numel() // 1)
        chosen = due.abs().argsort(descending=True)[:capacity].sort().values
        codec = FlatCodec(self.values.codec)
        rounded = codec.decode(codec.encode(due[chosen]), capacity)
        return torch.zeros_like(due).index_copy(0, chosen, rounded)
