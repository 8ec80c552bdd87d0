"""`OpenTrainPipeline`: TorchRec's sparse pipeline, taken apart."""

from collections.abc import Iterator
from typing import Any, TypeVar, cast

import torch
from torch import nn
from torch.profiler import record_function
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.distributed.types import NoWait
from torchrec.streamable import Pipelineable

In = TypeVar("In", bound=Pipelineable)
Out = TypeVar("Out")


class OpenTrainPipeline(TrainPipelineSparseDist[In, Out]):
    """TorchRec's sparse pipeline, with what its `progress` does under public names.

    A subclass puts them in an order of its own, and may take batches in another way.
    """

    @property
    def model(self) -> nn.Module:
        """The model that is trained."""
        return self._model

    @property
    def is_attached(self) -> bool:
        """Whether the model's lookups run in the pipeline."""
        return self._model_attached

    @property
    def pipelined_modules(self) -> list[Any]:
        """The sharded modules whose ids are distributed ahead."""
        return cast(list[Any], self._pipelined_modules)

    @property
    def takes_batch_after_forward(self) -> bool:
        """Whether the user wants the next batch to be taken after the forward."""
        return self._enqueue_batch_after_forward

    def attach_again(self) -> None:
        """Attach the model if it was detached."""
        if not self._model_attached:
            self.attach(self._model)

    def begin_step(self) -> None:
        """Let the modules look up the first batch, when it is there, with gradients of zero."""
        self._set_module_context(self.contexts[0])
        if self._model.training:
            with record_function("## zero_grad ##"):
                self._optimizer.zero_grad()
        self._wait_for_batch()
        if self._clear_data_dist_inputs:
            self.clear_sparse_data_dist_inputs(self.contexts[0])

    def run_forward(self) -> tuple[torch.Tensor, Out]:
        """The losses and the output of the first batch."""
        with record_function(f"## forward {self.contexts[0].index} ##"):
            return self._model_fwd(self.batches[0])

    def update(self, losses: torch.Tensor) -> None:
        """The backward of the first batch, and the step of the optimizer."""
        self._backward(losses)
        every = self._dmp_collection_sync_interval_batches
        self.sync_embeddings(self._model, every, self.contexts[0])
        self._optimizer_step()

    def arrived(self, context: Any, name: str) -> Any:
        """What a batch's input exchange gives, which is kept for the batch's lookup.

        Args:
            context: the pipeline's, of the batch.
            name: of the module whose ids are exchanged.
        """
        requests = context.input_dist_tensors_requests
        if not isinstance(requests[name], NoWait):
            with self._stream_context(cast(Any, self._data_dist_stream)):
                given = requests[name].wait()
            if self._data_dist_stream is not None:
                current = torch.get_device_module(self._device).current_stream()
                current.wait_stream(self._data_dist_stream)
                given.record_stream(current)
            requests[name] = NoWait(given)
        return requests[name].wait()

    def next_batch(self, dataloader_iter: Iterator[In]) -> In | None:
        """The next batch, or `None` at the end."""
        return TrainPipelineSparseDist._next_batch(self, dataloader_iter)

    def _next_batch(self, dataloader_iter: Iterator[In]) -> In | None:
        return self.next_batch(dataloader_iter)
