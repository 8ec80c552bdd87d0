"""`ShardedLayers`: the layers of a rank, of which each pipeline has a share, by torch's FSDP2.

between batches    pipeline 0: first half   pipeline 1: second half   of each parameter
      | gather, once for a batch                                            ^
      v                                                                     | added up
in the schedule    pipeline 0: all          pipeline 1: all           gradients of each
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from torchrec_2dsp.dense.layer_stack import LayerStack
from torchrec_2dsp.dense.pipelined.groups import PipelineGroups
from torchrec_2dsp.dense.pipelined.held_layers import (
    add_gradient_,
    broadcast_first,
    is_split,
    local_part,
)
from torchrec_2dsp.dense.pipelined.stage import LayerStage
from torchrec_2dsp.dense.pipelined.stage_layers import StageLayers
from torchrec_2dsp.errors import ConfigError


class _Shares(nn.Module):
    """Holds the modules of a stage, whose parameters FSDP2 gathers and frees when it is told to.

    FSDP2 would gather in the forward of a module, and send gradients in each backward. A stage runs
    its layers many times for a batch, so these aren't wrapped, and nobody calls this module.
    """

    def __init__(self, content: nn.Module) -> None:
        super().__init__()
        self.content = content

    def forward(self) -> None:
        """Raise an error: the layers run one by one."""
        raise NotImplementedError("the layers of a stage run one by one")


class ShardedLayers:
    """The parameters of this rank's stages, each of which is sharded over the pipelines."""

    def __init__(
        self, stages: Sequence[LayerStage], groups: PipelineGroups, mesh: DeviceMesh
    ) -> None:
        """
        Args:
            stages: of this rank; their parameters become shares.
            groups: of the pipeline.
            mesh: the ranks that share this rank's layers, an axis of `PipelineGroups.layers_mesh`.
        """
        self._stages, self._groups = list(stages), groups
        self._is_split = [is_split(param) for stage in stages for param in stage.params]
        self._shares = [
            fully_shard(_Shares(stage.modules), mesh=mesh, reshard_after_forward=False)
            for stage in stages
        ]
        self._take_params()
        self.params = [param for stage in stages for param in stage.params]
        """This rank's shares of the parameters that are trained."""

    @contextmanager
    def whole(self) -> Iterator[None]:
        """A context in which the stages have whole parameters.

        Collectives:
            An all-gather of each stage's parameters over the pipelines, waited for.
        """
        shares: list[FSDPModule] = self._shares
        try:
            for stage in shares:
                stage.unshard()
            self._take_params()
            yield
        finally:
            for stage in shares:
                stage.reshard()
            self._take_params()

    @contextmanager
    def gradients_set_aside(self) -> Iterator[list[torch.Tensor]]:
        """The context `whole`, in which parameters have no gradients but those computed in it.

        Yields:
            A list that has these gradients after the context, or this rank's part of those that
            are split over its tensor-parallel group, for each parameter in order.
        """
        computed: list[torch.Tensor] = []
        with self.whole():
            params = [param for stage in self._stages for param in stage.params]
            try:
                yield computed
                computed += [
                    local_part(torch.zeros_like(param) if param.grad is None else param.grad, param)
                    for param in params
                ]
            finally:
                for param in params:
                    param.grad = None

    @torch.no_grad()
    def add_mean(self, gradients: Sequence[torch.Tensor], factor: float) -> None:
        """Add the mean over the pipelines to the gradients of this rank's shares.

        Args:
            gradients: of whole parameters, in the order of `params`.
            factor: by which they are multiplied before.

        Collectives:
            A reduce-scatter of the gradients of each stage over the pipelines, waited for.
        """
        start = 0
        for stage in self._stages:
            end = start + len(stage.params)
            if start < end:
                scattered = self._scattered([part * factor for part in gradients[start:end]])
                for param, share in zip(self.params[start:end], scattered, strict=True):
                    add_gradient_(param, share[: _local(param).shape[0]])
            start = end

    def broadcast_buffers(self) -> None:
        """Give all pipelines the buffers of the first one, as DDP does.

        Collectives:
            A broadcast of each buffer.
        """
        buffers = [buffer for stage in self._stages for buffer in stage.modules.buffers()]
        broadcast_first(buffers, self._groups)

    def gradients(self) -> list[torch.Tensor]:
        """The gradients of this rank's shares."""
        return [_local(param.grad) for param in self.params if param.grad is not None]

    def square_norm(self) -> torch.Tensor:
        """This rank's part of the sum of the squares of all gradients.

        The ranks of a tensor-parallel group count a part each of what isn't split over them.
        """
        total = torch.zeros((), dtype=torch.float64, device=self._groups.device)
        for param, is_split_by_tp in zip(self.params, self._is_split, strict=True):
            if param.grad is not None:
                square = _local(param.grad).double().square().sum()
                total += square if is_split_by_tp else square / self._groups.mesh.tp
        return total

    def _scattered(self, gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """This rank's rows of the mean of each gradient, filled up to those of the first rank."""
        num_shares = self._groups.mesh.dp
        flat = torch.cat([_padded(part, num_shares).view(num_shares, -1) for part in gradients], 1)
        own = flat.new_empty(flat.shape[1])
        dist.reduce_scatter_tensor(own, flat.view(-1), group=self._groups.copies)
        own /= num_shares
        shapes = [(-(-part.shape[0] // num_shares), *part.shape[1:]) for part in gradients]
        parts = own.split([torch.Size(shape).numel() for shape in shapes])
        return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]

    def _take_params(self) -> None:
        for stage in self._stages:
            stage.take_params()


def check_shareable(stages: Sequence[StageLayers], stack: LayerStack) -> None:
    """Raise an error, if FSDP2 can't shard a stage.

    Args:
        stages: of the stack.
        stack: not cut yet.

    Raises:
        ConfigError: parameters of a stage have several data types, or one of them can't be cut.
    """
    for stage in stages:
        modules = [stack.layers[number] for number in stage.numbers]
        if stage is stages[-1]:
            modules.append(stack.loss)
        params = [param for module in modules for param in module.parameters()]
        types = sorted({str(param.dtype) for param in params if param.requires_grad})
        if len(types) > 1:
            raise ConfigError(
                f"{stage.name} trains parameters of {' and '.join(types)}, which fully_shard=True "
                "can't gather together; choose one type, or cuts that part them"
            )
        if any(not param.dim() or not param.is_contiguous() for param in params):
            raise ConfigError(
                f"{stage.name} has a parameter without a dimension, or one that isn't contiguous, "
                "which fully_shard=True can't cut; give it a dimension, or store it contiguously"
            )


def _padded(gradient: torch.Tensor, num_shares: int) -> torch.Tensor:
    """A gradient with rows of zeros, so that all ranks have equally many rows of it."""
    num_missing = -gradient.shape[0] % num_shares
    if not num_missing:
        return gradient.contiguous()
    return torch.cat([gradient, gradient.new_zeros(num_missing, *gradient.shape[1:])])


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
