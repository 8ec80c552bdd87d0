"""Eager update rules on plain tensors, which fused and distributed runs must match.

Each function takes the weight of a table, or of some of its rows, the gradient of the *global*
batch and the state, and changes weight and state in place. Rows with a zero gradient don't move.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple, cast

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from tests.support.batches import make_variable_batch, written_out
from tests.support.models import Model, ModelSpec, build, make_batch, tables_of


@torch.no_grad()
def sgd_(weight: torch.Tensor, grad: torch.Tensor, *, lr: float) -> None:
    """``w <- w - lr * g``."""
    weight -= lr * grad


@torch.no_grad()
def row_wise_adagrad_(
    weight: torch.Tensor,
    grad: torch.Tensor,
    moment: torch.Tensor,
    *,
    lr: float,
    eps: float = 1e-8,
    moment_scale: float = 1.0,
) -> None:
    """``v <- v + mean(g^2)``, ``w <- w - lr * g / (sqrt(v / c) + eps)``, one v per row."""
    moment += grad.pow(2).mean(dim=1)
    weight -= lr * grad / ((moment / moment_scale).sqrt() + eps)[:, None]


@torch.no_grad()
def adagrad_(
    weight: torch.Tensor,
    grad: torch.Tensor,
    moment: torch.Tensor,
    *,
    lr: float,
    eps: float = 1e-8,
) -> None:
    """``v <- v + g^2``, ``w <- w - lr * g / (sqrt(v) + eps)``, one v per element."""
    moment += grad.pow(2)
    weight -= lr * grad / (moment.sqrt() + eps)


def local_loss(scores: torch.Tensor) -> torch.Tensor:
    """Return the loss of one rank's batch; ranks are averaged, as DDP does."""
    return (scores - 1.0).pow(2).sum()


class Oracle:
    """Trains all tables with an eager optimizer and the rest with SGD.

    ``column_blocks`` splits a table's row-wise moment as TorchRec's column-wise sharding does:
    each block of columns has a moment of its own.
    """

    def __init__(
        self,
        spec: ModelSpec,
        *,
        optimizer: str,
        lr: float,
        eps: float = 1e-8,
        column_blocks: dict[str, int] | None = None,
        seed: int = 0,
    ) -> None:
        self.model: Model = build(spec, seed)
        self.optimizer, self.lr, self.eps = optimizer, lr, eps
        self.weights = {
            name: cast(torch.Tensor, table.weight).detach()
            for name, table in tables_of(self.model).items()
        }
        self.blocks = {name: (column_blocks or {}).get(name, 1) for name in self.weights}
        self.moments = {name: self._moment(name) for name in self.weights}

    def step(self, batches: Sequence[KeyedJaggedTensor]) -> list[float]:
        """Update once on all ranks' batches; return each rank's loss before it."""
        self.model.zero_grad()
        batches = [written_out(batch) for batch in batches]
        losses = [
            local_loss(self.scores(batch)) if batch.stride() else torch.zeros(())
            for batch in batches
        ]
        (sum(losses, torch.zeros(())) / len(batches)).backward()
        with torch.no_grad():
            for param in self.model.over.parameters():
                param -= self.lr * param.grad  # type: ignore[operator]
            for name, table in tables_of(self.model).items():
                self._update_(name, cast(torch.Tensor, cast(torch.Tensor, table.weight).grad))
        return [loss.item() for loss in losses]

    def scores(self, batch: KeyedJaggedTensor) -> torch.Tensor:
        """Return the scores of one rank's batch."""
        return self.model(batch)

    def _update_(self, name: str, grad: torch.Tensor) -> None:
        weight = self.weights[name]
        if self.optimizer == "sgd":
            sgd_(weight, grad, lr=self.lr)
        elif self.optimizer == "adagrad":
            adagrad_(weight, grad, self.moments[name], lr=self.lr, eps=self.eps)
        else:
            columns = weight.shape[1] // self.blocks[name]
            for block in range(self.blocks[name]):
                part = slice(block * columns, (block + 1) * columns)
                row_wise_adagrad_(
                    weight[:, part],
                    grad[:, part],
                    self.moments[name][:, block],
                    lr=self.lr,
                    eps=self.eps,
                )

    def _moment(self, name: str) -> torch.Tensor:
        rows, columns = self.weights[name].shape
        if self.optimizer == "adagrad":
            return torch.zeros(rows, columns)
        return torch.zeros(rows, self.blocks[name])


class OracleKind(NamedTuple):
    """An oracle's parameters."""

    spec: ModelSpec
    optimizer: str
    lr: float
    eps: float
    column_blocks: tuple[tuple[str, int], ...]

    def make(self) -> Oracle:
        return Oracle(
            self.spec,
            optimizer=self.optimizer,
            lr=self.lr,
            eps=self.eps,
            column_blocks=dict(self.column_blocks),
        )


def batches_of(
    spec: ModelSpec,
    seed: int,
    sizes: tuple[int, ...],
    max_length: int,
    step: int,
    variable: bool = False,
) -> list[KeyedJaggedTensor]:
    """Draw all ranks' batches; if ``variable``, most have a batch size for each feature."""
    return [
        batch_of(spec, seed, sizes, max_length, step, variable, rank=rank)
        for rank in range(len(sizes))
    ]


def batch_of(
    spec: ModelSpec,
    seed: int,
    sizes: tuple[int, ...],
    max_length: int,
    step: int,
    variable: bool = False,
    *,
    rank: int,
) -> KeyedJaggedTensor:
    """Draw one rank's batch, without those of the others."""
    make = make_variable_batch if variable else make_batch
    return make(spec, seed + 1000 * step + rank, sizes[rank], max_length)


@lru_cache(maxsize=64)
def trained_oracle(
    kind: OracleKind,
    seed: int,
    sizes: tuple[int, ...],
    max_length: int,
    steps: int,
    variable: bool = False,
) -> tuple[Oracle, tuple[list[float], ...]]:
    """Return a trained oracle, which nobody may train further, and each step's losses."""
    oracle = kind.make()
    losses = [
        oracle.step(batches_of(kind.spec, seed, sizes, max_length, n, variable))
        for n in range(steps)
    ]
    return oracle, tuple(losses)
