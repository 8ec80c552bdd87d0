"""`RowCounter`: counts each row's lookups, batch by batch."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import datasketches
import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torchrec.modules.embedding_configs import BaseEmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_2dsp.access.stats import AccessStats
from torchrec_2dsp.access.table_access import TableAccess
from torchrec_2dsp.comms.alarm import agree
from torchrec_2dsp.errors import ConfigError, InputError


class ExactCounts:
    """Exact lookup counts for every row."""

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows
        """The table's number of rows."""
        self._counts = torch.zeros(num_rows, dtype=torch.float64)

    def describe(self) -> str:
        """Describe the counter and its settings, which all ranks must share."""
        return f"{self.num_rows} rows, exactly"

    def empty(self) -> "ExactCounts":
        """Return a zeroed counter for the same table."""
        return ExactCounts(self.num_rows)

    def add(self, ids: torch.Tensor) -> None:
        """Count these lookups."""
        ones = torch.ones((), dtype=torch.float64).expand(ids.numel())
        self._counts.index_add_(0, ids.long(), ones)

    def halve(self) -> None:
        """Halve all counts."""
        self._counts /= 2

    def gathered(self, group: dist.ProcessGroup) -> "ExactCounts":
        """Return the counts summed over all ranks.

        Collectives:
            One all-reduce.
        """
        total = ExactCounts(self.num_rows)
        is_nccl = dist.get_backend(group) == dist.Backend.NCCL
        counts = self._counts.to("cuda" if is_nccl else "cpu", copy=True)
        dist.all_reduce(counts, group=group)
        total._counts.copy_(counts)
        return total

    def state_dict(self) -> dict[str, Any]:
        """Return each row's count."""
        return {"counts": self._counts.clone()}

    def add_state_dict(self, state: Mapping[str, Any]) -> None:
        """Add another counter's counts for the same table."""
        self._counts += state["counts"]

    def access(self, num_samples: float) -> TableAccess:
        """Return the counts as the table's statistics."""
        return TableAccess.of_counts(self._counts.numpy(), num_samples)


ds: Any = datasketches
"""The sketch library; its names come from a compiled module without types."""

_LG_DISTINCT = 14
"""The binary logarithm of the HyperLogLog's register count: 0.8 % standard error."""


class SketchedCounts:
    """Apache DataSketches' frequent items, and its HyperLogLog for the distinct row count."""

    def __init__(self, num_rows: int, sketch_rows: int) -> None:
        """Create an empty sketch.

        Args:
            num_rows: the table's row count.
            sketch_rows: the sketch's capacity, a power of two.
        """
        if sketch_rows < 8 or sketch_rows & (sketch_rows - 1):
            raise ConfigError(f"sketch_rows={sketch_rows} must be a power of two, at least 8")
        self.num_rows = num_rows
        """The table's number of rows."""
        self._lg_size = sketch_rows.bit_length() - 1
        self._used = ds.frequent_items_sketch(self._lg_size)
        self._distinct = ds.hll_sketch(_LG_DISTINCT)
        self._num_lookups = 0.0

    def describe(self) -> str:
        """Describe the counter and its settings, which all ranks must share."""
        return f"{self.num_rows} rows, by a sketch of {2**self._lg_size}"

    def empty(self) -> "SketchedCounts":
        """Return a zeroed counter for the same table."""
        return SketchedCounts(self.num_rows, 2**self._lg_size)

    def add(self, ids: torch.Tensor) -> None:
        """Count these lookups."""
        self._num_lookups += ids.numel()
        rows, counts = torch.unique(ids, return_counts=True)
        for row, count in zip(rows.tolist(), counts.tolist(), strict=True):
            self._used.update(row, count)
            self._distinct.update(row)

    def halve(self) -> None:
        """Halve all counts, and drop rows with a single lookup.

        The distinct row count can't shrink and stays.
        """
        halved = ds.frequent_items_sketch(self._lg_size)
        for row, _, lower, _ in self._items():
            if lower > 1:
                halved.update(row, lower // 2)
        self._used = halved
        self._num_lookups /= 2

    def gathered(self, group: dist.ProcessGroup) -> "SketchedCounts":
        """Merge all ranks' sketches.

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
        """Return the sketches as bytes.

        This counter reloads the same bytes: a sketch's next evictions depend on its internal row
        order, which a sketch that has grown doesn't serialize.
        """
        state = self._serialized()
        self._used = ds.frequent_items_sketch(self._lg_size)
        self._distinct = ds.hll_sketch(_LG_DISTINCT)
        self._num_lookups = 0.0
        self.add_state_dict(state)
        return state

    def add_state_dict(self, state: Mapping[str, Any]) -> None:
        """Add another counter's counts for the same table."""
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
        """Return the counts as the table's statistics."""
        items = self._items()
        rows = np.array([row for row, *_ in items], dtype=np.int64)
        # The lower bounds: a count is never too high, and lookups it misses go to the tail.
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
        """Return the sketch's rows, with their estimates and bounds."""
        return self._used.get_frequent_items(ds.frequent_items_error_type.NO_FALSE_NEGATIVES)


class RowCounter:
    """Counts every table's lookups.

    Tables with at most ``exact_rows`` rows are counted exactly, with 8 bytes per row. For larger
    ones, a sketch keeps the most used rows, about ``0.75 * sketch_rows``: each kept count misses
    at most ``3.5 / sketch_rows`` of all lookups, and an evicted row has no more than that.

    Example:
        >>> import torch
        >>> from torchrec.modules.embedding_configs import EmbeddingBagConfig
        >>> from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
        >>> import torchrec_2dsp as tdsp
        >>> counter = tdsp.RowCounter(
        ...     [EmbeddingBagConfig(100, 8, name="ads", feature_names=["ad"])]
        ... )
        >>> batch = KeyedJaggedTensor.from_lengths_sync(
        ...     ["ad"], torch.tensor([7, 3, 7]), torch.tensor([2, 1])
        ... )
        >>> counter.update(batch)
        >>> stats = counter.stats()
        >>> stats["ads"].rows, stats["ads"].counts
        (array([7, 3]), array([2., 1.]))
        >>> tdsp.HotSet.from_stats(stats, "ads", share=0.5)
        HotSet(row_ids=(7,))
    """

    def __init__(
        self,
        tables: Iterable[BaseEmbeddingConfig],
        *,
        exact_rows: int = 2**24,
        sketch_rows: int = 2**16,
        half_life: int | None = None,
    ) -> None:
        """Create a zeroed counter.

        Args:
            tables: the tables, as TorchRec's modules are configured.
            exact_rows: the largest row count for which a table is counted exactly.
            sketch_rows: a sketch's capacity, a power of two.
            half_life: how many batches pass before all counts are halved, so that recent
                batches weigh more; by default all batches count alike.
        """
        if half_life is not None and half_life < 1:
            raise ConfigError(f"half_life={half_life} must be at least one batch")
        self._half_life = half_life
        self._num_batches = 0
        self._tables: dict[str, _CountedTable] = {}
        for config in tables:
            if config.name in self._tables:
                raise ConfigError(f"two tables are named {config.name!r}; count them separately")
            num_rows = config.num_embeddings
            is_exact = num_rows <= exact_rows
            counts = ExactCounts(num_rows) if is_exact else SketchedCounts(num_rows, sketch_rows)
            self._tables[config.name] = _CountedTable(tuple(config.feature_names), counts)

    @classmethod
    def for_model(
        cls,
        model: nn.Module,
        *,
        exact_rows: int = 2**24,
        sketch_rows: int = 2**16,
        half_life: int | None = None,
    ) -> "RowCounter":
        """Build a counter for all tables in an unsharded model."""
        tables: list[BaseEmbeddingConfig] = []
        for module in model.modules():
            if isinstance(module, EmbeddingBagCollection):
                tables += module.embedding_bag_configs()
            elif isinstance(module, EmbeddingCollection):
                tables += module.embedding_configs()
        if not tables:
            raise ConfigError(
                f"{type(model).__name__} has no EmbeddingBagCollection and no EmbeddingCollection; "
                "count before the model is sharded"
            )
        return cls(tables, exact_rows=exact_rows, sketch_rows=sketch_rows, half_life=half_life)

    @property
    def tables(self) -> tuple[str, ...]:
        """The names of the counted tables."""
        return tuple(self._tables)

    @torch.no_grad()
    def update(self, features: KeyedJaggedTensor) -> None:
        """Count a batch, or none of it if an id lies outside its table.

        It ignores features that no table has, and features that the batch lacks.

        On a GPU this waits for the ids; count every hundredth batch there.
        """
        ids_of = {key: features[key].values() for key in features.keys()}  # noqa: SIM118
        looked_up: list[tuple[_CountedTable, torch.Tensor]] = []
        for name, table in self._tables.items():
            parts = [ids_of[feature] for feature in table.features if feature in ids_of]
            if parts:
                ids = torch.cat(parts).cpu()
                _check(name, ids, table.counts.num_rows)
                looked_up.append((table, ids))
        if self._half_life and self._num_batches and self._num_batches % self._half_life == 0:
            for table in self._tables.values():
                table.counts.halve()
                table.num_samples /= 2
        self._num_batches += 1
        for table, ids in looked_up:
            table.counts.add(ids)
            table.num_samples += features.stride()

    def gather(self, group: dist.ProcessGroup | None = None) -> AccessStats:
        """Sum the counts over all ranks; this counter keeps its own.

        Args:
            group: the ranks, by default all of them.

        Collectives:
            One all-gather for the counters' settings, which must be the same on all ranks; per
            table an all-reduce for exact counts, or an all-gather for a sketch; and one all-gather
            for sample counts.
        """
        group = group or dist.group.WORLD
        assert group is not None
        counted = [f"{name}: {table.counts.describe()}" for name, table in self._tables.items()]
        agree(group, facts={"what the RowCounter counts": "\n".join(counted)})
        own_samples = [table.num_samples for table in self._tables.values()]
        every: list[list[float]] = [[] for _ in range(dist.get_world_size(group))]
        dist.all_gather_object(every, own_samples, group=group)
        num_samples = [sum(numbers) for numbers in zip(*every, strict=True)]
        return AccessStats(
            {
                name: table.counts.gathered(group).access(samples)
                for (name, table), samples in zip(self._tables.items(), num_samples, strict=True)
            }
        )

    def stats(self) -> AccessStats:
        """Return this rank's counts so far."""
        return AccessStats(
            {name: table.counts.access(table.num_samples) for name, table in self._tables.items()}
        )

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's counts, to resume from."""
        return {
            "num_batches": self._num_batches,
            "tables": {
                name: {
                    "kind": table.counts.describe(),
                    "num_samples": table.num_samples,
                    **table.counts.state_dict(),
                }
                for name, table in self._tables.items()
            },
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from another counter's counts for the same tables."""
        self.load_rank_states([state])

    def check_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raise unless the state has the same tables and settings."""
        saved = {name: table["kind"] for name, table in state["tables"].items()}
        own = {name: table.counts.describe() for name, table in self._tables.items()}
        for name in sorted(saved.keys() | own.keys()):
            if saved.get(name) != own.get(name):
                raise ConfigError(
                    f"table {name!r} was counted as {saved.get(name, 'nothing')}, but this counter "
                    f"has {own.get(name, 'nothing')}; make the RowCounter as it was made"
                )

    def load_rank_states(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Resume from several ranks' summed counts."""
        for state in states:
            self.check_state_dict(state)
        self._num_batches = max((state["num_batches"] for state in states), default=0)
        for name, table in self._tables.items():
            table.counts = table.counts.empty()
            table.num_samples = 0.0
            for state in states:
                table.counts.add_state_dict(state["tables"][name])
                table.num_samples += state["tables"][name]["num_samples"]


@dataclass
class _CountedTable:
    features: tuple[str, ...]
    counts: ExactCounts | SketchedCounts
    num_samples: float = 0.0


def _check(table: str, ids: torch.Tensor, num_rows: int) -> None:
    if not ids.numel():
        return
    low, high = (int(bound) for bound in torch.aminmax(ids))
    if low < 0 or high >= num_rows:
        raise InputError(
            f"id {low if low < 0 else high} of table {table!r} is out of range: the table has "
            f"{num_rows} rows (0..{num_rows - 1})"
        )
