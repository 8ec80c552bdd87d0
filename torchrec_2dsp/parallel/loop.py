"""Helpers for a training loop: `accumulate`, `failing_together`, `HotSetRefresh`."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from types import TracebackType
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from torchrec_2dsp._compat.ddp import has_synced, noting_backwards, reduce_late
from torchrec_2dsp.access.counter import RowCounter
from torchrec_2dsp.access.table_access import HotSet
from torchrec_2dsp.comms.alarm import BatchesInStep, agreeing
from torchrec_2dsp.comms.failure_detection import NoticeBoard, naming_faults
from torchrec_2dsp.comms.groups import world_group
from torchrec_2dsp.errors import ConfigError
from torchrec_2dsp.parallel.model_parallel2d import ModelParallel2D
from torchrec_2dsp.shard.parted import groups_of, refuse_updates_at_once, sharded_tables
from torchrec_2dsp.shard.tables import Tables2D

T = TypeVar("T")


def accumulate(model: nn.Module, batches: Iterable[T]) -> Iterator[T]:
    """Yield batches whose gradients make one update together.

    TorchRec's fused optimizers update tables in each backward. Here row gradients wait until the
    last batch, and a row gets one update with the sum of them all, as in a step on one large
    batch. With AdaGrad or Adam that differs from an update per batch. Dense
    gradients are reduced over the ranks only after the last batch.

    Example::

        sharders = [tdsp.EmbeddingBagCollectionSharder2D(optimizer, accumulates=True)]
        ...
        optimizer.zero_grad()
        for batch in tdsp.accumulate(model, batches):
            loss = model(batch) / len(batches)
            loss.backward()
        optimizer.step()

    Args:
        model: sharded by this package's sharders, in `ModelParallel2D` or TorchRec's wrapper.
        batches: one step's batches, equally many on each rank.

    Raises:
        ConfigError: there are no batches, other ranks have more or fewer, the tables are updated in
            the backward, or another call hasn't finished.

    Collectives:
        An all-reduce of 8 bytes and an agreement of all ranks, waited for; if no backward followed
        the last batch, an all-reduce of each dense gradient.
    """
    batches = list(batches)
    tables = sharded_tables(model)
    if tables:
        # A rank that has left the loop doesn't take part in the agreement.
        with naming_faults(tables[0].groups.board, "the start of accumulate()"):
            tables[0].groups.alarm.check().wait()
    with agreeing(world_group()) as facts:
        refuse_updates_at_once(model)
        if not batches:
            raise ConfigError("accumulate() got no batches, so there is nothing to update by")
        if any(part.sync_point.is_held for part in tables):
            raise ConfigError(
                "another accumulate() of this model isn't over, so its tables would never be "
                "updated; let its loop end, or close() it"
            )
        facts["the number of batches of accumulate()"] = str(len(batches))
    *waiting, last = batches
    activity = NoticeBoard.of(world_group()).activity
    with ExitStack() as tables_held:
        for part in tables if waiting else []:
            with naming_faults(part.groups.board, "accumulate()"):
                for stage in part.stages:
                    stage.before_accumulating()
                part.sync_point.hold()
            tables_held.callback(part.sync_point.release)
        # DDP learns the graph in its first backward; reducing each batch then gives the same sums.
        ddps = [
            ddp
            for ddp in (model.modules() if waiting else ())
            if isinstance(ddp, DistributedDataParallel) and has_synced(ddp)
        ]
        reduced: set[str] = set()
        try:
            with ExitStack() as dense_held:
                for ddp in ddps:
                    dense_held.enter_context(ddp.no_sync())
                for number, batch in enumerate(waiting, 1):
                    activity.batch = f" of batch {number} of {len(batches)}"
                    yield batch
            if waiting:
                activity.batch, activity.is_last_batch = " of the step's last batch", True
            # Tables stay held, because the last batch's lookup would sync, too.
            with noting_backwards(ddps, reduced):
                yield last
        except GeneratorExit:
            for part in tables:
                part.in_step.is_step_left = bool(ddps) and not reduced
            raise
        finally:
            activity.batch, activity.is_last_batch = "", False
    if ddps and not reduced:
        _end_without_backward(tables, ddps)


def _end_without_backward(
    tables: Sequence[Tables2D], ddps: Sequence[DistributedDataParallel]
) -> None:
    """Reduce the dense gradients that the last batch's backward would, if no rank runs it."""
    for part in tables:
        part.in_step.end_step()
    with naming_faults(tables[0].groups.board, "the end of accumulate()"):
        tables[0].groups.alarm.step_outside()
        for ddp in ddps:
            reduce_late(ddp)


class failing_together(AbstractContextManager["failing_together"]):
    """A context for a training loop in which one rank's error names that rank on all ranks.

    - An exception of this rank, anywhere in the loop, is posted to the others, then raised.
    - A failing collective, also in the backward, in the optimizer or in one of TorchRec's
      pipelines, becomes a `RankError`: it names the ranks that failed or don't respond, the
      step, and what they did there.
    - A rank that leaves the loop while others train on is named by all of them.

    Example::

        with tdsp.failing_together(model) as loop:
            for batch in loop.batches(loader):
                optimizer.zero_grad()
                loss = model(batch)
                loss.backward()
                model.sync()
                optimizer.step()

    Collectives:
        An all-reduce of 8 bytes at the end of the loop, waited for; a rank that is done waits
        for the others there.
    """

    def __init__(self, model: nn.Module) -> None:
        """Prepare the context.

        Args:
            model: a `ModelParallel2D`, or TorchRec's own wrapper around this package's modules.
        """
        groups = groups_of(model)
        if groups is None:
            raise ConfigError(
                f"the model ({type(model).__name__}) has no sharded module of torchrec_2dsp, which "
                "know its ranks; shard it first, with this package's sharders"
            )
        self._model, self._board, self._alarm = model, groups.board, groups.alarm
        self._naming = naming_faults(groups.board)
        self._hook: Any = None

    def __enter__(self) -> "failing_together":
        self._naming.__enter__()
        self._board.enter_loop()
        if not isinstance(self._model, ModelParallel2D):
            self._hook = self._model.register_forward_pre_hook(self._count_step)
        return self

    def batches(self, batches: Iterable[T]) -> Iterator[T]:
        """Yield this rank's batches for as long as all ranks have one.

        A rank with no batch left, or whose loader fails, is named on all ranks before these begin
        the next step. Batches are taken one step ahead. Pipelines of `ModelParallel2D.pipeline`
        do the same by themselves.

        Args:
            batches: a loader, or an iterator.

        Collectives:
            An all-reduce of 8 bytes per batch, which overlaps with a step.
        """
        return BatchesInStep(batches, self._alarm)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._hook is not None:
            self._hook.remove()
        if error is not None:
            self._naming.__exit__(kind, error, trace)
            return
        self._board.wait_for_others(-1)
        self._board.leave_loop()
        with naming_faults(self._board, "the end of the loop"):
            self._alarm.step_outside()

    def _count_step(self, model: nn.Module, inputs: Any) -> None:
        if model.training and torch.is_grad_enabled():
            self._board.activity.step += 1
            self._board.activity.num_forwards += 1
        self._board.activity.begin("the forward")


class HotSetRefresh:
    """Makes the most used rows hot, once every ``every`` steps.

    Each hot table keeps the number of hot rows in its plan. You update the counter, with every
    batch or some of them; give it a ``half_life``, or old batches count as much as new ones.

    Example:
        The counter is made before the model is sharded::

            counter = tdsp.RowCounter.for_model(model, half_life=10_000)
            ...
            refresh = tdsp.HotSetRefresh(model, counter, every=10_000)
            for batch in batches:
                counter.update(batch.sparse_features)
                train_step(model, batch)
                refresh.step()
    """

    def __init__(self, model: ModelParallel2D, counter: RowCounter, *, every: int) -> None:
        """Prepare refreshes of all hot sets in the plan.

        Args:
            model: a model with hot sets in its plan.
            counter: the counter of this rank's batches.
            every: the number of steps from one choice to the next.
        """
        if every < 1:
            raise ConfigError(f"every={every} must be at least one step")
        self._rows = {name: len(hot_set) for name, hot_set in model.hot_sets.items()}
        missing = sorted(self._rows.keys() - set(counter.tables))
        if missing:
            raise ConfigError(
                f"the counter doesn't count table {missing[0]!r}, whose hot rows it is to choose; "
                "make it by RowCounter.for_model(model), before the model is sharded"
            )
        if not self._rows:
            raise ConfigError("the model has no hot rows to refresh; pin some when you plan")
        self._model, self._counter, self._every = model, counter, every
        self._num_steps = 0

    def step(self) -> bool:
        """Count a finished step, on all ranks; return whether the hot rows have changed.

        Collectives:
            Once every ``every`` steps `RowCounter.gather`'s, and if other rows are the most used
            now, `ModelParallel2D.refresh_hot_sets`'.
        """
        self._num_steps += 1
        if self._num_steps % self._every:
            return False
        stats = self._counter.gather(world_group())
        current = self._model.hot_sets
        changed = {
            name: hot_set
            for name, rows in self._rows.items()
            if stats[name].num_lookups
            and (hot_set := HotSet.from_stats(stats, name, rows=rows)) != current[name]
        }
        if changed:
            self._model.refresh_hot_sets(changed)
        return bool(changed)

    def state_dict(self) -> dict[str, int]:
        """Return the step count; the model and the counter hold the rest."""
        return {"num_steps": self._num_steps}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Resume the step count from a stored state."""
        self._num_steps = state["num_steps"]
