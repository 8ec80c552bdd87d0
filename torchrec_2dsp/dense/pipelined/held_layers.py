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

from torchrec_2dsp.comms.collectives import broadcast_first
from torchrec_2dsp.dense.pipelined.engine import LayerStage
from torchrec_2dsp.dense.pipelined.layer_stack import LayerStack, StageLayers
from torchrec_2dsp.dense.pipelined.links import PipelineGroups
from torchrec_2dsp.dense.sharded_parts import check_shareable
from torchrec_2dsp.dense.thresholded_gradients import ThresholdedGradients


class HeldLayers(ABC):
    """The trained parameters and buffers in a rank's stages."""

    def __init__(
        self, stages: Sequence[LayerStage], groups: PipelineGroups, num_equal: int
    ) -> None:
        self._stages, self._groups = list(stages), groups
        self._num_equal = num_equal
        """The number of pipelines that hold the same parameters."""

    @property
    def params(self) -> list[nn.Parameter]:
        """The trained parameters that this rank holds now: inside `whole`, those of its stages."""
        return [param for stage in self._stages for param in stage.params]

    @abstractmethod
    def whole(self) -> AbstractContextManager[None]:
        """Return a context in which the stages can run."""

    @contextmanager
    def gradients_set_aside(self) -> Iterator[list[torch.Tensor]]:
        """Enter `whole` without gradients; yield a list that receives the gradients computed in it.

        It receives zeros for parameters that the batch hasn't used. Its last tensor, on the CPU, is
        True for the other parameters.
        """
        computed: list[torch.Tensor] = []
        with self.whole():
            params = self.params
            before = [param.grad for param in params]
            for param in params:
                param.grad = None
            try:
                yield computed
                computed += [self._set_aside(_gradient_or_zeros(param), param) for param in params]
                have_gradients = [param.grad is not None for param in params]
                computed.append(torch.tensor(have_gradients, dtype=torch.bool))
            finally:
                for param, gradient in zip(params, before, strict=True):
                    param.grad = gradient

    def _set_aside(self, gradient: torch.Tensor, param: nn.Parameter) -> torch.Tensor:
        """Return the part of a gradient that `add_mean` receives."""
        return gradient

    @abstractmethod
    def add_mean(self, gradients: Sequence[torch.Tensor], factor: float) -> None:
        """Add the mean over all pipelines, times ``factor``, to the gradients held here.

        A parameter that no pipeline has used gets no gradient, as in one process.
        """

    def broadcast_buffers(self) -> None:
        """Give all pipelines the first one's buffers, as DDP does.

        Collectives:
            A broadcast per buffer.
        """
        for stage in self._stages if self._groups.mesh.dp > 1 else ():
            for buffer in stage.modules.buffers():
                broadcast_first(buffer, self._groups.copies)

    def gradients(self) -> list[torch.Tensor]:
        """Return the gradients held here, as local tensors."""
        return [_local_part(param.grad, param) for param in self.params if param.grad is not None]

    def square_norm(self) -> torch.Tensor:
        """Return this rank's part of all gradients' squared norm.

        Each pipeline with equal parameters counts its share, as does each tensor-parallel rank
        for parameters that aren't split.
        """
        total = torch.zeros((), dtype=torch.float64, device=self._groups.device)
        for param in self.params:
            if param.grad is not None:
                square = square_sum(_local_part(param.grad, param))
                total += square if _is_split(param) else square / self._groups.mesh.tp
        return total / self._num_equal


def square_sum(gradient: torch.Tensor) -> torch.Tensor:
    """Return a gradient's squared norm, over real and imaginary parts."""
    return gradient.abs().double().square().sum()


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

    @torch.no_grad()
    def add_mean(self, gradients: Sequence[torch.Tensor], factor: float) -> None:
        """Add the mean over the copies, times ``factor``, to the parameters' gradients.

        Collectives:
            An all-reduce per data type, waited for; or `ThresholdedGradients.means`'.
        """
        *gradients, is_used = gradients
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
        is_used_anywhere = is_used.clone()
        for numbers in by_type.values() if self._num_equal > 1 else ():
            use = is_used[numbers].to(local[numbers[0]])
            flat = torch.cat([*(local[number].reshape(-1) for number in numbers), use])
            dist.all_reduce(flat, group=self._groups.copies)
            flat /= self._num_equal
            *parts, use = flat.split([*(local[number].numel() for number in numbers), len(use)])
            for number, part in zip(numbers, parts, strict=True):
                local[number] = part.view(local[number].shape)
            is_used_anywhere[numbers] = _anywhere(is_used[numbers], use)
        _add_used_(self.params, local, is_used_anywhere)


class _Shares(nn.Module):
    """Holds a stage's modules, whose parameters FSDP2 gathers and frees on demand.

    FSDP2 would gather in a module's forward, and reduce in each backward. A stage runs its layers
    many times per batch, so they aren't wrapped, and nobody calls this module.
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
            yield
        finally:
            for stage in shares:
                stage.reshard()

    def _set_aside(self, gradient: torch.Tensor, param: nn.Parameter) -> torch.Tensor:
        """Return this rank's part of a gradient split over the tensor-parallel group."""
        return _local_part(gradient, param)

    @torch.no_grad()
    def add_mean(self, gradients: Sequence[torch.Tensor], factor: float) -> None:
        """Add the mean over the pipelines, times ``factor``, to this rank's sharded gradients.

        Collectives:
            A reduce-scatter per stage over the pipelines, waited for.
        """
        *gradients, is_used = gradients
        start = 0
        for stage in self._stages:
            end = start + len(stage.params)
            if start < end:
                own = [part * factor for part in gradients[start:end]]
                scattered, is_used_anywhere = self._scattered(own, is_used[start:end])
                rows = [
                    share[: local(param).shape[0]]
                    for param, share in zip(stage.params, scattered, strict=True)
                ]
                _add_used_(stage.params, rows, is_used_anywhere)
            start = end

    def _scattered(
        self, gradients: Sequence[torch.Tensor], is_used: torch.Tensor
    ) -> tuple[list[torch.Tensor], torch.Tensor]:
        """Return this rank's rows of each gradient's mean, padded to the first rank's.

        Also return which parameters any rank has used.
        """
        num_shares = self._groups.mesh.dp
        columns = [_padded(part, num_shares).view(num_shares, -1) for part in gradients]
        use = is_used.to(columns[0]).expand(num_shares, -1)
        flat = torch.cat([*columns, use], 1)
        own = flat.new_empty(flat.shape[1])
        dist.reduce_scatter_single(own, flat.view(-1), group=self._groups.copies)
        own /= num_shares
        shapes = [(-(-part.shape[0] // num_shares), *part.shape[1:]) for part in gradients]
        sizes = [torch.Size(shape).numel() for shape in shapes]
        *parts, use = own.split([*sizes, len(is_used)])
        shares = [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]
        return shares, _anywhere(is_used, use)


def check_stages_shareable(stages: Sequence[StageLayers], stack: LayerStack) -> None:
    """Refuse a stage that FSDP2 can't shard."""
    for stage in stages:
        modules = [stack.layers[number] for number in stage.numbers]
        if stage is stages[-1]:
            modules.append(stack.loss)
        params = [param for module in modules for param in module.parameters()]
        check_shareable(stage.name, params, "fully_shard=True", "cuts that part them")


def _padded(gradient: torch.Tensor, num_shares: int) -> torch.Tensor:
    """Pad a gradient so that all ranks have equally many rows."""
    num_missing = -gradient.shape[0] % num_shares
    if not num_missing:
        return gradient.contiguous()
    return torch.cat([gradient, gradient.new_zeros(num_missing, *gradient.shape[1:])])


def _gradient_or_zeros(param: nn.Parameter) -> torch.Tensor:
    return torch.zeros_like(param) if param.grad is None else param.grad


def _anywhere(is_used: torch.Tensor, use: torch.Tensor) -> torch.Tensor:
    """Return which parameters any rank has used; ``use`` is this rank's, summed over ranks."""
    return is_used if is_used.all() else (use.real > 0).cpu()


def _add_used_(
    params: Sequence[nn.Parameter], gradients: Sequence[torch.Tensor], is_used: torch.Tensor
) -> None:
    """Add gradients to used parameters, in place; to all parameters if nobody had samples."""
    is_idle = not is_used.any()
    for param, gradient, has_gradient in zip(params, gradients, is_used.tolist(), strict=True):
        if has_gradient or is_idle:
            _add_gradient_(param, gradient)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor that may be split."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
