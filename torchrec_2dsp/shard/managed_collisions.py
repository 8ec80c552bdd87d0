"""Managed collisions: unbounded ids, mapped to rows by one map for the whole world.

Each rank holds TorchRec's own id maps, unsharded. Before a map gives rows to ids, all ranks send
each other the ids that it must know, so that it changes like all other ranks' maps, and like an
unsharded model's that sees the world's batches in rank order. Each rank maps its own ids.

    rank 0:  ids 7, 9  \\                     / map of 7, 9, 4    7, 9 -> rows 0, 1
                        - ids to be known -
    rank 1:  ids 4, 9  /                     \\ map of 7, 9, 4    4, 9 -> rows 2, 1

Rows that a map evicts are reset in all copies, see `EvictedRows`.
"""

import gc
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import dropwhile, takewhile
from typing import Any, cast

import torch
from torch import nn
from torch.profiler import record_function
from torchrec.distributed.types import Awaitable
from torchrec.distributed.utils import append_prefix
from torchrec.modules.mc_modules import ManagedCollisionCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.streamable import Multistreamable

from torchrec_2dsp._compat.id_map_base import History, Memory, Overwritten, WorldBatch
from torchrec_2dsp._compat.id_maps import IdMap, id_map_of
from torchrec_2dsp._compat.shardings import distributed_again
from torchrec_2dsp._compat.tensors import is_checkpointed
from torchrec_2dsp._compat.torchrec import jagged_features
from torchrec_2dsp._compat.wrapped_collections import (
    MAP_NAMES,
    collection_inside,
    id_maps_of,
    returns_features,
    table_configs,
)
from torchrec_2dsp.access.table_access import HotSet
from torchrec_2dsp.errors import UnsupportedError
from torchrec_2dsp.plan.fits_module import has_weights
from torchrec_2dsp.shard.batch import BatchForm, distinct_bags, with_parts
from torchrec_2dsp.shard.ids_of_world import MAX_IN_FLIGHT, Contents, IdsOfWorld, Mark
from torchrec_2dsp.shard.parted import PartedModule, ShardedModule2D, TablesAndMore, parts_of
from torchrec_2dsp.shard.stages import BatchNotes, Eviction, ids_per_feature

_LABEL = "## map ids ##"


@dataclass(eq=False)
class MappedBatch:
    """A batch with mapped ids."""

    features: KeyedJaggedTensor
    """The batch, with row ids."""
    context: "weakref.ref[MappedContext]"
    """The context that the batch was mapped for."""
    forward: "weakref.ref[Any]"
    """The forward that an attached pipeline had given the module: one object for its batches."""
    contents: Contents | None
    """A copy of the batch's contents if it's a pipeline's, because the batch may come again."""
    eviction: Eviction | None = None
    """The rows that the maps have given to other ids."""
    before: Mapping[str, Overwritten] = field(default_factory=dict)
    """The maps' earlier state, as far as the batch has changed it."""
    is_awaited: bool = False
    """True if the maps have seen the batch, and a pipeline will look it up."""
    is_over: bool = False
    """True if its pipeline is gone or has dropped it, so that it is mapped again if it returns."""

    @property
    def is_in_flight(self) -> bool:
        """Tell whether a pipeline still holds the batch."""
        return self.context() is not None


@dataclass
class MappedContext(Multistreamable):
    """A batch's context in the tables, with its mapped ids."""

    of_tables: Any
    mapped: MappedBatch | None = None
    given: Any = None
    """The batch as the module received it."""
    is_at_once: bool = False
    """True if the batch is looked up as soon as its ids have travelled, without a pipeline."""

    @property
    def sharding_contexts(self) -> list[Any]:
        """The tables' contexts, in which TorchRec's pipelines note their exchanges."""
        return getattr(self.of_tables, "sharding_contexts", [])

    def record_stream(self, stream: torch.Stream) -> None:
        """Keep the tensors alive for ``stream``."""
        self.of_tables.record_stream(stream)
        if self.mapped is not None:
            self.mapped.features.record_stream(cast(Any, stream))


class ShardedManagedCollisions2D(TablesAndMore):
    """A sharded collection behind id maps that are equal on all ranks."""

    def __init__(
        self,
        module: Any,
        sharded: ShardedModule2D | PartedModule,
        device: torch.device,
        *,
        hot_ids: Mapping[str, HotSet],
        resets: bool,
        init_seed: int,
    ) -> None:
        """Put maps before a sharded collection; ``hot_ids`` name its hot rows by ids."""
        super().__init__(module, sharded)
        configs = table_configs(module)
        self._maps: dict[str, IdMap] = {
            table: id_map_of(of_table).copied_to(device)
            for table, of_table in id_maps_of(module).items()
        }
        # Both are under TorchRec's names, with which names in a state dict begin.
        self._embedding_module: Any = sharded
        self._managed_collision_collection: Any = ManagedCollisionCollection(
            {table: id_map.module for table, id_map in self._maps.items()}, configs
        ).train(module.training)
        self._parts = parts_of(sharded)
        self._returns_features = returns_features(module)
        self._resets = resets
        of_tables = {config.name: config.feature_names for config in configs}
        self._table_of = {name: config.name for config in configs for name in config.feature_names}
        self._features = list(self._table_of)
        groups = self._parts[0].tables.groups
        self.world = IdsOfWorld(groups, device, self._maps, of_tables)
        is_weighted = has_weights(collection_inside(module))
        self._form = BatchForm(self._features, groups.alarm.group, is_weighted=is_weighted)
        for part in self._parts:
            part.tables.hot_sets.name_ids(hot_ids, self._owned_rows)
        self._note_new_rows()
        self._waiting: list[MappedBatch] = []
        """Batches that the maps have seen, and whose evicted rows haven't been reset yet."""
        self._in_flight: list[MappedBatch] = []
        """Batches that a pipeline has distributed but not looked up yet; the same on all ranks."""
        self._before_waiting: tuple[list[MappedBatch], Mapping[str, Overwritten]] = [], {}
        """Waiting batches, and the maps before them; restored once for a whole evaluation."""
        self._attached, self._has_gone_on = self._forward_now(), False
        """The attached forward, and whether no earlier batch can come to it again."""
        self._evicted_rows = [part.tables.reset_evicted_rows(init_seed) for part in self._parts]
        self.register_state_dict_pre_hook(lambda *_: self._reset_dropped())
        self.register_state_dict_post_hook(_show_trained_maps)
        self.register_load_state_dict_pre_hook(lambda _, *load: self._before_load(*load[:2]))
        self.register_load_state_dict_post_hook(lambda *_: self._after_load())

    def create_context(self) -> MappedContext:
        """Create a batch's context."""
        return MappedContext(self._embedding_module.create_context())

    def forward(self, *input: Any, **kwargs: Any) -> Any:
        """Look up a batch immediately, independently of those that a detached pipeline holds."""
        ctx = self.create_context()
        ctx.is_at_once = True
        arrived = self.input_dist(ctx, *input, **kwargs).wait().wait()
        return self.compute_and_output_dist(ctx, arrived)

    def input_dist(
        self, ctx: MappedContext, features: KeyedJaggedTensor, mutate_miss_lengths: bool = True
    ) -> Awaitable[Awaitable[Any]]:
        """Map the batch's ids, then distribute them.

        Collectives:
            `IdsOfWorld.gathered`'s, then the tables'.
        """
        if self._managed_collision_collection.training and is_checkpointed():
            raise UnsupportedError(
                "a lookup behind id maps is inside torch.utils.checkpoint, whose recomputation "
                "would show the batch to the maps again; look up outside of it"
            )
        ctx.given = features
        with record_function(_LABEL):
            ctx.mapped = self._mapped(ctx, features)
        return self._embedding_module.input_dist(ctx.of_tables, ctx.mapped.features)

    def compute_and_output_dist(self, ctx: MappedContext, input: Any) -> Any:
        """Reset evicted rows, then look up in the tables.

        Collectives:
            The tables'.
        """
        assert ctx.mapped is not None
        due = self._due(ctx.mapped)
        contexts = getattr(ctx.of_tables, "of_parts", [ctx.of_tables])
        for part_ctx in contexts:
            part_ctx.notes.evictions = [batch.eviction for batch in due if batch.eviction]
        output = self._embedding_module.compute_and_output_dist(ctx.of_tables, input)
        self._in_flight = [batch for batch in self._in_flight if batch is not ctx.mapped]
        # Only now, because a refused batch resets nothing.
        self._waiting = self._waiting[len(due) :]
        return output, self._features_of(ctx)

    def _mapped(self, ctx: MappedContext, given: Any) -> MappedBatch:
        features = jagged_features(given, self._features)
        self._note_attached()
        # Also in contiguous memory, in which TorchRec sums the lengths of variable sizes.
        bags = distinct_bags(features, self._features)
        # The tables refuse an invalid batch, on all ranks.
        is_right = bags.error is None and self._form.error_in(bags.features) is None
        no_ids = features.lengths().new_empty(0, dtype=torch.int64)
        own, places, contents = dict.fromkeys(self._features, no_ids), {}, None
        is_training = self._managed_collision_collection.training
        if is_right:
            # Not the batch's cached bounds: its memory may have been refilled.
            bounds = [0, *ids_per_feature(bags.features).cumsum(0).tolist()]
            places = {key: slice(*bounds[n : n + 2]) for n, key in enumerate(features.keys())}
            own = self._hashed(features, places)
            contents = None if ctx.is_at_once else Contents.of(features)
        gathered = self.world.gathered(
            own,
            is_training=is_training,
            is_right=is_right,
            in_flight=self._marks(ctx, contents if is_training else None),
            fingerprint=self._fingerprint,
        )
        if gathered.again is not None:
            return self._again(ctx, self._in_flight[gathered.again], features)
        for n, batch in enumerate(self._in_flight):
            batch.is_over |= bool(gathered.gone >> n & 1)
        self._in_flight = [batch for batch in self._in_flight if not batch.is_over]
        self._forget()
        mapped = MappedBatch(features, weakref.ref(ctx), self._attached, contents)
        if not ctx.is_at_once:
            self._in_flight = [*self._in_flight, mapped][-MAX_IN_FLIGHT:]
            self._has_gone_on |= bool(gathered.batches)
        # An evaluation before another pipeline's batches sees the maps to which the
        # tables' rows belong.
        maps = {} if is_training else self.maps_before_waiting(elsewhere=not ctx.is_at_once)
        if is_training:
            self._before_waiting = [], {}
        if gathered.batches:
            mapped.is_awaited = not ctx.is_at_once
            mapped.eviction = self._profile(gathered.batches, is_at_once=ctx.is_at_once)
            changes = {table: id_map.overwritten for table, id_map in self._maps.items()}
            mapped.before = {table: change for table, change in changes.items() if change}
            self._waiting.append(mapped)
        if is_right:
            mapped.features = self._with_rows(features, own, places, maps)
        return mapped

    def _note_attached(self) -> None:
        """Note whether another pipeline, or none, is attached now."""
        now = self._forward_now()
        if now is self._attached:
            return
        self._attached, self._has_gone_on = now, False
        self._free_pipelines()

    def _marks(self, ctx: MappedContext, contents: Contents | None) -> list[Mark]:
        """Return this rank's marks of the batches in flight, compared with a new batch.

        Batches of a detached, dropped or reset pipeline may come again before others, in other
        objects: a loop may rebuild the features at each access, or refill memory. An evaluated
        batch changes no map, and is mapped again, except by a pipeline that has distributed it.
        """
        marks, is_attached_again = [], distributed_again(self, ctx)
        for batch in self._in_flight:
            is_attached = batch.forward is self._attached
            has_passed = batch.is_in_flight if is_attached else self._has_gone_on
            # The maps have seen it, or its own pipeline distributes it again.
            is_known = batch.is_awaited or is_attached_again
            may_be = is_known and not (has_passed or batch.is_over)
            is_equal = may_be and contents is not None and contents.equals(batch.contents)
            marks.append((is_equal, not batch.is_in_flight))
        return marks

    def _again(self, ctx: MappedContext, batch: MappedBatch, given: Any) -> MappedBatch:
        """Return an already mapped batch for this context; its pipeline has dropped older ones."""
        for older in takewhile(lambda older: older is not batch, self._in_flight):
            older.is_over |= older.forward is batch.forward
        self._forget()
        forward, is_attached_again = batch.forward, distributed_again(self, ctx)
        # Such a pipeline still holds its later batches.
        self._has_gone_on |= is_attached_again
        for other in self._in_flight if is_attached_again else [batch]:
            if other.forward is forward:
                other.forward = self._attached
        batch.context = weakref.ref(ctx)
        # The memory of its lengths may have been reused since it first came.
        batch.features = _with_values(given, batch.features.values())
        return batch

    def _forward_now(self) -> "weakref.ref[Any]":
        # A forward holds the pipeline's contexts, which are freed with the pipeline.
        return weakref.ref(vars(self).get("forward", self))

    def _hashed(
        self, features: KeyedJaggedTensor, places: Mapping[str, slice]
    ) -> dict[str, torch.Tensor]:
        """Return each feature's ids as its map sees them."""
        values = features.values().long()
        return {
            name: self._maps[table].hashed(values[places[name]])
            for name, table in self._table_of.items()
        }

    def _profile(self, batches: Mapping[str, WorldBatch], *, is_at_once: bool) -> Eviction:
        """Let the maps see all ranks' batches; return the rows that they have evicted."""
        seen = {
            table: self._maps[table].see(batch, keeps_before=not is_at_once)
            for table, batch in batches.items()
        }
        evicted = self.world.settled({t: rows for t, rows in seen.items() if rows is not None})
        in_step = is_at_once and any(part.tables.in_step.is_in_step for part in self._parts)
        if evicted or (self._hot_rows_lag and not in_step):
            self._note_new_rows(in_step=in_step)
        number = next(iter(self._maps.values())).batches_seen
        to_reset = evicted.items() if self._resets else ()
        return Eviction(number, {table: rows for table, rows in to_reset if rows.numel()})

    def _with_rows(
        self,
        features: KeyedJaggedTensor,
        ids: Mapping[str, torch.Tensor],
        places: Mapping[str, slice],
        maps: Mapping[str, Overwritten],
    ) -> KeyedJaggedTensor:
        """Return the batch with row ids, in the same form."""
        values = features.values().clone()
        for feature in self._features:
            table = self._table_of[feature]
            buffers = maps[table].buffers if maps else {}
            rows = self._maps[table].rows_of(ids[feature], buffers)
            values[places[feature]] = rows.to(values.dtype)
        return _with_values(features, values)

    def _features_of(self, ctx: MappedContext) -> KeyedJaggedTensor | None:
        """Return the mapped features in the tables' order, as the unsharded module does."""
        if not self._returns_features:
            return None
        assert ctx.mapped is not None
        features = ctx.mapped.features
        keys = features.keys()
        if keys == self._features:
            return features
        return features.permute([keys.index(name) for name in self._features])

    def _due(self, mapped: MappedBatch | None = None) -> list[MappedBatch]:
        """Return the batches up to this one that weren't looked up; some may never be."""
        if mapped in self._waiting:
            return self._waiting[: self._waiting.index(mapped) + 1]
        return list(takewhile(lambda batch: not batch.is_awaited, self._waiting))

    def _forget(self) -> None:
        """Forget the maps before the oldest waiting batches that won't be looked up."""
        for batch in takewhile(lambda batch: batch.is_over or not batch.is_awaited, self._waiting):
            batch.before, batch.is_awaited = {}, False

    def _reset_dropped(self) -> None:
        """Reset rows evicted by dropped batches, because state dicts show the maps after these."""
        self._free_dropped()
        due = self._due()
        self._waiting = self._waiting[len(due) :]
        for part, evicted_rows in zip(self._parts, self._evicted_rows, strict=True) if due else ():
            part.tables.complete_state()
            evictions = [batch.eviction for batch in due if batch.eviction]
            evicted_rows.before_lookup(BatchNotes(evictions=evictions))

    def _free_dropped(self) -> None:
        """Note which batches have gone with their pipelines."""
        self._free_pipelines()
        for batch in self._in_flight:
            batch.is_over |= not batch.is_in_flight
        self._forget()

    def _free_pipelines(self) -> None:
        """Free unused pipelines now, because each rank would free them at a different time."""
        now = self._forward_now()
        if any(batch.is_in_flight and batch.forward is not now for batch in self._in_flight):
            gc.collect()

    def _note_new_rows(self, *, in_step: bool = False) -> None:
        """Note that ids' rows may have changed; lookups in one step use the same hot rows."""
        prints = [id_map.fingerprint() for id_map in self._maps.values()]
        # Convert to an int64.
        self._fingerprint = (hash(tuple(prints)) + 2**63) % 2**64 - 2**63
        self._hot_rows_lag = in_step
        for part in () if in_step else self._parts:
            part.tables.hot_sets.follow_map()

    def _owned_rows(self, table: str, ids: torch.Tensor) -> torch.Tensor:
        """Return the rows that belong to a table's ids."""
        return self._maps[table].owned_rows(self._maps[table].hashed(ids))

    def sharded_parameter_names(self, prefix: str = "") -> Iterator[str]:
        """Yield the names that data parallelism skips: tables, and maps, which are equal anyway."""
        yield from self._embedding_module.sharded_parameter_names(append_prefix(prefix, _TABLES))
        maps = self._managed_collision_collection.named_buffers(append_prefix(prefix, _MAPS))
        yield from (name for name, _ in maps)

    def _before_load(self, state: dict[str, Any], prefix: str) -> None:
        """Refuse other maps while mapped batches wait; keep the maps if a state has none."""
        self._loads_maps = any(name.startswith(f"{prefix}{_MAPS}.") for name in state)
        if not self._loads_maps:
            state |= self._managed_collision_collection.state_dict(prefix=f"{prefix}{_MAPS}.")
            return
        self._free_dropped()
        if any(batch.is_in_flight for batch in self._in_flight):
            raise UnsupportedError(
                "a pipeline has batches whose ids were mapped already; train them, or drop the "
                "pipeline, before you load other id maps"
            )

    def _after_load(self) -> None:
        """Continue with loaded maps as TorchRec's do after a load."""
        if self._loads_maps:
            self._waiting, self._in_flight = [], []
            for id_map in self._maps.values():
                id_map.forget()
            self._note_new_rows()

    def histories(self) -> dict[str, History]:
        """Return the maps' state besides their buffers, by table, as of the last trained batch.

        Collectives:
            `IdsOfWorld.histories`'.
        """
        self._free_dropped()
        before = self.maps_before_waiting()
        memories = {table: id_map.memory for table, id_map in self._maps.items()}
        return self.world.histories(
            memories | {table: state.memory for table, state in before.items()}
        )

    def set_histories(self, histories: Mapping[str, History]) -> None:
        """Continue from other maps' histories, after their buffers were loaded."""
        for table in histories.keys() & self._maps.keys():
            id_map = self._maps[table]
            id_map.memory = Memory.of(histories[table], id_map.module.device)

    def maps_before_waiting(self, *, elsewhere: bool = False) -> Mapping[str, Overwritten]:
        """Return the maps before the oldest batch that a pipeline still has to look up.

        With ``elsewhere``, only pipelines other than the attached one count.
        """
        now = self._forward_now()
        waiting = list(
            dropwhile(
                lambda batch: not batch.is_awaited or (elsewhere and batch.forward is now),
                self._waiting,
            )
        )
        if waiting != self._before_waiting[0]:
            changes = [batch.before for batch in waiting]
            self._before_waiting = (
                waiting,
                {
                    table: self._maps[table].state_before(
                        [of[table] for of in changes if table in of]
                    )
                    for table in (self._maps if waiting else ())
                },
            )
        return self._before_waiting[1]


def managed_collisions(model: nn.Module) -> list[ShardedManagedCollisions2D]:
    """Return a model's sharded modules with id maps."""
    return [part for part in model.modules() if isinstance(part, ShardedManagedCollisions2D)]


def _with_values(features: KeyedJaggedTensor, values: torch.Tensor) -> KeyedJaggedTensor:
    """Return a batch with other ids in the same form."""
    sizes: dict[str, Any] = {}
    if features.variable_stride_per_key():
        by_rank = features.stride_per_key_per_rank()
        sizes = {"stride": None, "stride_per_key_per_rank": by_rank}
    inverse_indices = features.inverse_indices_or_none()
    return with_parts(features, values=values, inverse_indices=inverse_indices, **sizes)


_TABLES, _MAPS = "_embedding_module", "_managed_collision_collection"
"""TorchRec's names, with which names in a state dict begin."""


def _show_trained_maps(
    module: ShardedManagedCollisions2D, state: dict[str, Any], prefix: str, metadata: Any
) -> None:
    """Show maps in a state dict as they were when the last trained batch was looked up.

    Collectives:
        `IdsOfWorld.fill_in`'s.
    """
    path = f"{prefix}{_MAPS}.{MAP_NAMES}."
    for table, before in module.maps_before_waiting().items():
        state |= {f"{path}{table}.{name}": value for name, value in before.buffers.items()}
    module.world.fill_in(state, path)
