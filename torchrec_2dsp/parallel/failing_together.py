"""`failing_together`: a training loop whose ranks end together, and say why."""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, TypeVar

import torch
from torch import nn

from torchrec_2dsp.comms.alarm import BatchesInStep, Signal
from torchrec_2dsp.comms.notice_board import naming_faults
from torchrec_2dsp.errors import ConfigError
from torchrec_2dsp.parallel.model_parallel2d import ModelParallel2D
from torchrec_2dsp.shard.parted import groups_of

T = TypeVar("T")


class failing_together(AbstractContextManager["failing_together"]):
    """A context for a training loop, in which an error of one rank names that rank on all.

    - An exception of this rank, wherever in the loop, is posted for the others, then raised.
    - A collective that fails, also one in the backward, in the optimizer or in one of TorchRec's
      pipelines, becomes a `RankError`: it names the ranks that failed, or that don't answer, the
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
        At the end of the loop an all-reduce of 8 bytes, waited for; a rank that is done waits
        there for the others.
    """

    def __init__(self, model: nn.Module) -> None:
        """
        Args:
            model: a `ModelParallel2D`, or TorchRec's own wrapper around modules of this package.
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
        """The batches of this rank, as long as all ranks have one.

        A rank that has none left, or whose loader fails, is named on all ranks before they begin
        the next step. Batches are taken one step ahead. `TrainPipelineRowPrefetch` does the same by
        itself.

        Args:
            batches: a loader, or an iterator.

        Collectives:
            An all-reduce of 8 bytes for each batch, which overlaps with a step.
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
        self._board.leave_loop()
        with naming_faults(self._board, "the end of the loop"):
            self._alarm.check(signal=Signal.OUTSIDE).wait()

    def _count_step(self, model: nn.Module, inputs: Any) -> None:
        if model.training and torch.is_grad_enabled():
            self._board.activity.step += 1
        self._board.activity.begin("the forward")
