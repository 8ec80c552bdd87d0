"""`HeldLayers`: the parameters of a rank's stages, however the pipelines share them."""

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from torchrec_2dsp.dense.pipelined.groups import PipelineGroups


class HeldLayers(Protocol):
    """What a pipeline asks of whoever holds the layers of this rank's stages."""

    def whole(self) -> AbstractContextManager[None]:
        """A context in which the stages can run."""
        ...

    def gradients_set_aside(self) -> AbstractContextManager[list[torch.Tensor]]:
        """The context `whole`, in which parameters have no gradients but those computed in it.

        Yields:
            A list that has these gradients after the context, for each parameter in order.
        """
        ...

    def add_mean(self, gradients: Sequence[torch.Tensor], factor: float) -> None:
        """Add the mean over all pipelines to the gradients of what this rank holds.

        Args:
            gradients: what `gradients_set_aside` gave.
            factor: by which they are multiplied before.
        """
        ...

    def broadcast_buffers(self) -> None:
        """Give all pipelines the buffers of the first one, as DDP does."""
        ...

    def gradients(self) -> list[torch.Tensor]:
        """The gradients of what this rank holds."""
        ...

    def square_norm(self) -> torch.Tensor:
        """This rank's part of the sum of the squares of all gradients."""
        ...


def local_part(gradient: torch.Tensor, param: nn.Parameter) -> torch.Tensor:
    """This rank's part of a gradient, split as its parameter is."""
    if isinstance(gradient, DTensor) and isinstance(param, DTensor):
        return gradient.redistribute(placements=param.placements).to_local()
    return gradient


def like_param(local: torch.Tensor, param: nn.Parameter) -> torch.Tensor:
    """The gradient of a parameter, of which this rank has a part if it is split."""
    if isinstance(param, DTensor):
        return DTensor.from_local(
            local, param.device_mesh, param.placements, shape=param.shape, stride=param.stride()
        )
    return local


def is_split(param: nn.Parameter) -> bool:
    """Whether the ranks that hold a parameter have different parts of it."""
    return isinstance(param, DTensor) and any(
        placement.is_shard() for placement in param.placements
    )


def add_gradient_(param: nn.Parameter, local: torch.Tensor) -> None:
    """Add to the gradient of a parameter, in place.

    Args:
        param: it may have none yet.
        local: this rank's part of what is added.
    """
    gradient = like_param(local, param)
    if param.grad is None:
        param.grad = gradient
    else:
        param.grad.add_(gradient)


def broadcast_first(buffers: Iterable[torch.Tensor], groups: PipelineGroups) -> None:
    """Give all pipelines the buffers of the first one.

    Args:
        buffers: of this rank's layers.
        groups: of the pipeline.

    Collectives:
        A broadcast of each buffer.
    """
    if groups.mesh.dp > 1:
        for buffer in buffers:
            dist.broadcast(buffer, group_src=0, group=groups.copies)
