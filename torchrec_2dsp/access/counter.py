"""`RowCounter`: counts how often each row is looked up, batch by batch."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchrec.modules.embedding_configs import BaseEmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_2dsp.access.exact_counts import ExactCounts
from torchrec_2dsp.access.sketched_counts import SketchedCounts
from torchrec_2dsp.access.stats import AccessStats
from torchrec_2dsp.comms.alarm import agree
from torchrec_2dsp.errors import ConfigError, InputError


class RowCounter:
    """Counts the lookups of every table.

    Tables with at most ``exact_rows`` rows are counted exactly, 8 bytes a row. Of larger ones, a
    sketch keeps the rows that are used most, about three quarters of ``sketch_rows``: their counts
    lack at most ``3.5 / sketch_rows`` of all lookups, and so does that of any row which it has
    dropped.

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
        """
        Args:
            tables: what is looked up, as TorchRec's modules are configured.
            exact_rows: up to how many rows a table is counted exactly.
            sketch_rows: how large a sketch is, a power of two.
            half_life: after so many batches all counts are halved, so that the last ones say more
                than old ones; by default all batches count alike.
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
        """A counter for all tables of an unsharded model."""
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
        """The names of the tables that are counted."""
        return tuple(self._tables)

    @torch.no_grad()
    def update(self, features: KeyedJaggedTensor) -> None:
        """Count one batch, or nothing of it if it has an id that its table has no row for.

        Features of no table are left alone; those that the batch lacks count nothing.

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
        """The counts of all ranks so far, added up; this counter keeps those of its own rank.

        Args:
            group: of the ranks, by default all of them.

        Collectives:
            An all-gather of what is counted, which must be the same on all ranks; for each table an
            all-reduce of its counts, or an all-gather of its sketch; and one all-gather of the
            numbers of samples. Tensors travel on the CPU, so the group needs a backend for it, as
            gloo.
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
        """The counts of this rank so far."""
        return AccessStats(
            {name: table.counts.access(table.num_samples) for name, table in self._tables.items()}
        )

    def state_dict(self) -> dict[str, Any]:
        """The counts of this rank so far, for a run that goes on."""
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
        """Go on from what a counter of the same tables had counted."""
        self.load_rank_states([state])

    def check_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raise unless the same tables were counted in the same way."""
        saved = {name: table["kind"] for name, table in state["tables"].items()}
        own = {name: table.counts.describe() for name, table in self._tables.items()}
        for name in sorted(saved.keys() | own.keys()):
            if saved.get(name) != own.get(name):
                raise ConfigError(
                    f"table {name!r} was counted as {saved.get(name, 'nothing')}, but this counter "
                    f"has {own.get(name, 'nothing')}; make the RowCounter as it was made"
                )

    def load_rank_states(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Go on from the sum of what several ranks had counted, or from nothing for none."""
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
