"""Stages for row exchange: rows move within their shards, or are sent ahead of their step.

`RowArrangement`: with `RowOwners.HASH` a row's owner isn't the rank in whose shard TorchRec's state
dicts show it. While a model trains, each owner's rows are in its shard; before the state is read or
written they move to where their numbers say, and back before the next lookup. So every tensor in a
state dict is the shard itself, and checkpoints are independent of owners. Drawn rows needn't move
before the first lookup: the row at an owner's place simply gets the number that belongs there.

`RowPrefetch` sends rows early for a pipeline that announces its batches.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.profiler import record_function
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_2dsp.comms.groups import MeshGroups
from torchrec_2dsp.plan.parameter_sharding import RowOwners, RowSpread, num_rows
from torchrec_2dsp.plan.plan2d import ModulePlan2D
from torchrec_2dsp.replicas.drift import fingerprint
from torchrec_2dsp.replicas.sync_action import SyncAction, SyncReason, SyncReport
from torchrec_2dsp.replicas.synced_shard import TableShard
from torchrec_2dsp.shard.kernels import Kernel
from torchrec_2dsp.shard.row_exchange.exchange import RowContext, RowFetch
from torchrec_2dsp.shard.row_exchange.journey import RowJourney
from torchrec_2dsp.shard.row_exchange.lookup import RowLookup
from torchrec_2dsp.shard.stages import BatchNotes, HotIds, Output, Stage

_ARRANGE_LABEL = "## arrange rows ##"

_BUFFER_BYTES = 64 * 2**20
"""The bytes that move at a time, so that a large shard doesn't exist twice."""


@dataclass(frozen=True)
class SpreadShard:
    """A table shard with rows spread over owners."""

    shard: TableShard
    spread: RowSpread
    rows_per_owner: int
    """The table's rows per owner; the last owners may have fewer."""


@dataclass(frozen=True)
class _Side:
    """This rank's rows in one arrangement, as they travel to or from the other one."""

    order: torch.Tensor
    """Places in the shard, ordered by the rank at the other end, then by row number."""
    counts: list[int]


def arrangement_of(
    plan: ModulePlan2D, kernels: Sequence[Kernel], groups: MeshGroups
) -> "RowArrangement | None":
    """Return a module's arrangement; `None` if all its tables are in blocks."""
    shards = {shard.table: shard for kernel in kernels for shard in kernel.shards()}
    spread = []
    for name, table in plan.tables():
        rows = num_rows(table)
        if table.owners is RowOwners.HASH and rows is not None:
            rows_per_owner = cast(Any, table.sharding_spec).shards[0].shard_sizes[0]
            spread.append(SpreadShard(shards[name], RowSpread(rows), rows_per_owner))
    return RowArrangement(spread, groups) if spread else None


class RowArrangement(Stage):
    """Moves spread tables' rows between the two arrangements."""

    def __init__(self, shards: Sequence[SpreadShard], groups: MeshGroups) -> None:
        self._shards = list(shards)
        self._group = groups.sharding_group
        self._world = groups.world
        self._is_by_owner = False
        self._drawn: torch.Tensor | None = None
        """Fingerprints of drawn rows, until it is known whether these are at their owners."""

    def take_drawn_rows(self, is_drawn_alike: bool) -> None:
        """Consider rows at their owners from now on if all ranks have just drawn them alike.

        Collectives:
            An all-reduce of 8 bytes over the world.
        """
        if self._on_all_ranks(is_drawn_alike):
            self._drawn = self._fingerprints()

    def before_load(self) -> None:
        """Consider drawn rows where state dicts show them, as they will be overwritten there."""
        if self._drawn is not None:
            self._drawn = self._drawn[:0]

    def before_lookup(self, notes: BatchNotes) -> None:
        """Find out where rows are, before the comparison of replicas, which may read them.

        Collectives:
            Before the first lookup of drawn rows, an all-reduce of 8 bytes over the world.
        """
        self._settle()

    def before_use(self) -> None:
        """Move every row to its owner.

        Collectives:
            Unless rows are there, all-to-alls on the group for tables and optimizer state.
        """
        self._settle()
        if not self._is_by_owner:
            self._move()

    def before_read(self) -> None:
        """Move every row to where state dicts show it.

        Collectives:
            Unless rows are there, all-to-alls on the group for tables and optimizer state.
        """
        if self._is_newly_drawn:
            self._settle()
        if self._is_by_owner:
            self._move()

    @property
    def is_behind(self) -> bool:
        """True if rows aren't where state dicts show them."""
        return self._is_newly_drawn or self._is_by_owner

    @property
    def _is_newly_drawn(self) -> bool:
        """True if drawn rows' arrangement is unknown; not while a rank loads by itself."""
        return self._drawn is not None and self._drawn.numel() > 0

    def positions(self, table: str, rows: torch.Tensor) -> torch.Tensor:
        """Return the current places of a table's rows, counted from its first shard on."""
        for spread_shard in self._shards if self._is_by_owner else ():
            if spread_shard.shard.table == table:
                return spread_shard.spread.positions(rows)
        return rows

    # The state may be read in inference mode, whose tensors can't be changed afterwards.
    @torch.inference_mode(mode=False)
    @torch.no_grad()
    def _move(self) -> None:
        with record_function(_ARRANGE_LABEL):
            for spread_shard in self._shards:
                owned, numbered = self._sides(spread_shard)
                start, end = (owned, numbered) if self._is_by_owner else (numbered, owned)
                for tensor in spread_shard.shard.tensors.values():
                    # Hidden from autograd: before a backward, rows return to its lookup's places.
                    for part in _in_parts(tensor.data):
                        self._send(part, start, end)
        self._is_by_owner = not self._is_by_owner

    def _settle(self) -> None:
        """Find out whether drawn rows are at their owners, or a rank has written some by number."""
        if self._drawn is not None:
            is_as_drawn = torch.equal(self._drawn, self._fingerprints())
            self._is_by_owner, self._drawn = self._on_all_ranks(is_as_drawn), None

    @torch.no_grad()
    def _fingerprints(self) -> torch.Tensor:
        tensors = [shard.shard.tensors.values() for shard in self._shards]
        return torch.stack([fingerprint(tensor) for of_shard in tensors for tensor in of_shard])

    def _on_all_ranks(self, condition: bool) -> bool:
        flag = torch.tensor(int(condition), device=self._shards[0].shard.device)
        dist.all_reduce(flag, dist.ReduceOp.MIN, group=self._world)
        return bool(flag)

    def _sides(self, spread_shard: SpreadShard) -> tuple[_Side, _Side]:
        """Return the shard's contents by owner, and by number."""
        shard, num_ranks = spread_shard.shard, dist.get_world_size(self._group)
        numbers = torch.arange(shard.row, shard.row + shard.num_rows, device=shard.device)
        rows = spread_shard.spread.rows(numbers)
        readers = rows // spread_shard.rows_per_owner
        owners = spread_shard.spread.positions(numbers) // spread_shard.rows_per_owner

        def counts(ranks: torch.Tensor) -> list[int]:
            return torch.bincount(ranks, minlength=num_ranks).tolist()

        # Sorting by row number also sorts by reader.
        return (
            _Side(rows.argsort(), counts(readers)),
            _Side(owners.argsort(stable=True), counts(owners)),
        )

    def _send(self, part: torch.Tensor, start: _Side, end: _Side) -> None:
        leaving = part[start.order]
        coming = torch.empty_like(leaving)
        dist.all_to_all_single(coming, leaving, end.counts, start.counts, group=self._group)
        part[end.order] = coming


def _in_parts(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield some columns at a time, as views."""
    if tensor.dim() == 1:
        yield tensor
        return
    column_bytes = max(1, tensor.shape[0] * tensor.element_size())
    yield from tensor.split(max(1, _BUFFER_BYTES // column_bytes), dim=1)


_PREFETCH_LABEL = "## rows beside computing ##"
_FINISH_LABEL = "## finish row gradients ##"


class LaggingGradients(SyncAction):
    """A sync action that finishes lagging updates, whose rows the next batch doesn't need.

    Journeys announce lagging gradients by `expect`. Where updates accumulate, none lags.
    """

    def __init__(self) -> None:
        self._journeys: list[RowJourney] = []

    @property
    def pending(self) -> bool:
        """True while updates lag."""
        return bool(self._journeys)

    def expect(self, journey: RowJourney) -> None:
        """Note that a journey has lagging gradients."""
        self._journeys.append(journey)

    def finish(self, but: Collection[RowJourney] = ()) -> None:
        """Apply updates from all journeys except those in ``but``.

        Collectives:
            `RowJourney.finish`'s.
        """
        for journey in self._journeys:
            if journey not in but:
                journey.finish()
        self._journeys = [journey for journey in self._journeys if journey in but]

    def reach(self, reason: SyncReason) -> SyncReport:
        """Apply all updates before a reader sees the tables.

        Collectives:
            `RowJourney.finish`'s, before a read.
        """
        if reason is SyncReason.READ:
            self.finish()
        return SyncReport()


class RowPrefetch(Stage):
    """Prefetches the next batch's rows, and lets the running batch's gradients lag."""

    def __init__(
        self,
        exchanges: Sequence[tuple[RowLookup, RowFetch] | None],
        *,
        updates_at_once: bool,
        before_use: Callable[[], None],
    ) -> None:
        self._exchanges = list(exchanges)
        self._before_use = before_use
        self.can_send_early = updates_at_once and any(self._exchanges)
        """True if there are rows that can come early."""
        self.lagging = LaggingGradients()
        """The gradients that may still be in flight to owners."""
        self._num_lookups = 0
        self._num_writes = 0

    def announce(
        self,
        notes: BatchNotes,
        arrived: Sequence[KeyedJaggedTensor],
        running: BatchNotes,
        running_arrived: Sequence[KeyedJaggedTensor],
    ) -> None:
        """Tell all ranks which rows in a batch may come early. Call it on all ranks.

        It does nothing if replicas change rows, too, or if the two batches' hot rows differ.

        Collectives:
            `RowFetch.journeys`', for each kernel with row exchange.
        """
        if not self.can_send_early or _hot_ids(notes) is not _hot_ids(running):
            return
        notes.prefetch.loads_seen = self._num_writes
        contexts = zip(notes.shardings, running.shardings, strict=True)
        batches = zip(arrived, running_arrived, strict=True)
        for exchange, (context, before), (ids, running_ids) in zip(
            self._exchanges, contexts, batches, strict=True
        ):
            if exchange is None:
                continue
            lookup, fetch = exchange
            row_context = cast(RowContext, context)
            row_context_before = cast(RowContext, before)
            row_context.journeys = fetch.journeys(
                lookup,
                ids,
                row_context.requested,
                running_ids,
                row_context_before,
                self.lagging.expect,
            )
            row_context.before = row_context_before.journeys

    def let_follow(self, notes: BatchNotes, follower: BatchNotes) -> None:
        """Send a batch's early rows after another batch's rows."""
        notes.prefetch.follower = follower

    def drop(self, notes: BatchNotes) -> None:
        """Let all rows in a batch come late. Call it on all ranks."""
        for context in _row_contexts(notes):
            context.journeys, context.before = [], []

    def send_late(self, notes: BatchNotes) -> None:
        """Send the late rows of the batch to be looked up next. Call it on all ranks.

        A lookup does this by itself; called earlier, rows travel while something else is computed.

        Collectives:
            `RowJourney.send_late`'s, and those of the updates that it waits for; and if the state
            was read since the last step, those that move rows to where lookups find them.
        """
        self._finish_updates(notes, self._num_lookups + 1)
        late = [
            journey
            for context in _row_contexts(notes)
            if context.comes_by_journeys
            for journey in context.journeys
        ]
        if late:
            self._before_use()
        for journey in late:
            journey.send_late()

    def before_lookup(self, notes: BatchNotes) -> None:
        """Apply the updates that the lookup waits for, and tell it which rows journeys read."""
        self._num_lookups += 1
        self._finish_updates(notes, self._num_lookups)
        for exchange, context in zip(self._exchanges, notes.shardings, strict=True):
            if exchange is not None:
                exchange[0].is_for_journeys = cast(RowContext, context).comes_by_journeys

    def on_output(self, notes: BatchNotes, output: Output) -> Output:
        """Send the next batch's early rows, and the last batch's lagging gradients.

        This batch's rows have arrived, so the others don't delay them.
        """
        prefetch, follower = notes.prefetch, notes.prefetch.follower
        lagging = [journey for context in _row_contexts(notes) for journey in context.before]
        early = []
        if follower is not None:
            early = [journey for context in _row_contexts(follower) for journey in context.journeys]
            follower.prefetch.due = self._num_lookups + 1
        # A caller that keeps a step's loss shouldn't also keep all following batches' notes.
        prefetch.follower = None
        if lagging or early:
            with record_function(_PREFETCH_LABEL):
                for journey in lagging:
                    journey.send_lagging()
                for journey in early:
                    journey.send_early()
        return output

    def after_write(self) -> None:
        """Note that rows that came early may have changed."""
        self._num_writes += 1

    def _finish_updates(self, notes: BatchNotes, lookup: int) -> None:
        """Apply the updates that a lookup waits for, and drop rows that may have changed."""
        if (notes.prefetch.loads_seen, notes.prefetch.due) != (self._num_writes, lookup):
            # Weights were loaded since, or another batch was looked up: all must be sent again.
            self.drop(notes)
        with record_function(_FINISH_LABEL):
            self.lagging.finish(
                but=[journey for context in _row_contexts(notes) for journey in context.before]
            )


def _hot_ids(notes: BatchNotes) -> HotIds | None:
    return None if notes.hot is None else notes.hot.ids


def _row_contexts(notes: BatchNotes) -> list[RowContext]:
    return [context for context in notes.shardings if isinstance(context, RowContext)]
