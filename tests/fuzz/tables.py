"""The weights and moments of one table in the oracle, in one copy or one for each group."""

import copy

import torch

import torchrec_2dsp as tdsp
from tests.fuzz.case import DTYPES, Case, TableCase
from tests.fuzz.noise import Noise
from tests.fuzz.weights import EPS

ROW_WISE = ("rowwise_adagrad", "moment_scaled", "delayed_moment")
"""Optimizers with one moment for each row of a column shard."""


class TableState:
    """What a table's training has come to."""

    def __init__(
        self, case: Case, table: TableCase, weight: torch.Tensor, *, is_copied: bool, noise: Noise
    ) -> None:
        """
        Args:
            case: says how it is trained.
            table: which one.
            weight: what it starts from.
            is_copied: whether each group has a copy that it trains by itself.
            noise: of the transport, and of the type of the table.
        """
        self._table, self._noise = table, noise
        self._transport = tdsp.Transport(case.sync.transport)
        is_still = table.sharding == "data_parallel"
        self._is_sent = case.groups > 1 and not table.once and not is_still
        self._is_sent_hot = case.world_size > 1
        self._groups = [case.mesh.group_of(rank) for rank in range(case.world_size)]
        self.is_copied = is_copied
        """Whether each group has a copy that it trains by itself."""
        self.weights = weight.expand(case.groups if is_copied else 1, -1, -1).clone()
        """The weights of each copy: ``[copies, rows, dim]``."""
        # A dense optimizer trains data-parallel tables.
        self._rule = "sgd" if table.sharding == "data_parallel" else case.optimizer
        moments_per_row = {"adagrad": table.dim, "sgd": 0}.get(self._rule, table.num_blocks)
        self._moments = torch.zeros(len(self.weights), table.rows, moments_per_row).to(weight)
        self._synced = (self.weights[0].clone(), self._moments[0].clone())
        self._scale = 1.0
        if self._rule == "moment_scaled" and case.sync.kind == "weight" and is_copied:
            self._scale = float(case.groups)

    @property
    def has_moments(self) -> bool:
        """Whether its optimizer has a state."""
        return self._moments.shape[2] > 0

    def weights_of(self, group: int) -> torch.Tensor:
        """The copy that a group looks up."""
        return self.weights[group if self.is_copied else 0]

    def moment_columns(self) -> torch.Tensor:
        """The first copy's moments, one for each column: ``[rows, dim]``."""
        moments = self._moments[0]
        return moments.repeat_interleave(self._table.dim // moments.shape[1], dim=1)

    def copy(self) -> "TableState":
        """A copy of the state, which further training doesn't change."""
        other = copy.copy(self)
        other.weights, other._moments = self.weights.clone(), self._moments.clone()
        other._synced = (self._synced[0].clone(), self._synced[1].clone())
        return other

    def restore(self, other: "TableState") -> None:
        """Take over a copied state."""
        self.weights, self._moments = other.weights.clone(), other._moments.clone()
        self._synced = (other._synced[0].clone(), other._synced[1].clone())

    def train_locally(self, grads: torch.Tensor, hot: torch.Tensor, lr: float) -> None:
        """Each group's copy by the group's gradient, but for hot rows.

        Args:
            grads: of the mean loss of the world, by the rank that they come from.
            hot: the ids of hot rows.
            lr: the learning rate.
        """
        is_cold = torch.ones(self._table.rows, dtype=torch.bool)
        is_cold[hot] = False
        num_groups = len(self.weights)
        for group in range(num_groups):
            ranks = [rank for rank, other in enumerate(self._groups) if other == group]
            # A group takes the mean over its own ranks.
            grad = num_groups * grads[ranks].sum(dim=0)
            self._apply(group, grad * is_cold[:, None], lr, self._scale)

    def train_merged(
        self, grads: torch.Tensor, rows: torch.Tensor, lr: float, *, is_hot: bool = False
    ) -> None:
        """All copies by the gradients of all ranks, for some rows."""
        width = self._table.dim // self._table.num_blocks
        if is_hot:
            if self._is_sent_hot:
                grads = self._noise.sent(grads, self._transport, width)
        elif self._is_sent:
            # Groups add their own gradients before they exchange them.
            groups = torch.tensor(self._groups)
            of_groups = grads.new_zeros(max(self._groups) + 1, *grads.shape[1:])
            of_groups.index_add_(0, groups, grads)
            grads = self._noise.sent(of_groups, self._transport, width)
        is_trained = torch.zeros(self._table.rows, 1, dtype=torch.bool)
        is_trained[rows] = True
        grad = grads.sum(dim=0) * is_trained
        for number in range(len(self.weights)):
            self._apply(number, grad, lr, 1.0 if is_hot else self._scale)

    def average(self, *, weights: bool, moments: bool) -> None:
        """Make all copies their mean."""
        synced_weight, synced_moment = self._synced
        if weights:
            width = self._table.dim // self._table.num_blocks
            synced_weight = self._in_type(self._mean(self.weights, synced_weight, width))
            self.weights = synced_weight.expand_as(self.weights).clone()
        if moments:
            width = max(1, self._moments.shape[2] // self._table.num_blocks)
            synced_moment = self._mean(self._moments, synced_moment, width)
            self._moments = synced_moment.expand_as(self._moments).clone()
        self._synced = (synced_weight, synced_moment)

    def _mean(self, copies: torch.Tensor, synced: torch.Tensor, width: int) -> torch.Tensor:
        """The mean of all copies, as the last synced values and the mean of the changes."""
        changes = self._noise.sent(copies - synced, self._transport, width)
        return synced + changes.mean(dim=0)

    def _apply(self, number: int, grad: torch.Tensor, lr: float, scale: float) -> None:
        weight, moment = self.weights[number], self._moments[number]
        if self._rule == "sgd":
            weight -= lr * grad
        elif self._rule == "adagrad":
            moment += grad.square()
            weight -= lr * grad / (moment.sqrt() + EPS)
        else:
            blocks = moment.shape[1]
            added = grad.reshape(grad.shape[0], blocks, -1).square().mean(dim=2)
            moment += added
            divided = moment / scale
            if self._rule == "delayed_moment":
                before = moment - added
                divided = torch.where(before > 0, before, added)
            roots = divided.sqrt().repeat_interleave(grad.shape[1] // blocks, dim=1)
            weight -= lr * grad / (roots + EPS)
        self.weights[number] = self._in_type(weight)

    def _in_type(self, weights: torch.Tensor) -> torch.Tensor:
        return self._noise.rounded(weights, DTYPES[self._table.dtype])
