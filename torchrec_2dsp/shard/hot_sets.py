"""Hot sets of a module's tables, and the hot ids that they take out of a batch."""

import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torchrec.modules.embedding_configs import BaseEmbeddingConfig
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_2dsp.access.table_access import HotSet
from torchrec_2dsp.errors import PlanError
from torchrec_2dsp.plan.parameter_sharding import ParameterSharding2D


@dataclass(frozen=True)
class HotFeature:
    """One feature's hot ids in one batch."""

    slots: torch.Tensor
    """Positions in the table's hot set, in the order of the batch."""
    lengths: torch.Tensor
    """Hot ids per bag."""
    weights: torch.Tensor | None
    is_hot: torch.Tensor
    """Whether each id of the batch is hot, in the order of the batch."""


@dataclass(frozen=True, eq=False)
class HotIds:
    """A module's hot rows at one time."""

    by_table: Mapping[str, torch.Tensor]
    """Row ids, ascending; a row's position is its slot."""
    by_feature: Mapping[str, torch.Tensor]
    """The row ids of the table that each feature looks up."""


@dataclass(frozen=True)
class HotBatch:
    """A batch's lookups in the replicas."""

    features: dict[str, HotFeature]
    """The hot ids of each feature, by its name."""
    ids: HotIds
    """The rows that were hot when the batch was split."""

    def record_stream(self, stream: torch.Stream) -> None:
        """Keep the tensors alive for ``stream``; pipelines hand batches between streams."""
        for feature in self.features.values():
            for tensor in (feature.slots, feature.lengths, feature.weights, feature.is_hot):
                if tensor is not None:
                    tensor.record_stream(stream)


@torch.no_grad()
def split_hot_rows(features: KeyedJaggedTensor, ids: HotIds) -> tuple[KeyedJaggedTensor, HotBatch]:
    """Split a batch into one with the same keys and bags without hot ids, and the hot ids."""
    keys, batch_size = features.keys(), features.stride()
    hot_ids = ids.by_feature
    values, weights = features.values(), features.weights_or_none()
    lengths = features.lengths().view(len(keys), batch_size)
    bounds = features.offset_per_key()
    is_hot = torch.zeros(values.numel(), dtype=torch.bool, device=values.device)
    slots = torch.zeros(values.numel(), dtype=torch.int64, device=values.device)
    for index, key in enumerate(keys):
        if key in hot_ids:
            part = slice(bounds[index], bounds[index + 1])
            slots[part], is_hot[part] = _positions(values[part].long(), hot_ids[key])
    num_hot = count_per_bag(is_hot, features.offsets()).view(len(keys), batch_size)
    batch = HotBatch(
        features={
            key: HotFeature(
                slots=slots[bounds[index] : bounds[index + 1]][mask],
                lengths=num_hot[index],
                weights=None
                if weights is None
                else weights.detach()[bounds[index] : bounds[index + 1]][mask],
                is_hot=mask,
            )
            for index, key in enumerate(keys)
            if key in hot_ids
            for mask in (is_hot[bounds[index] : bounds[index + 1]],)
        },
        ids=ids,
    )
    cold = KeyedJaggedTensor(
        keys=keys,
        values=values[~is_hot],
        lengths=(lengths - num_hot.to(lengths.dtype)).view(-1),
        weights=None if weights is None else weights[~is_hot],
    )
    return cold, batch


def _positions(ids: torch.Tensor, hot: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each id's position in the sorted ``hot``, and whether it is hot."""
    slots = torch.searchsorted(hot, ids).clamp_(max=hot.numel() - 1)
    return slots, hot[slots] == ids


def count_per_bag(flags: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Count the flagged ids in each bag."""
    running = torch.cat([flags.new_zeros(1, dtype=torch.int64), flags.cumsum(0)])
    return running[offsets.long()].diff()


@dataclass(frozen=True)
class _HotTable:
    """A table with room for hot rows."""

    features: tuple[str, ...]
    num_rows: int
    num_slots: int
    """The room that the plan has given it."""
    hot_set: HotSet


class HotSets:
    """A module's hot sets: those that new batches use, and those that the replicas hold.

    The two differ after a refresh, until a batch with the new sets is looked up, and again when a
    pipeline looks up a batch that was split before.
    """

    def __init__(
        self,
        configs: Sequence[BaseEmbeddingConfig],
        tables: Mapping[str, ParameterSharding2D],
        device: torch.device,
    ) -> None:
        self._device = device
        self._tables = {
            config.name: _HotTable(
                tuple(config.feature_names), config.num_embeddings, len(hot_set), hot_set
            )
            for config in configs
            if (hot_set := tables[config.name].hot_set) is not None
        }
        self.newest = self._ids()
        self.held = self.newest
        self._before_newest: deque[HotIds] = deque()
        """The sets that the next batches use, one each, before others use the newest sets."""
        self._waiting: list[weakref.ref[HotBatch]] = []
        """Batches that were split and not looked up yet, as pipelines have them."""

    @property
    def by_table(self) -> dict[str, HotSet]:
        """The sets that new batches use."""
        return {name: table.hot_set for name, table in self._tables.items()}

    def split(self, features: KeyedJaggedTensor) -> tuple[KeyedJaggedTensor, HotBatch]:
        """Split a batch into cold features and hot ids."""
        ids = self._before_newest.popleft() if self._before_newest else self.newest
        cold, batch = split_hot_rows(features, ids)
        self._waiting = [*self._still_waiting(), weakref.ref(batch)]
        return cold, batch

    def looked_up(self, batch: HotBatch) -> None:
        """Note that a batch no longer waits."""
        self._waiting = [other for other in self._still_waiting() if other() is not batch]

    @property
    def older(self) -> list[dict[str, HotSet]]:
        """The sets of waiting batches, up to the last one without the newest sets."""
        batches = [other() for other in self._still_waiting()]
        ids = [batch.ids for batch in batches if batch is not None] + list(self._before_newest)
        while ids and ids[-1] is self.newest:
            ids.pop()
        return [
            {name: HotSet.of(rows) for name, rows in of_batch.by_table.items()} for of_batch in ids
        ]

    def put_before_newest(self, older: Sequence[Mapping[str, HotSet]]) -> None:
        """Let the next batches use older sets, one each: those that were `older` at a save."""
        for hot_sets in older:
            self.check(hot_sets)
        self._before_newest = deque(self._ids({**self.by_table, **sets}) for sets in older)

    def _still_waiting(self) -> list["weakref.ref[HotBatch]"]:
        return [batch for batch in self._waiting if batch() is not None]

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
        """Let new batches use these sets; unnamed tables keep theirs."""
        self.check(hot_sets)
        for name, hot_set in hot_sets.items():
            self._tables[name] = replace(self._tables[name], hot_set=hot_set)
        self.newest = self._ids()

    def _ids(self, hot_sets: Mapping[str, HotSet] | None = None) -> HotIds:
        hot_sets = self.by_table if hot_sets is None else hot_sets
        by_table = {name: rows.tensor(self._device) for name, rows in hot_sets.items()}
        by_feature = {
            feature: by_table[name]
            for name, table in self._tables.items()
            for feature in table.features
        }
        return HotIds(by_table, by_feature)
