"""`SketchedCounts`: the most used rows of a table that has too many to count them all."""

from collections.abc import Mapping
from typing import Any

import datasketches
import numpy as np
import torch
import torch.distributed as dist

from torchrec_2dsp.access.table_access import TableAccess
from torchrec_2dsp.errors import ConfigError

ds: Any = datasketches
"""The sketch library; its names come from a compiled module without types."""

_LG_DISTINCT = 14
"""Registers of the sketch that counts distinct rows, as a power of two: 0.8 % standard error."""


class SketchedCounts:
    """Apache DataSketches' frequent items, and its HyperLogLog for how many rows there are."""

    def __init__(self, num_rows: int, sketch_rows: int) -> None:
        """
        Args:
            num_rows: of the table.
            sketch_rows: how many places the sketch has, a power of two.
        """
        if sketch_rows < 8 or sketch_rows & (sketch_rows - 1):
            raise ConfigError(f"sketch_rows={sketch_rows} must be a power of two, at least 8")
        self.num_rows = num_rows
        """How many rows the table has."""
        self._lg_size = sketch_rows.bit_length() - 1
        self._used = ds.frequent_items_sketch(self._lg_size)
        self._distinct = ds.hll_sketch(_LG_DISTINCT)
        self._num_lookups = 0.0

    def describe(self) -> str:
        """What is counted and how, as text; counters of other ranks must say the same."""
        return f"{self.num_rows} rows, by a sketch of {2**self._lg_size}"

    def empty(self) -> "SketchedCounts":
        """A counter of the same table that has counted nothing."""
        return SketchedCounts(self.num_rows, 2**self._lg_size)

    def add(self, ids: torch.Tensor) -> None:
        """Count these lookups."""
        self._num_lookups += ids.numel()
        rows, counts = torch.unique(ids, return_counts=True)
        for row, count in zip(rows.tolist(), counts.tolist(), strict=True):
            self._used.update(row, count)
            self._distinct.update(row)

    def halve(self) -> None:
        """Let all lookups until now count half; rows with a single one are dropped.

        How many rows there were stays as it is: it can't be taken back.
        """
        halved = ds.frequent_items_sketch(self._lg_size)
        for row, _, lower, _ in self._items():
            if lower > 1:
                halved.update(row, lower // 2)
        self._used = halved
        self._num_lookups /= 2

    def gathered(self, group: dist.ProcessGroup) -> "SketchedCounts":
        """The sketches of all ranks, merged.

        Collectives:
            One all-gather of the sketches.
        """
        own_state = self._serialized()
        states: list[dict[str, Any]] = [own_state] * dist.get_world_size(group)
        dist.all_gather_object(states, own_state, group=group)
        merged = SketchedCounts(self.num_rows, 2**self._lg_size)
        for state in states:
            merged.add_state_dict(state)
        return merged

    def state_dict(self) -> dict[str, Any]:
        """The sketches, as bytes.

        This counter goes on from the same bytes: what a sketch drops next depends on the order in
        which it holds its rows, and bytes don't tell that of a sketch that has grown.
        """
        state = self._serialized()
        self._used = ds.frequent_items_sketch(self._lg_size)
        self._distinct = ds.hll_sketch(_LG_DISTINCT)
        self._num_lookups = 0.0
        self.add_state_dict(state)
        return state

    def add_state_dict(self, state: Mapping[str, Any]) -> None:
        """Add what another counter of the same table had counted."""
        self._used.merge(ds.frequent_items_sketch.deserialize(state["used"], ds.PyLongsSerDe()))
        union = ds.hll_union(_LG_DISTINCT)
        union.update(self._distinct)
        union.update(ds.hll_sketch.deserialize(state["distinct"]))
        self._distinct = union.get_result()
        self._num_lookups += state["num_lookups"]

    def _serialized(self) -> dict[str, Any]:
        return {
            "used": self._used.serialize(ds.PyLongsSerDe()),
            "distinct": self._distinct.serialize_compact(),
            "num_lookups": self._num_lookups,
        }

    def access(self, num_samples: float) -> TableAccess:
        """The counts as statistics of the table."""
        items = self._items()
        rows = np.array([row for row, *_ in items], dtype=np.int64)
        # The lower bounds: a count is never too high, and what they lack is the tail's.
        counts = np.array([lower for _, _, lower, _ in items], dtype=np.float64)
        num_distinct = min(round(self._distinct.get_estimate()), self.num_rows)
        return TableAccess.of_rows(
            self.num_rows,
            num_samples,
            rows,
            counts,
            tail_rows=max(num_distinct - len(rows), 0),
            tail_lookups=self._num_lookups - float(counts.sum()),
            max_error=max((float(upper - lower) for *_, lower, upper in items), default=0.0),
        )

    def _items(self) -> list[tuple[int, int, int, int]]:
        """The rows that the sketch has, with an estimate and bounds of their counts."""
        return self._used.get_frequent_items(ds.frequent_items_error_type.NO_FALSE_NEGATIVES)
