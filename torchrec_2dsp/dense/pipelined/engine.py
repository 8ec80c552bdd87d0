"""`Engine`: runs this rank's part of a schedule, stage by stage.

Orders of work and the split backward come from `torch.distributed.pipelining`. Its stages need
equal micro-batches and scalar losses, cast nothing on the wire, and leave a failed rank's
neighbours waiting for the group's whole timeout.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any, TypeGuard

import torch
from torch import nn

from torchrec_2dsp._compat.pipelining import input_gradients, weight_gradients
from torchrec_2dsp.dense.pipelined.activations import Activations, TensorKind
from torchrec_2dsp.dense.pipelined.links import Inbox, Links, PipelineGroups
from torchrec_2dsp.dense.pipelined.schedule import Schedule, Work, WorkKind
from torchrec_2dsp.dense.thresholded import Thresholded
from torchrec_2dsp.errors import UnsupportedError


@dataclass
class _Graph:
    """A micro-batch's graph, from its forward to its backward."""

    leaves: list[torch.Tensor]
    """The input, then the targets that need gradients."""

    output: torch.Tensor
    rest: Any = None
    """The state between the two parts of a split backward."""


class LayerStage:
    """Runs a stage's layers on one micro-batch after another, forward and backward.

    Weight gradients accumulate in the parameters' ``grad``, without running hooks on them.
    """

    def __init__(self, name: str, layers: Sequence[nn.Module], loss: nn.Module | None) -> None:
        self.name = name
        self.layers, self.loss = list(layers), loss
        modules = [*self.layers, *([] if loss is None else [loss])]
        self.modules = nn.ModuleList(modules)
        """The layers, and the last stage's loss."""
        self.forward_seconds = [0.0] * len(self.layers)
        """Each layer's forward time in training, without the loss."""
        self._graphs: dict[int, _Graph] = {}

    @property
    def params(self) -> list[nn.Parameter]:
        """The trained parameters that the modules have now."""
        return [param for param in self.modules.parameters() if param.requires_grad]

    @property
    def is_trained(self) -> bool:
        """True if a layer in training mode has trained parameters."""
        return any(
            layer.training and any(param.requires_grad for param in layer.parameters())
            for layer in self.layers
        )

    @property
    def densities(self) -> list[float]:
        """The densities of `Thresholded` layers, on which the sizes of messages depend."""
        return [layer.density for layer in self.modules.modules() if isinstance(layer, Thresholded)]

    def forward(
        self,
        micro_batch: int,
        given: Activations,
        targets: Sequence[torch.Tensor] | None = None,
        *,
        drops: bool = False,
    ) -> Activations:
        """Run a micro-batch; keep its graph if gradients are enabled.

        The last stage's loss takes ``targets``. With ``drops`` the activations lack elements that
        a `Thresholded` at the end of the stage zeroes.
        """
        output, places, whole_dim = given.whole(), None, 0
        if output.requires_grad and output.is_leaf and _begins_in_place(self.layers[0]):
            output = output.clone()
        num_samples = given.values.shape[:1]
        started = time.perf_counter()
        for number, layer in enumerate(self.layers):
            if drops and number == len(self.layers) - 1 and _keeps_some(layer, output):
                whole_dim = output.shape[-1]
                output, places = layer.kept(output)
            else:
                output = layer(output)
            ended = time.perf_counter()
            if torch.is_grad_enabled():
                self.forward_seconds[number] += ended - started
            started = ended
        if targets is not None and self.loss is not None:
            output = self.loss(output, *targets)
            if not isinstance(output, torch.Tensor) or output.shape != num_samples:
                raise UnsupportedError(
                    f"the loss of {self.name} gives {_described(output)} for {num_samples[0]} "
                    "samples; let it give one number for each sample"
                )
        elif (
            not isinstance(output, torch.Tensor)
            or not output.is_floating_point()
            or output.shape[:1] != num_samples
        ):
            raise UnsupportedError(
                f"{self.name} gives {_described(output)} for {num_samples[0]} samples; let layers "
                "give one tensor of floating-point numbers, whose first dimension is the batch"
            )
        if torch.is_grad_enabled():
            leaves = [leaf for leaf in (given.values, *(targets or ())) if leaf.requires_grad]
            self._graphs[micro_batch] = _Graph(leaves, output)
        return Activations(output.detach(), places, whole_dim)

    def backward(self, micro_batch: int, gradient: torch.Tensor) -> list[torch.Tensor]:
        """Return input and target gradients; accumulate weight gradients."""
        return self._whole_backward(self._graphs.pop(micro_batch), gradient)

    def input_gradient(self, micro_batch: int, gradient: torch.Tensor) -> list[torch.Tensor]:
        """Return only input and target gradients; `weight_gradient` follows."""
        graph = self._graphs[micro_batch]
        if not graph.leaves or not graph.output.requires_grad:
            return self._whole_backward(graph, gradient)
        graph.rest = input_gradients(graph.output, gradient, graph.leaves, self.params)
        if all(leaf.grad is None for leaf in graph.leaves):
            # A layer detaches the input: the split backward would miss the weights behind it.
            graph.rest = None
            return self._whole_backward(graph, gradient)
        graph.output = graph.output.detach()
        return [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in graph.leaves]

    def weight_gradient(self, micro_batch: int) -> None:
        """Accumulate the weight gradients, after `input_gradient`."""
        graph = self._graphs.pop(micro_batch)
        if graph.rest is not None:
            weight_gradients(self.params, graph.rest)

    def forget(self) -> None:
        """Drop all graphs, after an error."""
        self._graphs.clear()

    def _whole_backward(self, graph: _Graph, gradient: torch.Tensor) -> list[torch.Tensor]:
        if not graph.output.requires_grad:
            return [torch.zeros_like(leaf) for leaf in graph.leaves]
        params = self.params
        gradients = torch.autograd.grad(
            graph.output, [*graph.leaves, *params], gradient, allow_unused=True
        )
        num_leaves = len(graph.leaves)
        for param, grad in zip(params, gradients[num_leaves:], strict=True):
            if grad is not None:
                param.grad = grad if param.grad is None else param.grad + grad
        return [
            torch.zeros_like(leaf) if grad is None else grad
            for leaf, grad in zip(graph.leaves, gradients, strict=False)
        ]


def _begins_in_place(layer: nn.Module) -> bool:
    """Return whether a layer's first module writes into its input, such as a ReLU."""
    first = next(module for module in layer.modules() if not any(True for _ in module.children()))
    return bool(getattr(first, "inplace", False))


def _keeps_some(layer: nn.Module, given: torch.Tensor) -> TypeGuard[Thresholded]:
    """Return whether a layer keeps equally many elements for each sample, and not all."""
    return (
        isinstance(layer, Thresholded)
        and layer.threshold == "exact"
        and given.dim() > 1
        and layer.num_kept(given.shape[-1]) < given.shape[-1]
    )


def _described(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return (
            f"a tensor of {str(value.dtype).removeprefix('torch.')} of shape {tuple(value.shape)}"
        )
    return f"a {type(value).__name__}"


_Key = tuple[int, int]
"""A boundary, named by the stage after it, and a micro-batch."""


@dataclass
class Batch:
    """All samples of a pipeline's ranks, as far as this rank has them."""

    sizes: list[int]
    """Samples per micro-batch."""

    inputs: torch.Tensor | None = None
    """`None` except on the first stage's ranks."""

    input_needs_gradient: bool = False
    targets: list[torch.Tensor] | None = None
    """`None` except on the last stage's ranks, and without targets."""

    targets_need_gradient: list[bool] = field(default_factory=list)
    weights: torch.Tensor | None = None
    """Each sample's loss weight, on the last stage's ranks."""


@dataclass
class Computed:
    """A rank's results for a batch, by micro-batch."""

    outputs: dict[int, torch.Tensor] = field(default_factory=dict)
    """Losses, or the last layer's outputs, on the last stage's ranks."""

    input_gradients: dict[int, torch.Tensor] = field(default_factory=dict)
    """Filled on the first stage's ranks."""

    target_gradients: dict[int, list[torch.Tensor]] = field(default_factory=dict)
    """Filled on the last stage's ranks."""


@dataclass
class BusyTime:
    """A rank's busy time, and its schedules' time."""

    num_steps: int = 0
    """The number of trained batches."""

    total_seconds: float = 0.0
    """The schedules' time, from the first piece of work to the last message."""

    seconds_of_stage: dict[int, float] = field(default_factory=dict)
    """Busy time per stage."""


@dataclass
class Engine:
    """Runs this rank's stages on a batch's micro-batches."""

    schedule: Schedule
    stages: Mapping[int, LayerStage]
    groups: PipelineGroups
    links: tuple[Links, Links]
    """Forward for activations, backward for gradients."""

    wire: torch.dtype | None
    busy: BusyTime = field(default_factory=BusyTime)

    def run(self, batch: Batch, kinds: dict[int, TensorKind], *, trains: bool) -> Computed:
        """Work through the schedule.

        Collectives:
            A send and a receive for each activation, and in training each gradient, that goes from
            a stage to another rank.
        """
        run = _Run(self, batch, kinds, trains=trains)
        started = time.perf_counter()
        try:
            for work in run.order[self.groups.position]:
                if batch.sizes[work.micro_batch]:
                    run.do(work)
            for links in self.links:
                links.finish()
        finally:
            for stage in self.stages.values():
                stage.forget()
        if trains:
            self.busy.num_steps += 1
            self.busy.total_seconds += time.perf_counter() - started
        return run.computed


class _Run:
    """One pass through a schedule."""

    def __init__(
        self, engine: Engine, batch: Batch, kinds: dict[int, TensorKind], *, trains: bool
    ) -> None:
        self._engine, self._batch, self._kinds = engine, batch, kinds
        self._groups, self._trains = engine.groups, trains
        self._schedule = engine.schedule
        self.order = engine.schedule.work if trains else engine.schedule.forwards
        self.computed = Computed()
        # Activations, then gradients, passed between this rank's own stages.
        self._own: tuple[dict[_Key, torch.Tensor], dict[_Key, torch.Tensor]] = ({}, {})
        starts = accumulate(batch.sizes, initial=0)
        self._rows = [slice(start, end) for start, end in pairwise(starts)]
        self._inboxes = {
            (position, is_gradient): self._inbox(position, is_gradient=is_gradient)
            for position in range(self._schedule.num_ranks)
            for is_gradient in (False, True)
        }

    def _inbox(self, position: int, *, is_gradient: bool) -> Inbox:
        """Build the inbox for a rank's messages in one direction."""
        expected = [
            (self._key(work), self._batch.sizes[work.micro_batch])
            for work in self.order[position]
            if self._batch.sizes[work.micro_batch]
            and self._sends(work, is_gradient)
            and self._receiver(work) == self._groups.position != position
        ]
        links, rank = self._engine.links[is_gradient], self._groups.rank_at(position)
        wire, device = self._engine.wire, self._groups.device
        return Inbox(links, rank, expected, self._kinds, wire, device, is_gradient=is_gradient)

    def _sends(self, work: Work, is_gradient: bool) -> bool:
        """Return whether work produces an activation, or a gradient, for another stage."""
        if is_gradient:
            is_backward = work.kind in (WorkKind.BACKWARD, WorkKind.INPUT_GRADIENT)
            return is_backward and work.stage > 0
        return work.kind is WorkKind.FORWARD and work.stage < self._schedule.num_stages - 1

    def _receiver(self, work: Work) -> int:
        """Return the position of the rank that waits for the result."""
        step = 1 if work.kind is WorkKind.FORWARD else -1
        return self._schedule.rank_of(work.stage + step)

    def _key(self, work: Work) -> _Key:
        boundary = work.stage + (1 if work.kind is WorkKind.FORWARD else 0)
        return boundary, work.micro_batch

    def do(self, work: Work) -> None:
        """Do a piece of work, and send the result."""
        stage = self._engine.stages[work.stage]
        if work.kind is WorkKind.FORWARD:
            self._do_forward(work, stage)
        elif work.kind is WorkKind.WEIGHT_GRADIENT:
            self._timed(work, lambda: stage.weight_gradient(work.micro_batch))
        else:
            self._do_backward(work, stage)

    def _do_forward(self, work: Work, stage: LayerStage) -> None:
        batch, rows, is_last = self._batch, self._rows[work.micro_batch], self._is_last(work)
        if work.stage == 0:
            assert batch.inputs is not None
            given = Activations(batch.inputs[rows]).leaf(needs_gradient=batch.input_needs_gradient)
        else:
            given = self._activations((work.stage, work.micro_batch)).leaf(needs_gradient=True)
        targets = None
        if is_last and batch.targets is not None:
            targets = [
                target[rows].detach().requires_grad_(needs)
                for target, needs in zip(batch.targets, batch.targets_need_gradient, strict=True)
            ]
        travels = not is_last and self._receiver(work) != self._groups.position
        with torch.set_grad_enabled(self._trains):
            output = self._timed(
                work,
                lambda: stage.forward(work.micro_batch, given, targets, drops=travels),
            )
        if travels:
            self._send(work, output.kind, output.message(self._engine.wire))
        elif is_last:
            self.computed.outputs[work.micro_batch] = output.values
        else:
            self._own[False][self._key(work)] = output.values

    def _do_backward(self, work: Work, stage: LayerStage) -> None:
        batch, number = self._batch, work.micro_batch
        if self._is_last(work):
            assert batch.weights is not None
            gradient = batch.weights[self._rows[number]].to(self.computed.outputs[number].dtype)
        else:
            gradient = self._gradient((work.stage + 1, number))
        backward = stage.backward if work.kind is WorkKind.BACKWARD else stage.input_gradient
        # A caller's autocast only applies to the forward.
        with torch.autocast(self._groups.device.type, enabled=False):
            gradients = self._timed(work, lambda: backward(number, gradient))
        if work.stage == 0:
            if batch.input_needs_gradient:
                self.computed.input_gradients[number] = gradients.pop(0)
        elif self._receiver(work) == self._groups.position:
            self._own[True][self._key(work)] = gradients.pop(0)
        else:
            gradient = gradients.pop(0)
            kind = self._kinds[self._key(work)[0]]
            self._send(work, kind, gradient.to(self._engine.wire or gradient.dtype))
        if self._is_last(work):
            self.computed.target_gradients[number] = gradients

    def _is_last(self, work: Work) -> bool:
        return work.stage == self._schedule.num_stages - 1

    def _activations(self, key: _Key) -> Activations:
        """Return the activations that a stage waits for."""
        if key in self._own[False]:
            return Activations(self._own[False].pop(key))
        message = self._inboxes[self._schedule.rank_of(key[0] - 1), False].take(key)
        return Activations.from_message(message, self._kinds[key[0]], self._engine.wire)

    def _gradient(self, key: _Key) -> torch.Tensor:
        """Return the gradient of the activations that a stage has produced."""
        if key in self._own[True]:
            return self._own[True].pop(key)
        message = self._inboxes[self._schedule.rank_of(key[0]), True].take(key)
        return message.to(self._kinds[key[0]].dtype)

    def _send(self, work: Work, kind: TensorKind, message: torch.Tensor) -> None:
        key, rank = self._key(work), self._groups.rank_at(self._receiver(work))
        links = self._engine.links[work.kind is not WorkKind.FORWARD]
        if key[0] not in self._kinds:
            self._kinds[key[0]] = kind
            links.send_kind(kind, rank)
        kind.check_like(self._kinds[key[0]], f"stage {work.stage}")
        links.send(message, rank)

    def _timed(self, work: Work, action: Any) -> Any:
        started = time.perf_counter()
        result = action()
        seconds = self._engine.busy.seconds_of_stage
        elapsed = time.perf_counter() - started
        if self._trains:
            seconds[work.stage] = seconds.get(work.stage, 0.0) + elapsed
        return result
