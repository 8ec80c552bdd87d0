"""The oracle: the unsharded model, trained eagerly on the global batch."""

from collections.abc import Sequence
from typing import cast

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from tests.support.models import Model, ModelSpec, build, tables_of
from torchrec_2dsp.optim import reference


def local_loss(scores: torch.Tensor) -> torch.Tensor:
    """The loss of one rank's batch; ranks are averaged, as DDP does."""
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
        """One update on the batches of all ranks; each rank's loss before it."""
        self.model.zero_grad()
        losses = [local_loss(self.model(batch)) for batch in batches if batch.stride() > 0]
        (sum(losses, torch.zeros(())) / len(batches)).backward()
        with torch.no_grad():
            for param in self.model.over.parameters():
                param -= self.lr * param.grad  # type: ignore[operator]
            for name, table in tables_of(self.model).items():
                self._update_(name, cast(torch.Tensor, cast(torch.Tensor, table.weight).grad))
        return [loss.item() for loss in losses]

    def _update_(self, name: str, grad: torch.Tensor) -> None:
        weight = self.weights[name]
        if self.optimizer == "sgd":
            reference.sgd_(weight, grad, lr=self.lr)
        elif self.optimizer == "adagrad":
            reference.adagrad_(weight, grad, self.moments[name], lr=self.lr, eps=self.eps)
        else:
            columns = weight.shape[1] // self.blocks[name]
            for block in range(self.blocks[name]):
                part = slice(block * columns, (block + 1) * columns)
                reference.row_wise_adagrad_(
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
