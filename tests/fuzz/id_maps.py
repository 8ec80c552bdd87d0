"""The oracle's id maps: TorchRec's own, which see all ranks' batches in rank order."""

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.mc_modules import ManagedCollisionModule
from torchrec.sparse.jagged_tensor import JaggedTensor

from tests.fuzz.actions import actions_of, distributions
from tests.fuzz.batches import LocalBatch, Lookups
from tests.fuzz.case import Case, ModuleCase, TableCase, table_name
from tests.support.hash_zch import OneThreadHashZch, at_hour
from tests.support.managed_collisions import HASHED, hashed_map, hour_of, sorting_map
from torchrec_2dsp.shard.initial_tables import drawn_rows

Maps = dict[str, Any]
IdMapState = dict[str, torch.Tensor]
"""The buffers of all maps, by table and name."""
HotRows = dict[str, torch.Tensor]
"""The hot rows of all tables."""
Evicted = tuple[str, torch.Tensor, torch.Tensor]
"""A table, rows of it, and their new weights."""


def id_map(module: ModuleCase, config: Any, **hashed: Any) -> ManagedCollisionModule:
    """Return the id map for a table in a module with id maps."""
    if module.evicts in HASHED:
        return hashed_map(module.evicts, config, **hashed)
    return sorting_map(config, module.evicts, module.interval)


class IdMaps:
    """All of a case's id maps, which see each batch when it is distributed."""

    def __init__(self, case: Case, batches: Callable[[int], list[LocalBatch]]) -> None:
        self._case, self._batches = case, batches
        self._actions = actions_of(case)
        self._distributed = distributions(case, self._actions)
        self._maps = self._fresh()
        self._waiting: dict[int, tuple[Maps, list[Evicted]]] = {}
        """Training batches distributed but not looked up, by action: the maps before, and the rows
        that they evict."""
        self._mapped: dict[int, list[LocalBatch]] = {}
        self._hot: dict[int, HotRows] = {}
        """The hot rows of each action's batch: of hot ids, when it was distributed."""

    def _fresh(self) -> Maps:
        return {
            table_name(number, index): id_map(
                module, _config(table_name(number, index), table), kind=OneThreadHashZch
            )
            for number, module in enumerate(self._case.modules)
            for index, table in enumerate(module.tables if module.evicts else ())
        }

    @property
    def _trained(self) -> Maps:
        """The maps to which the tables' rows belong."""
        return next((before for before, _ in self._waiting.values()), self._maps)

    def state(self) -> IdMapState:
        """Return the maps' tensors as a state dict shows them."""
        return {
            f"{table}.{name}": value.clone()
            for table, of_table in self._trained.items()
            for name, value in of_table.state_dict().items()
        }

    def load(self, state: IdMapState) -> None:
        """Continue from a state; anything else that maps remember is dropped."""
        self._maps = self._fresh()
        for table, of_table in self._maps.items():
            names = of_table.state_dict().keys()
            of_table.load_state_dict({name: state[f"{table}.{name}"] for name in names})

    def distribute(self, action: int) -> None:
        """Map the batches distributed in an action, by its mode, and find their hot rows."""
        is_training = self._actions[action].kind not in ("evaluate", "detach_eval", "reordered")
        for index, other in enumerate(self._actions):
            if other.distributed_again == action:
                if self._maps and not is_training:
                    self._map(index, is_training=False)
                self._hot[index] = self._hot_rows(index)
        for index in self._distributed[action]:
            if self._maps:
                self._map(index, is_training=is_training)
            self._hot[index] = self._hot_rows(index)

    def _map(self, index: int, *, is_training: bool) -> None:
        """Map an action's batches."""
        batches, maps = self._batches(self._actions[index].batch), self._maps
        if is_training:
            before = copy.deepcopy(maps)
            self._waiting[index] = before, list(self._profiled(batches))
        elif not self._actions[index].in_stream:
            maps = self._trained
        self._mapped[index] = [self._with_rows(batch, maps) for batch in batches]

    def mapped(self, action: int, batches: list[LocalBatch]) -> list[LocalBatch]:
        """Return the batches that an action looks up, with mapped ids replaced by rows."""
        return self._mapped[action] if self._maps else batches

    def hot_rows(self, action: int) -> HotRows:
        """Return the hot rows in the batch that an action looks up."""
        return self._hot[action]

    def _hot_rows(self, action: int) -> HotRows:
        """Return the rows that the hot ids in an action's batch have now."""
        rows = {}
        for table in self._case.tables:
            ids = torch.tensor(
                self._case.hot_ids(table, self._actions[action].hot), dtype=torch.int64
            )
            of_table = self._maps.get(table)
            rows[table] = ids if of_table is None else _rows_with(of_table, ids)
        return rows

    def evicted_until(self, action: int) -> Iterator[Evicted]:
        """Yield the evicted rows to reset before an action's lookup."""
        while action in self._waiting:
            yield from self._waiting.pop(next(iter(self._waiting)))[1]

    def _profiled(self, batches: list[LocalBatch]) -> Iterator[Evicted]:
        for name, of_table in self._maps.items():
            table, module = self._case.tables[name], self._case.module_of(name)
            ids = [
                torch.cat([batch.sent[module, feature].ids for batch in batches])
                for feature in table.features
            ]
            number = _see(of_table, ids)
            if (rows := of_table.evict()) is not None:
                yield name, rows, drawn_rows(_config(name, table), 0, number, len(rows))

    def _with_rows(self, batch: LocalBatch, maps: Maps) -> LocalBatch:
        def of(key: tuple[int, int], lookups: Lookups) -> Lookups:
            module, feature = key
            for index, table in enumerate(self._case.modules[module].tables):
                of_table = maps.get(table_name(module, index))
                if of_table is not None and feature in table.features:
                    ids = _jagged(lookups.ids, len(table.features))
                    rows = of_table.eval().remap({"": ids})[""].values()
                    of_table.train()
                    return replace(lookups, ids=rows)
            return lookups

        return replace(
            batch,
            features={key: of(key, lookups) for key, lookups in batch.features.items()},
            shared={
                key: replace(bags, lookups=of(key, bags.lookups))
                for key, bags in batch.shared.items()
            },
        )


def _config(name: str, table: TableCase) -> EmbeddingBagConfig:
    features = [str(number) for number in table.features]
    return EmbeddingBagConfig(table.rows, table.dim, name=name, feature_names=features)


def _see(of_table: Any, ids: list[torch.Tensor]) -> int:
    """Let a map see each feature's ids; return the batch number."""
    if not isinstance(of_table, OneThreadHashZch):
        of_table.profile({"": _jagged(torch.cat(ids))})
        return int(of_table.state_dict()["_current_iter_tensor"])
    sizes = torch.tensor([len(feature) for feature in ids])
    with at_hour(hour_of(of_table.num_batches)):
        of_table.remap({"": JaggedTensor(torch.cat(ids), lengths=sizes, weights=sizes)})
    of_table.num_batches += 1
    return of_table.num_batches


def _rows_with(of_table: Any, ids: torch.Tensor) -> torch.Tensor:
    """Return the rows that a map has given to some ids, ascending."""
    state = of_table.state_dict()
    if isinstance(of_table, OneThreadHashZch):
        return torch.isin(state["_hash_zch_identities"][:, 0], ids).nonzero().squeeze(1)
    rows = state["_mch_remapped_ids_mapping"][torch.isin(state["_mch_sorted_raw_ids"], ids)]
    return rows.sort().values


def _jagged(ids: torch.Tensor, num_features: int = 1) -> JaggedTensor:
    """Return ids as the first feature's; TorchRec needs them in evaluation, too."""
    of_features = torch.tensor([ids.numel(), *(num_features - 1) * [0]])
    return JaggedTensor(ids, lengths=of_features[:1], weights=of_features)
