"""How a run trains one step: in a pipeline, or as several batches that make one update."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any, Protocol

import torch
from torch import nn
from torch.profiler import record_function
from torchrec.datasets.utils import Batch
from torchrec.distributed.model_parallel import DistributedModelParallel

from torchrec_2dsp.parallel.accumulate import accumulate
from torchrec_2dsp.parallel.model_parallel2d import ModelParallel2D
from torchrec_2dsp.programs.models.pipeline import make_pipeline

Output = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""What a model gives beside the loss that is trained: the detached loss, scores and labels."""


class Stepper(Protocol):
    """A way to train a step."""

    def step(self, batches: Iterator[Batch]) -> Output:
        """Train a step.

        Raises:
            StopIteration: the batches are over.
        """
        ...

    def pause(self) -> None:
        """Give the model back, so that it can be evaluated; the next step takes it again."""
        ...


class PipelinedSteps:
    """Steps in one of TorchRec's pipelines, which takes batches ahead."""

    def __init__(
        self,
        model: DistributedModelParallel,
        optimizer: torch.optim.Optimizer,
        device: torch.device,
        *,
        prefetch_rows: bool,
    ) -> None:
        self._model = model
        self._pipeline = make_pipeline(model, optimizer, device, prefetch_rows=prefetch_rows)
        self._is_detached = False

    def step(self, batches: Iterator[Batch]) -> Output:
        """Train one batch."""
        if self._is_detached and not isinstance(self._model, ModelParallel2D):
            # By default a pipeline starts the input exchange of its next batch once more. With
            # TorchRec's own sequences, that loses the sizes of the exchange that is over.
            self._pipeline.attach(self._model, sparse_dist=False)
        self._is_detached = False
        return self._pipeline.progress(batches)

    def pause(self) -> None:
        """Detach the model; batches that were taken ahead stay in the pipeline."""
        self._pipeline.detach()
        self._is_detached = True


class AccumulatedSteps:
    """Steps of several batches, which make one update."""

    def __init__(
        self,
        model: ModelParallel2D,
        optimizer: torch.optim.Optimizer,
        device: torch.device,
        *,
        num_batches: int,
    ) -> None:
        self._model, self._optimizer = model, optimizer
        self._device, self._num_batches = device, num_batches

    def step(self, batches: Iterator[Batch]) -> Output:
        """Train as many batches as make a step; what is left of the data for less is not trained.

        Collectives:
            Those of `accumulate` and of the model.
        """
        with record_function("## next_batch ##"):
            parts = [batch.to(self._device) for batch in islice(batches, self._num_batches)]
        if len(parts) < self._num_batches:
            raise StopIteration
        outputs: list[Output] = []
        self._optimizer.zero_grad()
        for batch in accumulate(self._model, parts):
            with record_function("## forward ##"):
                loss, output = self._model(batch)
            with record_function("## backward ##"):
                (loss / self._num_batches).backward()
            outputs.append(output)
        self._model.sync()
        with record_function("## optimizer ##"):
            self._optimizer.step()
        losses, scores, labels = zip(*outputs, strict=True)
        return torch.stack(losses).mean(), torch.cat(scores), torch.cat(labels)

    def pause(self) -> None:
        """Nothing to do: between two steps the model is free."""


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """A context in which a model evaluates, and learns nothing."""
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train()


@contextmanager
def closing_batches(batches: Iterator[Batch]) -> Iterator[Iterator[Batch]]:
    """A context for an iterator over batches, which is closed at its end if it can be: readers
    have threads."""
    closable: Any = batches
    try:
        yield batches
    finally:
        if hasattr(closable, "close"):
            closable.close()
