"""Which rows of a module are hot, now and after a refresh."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torchrec.modules.embedding_configs import BaseEmbeddingConfig

from torchrec_2dsp.access.hot_set import HotSet
from torchrec_2dsp.errors import PlanError
from torchrec_2dsp.plan.parameter_sharding import ParameterSharding2D
from torchrec_2dsp.shard.hot_split import HotIds


@dataclass(frozen=True)
class _HotTable:
    """A table that has room for hot rows."""

    features: tuple[str, ...]
    num_rows: int
    num_slots: int
    """How many hot rows the plan has given it room for."""
    hot_set: HotSet


class HotSets:
    """The hot sets of a module's tables: what new batches go by, and what the replicas hold.

    The two differ after a refresh, until the first batch that went by the new sets is looked up;
    and again when one is looked up that went by the old ones, as pipelines have it.
    """

    def __init__(
        self,
        configs: Sequence[BaseEmbeddingConfig],
        tables: Mapping[str, ParameterSharding2D],
        device: torch.device,
    ) -> None:
        """
        Args:
            configs: the module's tables.
            tables: their plan.
            device: of the batches.
        """
        self._device = device
        self._tables = {
            config.name: _HotTable(
                tuple(config.feature_names), config.num_embeddings, len(hot_set), hot_set
            )
            for config in configs
            if (hot_set := tables[config.name].hot_set) is not None
        }
        self.newest = self._ids()
        """What new batches go by."""
        self.held = self.newest
        """What the replicas hold."""

    @property
    def by_table(self) -> dict[str, HotSet]:
        """What new batches go by."""
        return {name: table.hot_set for name, table in self._tables.items()}

    def check(self, hot_sets: Mapping[str, HotSet]) -> None:
        """Raise unless there is room for these sets."""
        for name, hot_set in hot_sets.items():
            table = self._tables[name]
            hot_set.check_fits(name, table.num_rows)
            if len(hot_set) > table.num_slots:
                raise PlanError(
                    f"table {name!r} was planned with {table.num_slots} hot rows and has no room "
                    f"for {len(hot_set)}; refresh it with fewer, as by HotSet.from_stats(..., "
                    f"rows={table.num_slots}), or pin more when you plan"
                )

    def renew(self, hot_sets: Mapping[str, HotSet]) -> None:
        """Let new batches go by these sets; tables that aren't named keep theirs."""
        self.check(hot_sets)
        for name, hot_set in hot_sets.items():
            self._tables[name] = replace(self._tables[name], hot_set=hot_set)
        self.newest = self._ids()

    def _ids(self) -> HotIds:
        by_table = {
            name: table.hot_set.tensor(self._device) for name, table in self._tables.items()
        }
        by_feature = {
            feature: by_table[name]
            for name, table in self._tables.items()
            for feature in table.features
        }
        return HotIds(by_table, by_feature)
