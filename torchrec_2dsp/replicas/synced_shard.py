"""A table shard whose copies are averaged: its states' rules, and the rows that have changed.

Replicas are equal after a sync. A row's value at that time is its *base*, which is still the copy
of every peer that hasn't changed the row since.
"""

import enum
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from torchrec_2dsp.codecs.rows import RowCodec
from torchrec_2dsp.errors import UnsupportedError


class StateRule(enum.Enum):
    """The rule that turns a tensor's copies into one."""

    AVERAGE = "average"
    """The copies' mean, for state that accumulates or decays with the gradients."""

    MAX = "max"
    """The largest copy, for when a row was last seen, and how often."""

    def combine(self, copies: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return one tensor from all peers' copies; a mean adds them in peer order."""
        if self is StateRule.MAX:
            return torch.stack(tuple(copies)).amax(dim=0)
        total = copies[0].float()
        for copy in copies[1:]:
            total = total + copy
        return (total / len(copies)).to(copies[0].dtype)


STATE_RULES = {
    "weight": StateRule.AVERAGE,
    "sum": StateRule.AVERAGE,
    "exp_avg": StateRule.AVERAGE,
    "exp_avg_sq": StateRule.AVERAGE,
    "momentum_buffer": StateRule.AVERAGE,
    "sparse_ema": StateRule.AVERAGE,
    "prev_iter": StateRule.MAX,
    "row_counter": StateRule.MAX,
}
"""Each state's rule, by TorchRec's name."""

UNSYNCED_STATES = frozenset({"iter"})
"""States that are never averaged: they count forwards, which are equal on all replicas."""


def state_rule_for(state: str, table: str) -> StateRule:
    """Return the rule for a table's state; refuse an unknown state."""
    if state not in STATE_RULES:
        raise UnsupportedError(
            f"WeightSync has no rule for the optimizer state {state!r} of table {table!r}; use "
            "GradientSync, which needs none"
        )
    return STATE_RULES[state]


@dataclass(frozen=True)
class TableShard:
    """A table shard on this rank."""

    table: str
    row: int
    column: int
    tensors: Mapping[str, torch.Tensor]
    """``"weight"`` and the optimizer state, by name, as views."""

    @property
    def num_rows(self) -> int:
        """The shard's row count."""
        return next(iter(self.tensors.values())).shape[0]

    @property
    def device(self) -> torch.device:
        """The device that holds the shard."""
        return next(iter(self.tensors.values())).device

    def synced(self, is_synced: Callable[[str], bool] = lambda name: True) -> "TableShard":
        """Return the shard with only those tensors that are equal after a sync."""
        names = [name for name in self.tensors if name not in UNSYNCED_STATES and is_synced(name)]
        return replace(self, tensors={name: self.tensors[name] for name in names})


_ROW_WORK = 3.3
"""The cost of looking up and writing back a wide row singly, relative to its share of a whole
shard, if sending costs nearly nothing: measured over loopback. Slower links favour single rows."""

_ROW_OVERHEAD = 96
"""A single row's overhead in bytes: its id is sent, sorted and searched."""


def break_even_share(row_bytes: int, num_peers: int) -> float:
    """Return the share of touched rows above which averaging the whole shard can be faster.

    A ring all-reduce moves ``2 (M - 1) / M`` times the shard, touched rows go to each of the
    ``M - 1`` peers. The work per row is weighted as on a fast link, so that touched rows are never
    much slower; on slower links, they break even at larger shares.

    Example:
        >>> from torchrec_2dsp.replicas.synced_shard import break_even_share
        >>> [round(break_even_share(row_bytes=260, num_peers=peers), 2) for peers in (2, 4)]
        [0.22, 0.11]
    """
    return 2 / num_peers * row_bytes / (row_bytes + _ROW_OVERHEAD) / _ROW_WORK


@dataclass(frozen=True)
class ShardRows:
    """Rows of a table shard, with values for each of its tensors."""

    rows: torch.Tensor
    """Distinct row ids, ascending, int64 `[n]`."""

    values: tuple[torch.Tensor, ...]
    """For each tensor, these rows' bases, or a peer's values for them."""

    def part(self, places: slice) -> "ShardRows":
        """Return the rows at these places."""
        return ShardRows(self.rows[places], tuple(value[places] for value in self.values))


class TouchedRows:
    """Notes one table shard's rows before they change.

    A bitmap marks noted rows; it exists from the second backward after a sync. Once too many rows
    are noted (``max_share``), their bases are dropped and only the bitmap stays, because sending
    the whole shard is then faster.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], max_share: float) -> None:
        self.tensors = tuple(tensors)
        """Views of the shard's weights and optimizer state."""
        self.num_rows = self.tensors[0].shape[0]
        self._max_noted = int(max_share * self.num_rows)
        self._noted: list[ShardRows] = []
        self._num_noted = 0
        self._is_noted: torch.Tensor | None = None
        self.is_overfull = False
        """True if too many rows were touched to keep their bases."""

    @property
    def device(self) -> torch.device:
        """The shard's device."""
        return self.tensors[0].device

    @torch.no_grad()
    def note(self, rows: torch.Tensor) -> None:
        """Note that rows are about to change; ids may repeat."""
        if self.is_overfull:
            self.bitmap()[rows] = True
            return
        if rows.numel() == 0:
            return
        new = torch.unique(rows)
        if self._noted:
            is_noted = self.bitmap()
            new = new[~is_noted[new]]
            is_noted[new] = True
        self._num_noted += new.numel()
        if self._num_noted > self._max_noted:
            self.bitmap()[new] = True
            self._noted, self.is_overfull = [], True
        elif new.numel():
            self._noted.append(ShardRows(new.long(), self._values(new)))

    def changed(self) -> ShardRows:
        """Return the noted rows with their bases."""
        if len(self._noted) == 1:
            return self._noted[0]
        no_rows = torch.empty(0, dtype=torch.int64, device=self.device)
        noted = self._noted or [ShardRows(no_rows, self._values(no_rows))]
        rows, order = torch.cat([changed.rows for changed in noted]).sort()
        bases = zip(*(changed.values for changed in noted), strict=True)
        return ShardRows(rows, tuple(torch.cat(parts).index_select(0, order) for parts in bases))

    def forget(self) -> None:
        """Forget all noted rows after a sync."""
        if self._is_noted is not None:
            if self.is_overfull:
                self._is_noted.zero_()
            for changed in self._noted:
                self._is_noted[changed.rows] = False
        self._noted, self._num_noted, self.is_overfull = [], 0, False

    def bitmap(self) -> torch.Tensor:
        """Return whether each row is touched, bool `[num_rows]`."""
        if self._is_noted is None:
            self._is_noted = torch.zeros(self.num_rows, dtype=torch.bool, device=self.device)
        if len(self._noted) == 1:
            # The first backward after a sync needs no bitmap, so it hasn't marked its rows.
            self._is_noted[self._noted[0].rows] = True
        return self._is_noted

    def _values(self, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(tensor.index_select(0, rows) for tensor in self.tensors)


@dataclass(frozen=True)
class SyncedShard:
    """A table shard, and how its tensors are averaged."""

    table: str

    touched: TouchedRows
    """The shard's tensors, and which of their rows have changed."""

    rules: tuple[StateRule, ...]

    codecs: tuple[RowCodec | None, ...]
    """Each tensor's codec for changes of its rows; `None` sends plain values."""

    @property
    def dims(self) -> list[int]:
        """Each tensor's row width."""
        return [math.prod(tensor.shape[1:]) for tensor in self.touched.tensors]
