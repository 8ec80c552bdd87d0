"""`HeldLayers`: a rank's parameters, copied or sharded over pipelines.

between batches    pipeline 0: first half   pipeline 1: second half   of each parameter
      | gather, once per batch                                              ^
      v                                                                     | reduce-scatter
in the schedule    pipeline 0: all          pipeline 1: all           gradients of each
"""

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from torchrec_2dsp.dense.pipelined.engine import LayerStage
from torchrec_2dsp.dense.pipelined.layer_stack import LayerStack, StageLayers
from torchrec_2dsp.dense.pipelined.links import PipelineGroups
from torchrec_2dsp.dense.thresholded_gradients import ThresholdedGradients
from torchrec_2dsp.errors import ConfigError


class HeldLayers(ABC):
    """The trained parameters and buffers in a rank's stages."""

    def __init__(
        self, stages: Sequence[LayerStage], groups: PipelineGroups, num_equal: int
    ) -> None:
        self._stages, self._groups = list(stages), groups
        self._num_equal = num_equal
        """Number of pipelines that hold the same parameters."""

    @property
    def params(self) -> list[nn.Parameter]:
        """The trained parameters, as this rank holds them now: in `whole`, those of its stages."""
        return [param for stage in self._stages for param in stage.params]

    def take_params(self) -> None:
        """Look up the parameters again, which may be others, or frozen ones that are trained."""
        for stage in self._stages:
            stage.take_params()

    @abstractmethod
    def whole(self) -> AbstractContextManager[None]:
        """Return a context in which the stages can run."""

    @abstractmethod
    def gradients_set_aside(self) -> AbstractContextManager[list[torch.Tensor]]:
        """Enter `whole` without gradients; yield a list that gets those computed in it."""

    @abstractmethod
    def add_mean(self, gradients: Sequence[torch.Tensor], factor: float) -> None:
        """Add the mean over all pipelines, times ``factor``, to the gradients held here."""

    def broadcast_buffers(self) -> None:
        """Give all pipelines the first one's buffers, as DDP does.

        Collectives:
            A broadcast per buffer.
        """
        for stage in self._stages if self._groups.mesh.dp > 1 else ():
            for buffer in stage.modules.buffers():
                dist.broadcast(buffer, group_src=0, group=self._groups.copies)

    def gradients(self) -> list[torch.Tensor]:
        """Return the gradients held here, as local tensors."""
        return [_local_part(param.grad, param) for param in self.params if param.grad is not None]

    def square_norm(self) -> torch.Tensor:
        """Return this rank's part of all gradients' squared norm.

        Each pipeline with equal parameters counts its share, and so does each tensor-parallel rank
        of what isn't split.
        """
        total = torch.zeros((), dtype=torch.float64, device=self._groups.device)
        for param in self.params:
            if param.grad is not None:
                square = _local_part(param.grad, param).double().square().sum()
                total += square if _is_split(param) else square / self._groups.mesh.tp
        return total / self._num_equal


def _local_part(gradient: torch.Tensor, param: nn.Parameter) -> torch.Tensor:
    """Return this rank's part of a gradient, split like its parameter."""
    if isinstance(gradient, DTensor) and isinstance(param, DTensor):
        return gradient.redistribute(placements=param.placements).to_local()
    return gradient


def _is_split(param: nn.Parameter) -> bool:
    """Return whether tensor-parallel ranks have different parts."""
    return isinstance(param, DTensor) and any(
        axis == "tp" and placement.is_shard()
        for axis, placement in zip(
            param.device_mesh.mesh_dim_names or (), param.placements, strict=True
        )
    )


def _add_gradient_(param: nn.Parameter, gradient: torch.Tensor) -> None:
    """Add this rank's part to a parameter's gradient, in place."""
    if isinstance(param, DTensor):
        gradient = DTensor.from_local(
            gradient, param.device_mesh, param.placements, shape=param.shape, stride=param.stride()
        )
    if param.grad is None:
        param.grad = gradient
    else:
        param.grad.add_(gradient)


class CopiedLayers(HeldLayers):
    """A rank's layers, with equal copies in other pipelines.

    With ``thresholded``, copies send each other their gradients' largest elements.
    """

    def __init__(
        self,
        stages: Sequence[LayerStage],
        groups: PipelineGroups,
        thresholded: ThresholdedGradients | None = None,
    ) -> None:
        super().__init__(stages, groups, num_equal=groups.mesh.dp)
        self._thresholded = thresholded

    def whole(self) -> AbstractContextManager[None]:
        """Return a null context: copies are always whole."""
        return nullcontext()

    @contextmanager
    def gradients_set_aside(self) -> Iterator[list[torch.Tensor]]:
        """Run without gradients; yield a list that gets those computed meanwhile."""
        self.take_params()
        params = self.params
        before = [param.grad for param in params]
        computed: list[torch.Tensor] = []
        for param in params:
            param.grad = None
        try:
            yield computed
            computed += map(_gradient_or_zeros, params)
        finally:
            for param, gradient in zip(params, before, strict=True):
                param.grad = gradient

    @torch.no_grad()
    def add_mean(self, gradients: Sequence[torch.Tensor], factor: float) -> None:
        """Add the mean over the copies, times ``factor``, to the parameters' gradients.

        Collectives:
            An all-reduce per data type, waited for; or those of `ThresholdedGradients.means`.
        """
        local = [
            _local_part(gradient, param) * factor
            for param, gradient in zip(self.params, gradients, strict=True)
        ]
        if self._thresholded is not None:
            means = self._thresholded.means(self.params, local)
            for param, gradient in zip(self.params, means, strict=True):
                _add_gradient_(param, gradient)
            return
        by_type: dict[torch.dtype, list[int]] = defaultdict(list)
        for number, gradient in enumerate(local):
            by_type[gradient.dtype].append(number)
        for numbers in by_type.values() if self._num_equal > 1 else ():
            flat = torch.cat([local[number].reshape(-1) for number in numbers])
            dist.all_reduce(flat, group=self._groups.copies)
            flat /= self._num_equal
            parts = flat.split([local[number].numel() for number in numbers])
            for number, part in zip(numbers, parts, strict=True):
                local[number] = part.view(local[number].shape)
        for param, gradient in zip(self.params, local, strict=True):
            _add_gradient_(param, gradient)


class _Shares(nn.Module):
    """Holds a stage's modules, whose parameters FSDP2 gathers and frees on demand.

    FSDP2 would gather in a module's forward, and reduce in each backward. A stage runs its layers
    many times per batch, so these aren't wrapped, and nobody calls this module.
    """

    def __init__(self, content: nn.Module) -> None:
        super().__init__()
        self.content = content

    def forward(self) -> None:
        """Raise an error: the layers run one by one."""
        raise NotImplementedError("the layers of a stage run one by one")


class ShardedLayers(HeldLayers):
    """A rank's layers, each parameter sharded over the pipelines."""

    def __init__(
        self, stages: Sequence[LayerStage], groups: PipelineGroups, mesh: DeviceMesh
    ) -> None:
        super().__init__(stages, groups, num_equal=1)
        self._shares = [
            fully_shard(_Shares(stage.modules), mesh=mesh, reshard_after_forward=False)
            for stage in stages
        ]
        self.take_params()

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Give the stages whole parameters.

        Collectives:
            An all-gather per stage over the pipelines, waited for.
        """
        shares: list[FSDPModule] = self._shares
        try:
            for stage in shares:
                stage.unshard()
            self.take_params()
            yield
        finally:
            for stage in shares:
                stage.reshard()
            self.take_params()

    @contextmanager
    def gradients_set_aside(self) -> Iterator[list[torch.Tensor]]:
        """Enter `whole`; yield a list that gets the gradients computed in it.

        Of gradients split over the tensor-parallel group, it gets this rank's part.
        """
        computed: list[torch.Tensor] = []
        with self.whole():
            params = self.params
            try:
                yield computed
                computed += [_local_part(_gradient_or_zeros(param), param) for param in params]
            finally:
                for param in params:
                    param.grad = None

    @torch.no_grad()
    def add_mean(self, gradients: Sequence[torch.Tensor], factor: float) -> None:
        """Add the mean over the pipelines, times ``factor``, to this rank's sharded gradients.

        Collectives:
            A reduce-scatter per stage over the pipelines, waited for.
        """
        start = 0
        for stage in self._stages:
            end = start + len(stage.params)
            if start < end:
                scattered = self._scattered([part * factor for part in gradients[start:end]])
                for param, share in zip(self.params[start:end], scattered, strict=True):
                    _add_gradient_(param, share[: _local(param).shape[0]])
            start = end

    def _scattered(self, gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return this rank's rows of each gradient's mean, padded to the first rank's."""
        num_shares = self._groups.mesh.dp
        flat = torch.cat([_padded(part, num_shares).view(num_shares, -1) for part in gradients], 1)
        own = flat.new_empty(flat.shape[1])
        dist.reduce_scatter_tensor(own, flat.view(-1), group=self._groups.copies)
        own /= num_shares
        shapes = [(-(-part.shape[0] // num_shares), *part.shape[1:]) for part in gradients]
        parts = own.split([torch.Size(shape).numel() for shape in shapes])
        return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


def check_shareable(stages: Sequence[StageLayers], stack: LayerStack) -> None:
    """Refuse a stage that FSDP2 can't shard."""
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
    """Pad a gradient so that all ranks have equally many rows."""
    num_missing = -gradient.shape[0] % num_shares
    if not num_missing:
        return gradient.contiguous()
    return torch.cat([gradient, gradient.new_zeros(num_missing, *gradient.shape[1:])])


def _gradient_or_zeros(param: nn.Parameter) -> torch.Tensor:
    return torch.zeros_like(param) if param.grad is None else param.grad


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def clip_together_(
    max_norm: float,
    others: Sequence[nn.Module],
    held: Sequence[HeldLayers],
    groups: PipelineGroups,
) -> float:
    """Scale all dense gradients in place to a norm of at most ``max_norm``; return the norm.

    Collectives:
        An 8-byte all-reduce over all ranks, waited for.
    """
    gradients = [
        _local(param.grad)
        for part in others
        for param in part.parameters()
        if param.grad is not None
    ]
    square = torch.zeros((), dtype=torch.float64, device=groups.device)
    for gradient in gradients:
        square += gradient.double().square().sum()
    for layers in held:
        square += layers.square_norm()
        gradients += layers.gradients()
    dist.all_reduce(square, group=groups.everyone)
    norm = float(square.sqrt())
    if norm > max_norm:
        for gradient in gradients:
            gradient.mul_(max_norm / norm)
    return norm
