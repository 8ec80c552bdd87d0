"""`RowPrefetchModule`: what sharded modules with row exchange offer to a pipeline."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

from torch.profiler import record_function
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_2dsp._compat.shardings import lookups_of, output_dists_of
from torchrec_2dsp.replicas.sync_reason import SyncReason
from torchrec_2dsp.replicas.sync_report import SyncReport
from torchrec_2dsp.shard.hot_rows.module import HotRowsModule
from torchrec_2dsp.shard.prefetch.journey import RowJourney
from torchrec_2dsp.shard.row_exchange.exchange import RowFetch, RowLookup

_LABEL = "## rows beside computing ##"
"""In profiles."""


class LaggingGradients:
    """A sync action: updates of rows that the next batch doesn't need, still to be done."""

    def __init__(self) -> None:
        self._journeys: list[RowJourney] = []

    @property
    def pending(self) -> bool:
        """Whether there are some."""
        return bool(self._journeys)

    def backward_seen(self) -> None:
        """A backward has begun."""

    def expect(self, journey: RowJourney) -> None:
        """A journey has some."""
        self._journeys.append(journey)

    def finish(self, but: Collection[RowJourney] = ()) -> None:
        """Do the updates, but not those of some journeys.

        Collectives:
            Those of `RowJourney.finish`.
        """
        for journey in self._journeys:
            if journey not in but:
                journey.finish()
        self._journeys = [journey for journey in self._journeys if journey in but]

    def reach(self, reason: SyncReason) -> SyncReport:
        """Whoever reads the tables sees all updates.

        Collectives:
            Those of `RowJourney.finish`, before a read.
        """
        if reason is SyncReason.READ:
            self.finish()
        return SyncReport()

    def state_dict(self) -> dict[str, list[int]]:
        """Nothing: which gradients lag follows from the batches."""
        return {}

    def load_state_dict(self, state: Mapping[str, Sequence[int]]) -> None:
        """Nothing to take over."""


@dataclass
class PrefetchContext:
    """What sharded modules know of a batch besides."""

    loads_seen: int = 0
    """How often weights had been loaded when the batch was announced."""
    due: int = 0
    """Which lookup of the module it has to be, for what came early to be right."""
    follower: Any = None
    """The context of the batch whose early rows travel behind this one's."""
    asked: Any = None
    """What `input_dist` has returned, until the batch is looked up."""


class RowPrefetchModule(HotRowsModule):
    """A mixin for TorchRec's sharded modules: rows of a batch that come before its step."""

    _num_lookups = 0

    @cached_property
    def lagging(self) -> LaggingGradients:
        """What may still be on its way to owners."""
        return LaggingGradients()

    @property
    def can_send_early(self: Any) -> bool:
        """Whether there are rows of which nobody else has copies, in an exchange of rows."""
        is_exchanged = any(isinstance(fetch, RowFetch) for fetch in output_dists_of(self))
        return self._updates_at_once and is_exchanged

    def announce_rows(
        self: Any,
        ctx: Any,
        asked: Sequence[KeyedJaggedTensor],
        running_ctx: Any,
        running: Sequence[KeyedJaggedTensor],
    ) -> None:
        """Tell the ranks which rows of a batch may come early. Call it on all ranks.

        Nothing happens where that isn't known: rows that replicas change as well, or rows that are
        hot for one of the batches only.

        Args:
            ctx: of the batch.
            asked: what its input exchange gave, sharding by sharding.
            running_ctx: of the only batch that will be trained before.
            running: the same for that.

        Collectives:
            For each kernel with row exchange, those of `RowFetch.journeys`.
        """
        if not self.can_send_early or _hot_ids(ctx) is not _hot_ids(running_ctx):
            return
        ctx.loads_seen = self.num_loads
        dists = zip(lookups_of(self), output_dists_of(self), strict=True)
        contexts = zip(ctx.sharding_contexts, running_ctx.sharding_contexts, strict=True)
        batches = zip(asked, running, strict=True)
        for (lookup, fetch), (one, before), ids in zip(dists, contexts, batches, strict=True):
            if isinstance(fetch, RowFetch):
                one.journeys = fetch.journeys(
                    cast(RowLookup, lookup),
                    ids[0],
                    one.requested,
                    ids[1],
                    before,
                    self.lagging.expect,
                )
                one.before = before.journeys

    def let_follow(self, ctx: Any, follower: Any) -> None:
        """Let the early rows of a batch travel behind another one's rows.

        Args:
            ctx: of the batch that is looked up next.
            follower: of the batch after it, announced.
        """
        ctx.follower = follower

    def drop_early_rows(self, ctx: Any) -> None:
        """Let all rows of a batch come late. Call it on all ranks."""
        for one in _row_contexts(ctx):
            one.journeys, one.before = [], []

    def send_late_rows(self, ctx: Any) -> None:
        """Let the other rows go of the batch that is looked up next. Call it on all ranks.

        A lookup does so itself; before it, rows travel while something else is done.

        Args:
            ctx: of the batch.

        Collectives:
            Those of `RowJourney.send_late`, and of the updates that it waits for; and if the state
            was read since the last step, those of `_make_rows_ready`.
        """
        self._make_ready(ctx, self._num_lookups + 1)
        late = [
            journey
            for one in _row_contexts(ctx)
            if all(journey.has_begun for journey in one.journeys)
            for journey in one.journeys
        ]
        if late:
            self._make_rows_ready()
        for journey in late:
            journey.send_late()

    def _prepare_rows(self, ctx: Any) -> None:
        """Before a lookup."""
        self._num_lookups += 1
        self._make_ready(ctx, self._num_lookups)

    def _make_ready(self, ctx: Any, lookup: int) -> None:
        """Do the updates that a lookup waits for, and forget rows that may be others."""
        if (ctx.loads_seen, ctx.due) != (self.num_loads, lookup):
            # Weights were loaded since, or another batch was looked up: all has to come again.
            self.drop_early_rows(ctx)
        self.lagging.finish(but=[one for ours in _row_contexts(ctx) for one in ours.before])

    def _let_others_follow(self, awaitable: Any, ctx: Any) -> Any:
        """When the rows of a batch have come, others may set out, and gradients of others."""

        def follow(output: Any) -> Any:
            lagging = [journey for one in _row_contexts(ctx) for journey in one.before]
            early = [journey for one in _row_contexts(ctx.follower) for journey in one.journeys]
            if ctx.follower is not None:
                ctx.follower.due = self._num_lookups + 1
            # Whoever keeps a step's loss should not keep all contexts that follow.
            ctx.follower = None
            if lagging or early:
                with record_function(_LABEL):
                    for journey in lagging:
                        journey.send_lagging()
                    for journey in early:
                        journey.send_early()
            return output

        awaitable.callbacks.append(follow)
        return awaitable


def _hot_ids(ctx: Any) -> Any:
    return None if ctx.hot is None else ctx.hot.ids


def _row_contexts(ctx: Any) -> list[Any]:
    contexts = [] if ctx is None else ctx.sharding_contexts
    return [one for one in contexts if hasattr(one, "journeys")]
