"""`CopiedLayers`: the layers of a rank, of which the ranks of other pipelines have copies."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from torchrec_2dsp.dense.pipelined.groups import PipelineGroups
from torchrec_2dsp.dense.pipelined.stage import LayerStage


class CopiedLayers:
    """The parameters and buffers of this rank's stages, and what keeps their copies equal."""

    def __init__(self, stages: Sequence[LayerStage], groups: PipelineGroups) -> None:
        """
        Args:
            stages: of this rank.
            groups: of the pipeline.
        """
        self._groups = groups
        self.params = [param for stage in stages for param in stage.params]
        """The parameters that are trained."""
        self._modules = [stage.modules for stage in stages]

    @contextmanager
    def gradients_set_aside(self) -> Iterator[list[torch.Tensor]]:
        """A context in which the parameters have no gradients but those computed in it.

        Yields:
            A list that has these gradients after the context, for each parameter in order.
        """
        before = [param.grad for param in self.params]
        computed: list[torch.Tensor] = []
        for param in self.params:
            param.grad = None
        try:
            yield computed
            computed += [
                torch.zeros_like(param) if param.grad is None else param.grad
                for param in self.params
            ]
        finally:
            for param, gradient in zip(self.params, before, strict=True):
                param.grad = gradient

    @torch.no_grad()
    def add_mean(self, gradients: Sequence[torch.Tensor], factor: float) -> None:
        """Add the mean over the copies to the parameters' gradients.

        Args:
            gradients: of this rank, in the order of `params`.
            factor: by which they are multiplied before.

        Collectives:
            An all-reduce of all of them for each data type, waited for.
        """
        local = [
            _local(gradient, param) * factor
            for param, gradient in zip(self.params, gradients, strict=True)
        ]
        num_copies = self._groups.mesh.dp
        by_type: dict[torch.dtype, list[int]] = defaultdict(list)
        for number, gradient in enumerate(local):
            by_type[gradient.dtype].append(number)
        for numbers in by_type.values() if num_copies > 1 else ():
            flat = torch.cat([local[number].reshape(-1) for number in numbers])
            dist.all_reduce(flat, group=self._groups.copies)
            flat /= num_copies
            parts = flat.split([local[number].numel() for number in numbers])
            for number, part in zip(numbers, parts, strict=True):
                local[number] = part.view(local[number].shape)
        for param, gradient in zip(self.params, local, strict=True):
            mean = _like(gradient, param)
            if param.grad is None:
                param.grad = mean
            else:
                param.grad.add_(mean)

    def broadcast_buffers(self) -> None:
        """Give all copies the buffers of the first one, as DDP does.

        Collectives:
            A broadcast of each buffer.
        """
        if self._groups.mesh.dp > 1:
            for modules in self._modules:
                for buffer in modules.buffers():
                    dist.broadcast(buffer, group_src=0, group=self._groups.copies)

    def gradients(self) -> list[torch.Tensor]:
        """The gradients of this rank's layers, or its share of those that are split."""
        return [_local(param.grad, param) for param in self.params if param.grad is not None]

    def square_norm(self) -> torch.Tensor:
        """The sum of the squares of this rank's gradients, of its share of those that are split.

        Layers that aren't split are on all ranks of a tensor-parallel group; each counts a part.
        """
        total = torch.zeros((), dtype=torch.float64, device=self._groups.device)
        for param in self.params:
            if param.grad is not None:
                square = _local(param.grad, param).double().square().sum()
                is_split = isinstance(param, DTensor) and any(
                    placement.is_shard() for placement in param.placements
                )
                total += square if is_split else square / self._groups.mesh.tp
        return total


def _local(gradient: torch.Tensor, param: nn.Parameter) -> torch.Tensor:
    """This rank's part of a gradient, split as its parameter is."""
    if isinstance(gradient, DTensor) and isinstance(param, DTensor):
        return gradient.redistribute(placements=param.placements).to_local()
    return gradient


def _like(local: torch.Tensor, param: nn.Parameter) -> torch.Tensor:
    """The gradient of a parameter, of which this rank has a part if it is split."""
    if isinstance(param, DTensor):
        return DTensor.from_local(
            local, param.device_mesh, param.placements, shape=param.shape, stride=param.stride()
        )
    return local
