"""`TouchedRows`: which rows of a table shard have changed since the last sync, and what they were.

Replicas are equal after a sync. The value of a row from then is its *base*, which is still the copy
of every peer that hasn't changed the row since.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

_ROW_WORK = 3.3
"""How much longer a wide row takes singly, looked up and put back, than with its whole shard, where
sending costs almost nothing: measured over loopback. A slower link only favours single rows."""

_ROW_OVERHEAD = 96
"""The cost of a single row besides its own bytes, in bytes: its id is sent, sorted and searched."""


def break_even_share(row_bytes: int, num_peers: int) -> float:
    """The share of touched rows from which on it can be faster to average the whole shard.

    A ring all-reduce moves ``2 (M - 1) / M`` times the shard, touched rows go to each of the
    ``M - 1`` peers. The work per row is weighed as on a fast link, so that touched rows are never
    much slower; on slower links, they break even at larger shares.

    Example:
        >>> from torchrec_2dsp.replicas.touched import break_even_share
        >>> [round(break_even_share(row_bytes=260, num_peers=peers), 2) for peers in (2, 4)]
        [0.22, 0.11]
    """
    return 2 / num_peers * row_bytes / (row_bytes + _ROW_OVERHEAD) / _ROW_WORK


@dataclass(frozen=True)
class Changed:
    """The rows of one table shard that this rank has changed."""

    rows: torch.Tensor
    """Distinct row ids, ascending, int64 `[n]`."""

    bases: tuple[torch.Tensor, ...]
    """For each tensor of the shard, these rows as they were after the last sync."""

    def part(self, places: slice) -> "Changed":
        """The rows at these places."""
        return Changed(self.rows[places], tuple(base[places] for base in self.bases))


class TouchedRows:
    """Notes the rows of one table shard before they change.

    A bitmap tells which rows are noted already; it is created when a second backward comes before
    a sync. When too many rows are noted, their bases are dropped and only the bitmap is kept: it is
    faster then to send the whole shard.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], max_share: float) -> None:
        """
        Args:
            tensors: the shard's weights and optimizer state, one row of each per row.
            max_share: the share of touched rows from which on the whole shard is sent.
        """
        self.tensors = tuple(tensors)
        """Views of the shard's weights and optimizer state."""
        self.num_rows = self.tensors[0].shape[0]
        """How many rows the shard has."""
        self._max_noted = int(max_share * self.num_rows)
        self._noted: list[Changed] = []
        self._num_noted = 0
        self._is_noted: torch.Tensor | None = None
        self.is_overfull = False
        """Whether so many rows were touched that their bases were dropped."""

    @property
    def device(self) -> torch.device:
        """The shard's device."""
        return self.tensors[0].device

    @torch.no_grad()
    def note(self, rows: torch.Tensor) -> None:
        """Note that rows are about to change.

        Args:
            rows: row ids in any order, which may repeat.
        """
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
            self._noted.append(Changed(new.long(), self._values(new)))

    def changed(self) -> Changed:
        """The rows that were noted, with their bases."""
        if len(self._noted) == 1:
            return self._noted[0]
        no_rows = torch.empty(0, dtype=torch.int64, device=self.device)
        noted = self._noted or [Changed(no_rows, self._values(no_rows))]
        rows, order = torch.cat([changed.rows for changed in noted]).sort()
        bases = zip(*(changed.bases for changed in noted), strict=True)
        return Changed(rows, tuple(torch.cat(parts).index_select(0, order) for parts in bases))

    def forget(self) -> None:
        """Forget all noted rows, because they are synced."""
        if self._is_noted is not None:
            if self.is_overfull:
                self._is_noted.zero_()
            for changed in self._noted:
                self._is_noted[changed.rows] = False
        self._noted, self._num_noted, self.is_overfull = [], 0, False

    def bitmap(self) -> torch.Tensor:
        """Whether each row is touched, bool `[num_rows]`."""
        if self._is_noted is None:
            self._is_noted = torch.zeros(self.num_rows, dtype=torch.bool, device=self.device)
        if len(self._noted) == 1:
            # The first backward after a sync needs no bitmap, so it hasn't marked its rows.
            self._is_noted[self._noted[0].rows] = True
        return self._is_noted

    def _values(self, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(tensor.index_select(0, rows) for tensor in self.tensors)
