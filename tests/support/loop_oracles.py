"""Oracles for loops and algorithms other than one exact update per step."""

from typing import Any, cast

import torch
from torch import nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from tests.support.loops import Stream, Tensors
from tests.support.models import BagModel, tables_of
from tests.support.oracle import Oracle, local_loss, row_wise_adagrad_
from tests.support.parity import LR, Cell


class LoopOracle(Oracle):
    """The oracle for loops other than one backward per step on the mean over ranks."""

    max_norm: float | None = None
    """Clip the dense gradient to this norm."""
    table_factor: float = 1.0
    """The factor on embedding gradients; the world size where they are summed."""
    moment_scale: float = 1.0
    """That of `MomentScaledRowWiseAdaGrad`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.grads: Tensors = {}
        """Each table's latest gradient."""

    def accumulate(self, micro_batches: Stream) -> None:
        """Update tables per backward, as fused optimizers do, and dense layers once."""
        tables = tables_of(self.model)
        self.model.zero_grad()
        for batches in micro_batches:
            losses = [local_loss(self.model(batch)) for batch in batches]
            torch.stack(losses).mean().backward()
            for name, table in tables.items():
                self._update_(name, cast(torch.Tensor, table.weight.grad) * self.table_factor)
            tables.zero_grad()
        dense = list(self.model.over.parameters())
        if self.max_norm is not None:
            nn.utils.clip_grad_norm_(dense, self.max_norm)
        with torch.no_grad():
            for param in dense:
                param -= self.lr * cast(torch.Tensor, param.grad)

    def _update_(self, name: str, grad: torch.Tensor) -> None:
        self.grads[name] = grad
        state = (self.weights[name], grad, self.moments[name][:, 0])
        if self.moment_scale == 1.0:
            super()._update_(name, grad)
        else:
            row_wise_adagrad_(*state, lr=self.lr, eps=self.eps, moment_scale=self.moment_scale)


class Emulation:
    """`WeightSync` on plain tensors: one oracle per group, averaged after every step.

    Hot rows see the mean of all groups' gradients, unscaled, and are not averaged.
    """

    def __init__(self, cell: Cell, moment_scale: float = 1.0) -> None:
        self._mesh = cell.mesh
        self._hot_rows = {table: list(rows) for table, rows in cell.hot_rows}
        self.groups = [
            LoopOracle(cell.spec, optimizer=cell.optimizer, lr=LR, eps=cell.eps)
            for _ in range(cell.mesh.num_groups)
        ]
        for group in self.groups:
            group.moment_scale = moment_scale

    def set(self, **values: float) -> None:
        """Change ``lr`` or ``eps``."""
        for group in self.groups:
            for name, value in values.items():
                setattr(group, name, value)

    def step(self, batches: list[KeyedJaggedTensor]) -> None:
        """Train all groups for one step."""
        hot = self._read_hot_rows()
        for number, group in enumerate(self.groups):
            own = [
                batch for rank, batch in enumerate(batches) if self._mesh.group_of(rank) == number
            ]
            # The mean over a group's ranks divides its gradient by the group's size.
            group.accumulate([own])
        for copies in zip(*map(_tensors, self.groups), strict=True):
            mean = torch.stack(copies).mean(dim=0)
            for copy in copies:
                copy.copy_(mean)
        for name, (weight, moment) in hot.items():
            rows = self._hot_rows[name]
            grads = torch.stack([group.grads[name][rows] for group in self.groups]).mean(dim=0)
            lr, eps = self.groups[0].lr, self.groups[0].eps
            row_wise_adagrad_(weight, grads, moment, lr=lr, eps=eps)
            for group in self.groups:
                group.weights[name][rows] = weight
                group.moments[name][rows, 0] = moment

    def _read_hot_rows(self) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        first = self.groups[0]
        return {
            name: (first.weights[name][rows], first.moments[name][rows, 0])
            for name, rows in self._hot_rows.items()
        }


def _tensors(group: LoopOracle) -> list[torch.Tensor]:
    dense = [param.detach() for param in group.model.over.parameters()]
    return [*group.weights.values(), *group.moments.values(), *dense]


class TwiceModel(BagModel):
    """Looks its tables up twice in one forward, the second time without the last ids."""

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        lengths = (features.lengths() - 1).clamp(min=0)
        keep = torch.ones(features.values().numel(), dtype=torch.bool)
        keep[(features.offsets()[1:] - 1)[features.lengths() > 0]] = False
        shorter = KeyedJaggedTensor(features.keys(), features.values()[keep], lengths=lengths)
        return super().forward(features) - 0.5 * super().forward(shorter)


def bag_loss(cell: Cell, pooled: Any) -> torch.Tensor:
    """Compute a loss from the bags alone."""
    bags = torch.cat([pooled[feature] for feature, _ in cell.spec.features], dim=1)
    return local_loss(bags.mean(dim=1))


def bag_oracle(cell: Cell, stream: Stream) -> Oracle:
    """Return an oracle with one update per batch, all from the initial weights' gradients."""
    oracle = LoopOracle(cell.spec, optimizer=cell.optimizer, lr=LR, eps=cell.eps)
    model = cast(BagModel, oracle.model)
    tables = tables_of(model)
    grads = []
    for batches in stream:
        tables.zero_grad()
        losses = [bag_loss(cell, model.ebc(batch)) for batch in batches]
        torch.stack(losses).mean().backward()
        grads.append({name: cast(Any, table).weight.grad for name, table in tables.items()})
    for by_table in grads:
        for name, grad in by_table.items():
            oracle._update_(name, grad)
    return oracle
