"""Where the numbers of a table are rounded between the ranks of a group, in the oracle.

exchanges of rows    each row on its way to a rank; the rank's gradient of it on the way back
sequences            each vector; its gradient
bags                 what each owner has summed of a bag; the gradient of the bag
bags, by hosts       these, and once more what each host has summed of a bag

A rank that is alone in its group sends nothing, so nothing is rounded.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch

import torchrec_2dsp as tdsp
from tests.fuzz.batches import Lookups
from tests.fuzz.case import Case, TableCase
from tests.fuzz.noise import Noise

_BY_HOST = ("table_row_wise", "grid_shard")
BY_OWNER = ("row_wise", *_BY_HOST)
"""Shardings that deal the rows of a column to several ranks, each of which sums a part of a bag."""


@dataclass(frozen=True)
class TableWire:
    """The ways of a table's numbers."""

    table: TableCase
    is_bags: bool
    transport: tdsp.Transport
    width: int
    """How many numbers have a scale in common."""
    num_ranks: int
    """Among how many ranks numbers travel."""
    num_owners: int
    """Among how many ranks the rows of a column are dealt."""
    num_hosts: int
    """Between how many hosts bags travel once more."""
    noise: Noise

    @classmethod
    def of(cls, case: Case, name: str, noise: Noise) -> "TableWire":
        """The ways of the numbers of the table with this name."""
        (module,) = (of for of in numbered_modules(case) if name in of)
        table, kind = module[name], case.modules[int(name[1 : name.index("t")])].kind
        together = [other for other in module.values() if _message(other) == _message(table)]
        by_row = table.exchange in ("row", "row_per_host")
        widths = [other.dim // other.num_blocks for other in together]
        host_size = case.mesh.node_group_size(case.local_world_size)
        num_ranks = case.world_size if table.once else case.size
        by_host = table.sharding in _BY_HOST
        num_owners = {"row_wise": num_ranks} | dict.fromkeys(_BY_HOST, host_size)
        transport = table.transport if table.transport != "fp32" else case.qcomms
        is_still = table.sharding == "data_parallel" or transport == "none"
        return cls(
            table=table,
            is_bags=kind != "sequences",
            transport=tdsp.Transport("fp32" if is_still else transport),
            width=table.dim if by_row else math.gcd(*widths),
            num_ranks=host_size if by_host else num_ranks,
            num_owners=num_owners.get(table.sharding, 1),
            num_hosts=num_ranks // host_size if by_host else 1,
            noise=noise,
        )

    @property
    def _by_row(self) -> bool:
        return self.table.exchange in ("row", "row_per_host")

    @property
    def _divides_late(self) -> bool:
        """Whether bags of a mean travel as sums."""
        is_mean = self.is_bags and self.table.pooling == "mean"
        return is_mean and (self.table.sharding in BY_OWNER or self.table.hot != "none")

    def _sent(self, values: torch.Tensor) -> torch.Tensor:
        if self.num_ranks == 1:
            return values
        return self.noise.sent(values, self.transport, self.width)

    def _sent_to_hosts(self, bags: torch.Tensor) -> torch.Tensor:
        """Bags that hosts have summed, or their gradients, which go to hosts first."""
        if self.num_hosts == 1:
            return bags
        return self.noise.sent(bags, self.transport, self.width)

    def bags(
        self, weights: torch.Tensor, lookups: Lookups, shares: torch.Tensor, hot: torch.Tensor
    ) -> torch.Tensor:
        """A feature's bags of one rank.

        Args:
            weights: of the table.
            lookups: of the feature.
            shares: what the row of each id is multiplied by.
            hot: for each row, whether it is hot.
        """
        rows, ids = weights[lookups.ids], lookups.ids
        is_hot = hot[ids][:, None]
        bags = rows.new_zeros(lookups.lengths.numel(), rows.shape[1])
        if self._by_row or not self.is_bags:
            rows = torch.where(is_hot, rows, self._sent(rows))
            return bags.index_add_(0, lookups.samples, rows * shares)
        lengths = lookups.lengths.clamp(min=1).to(rows.dtype)[:, None]
        if self._divides_late:
            shares = torch.ones_like(shares)
        owners = ids // max(1, -(-self.table.rows // self.num_owners))
        for owner in range(self.num_owners):
            is_own = (owners == owner)[:, None] & ~is_hot
            part = torch.zeros_like(bags).index_add_(0, lookups.samples, rows * shares * is_own)
            bags += self._sent(part)
        bags = self._sent_to_hosts(bags)
        bags = bags.index_add_(0, lookups.samples, rows * shares * is_hot)
        return bags / lengths if self._divides_late else bags

    def row_gradients(
        self, bags: torch.Tensor, lookups: Lookups, shares: torch.Tensor, hot: torch.Tensor
    ) -> torch.Tensor:
        """The gradient of each id's row, from those of the bags."""
        if self._by_row:
            return bags[lookups.samples] * shares
        is_hot = hot[lookups.ids][:, None]
        exact = bags[lookups.samples] * shares
        if not self.is_bags:
            return torch.where(is_hot, exact, self._sent(exact))
        lengths = lookups.lengths.clamp(min=1).to(bags.dtype)[:, None]
        if self._divides_late:
            bags, shares = bags / lengths, torch.ones_like(shares)
        rows = self._sent(self._sent_to_hosts(bags))[lookups.samples] * shares
        return torch.where(is_hot, exact, rows)

    def summed_gradients(self, grads: torch.Tensor, hot: torch.Tensor) -> torch.Tensor:
        """What a rank's gradients of all rows come to at their owners."""
        if not self._by_row:
            return grads
        return torch.where(hot[:, None], grads, self._sent(grads))


def numbered_modules(case: Case) -> list[dict[str, TableCase]]:
    """The tables of each module by their names."""
    modules: list[dict[str, TableCase]] = [{} for _ in case.modules]
    for name, table in case.tables.items():
        modules[int(name[1 : name.index("t")])][name] = table
    return modules


def _message(table: TableCase) -> tuple[Any, ...]:
    """What tables whose numbers travel in one message have in common."""
    return table.sharding, table.exchange, table.transport, table.once
