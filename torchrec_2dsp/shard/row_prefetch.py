"""`RowPrefetchModule`: what sharded modules with row exchange offer to a pipeline."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_2dsp.shard.early_rows import send_early
from torchrec_2dsp.shard.hot_module import HotRowsModule
from torchrec_2dsp.shard.row_exchange import RowFetch


@dataclass
class PrefetchContext:
    """What sharded modules know of a batch besides."""

    loads_seen: int = 0
    """How often weights had been loaded when the batch was announced."""
    follower: Any = None
    """The context of the batch whose early rows travel behind this one's."""


class RowPrefetchModule(HotRowsModule):
    """A mixin for TorchRec's sharded modules: rows of a batch that come before its step."""

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
            For each kernel with row exchange, that of `RowJourney`.
        """
        if not self._updates_at_once or _hot_ids(ctx) is not _hot_ids(running_ctx):
            return
        ctx.loads_seen = self.num_loads
        parts = zip(
            ctx.sharding_contexts,
            asked,
            running,
            self._lookups,
            self._output_dists,
            strict=True,
        )
        for of_sharding, ids, running_ids, lookup, fetch in parts:
            if isinstance(fetch, RowFetch):
                of_sharding.journeys = fetch.journeys(
                    lookup, ids, running_ids, of_sharding.requested
                )

    def let_follow(self, ctx: Any, follower: Any) -> None:
        """Let the early rows of a batch travel behind another one's rows.

        Args:
            ctx: of the batch that is looked up next.
            follower: of the batch after it, announced.
        """
        ctx.follower = follower

    def drop_early_rows(self, ctx: Any) -> None:
        """Let all rows of a batch come late. Call it on all ranks."""
        for of_sharding in _with_journeys(ctx):
            of_sharding.journeys = None

    def _drop_outdated_rows(self, ctx: Any) -> None:
        """Before a lookup: rows that came before others were loaded have to come again."""
        if ctx.loads_seen != self.num_loads:
            self.drop_early_rows(ctx)

    def _let_followers_go(self, awaitable: Any, ctx: Any) -> Any:
        """When the rows of a batch have come, the next one's may set out."""

        def follow(output: Any) -> Any:
            for one in _with_journeys(ctx.follower):
                send_early(one.journeys)
            return output

        if ctx.follower is not None:
            awaitable.callbacks.append(follow)
        return awaitable


def _hot_ids(ctx: Any) -> Any:
    return None if ctx.hot is None else ctx.hot.ids


def _with_journeys(ctx: Any) -> list[Any]:
    return [one for one in ctx.sharding_contexts if getattr(one, "journeys", None)]
