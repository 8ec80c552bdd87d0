"""Train pipelines: one for each kind that a plan may ask for."""

import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property
from itertools import chain
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch.fx.proxy import TraceError
from torch.profiler import record_function
from torchrec.distributed.train_pipeline import TrainPipelineBase, TrainPipelineSparseDist
from torchrec.streamable import Pipelineable

from torchrec_2dsp._compat.shardings import OpenTrainPipeline
from torchrec_2dsp.comms.alarm import BatchesInStep
from torchrec_2dsp.comms.failure_detection import naming_faults
from torchrec_2dsp.errors import UnsupportedError
from torchrec_2dsp.plan.parameter_sharding import Pipeline
from torchrec_2dsp.shard.parted import (
    PrefetchedBatch,
    groups_of,
    parts_of,
    prefetched_batches,
    sharded_tables,
)

logger = logging.getLogger(__name__)
In = TypeVar("In", bound=Pipelineable)
Out = TypeVar("Out")


class _Source(Iterator[In], Generic[In]):
    """A pipeline's batches, taken only when all ranks have one.

    Otherwise other ranks' ids would meet the next call of a rank without a batch: gloo ends a
    process that gets more than it expects, and in a loop over epochs the rank would go on with its
    next epoch. A model without this package's modules takes the batches as they come.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._groups = groups_of(model)
        self._batches: Iterator[In] | None = None
        self._iterator: Iterator[In] | None = None
        self.has_ended = False
        """True if the last iterator is exhausted."""

    def of(self, dataloader_iter: Iterator[In]) -> "_Source[In]":
        """Switch to an iterator; a batch taken ahead from the previous one comes first."""
        if self._batches is None or dataloader_iter is not self._iterator:
            taken_ahead = self._batches.stop() if isinstance(self._batches, BatchesInStep) else []
            self._iterator, self._batches = dataloader_iter, dataloader_iter
            self.has_ended = False
            if self._groups is not None:
                batches = chain(taken_ahead, dataloader_iter)
                self._batches = BatchesInStep(batches, self._groups.alarm)
        return self

    def __next__(self) -> In:
        """Return the next batch; stop if no rank has one."""
        assert self._batches is not None
        if self.has_ended:
            raise StopIteration
        try:
            return next(self._batches)
        except StopIteration:
            self.has_ended = True
            raise

    def reset(self) -> None:
        """Drop the batch that was taken ahead."""
        self._batches = None

    def naming(self) -> AbstractContextManager[None]:
        """Return a context in which errors name the rank that failed."""
        return nullcontext() if self._groups is None else naming_faults(self._groups.board)


@contextmanager
def _naming_models() -> Iterator[None]:
    """Explain why TorchRec's pipelines, which distribute a batch's ids ahead, can't run a model."""
    remedy = "train it by a loop of your own, without model.pipeline()"
    try:
        yield
    except TraceError as error:
        raise UnsupportedError(
            f"the model's forward can't be traced by torch.fx ({error}), from which the pipeline "
            "learns which ids to distribute ahead; keep what depends on values out of it, or in "
            f"functions that torch.fx.wrap leaves whole, or {remedy}"
        ) from error
    except AssertionError as error:
        if "Invalid PipelinedForward usage" not in str(error):
            raise
        raise UnsupportedError(
            "the model looks a collection up twice in a forward, and the pipeline distributes ids "
            f"ahead for one lookup; {remedy}"
        ) from error


class TrainPipelineInStep(OpenTrainPipeline[In, Out]):
    """A `TrainPipelineSparseDist` where either all ranks take a batch or all raise an error."""

    @cached_property
    def source(self) -> _Source[In]:
        """The batches."""
        return _Source(self.model)

    def progress(self, dataloader_iter: Iterator[In]) -> Out:
        """Train one batch; if only some ranks have one, all raise a `RankError` that names them."""
        with self.source.naming(), _naming_models():
            return super().progress(dataloader_iter)

    def next_batch(self, dataloader_iter: Iterator[In]) -> In | None:
        """Take a batch if all ranks have one; return `None` if none has."""
        return next(self.source.of(dataloader_iter), None)

    def reset(self) -> None:
        """Drop all batches, as in TorchRec, and the one that was taken ahead."""
        super().reset()
        self.source.reset()


class TrainPipelineRowPrefetch(TrainPipelineInStep[In, Out]):
    """A pipeline to use in place of `TrainPipelineSparseDist` for tables with row exchange.

    Ids travel two batches ahead instead of one. While a step computes, the next batch's rows that
    it doesn't change are sent, and the gradients of the previous batch's rows that it
    doesn't need; losses and weights stay the same bit for bit. Other kinds of tables,
    and rows that replicas have copies of, train as in `TrainPipelineSparseDist`.

    Between two steps, you may read and load state and refresh hot sets as usual. Call the
    model's `sync_now` before you read tables directly instead of through state dicts, and `detach`
    the model before you write tables directly.

    Example::

        pipeline = tdsp.TrainPipelineRowPrefetch(model, optimizer, device)
        while True:
            try:
                loss = pipeline.progress(batches)
            except StopIteration:
                break
    """

    _has_warned = False

    def fill_pipeline(self, dataloader_iter: Iterator[In]) -> None:
        """Take two batches and distribute their ids, unless there is a batch already."""
        is_first = not self.batches
        super().fill_pipeline(dataloader_iter)
        if is_first and len(self.batches) > 1:
            self.start_sparse_data_dist(self.batches[-1], self.contexts[-1])
            self.wait_sparse_data_dist(self.contexts[-1])
            if not any(tables.prefetch.can_send_early for tables in sharded_tables(self.model)):
                self._warn_once()

    def progress(self, dataloader_iter: Iterator[In]) -> Out:
        """Train one batch.

        Args:
            dataloader_iter: the iterator over the batches.

        Returns:
            The model's output.

        Raises:
            StopIteration: when all batches are trained.

        Collectives:
            The model step's, the input exchange's for the second batch after it, and
            `RowPrefetch.announce`'s for the next one.
        """
        with self.source.naming(), _naming_models():
            return self._progress(dataloader_iter)

    def _progress(self, dataloader_iter: Iterator[In]) -> Out:
        self.attach_again()
        self.fill_pipeline(dataloader_iter)
        if not self.batches:
            raise StopIteration
        is_training = self.model.training
        self.begin_step()
        self._send_late_rows()
        self._announce_next()
        has_more = not self.takes_batch_after_forward and self._start_newest(dataloader_iter)
        self._let_next_follow()
        losses, output = self.run_forward()
        if self.takes_batch_after_forward:
            has_more = self._start_newest(dataloader_iter)
        if has_more:
            self.wait_sparse_data_dist(self.contexts[-1])
        if is_training:
            self.update(losses)
        self.dequeue_batch()
        return output

    def detach(self) -> torch.nn.Module:
        """Detach the model, as in TorchRec; it may train without the pipeline meanwhile."""
        for context in self.contexts if self.is_attached else ():
            for batch in self._batches(context):
                batch.tables.prefetch.drop(batch.notes)
        return super().detach()

    def _warn_once(self) -> None:
        """Warn, on rank 0 and only once, that no rows can be prefetched."""
        if self._has_warned or dist.get_rank():
            return
        self._has_warned = True
        logger.warning(
            "no rows can travel beside computing: no table has exchange='row' or 'row_per_host' "
            "and one copy in the world; this trains as TrainPipelineSparseDist does"
        )

    def _start_newest(self, dataloader_iter: Iterator[In]) -> bool:
        """Take a batch and distribute its ids; return whether there was one."""
        if not self.enqueue_batch(dataloader_iter):
            return False
        self.start_sparse_data_dist(self.batches[-1], self.contexts[-1])
        return True

    def _send_late_rows(self) -> None:
        """Send late rows before anything else, so that later batches are prepared meanwhile."""
        with record_function(f"## send late rows {self.contexts[0].index} ##"):
            for batch in self._batches(self.contexts[0]):
                batch.tables.prefetch.send_late(batch.notes)

    def _announce_next(self) -> None:
        """Tell the ranks which rows of the next batch may be sent early."""
        if len(self.contexts) < 2:
            return
        running, announced = self.contexts[0], self.contexts[1]
        with record_function(f"## announce rows {announced.index} ##"):
            for batch, before in zip(
                self._batches(announced, wait=True), self._batches(running, wait=True), strict=True
            ):
                batch.tables.prefetch.announce(
                    batch.notes, batch.arrived, before.notes, before.arrived
                )

    def _let_next_follow(self) -> None:
        if len(self.contexts) < 2:
            return
        running, follower = self._batches(self.contexts[0]), self._batches(self.contexts[1])
        if follower:
            for batch, following in zip(running, follower, strict=True):
                batch.tables.prefetch.let_follow(batch.notes, following.notes)

    def _batches(self, context: Any, *, wait: bool = False) -> list[PrefetchedBatch]:
        """Return the batch's views in the pipelined modules that can send rows early.

        Args:
            context: the pipeline's context for the batch.
            wait: also wait for the input exchanges' results.
        """
        batches = []
        for module in self.pipelined_modules:
            name = module.forward.name
            if name in context.module_contexts and parts_of(module):
                arrived = self.arrived(context, name) if wait else None
                batches += prefetched_batches(module, context.module_contexts[name], arrived)
        return batches


class TrainPipelinePlain(TrainPipelineBase[In, Out]):
    """A `TrainPipelineBase` where either all ranks take a batch or all raise an error.

    It also trains a second epoch: TorchRec's raises `StopIteration` for every iterator after the
    first one that has ended.
    """

    def __init__(self, model: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        """Prepare to train; the arguments are `TrainPipelineBase`'s."""
        super().__init__(model, *args, **kwargs)
        self._source, self._detached = _Source[In](model), model

    def progress(self, dataloader_iter: Iterator[In]) -> Out:
        """Train one batch; an iterator after an exhausted one starts over."""
        with self._source.naming():
            had_ended = self._source.has_ended
            batches = self._source.of(dataloader_iter)
            if had_ended and not batches.has_ended:
                super().reset()
            return super().progress(batches)

    def detach(self) -> torch.nn.Module:
        """Return the model; nothing is attached to it, but any plan's pipeline may be detached."""
        return self._detached

    def reset(self) -> None:
        """Drop all batches, as in TorchRec, and the one that was taken ahead."""
        super().reset()
        self._source.reset()


AnyPipeline = TrainPipelineBase[Any, Any] | TrainPipelineSparseDist[Any, Any]
"""A train pipeline of a plan."""
PIPELINES: dict[Pipeline, Any] = {
    Pipeline.BASE: TrainPipelinePlain,
    Pipeline.SPARSE_DIST: TrainPipelineInStep,
    Pipeline.ROW_PREFETCH: TrainPipelineRowPrefetch,
}
"""The class for each kind of pipeline."""
