"""`RowPrefetch`: the rows of a batch that come before its step, as a pipeline asks for them."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import cast

from torch.profiler import record_function
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_2dsp.replicas.sync_report import SyncReason, SyncReport
from torchrec_2dsp.shard.hot_sets import HotIds
from torchrec_2dsp.shard.row_exchange.exchange import RowContext, RowFetch, SequenceRowContext
from torchrec_2dsp.shard.row_exchange.journey import RowJourney
from torchrec_2dsp.shard.row_exchange.kernel import RowLookup
from torchrec_2dsp.shard.stages import BatchNotes, Output, Stage

_LABEL = "## rows beside computing ##"
_FINISH_LABEL = "## finish row gradients ##"
"""In profiles."""


class LaggingGradients:
    """A sync action: updates of rows that the next batch doesn't need, still to be done."""

    def __init__(self) -> None:
        self._journeys: list[RowJourney] = []

    @property
    def pending(self) -> bool:
        """Whether updates are still to be done."""
        return bool(self._journeys)

    def backward_seen(self) -> None:
        """Do nothing: journeys tell by `expect` which gradients a backward leaves behind."""

    def accumulate(self) -> None:
        """Do nothing: where updates can be accumulated, none lags."""

    def expect(self, journey: RowJourney) -> None:
        """Take note that a journey has gradients that lag."""
        self._journeys.append(journey)

    def finish(self, but: Collection[RowJourney] = ()) -> None:
        """Do the updates, except those of the journeys in ``but``.

        Collectives:
            Those of `RowJourney.finish`.
        """
        for journey in self._journeys:
            if journey not in but:
                journey.finish()
        self._journeys = [journey for journey in self._journeys if journey in but]

    def reach(self, reason: SyncReason) -> SyncReport:
        """Let whoever reads the tables see all updates.

        Collectives:
            Those of `RowJourney.finish`, before a read.
        """
        if reason is SyncReason.READ:
            self.finish()
        return SyncReport()

    def state_dict(self) -> dict[str, list[int]]:
        """Return nothing: which gradients lag follows from the batches."""
        return {}

    def load_state_dict(self, state: Mapping[str, Sequence[int]]) -> None:
        """Take over nothing, as `state_dict` has nothing to give."""


class RowPrefetch(Stage):
    """Lets rows of the next batch come early, and gradients of the running one lag."""

    def __init__(
        self,
        exchanges: Sequence[tuple[RowLookup, RowFetch] | None],
        *,
        updates_at_once: bool,
        before_use: Callable[[], None],
    ) -> None:
        """
        Args:
            exchanges: the lookup and the output exchange of each sharding; `None` for shardings
                without row exchange.
            updates_at_once: whether a backward updates the tables by itself, as it does where
                nobody else has copies of their rows.
            before_use: puts all rows of the module where lookups find them.
        """
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
        """Tell the ranks which rows of a batch may come early. Call it on all ranks.

        Nothing happens where that isn't known: rows that replicas change as well, or rows that are
        hot for one of the batches only.

        Args:
            notes: of the batch.
            arrived: what the batch's input exchange gave, sharding by sharding.
            running: the notes of the only batch that will be trained before.
            running_arrived: what the input exchange of that batch gave.

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
            row_context = cast(RowContext | SequenceRowContext, context)
            row_context_before = cast(RowContext | SequenceRowContext, before)
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
        """Let the early rows of a batch travel behind the rows of another one.

        Args:
            notes: of the batch that is looked up next.
            follower: the notes of the batch after it, announced.
        """
        notes.prefetch.follower = follower

    def drop(self, notes: BatchNotes) -> None:
        """Let all rows of a batch come late. Call it on all ranks."""
        for context in _row_contexts(notes):
            context.journeys, context.before = [], []

    def send_late(self, notes: BatchNotes) -> None:
        """Let the late rows of the batch that is looked up next set out. Call it on all ranks.

        A lookup does so by itself; before it, rows travel while something else is done.

        Args:
            notes: of the batch.

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
        """Do the updates that the lookup waits for."""
        self._num_lookups += 1
        self._finish_updates(notes, self._num_lookups)

    def on_output(self, notes: BatchNotes, output: Output) -> Output:
        """Let early rows of the next batch set out, and gradients of the one before.

        The rows of this batch have come, so that the others don't delay them.
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
        """Rows that came early may be others now."""
        self._num_writes += 1

    def _finish_updates(self, notes: BatchNotes, lookup: int) -> None:
        """Do the updates that a lookup waits for, and forget rows that may be others."""
        if (notes.prefetch.loads_seen, notes.prefetch.due) != (self._num_writes, lookup):
            # Weights were loaded since, or another batch was looked up: all has to come again.
            self.drop(notes)
        with record_function(_FINISH_LABEL):
            self.lagging.finish(
                but=[journey for context in _row_contexts(notes) for journey in context.before]
            )


def _hot_ids(notes: BatchNotes) -> HotIds | None:
    return None if notes.hot is None else notes.hot.ids


def _row_contexts(notes: BatchNotes) -> list[RowContext | SequenceRowContext]:
    kinds = (RowContext, SequenceRowContext)
    return [context for context in notes.shardings if isinstance(context, kinds)]
