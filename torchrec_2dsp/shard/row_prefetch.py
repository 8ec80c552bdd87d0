"""`RowPrefetch`: sends rows before their step, for a pipeline that announces its batches."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import cast

from torch.profiler import record_function
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_2dsp.replicas.sync_report import SyncReason, SyncReport
from torchrec_2dsp.shard.hot_sets import HotIds
from torchrec_2dsp.shard.row_exchange.exchange import RowContext, RowFetch
from torchrec_2dsp.shard.row_exchange.journey import RowJourney
from torchrec_2dsp.shard.row_exchange.kernel import RowLookup
from torchrec_2dsp.shard.stages import BatchNotes, Output, Stage

_LABEL = "## rows beside computing ##"
_FINISH_LABEL = "## finish row gradients ##"


class LaggingGradients:
    """A sync action that finishes lagging updates, whose rows the next batch doesn't need."""

    def __init__(self) -> None:
        self._journeys: list[RowJourney] = []

    @property
    def pending(self) -> bool:
        """Whether some updates lag."""
        return bool(self._journeys)

    def backward_seen(self) -> None:
        """Do nothing: journeys announce lagging gradients by `expect`."""

    def accumulate(self) -> None:
        """Do nothing: no update lags where updates accumulate."""

    def expect(self, journey: RowJourney) -> None:
        """Note that a journey has lagging gradients."""
        self._journeys.append(journey)

    def finish(self, but: Collection[RowJourney] = ()) -> None:
        """Apply the updates, except those of the journeys in ``but``.

        Collectives:
            Those of `RowJourney.finish`.
        """
        for journey in self._journeys:
            if journey not in but:
                journey.finish()
        self._journeys = [journey for journey in self._journeys if journey in but]

    def reach(self, reason: SyncReason) -> SyncReport:
        """Apply all updates before a reader sees the tables.

        Collectives:
            Those of `RowJourney.finish`, before a read.
        """
        if reason is SyncReason.READ:
            self.finish()
        return SyncReport()

    def state_dict(self) -> dict[str, list[int]]:
        """Return nothing: the batches determine which gradients lag."""
        return {}

    def load_state_dict(self, state: Mapping[str, Sequence[int]]) -> None:
        """Do nothing, like `state_dict`."""


class RowPrefetch(Stage):
    """Prefetches the next batch's rows, and lets gradients of the running batch lag."""

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
        """Whether there are rows that can come early."""
        self.lagging = LaggingGradients()
        """The gradients that may still be on their way to owners."""
        self._num_lookups = 0
        self._num_writes = 0

    def announce(
        self,
        notes: BatchNotes,
        arrived: Sequence[KeyedJaggedTensor],
        running: BatchNotes,
        running_arrived: Sequence[KeyedJaggedTensor],
    ) -> None:
        """Tell all ranks which rows of a batch may come early. Call it on all ranks.

        Does nothing if replicas change rows, too, or if rows are hot for only one of the batches.

        Collectives:
            For each kernel with row exchange, those of `RowFetch.journeys`.
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
        """Send a batch's early rows behind another batch's rows."""
        notes.prefetch.follower = follower

    def drop(self, notes: BatchNotes) -> None:
        """Let all rows of a batch come late. Call it on all ranks."""
        for context in _row_contexts(notes):
            context.journeys, context.before = [], []

    def send_late(self, notes: BatchNotes) -> None:
        """Send the late rows of the batch that is looked up next. Call it on all ranks.

        A lookup does so by itself; called before it, rows travel while something else is computed.

        Collectives:
            Those of `RowJourney.send_late`, and of the updates that it waits for; and if the state
            was read since the last step, those that put rows where lookups find them.
        """
        self._finish_updates(notes, self._num_lookups + 1)
        late = [
            journey
            for context in _row_contexts(notes)
            if all(journey.has_begun for journey in context.journeys)
            for journey in context.journeys
        ]
        if late:
            self._before_use()
        for journey in late:
            journey.send_late()

    def before_lookup(self, notes: BatchNotes) -> None:
        """Apply the updates that the lookup waits for."""
        self._num_lookups += 1
        self._finish_updates(notes, self._num_lookups)

    def on_output(self, notes: BatchNotes, output: Output) -> Output:
        """Send the next batch's early rows, and lagging gradients of the batch before.

        This batch's rows have come, so the others don't delay them.
        """
        prefetch, follower = notes.prefetch, notes.prefetch.follower
        lagging = [journey for context in _row_contexts(notes) for journey in context.before]
        early = []
        if follower is not None:
            early = [journey for context in _row_contexts(follower) for journey in context.journeys]
            follower.prefetch.due = self._num_lookups + 1
        # Whoever keeps a step's loss should not keep the notes of all batches that follow.
        prefetch.follower = None
        if lagging or early:
            with record_function(_LABEL):
                for journey in lagging:
                    journey.send_lagging()
                for journey in early:
                    journey.send_early()
        return output

    def after_write(self) -> None:
        """Note that rows that came early may have changed."""
        self._num_writes += 1

    def _finish_updates(self, notes: BatchNotes, lookup: int) -> None:
        """Apply the updates that a lookup waits for, and forget rows that may have changed."""
        if (notes.prefetch.loads_seen, notes.prefetch.due) != (self._num_writes, lookup):
            # Weights were loaded since, or another batch was looked up: all has to come again.
            self.drop(notes)
        with record_function(_FINISH_LABEL):
            self.lagging.finish(
                but=[journey for context in _row_contexts(notes) for journey in context.before]
            )


def _hot_ids(notes: BatchNotes) -> HotIds | None:
    return None if notes.hot is None else notes.hot.ids


def _row_contexts(notes: BatchNotes) -> list[RowContext]:
    return [context for context in notes.shardings if isinstance(context, RowContext)]
