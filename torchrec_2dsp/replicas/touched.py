"""`TouchedRows`: which rows of a table shard have changed since the last sync, and what they were.

Replicas are equal after a sync. So whoever knows a row's value from then, its *base*, and the
peers that have changed it since, knows what every peer's copy is.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

_ROW_WORK = 3.3
"""How much longer a wide row takes by itself, looked up and put back, than in its shard, where
sending costs almost nothing: measured on a loopback. A slower link only favours single rows."""

_ROW_OVERHEAD = 96
"""What a row costs besides its bytes, in bytes: its id travels, and is sorted and searched."""


def break_even_share(row_bytes: int, num_peers: int) -> float:
    """The share of touched rows from which on it can be quicker to average the whole shard.

    A ring all-reduce moves ``2 (M - 1) / M`` times the shard, touched rows go to each of the
    ``M - 1`` peers. The work that a row costs besides is that of a fast link, so that touched rows
    are never much slower; the slower a link, the more this leaves to gain.

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
        """Some of the rows."""
        return Changed(self.rows[places], tuple(base[places] for base in self.bases))


class TouchedRows:
    """Notes the rows of one table shard before they change.

    A bitmap tells which rows are noted already; it is made when a second backward comes before
    a sync. When too many rows are noted, their bases are dropped and the bitmap alone goes on: it
    is quicker then to send the whole shard.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], max_share: float) -> None:
        """
        Args:
            tensors: the shard's weights and optimizer state, one row of each per row.
            max_share: the share of touched rows from which on the whole shard is sent.
        """
        self.tensors = tuple(tensors)
        """Views of the shard."""
        self.num_rows = self.tensors[0].shape[0]
        """Of the shard."""
        self._max_noted = int(max_share * self.num_rows)
        self._noted: list[Changed] = []
        self._num_noted = 0
        self._is_noted: torch.Tensor | None = None
        self.is_overfull = False
        """Whether so many rows were touched that their bases were dropped."""

    @property
    def device(self) -> torch.device:
        """Where the shard is."""
        return self.tensors[0].device

    @torch.no_grad()
    def note(self, rows: torch.Tensor) -> None:
        """These rows are about to change.

        Args:
            rows: ids in any order, as often as they come.
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
        """What was noted."""
        if len(self._noted) == 1:
            return self._noted[0]
        nothing = torch.empty(0, dtype=torch.int64, device=self.device)
        noted = self._noted or [Changed(nothing, self._values(nothing))]
        rows, order = torch.cat([one.rows for one in noted]).sort()
        bases = zip(*(one.bases for one in noted), strict=True)
        return Changed(rows, tuple(torch.cat(parts).index_select(0, order) for parts in bases))

    def forget(self) -> None:
        """Start anew, with nothing touched."""
        if self._is_noted is not None:
            if self.is_overfull:
                self._is_noted.zero_()
            for one in self._noted:
                self._is_noted[one.rows] = False
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
