"""`CopiedLayers`: the layers of a rank, of which the ranks of other pipelines have copies."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
import torch.distributed as dist

from torchrec_2dsp.dense.pipelined.groups import PipelineGroups
from torchrec_2dsp.dense.pipelined.held_layers import (
    add_gradient_,
    broadcast_first,
    is_split,
    local_part,
)
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

    def whole(self) -> AbstractContextManager[None]:
        """A context in which the stages can run: copies are whole anyhow."""
        return nullcontext()

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
            local_part(gradient, param) * factor
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
            add_gradient_(param, gradient)

    def broadcast_buffers(self) -> None:
        """Give all copies the buffers of the first one, as DDP does.

        Collectives:
            A broadcast of each buffer.
        """
        buffers = [buffer for modules in self._modules for buffer in modules.buffers()]
        broadcast_first(buffers, self._groups)

    def gradients(self) -> list[torch.Tensor]:
        """The gradients of this rank's layers, or its share of those that are split."""
        return [local_part(param.grad, param) for param in self.params if param.grad is not None]

    def square_norm(self) -> torch.Tensor:
        """This rank's part of the sum of the squares of all gradients.

        Copies count a part each, and so do the ranks of a tensor-parallel group, if they all hold
        what isn't split.
        """
        total = torch.zeros((), dtype=torch.float64, device=self._groups.device)
        for param in self.params:
            if param.grad is not None:
                square = local_part(param.grad, param).double().square().sum()
                total += square if is_split(param) else square / self._groups.mesh.tp
        return total / self._groups.mesh.dp
