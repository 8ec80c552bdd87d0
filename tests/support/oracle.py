"""Eager update rules on plain tensors, which fused and distributed runs must match.

Each function takes the weight of a table or some rows, the *global* batch's gradient and the
state, and changes weight and state in place. Rows with a zero gradient don't move.
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
    """Apply ``w <- w - lr * g``."""
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
    """Apply ``v <- v + mean(g^2)``, ``w <- w - lr * g / (sqrt(v / c) + eps)``, one v per row."""
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
    """Apply ``v <- v + g^2``, ``w <- w - lr * g / (sqrt(v) + eps)``, one v per element."""
    moment += grad.pow(2)
    weight -= lr * grad / (moment.sqrt() + eps)


def float32(value: float) -> float:
    """Round to the nearest float32 number, as FBGEMM's kernels do with their arguments."""
    return torch.tensor(value).item()


BETA1, BETA2 = float32(0.9), float32(0.999)
DECAY = {"adam_decay": float32(0.3), "lamb": float32(0.1)}
"""The weight decay of the optimizers that have one here."""
WITH_AVERAGE = ("adam", "adam_decay", "partial_adam", "lamb", "partial_lamb")
"""Optimizers that also keep an average of gradients, and move each row that is looked up."""
PER_ELEMENT = ("adagrad", "adam", "adam_decay", "lamb")
"""Optimizers with a second moment for each element."""


@torch.no_grad()
def adam_(
    weight: torch.Tensor,
    grad: torch.Tensor,
    average: torch.Tensor,
    moment: torch.Tensor,
    *,
    optimizer: str,
    step: int,
    lr: float,
    eps: float,
) -> None:
    """Update by Adam or LAMB, or their partial forms with one moment per row.

    LAMB has one ratio per row. ``step`` counts the world's steps from 1 for all rows alike.
    """
    squares = grad**2 if optimizer in PER_ELEMENT else (grad**2).mean(dim=1, keepdim=True)
    average[:] = BETA1 * average + (1 - BETA1) * grad
    moment[:] = BETA2 * moment + (1 - BETA2) * squares
    change = average / (1 - BETA1**step) / ((moment / (1 - BETA2**step)).sqrt() + eps)
    change = change + DECAY.get(optimizer, 0.0) * weight
    if optimizer.endswith("lamb"):
        change = change * (weight**2).sum(1, True).sqrt() / (change**2).sum(1, True).sqrt()
    weight -= lr * change


def local_loss(scores: torch.Tensor) -> torch.Tensor:
    """Return one rank's loss on its batch; ranks are averaged, as in DDP."""
    return (scores - 1.0).pow(2).sum()


class Oracle:
    """Trains a model, by default with seed 0: tables by an eager optimizer, the rest by SGD.

    ``column_blocks`` splits a table's row-wise moment as TorchRec's column-wise sharding does:
    each column block has its own moment.
    """

    def __init__(
        self,
        spec: ModelSpec,
        *,
        optimizer: str,
        lr: float,
        eps: float = 1e-8,
        column_blocks: dict[str, int] | None = None,
        model: Model | None = None,
    ) -> None:
        self.spec = spec
        self.model = build(spec) if model is None else model
        self.optimizer, self.lr, self.eps = optimizer, lr, eps
        self.weights = {
            name: cast(torch.Tensor, table.weight).detach()
            for name, table in tables_of(self.model).items()
        }
        self.rates: dict[str, float] = {}
        """The learning rates of tables that have one of their own."""
        self.blocks = {name: (column_blocks or {}).get(name, 1) for name in self.weights}
        self.moments = {name: self._moment(name) for name in self.weights}
        self.averages = {name: torch.zeros_like(weight) for name, weight in self.weights.items()}
        self._num_steps = 0

    def step(self, batches: Sequence[KeyedJaggedTensor]) -> list[float]:
        """Update once on all ranks' batches; return each rank's loss before it."""
        self.model.zero_grad()
        batches = [written_out(batch) for batch in batches]
        losses = [
            local_loss(self.scores(batch)) if batch.stride() else torch.zeros(())
            for batch in batches
        ]
        (sum(losses, torch.zeros(())) / len(batches)).backward()
        self.apply_(batches)
        return [loss.item() for loss in losses]

    @torch.no_grad()
    def apply_(self, batches: Sequence[KeyedJaggedTensor]) -> None:
        """Update all weights by their gradients on these batches."""
        self._num_steps += 1
        # Others may train whatever else a model has.
        for name, param in self.model.named_parameters():
            if name.startswith("over.") or "position_weight" in name:
                param -= self.lr * param.grad  # type: ignore[operator]
        for name, table in tables_of(self.model).items():
            grad = cast(torch.Tensor, cast(torch.Tensor, table.weight).grad)
            if self.optimizer in WITH_AVERAGE:
                self._move_rows_(name, grad, self._looked_up(name, batches))
            else:
                self._update_(name, grad)

    def scores(self, batch: KeyedJaggedTensor) -> torch.Tensor:
        """Return the scores for one rank's batch."""
        return self.model(batch)

    def _update_(self, name: str, grad: torch.Tensor) -> None:
        weight, lr = self.weights[name], self.rates.get(name, self.lr)
        if self.optimizer == "sgd":
            sgd_(weight, grad, lr=lr)
        elif self.optimizer == "adagrad":
            adagrad_(weight, grad, self.moments[name], lr=lr, eps=self.eps)
        else:
            columns = weight.shape[1] // self.blocks[name]
            for block in range(self.blocks[name]):
                part = slice(block * columns, (block + 1) * columns)
                row_wise_adagrad_(
                    weight[:, part],
                    grad[:, part],
                    self.moments[name][:, block],
                    lr=lr,
                    eps=self.eps,
                )

    def _looked_up(self, name: str, batches: Sequence[KeyedJaggedTensor]) -> torch.Tensor:
        """Return the table's rows that any rank looks up, in ascending order."""
        (features,) = (table.features for table in self.spec.tables if table.name == name)
        ids = [batch[feature].values() for batch in batches for feature in features]
        return torch.cat(ids).long().unique()

    def _move_rows_(self, name: str, grad: torch.Tensor, rows: torch.Tensor) -> None:
        weights, averages, moments = self.weights[name], self.averages[name], self.moments[name]
        columns = weights.shape[1] // self.blocks[name]
        for block in range(self.blocks[name]):
            part = slice(block * columns, (block + 1) * columns)
            own = part if self.optimizer in PER_ELEMENT else slice(block, block + 1)
            weight, average = weights[rows, part], averages[rows, part]
            moment = moments[rows, own]
            adam_(
                weight,
                grad[rows, part],
                average,
                moment,
                optimizer=self.optimizer,
                step=self._num_steps,
                lr=self.lr,
                eps=self.eps,
            )
            weights[rows, part], averages[rows, part] = weight, average
            moments[rows, own] = moment

    def _moment(self, name: str) -> torch.Tensor:
        rows, columns = self.weights[name].shape
        if self.optimizer in PER_ELEMENT:
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
        return Oracle(**{**self._asdict(), "column_blocks": dict(self.column_blocks)})


def batches_of(
    spec: ModelSpec,
    seed: int,
    sizes: tuple[int, ...],
    max_length: int,
    step: int,
    variable: bool = False,
) -> list[KeyedJaggedTensor]:
    """Draw all ranks' batches; if ``variable``, most have one batch size per feature."""
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
    """Draw one rank's batch, without the other ranks' batches."""
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
    """Return a trained oracle, which must not be trained further, and each step's losses."""
    oracle = kind.make()
    losses = [
        oracle.step(batches_of(kind.spec, seed, sizes, max_length, n, variable))
        for n in range(steps)
    ]
    return oracle, tuple(losses)
