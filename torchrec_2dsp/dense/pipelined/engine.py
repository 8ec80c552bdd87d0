"""`LayerStage`: some layers of a `LayerStack`, and what their backward needs of micro-batches."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from torchrec_2dsp._compat.pipelining import input_gradients, weight_gradients
from torchrec_2dsp.dense.pipelined.links import Inbox, Links, TensorKind
from torchrec_2dsp.dense.pipelined.schedule import Schedule, Work, WorkKind
from torchrec_2dsp.errors import UnsupportedError


@dataclass
class _Graph:
    """What the forward of a micro-batch leaves for the backward."""

    leaves: list[torch.Tensor]
    """The input, then the targets that need gradients."""

    output: torch.Tensor
    """What came out, with its graph."""

    rest: Any = None
    """What the weights' part of a split backward needs."""


class LayerStage:
    """Runs layers on one micro-batch after the other, forward and backward.

    Gradients of weights are added up in the parameters' ``grad``, without running hooks on them.
    """

    def __init__(
        self,
        name: str,
        layers: Sequence[nn.Module],
        loss: nn.Module | None,
        *,
        splits_backward: bool,
    ) -> None:
        self.name = name
        """The name, for errors."""
        self.layers, self.loss = list(layers), loss
        modules = [*self.layers, *([] if loss is None else [loss])]
        self.modules = nn.ModuleList(modules)
        """The layers, and the loss of the last stage."""
        self.params: list[nn.Parameter] = []
        """The parameters that are trained."""
        self.take_params()
        self.forward_seconds = [0.0] * len(self.layers)
        """How long the forwards of each layer took in training, the loss not counted."""
        self._splits_backward = splits_backward
        self._graphs: dict[int, _Graph] = {}

    def take_params(self) -> None:
        """Look up the parameters anew, after the modules were given others."""
        self.params = [param for param in self.modules.parameters() if param.requires_grad]

    def forward(
        self, micro_batch: int, given: torch.Tensor, targets: Sequence[torch.Tensor] | None = None
    ) -> torch.Tensor:
        """Run a micro-batch; keep its graph where gradients are enabled."""
        output = given
        started = time.perf_counter()
        for number, layer in enumerate(self.layers):
            output = layer(output)
            ended = time.perf_counter()
            if torch.is_grad_enabled():
                self.forward_seconds[number] += ended - started
            started = ended
        if targets is not None and self.loss is not None:
            output = self.loss(output, *targets)
            self._check_losses(output, given.shape[0])
        else:
            self._check_output(output, given.shape[0])
        if torch.is_grad_enabled():
            # The split backward cuts outputs off from their graphs, which views don't allow.
            graph_output = output.clone() if self._splits_backward else output
            leaves = [leaf for leaf in (given, *(targets or ())) if leaf.requires_grad]
            self._graphs[micro_batch] = _Graph(leaves, graph_output)
        return output.detach()

    def backward(self, micro_batch: int, gradient: torch.Tensor) -> list[torch.Tensor]:
        """The gradients of a micro-batch's input and targets; those of weights are added up."""
        graph = self._graphs.pop(micro_batch)
        return self._whole_backward(graph, gradient)

    def input_gradient(self, micro_batch: int, gradient: torch.Tensor) -> list[torch.Tensor]:
        """The gradients of a micro-batch's input and targets alone; `weight_gradient` follows."""
        graph = self._graphs[micro_batch]
        if not graph.leaves or not graph.output.requires_grad:
            return self._whole_backward(graph, gradient)
        graph.rest = input_gradients(graph.output, gradient, graph.leaves, self.params)
        return [_gradient_of(leaf) for leaf in graph.leaves]

    def weight_gradient(self, micro_batch: int) -> None:
        """Add up the gradients of the weights, after `input_gradient`."""
        graph = self._graphs.pop(micro_batch)
        if graph.rest is not None:
            weight_gradients(self.params, graph.rest)

    def forget(self) -> None:
        """Drop all graphs, after an error."""
        self._graphs.clear()

    def _whole_backward(self, graph: _Graph, gradient: torch.Tensor) -> list[torch.Tensor]:
        if not graph.output.requires_grad:
            return [torch.zeros_like(leaf) for leaf in graph.leaves]
        gradients = torch.autograd.grad(
            graph.output, [*graph.leaves, *self.params], gradient, allow_unused=True
        )
        num_leaves = len(graph.leaves)
        for param, grad in zip(self.params, gradients[num_leaves:], strict=True):
            if grad is not None:
                param.grad = grad if param.grad is None else param.grad + grad
        return [
            torch.zeros_like(leaf) if grad is None else grad
            for leaf, grad in zip(graph.leaves, gradients, strict=False)
        ]

    def _check_output(self, output: Any, num_samples: int) -> None:
        if (
            isinstance(output, torch.Tensor)
            and output.is_floating_point()
            and output.shape[:1] == (num_samples,)
        ):
            return
        raise UnsupportedError(
            f"{self.name} gives {_described(output)} for {num_samples} samples; let layers give "
            "one tensor of floating-point numbers, whose first dimension is the batch"
        )

    def _check_losses(self, losses: Any, num_samples: int) -> None:
        if isinstance(losses, torch.Tensor) and losses.shape == (num_samples,):
            return
        raise UnsupportedError(
            f"the loss of {self.name} gives {_described(losses)} for {num_samples} samples; let it "
            "give one number for each sample"
        )


def _gradient_of(leaf: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad


def _described(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return (
            f"a tensor of {str(value.dtype).removeprefix('torch.')} of shape {tuple(value.shape)}"
        )
    return f"a {type(value).__name__}"


_Key = tuple[int, int]
"""The stage after a boundary between two stages, and a micro-batch."""


@dataclass
class Batch:
    """The samples of all ranks of a pipeline, as far as this rank has them."""

    sizes: list[int]
    """How many samples each micro-batch has."""

    inputs: torch.Tensor | None = None
    """On ranks of the first stage, what it is given."""

    input_needs_gradient: bool = False
    """Whether a rank wants the gradient of its inputs."""

    targets: list[torch.Tensor] | None = None
    """On ranks of the last stage, the targets; `None` if there are none."""

    targets_need_gradient: list[bool] = field(default_factory=list)
    """Whether a rank wants the gradient of its part of each target."""

    weights: torch.Tensor | None = None
    """On ranks of the last stage, by what the loss of each sample counts."""


@dataclass
class Computed:
    """What a rank has computed of a batch, by micro-batch."""

    outputs: dict[int, torch.Tensor] = field(default_factory=dict)
    """On ranks of the last stage, the losses, or what came out of the last layer."""

    input_gradients: dict[int, torch.Tensor] = field(default_factory=dict)
    """On ranks of the first stage, the gradients of the inputs."""

    target_gradients: dict[int, list[torch.Tensor]] = field(default_factory=dict)
    """On ranks of the last stage, the gradients of the targets that need them."""


@dataclass
class BusyTime:
    """How long a rank has worked, and how long its schedules took."""

    num_steps: int = 0
    """How many batches were trained."""

    total_seconds: float = 0.0
    """How long the schedules took, from the first piece of work to the last message."""

    seconds_of_stage: dict[int, float] = field(default_factory=dict)
    """How long the rank worked on each of its stages."""


@dataclass(frozen=True)
class PipelinePlace:
    """Where a rank is in its pipeline."""

    position: int
    """Which of the pipeline's ranks it is, among those of its tensor-parallel place."""

    rank_of: Sequence[int]
    """The rank, in the process groups of the pipeline, of each position."""


class Engine:
    """Runs the stages of this rank on the micro-batches of a batch."""

    def __init__(
        self,
        schedule: Schedule,
        stages: Sequence[tuple[int, LayerStage]],
        place: PipelinePlace,
        forward: Links,
        backward: Links,
        wire: torch.dtype | None,
        device: torch.device,
    ) -> None:
        self._schedule, self._stages, self._place = schedule, dict(stages), place
        self._forward, self._backward = forward, backward
        self._wire, self._device = wire, device
        self.busy = BusyTime()
        """How long this rank has worked."""

    def run(self, batch: Batch, kinds: dict[int, TensorKind], *, trains: bool) -> Computed:
        """Work through the schedule.

        Collectives:
            Sends and receives of activations, and of gradients if there is a backward; of each
            that leaves a stage for another rank, one.
        """
        run = _Run(self, batch, kinds, trains=trains)
        started = time.perf_counter()
        order = self._schedule.work if trains else self._schedule.forwards
        for work in order[self._place.position]:
            if batch.sizes[work.micro_batch]:
                run.do(work)
        self._forward.finish()
        self._backward.finish()
        if trains:
            self.busy.num_steps += 1
            self.busy.total_seconds += time.perf_counter() - started
        return run.computed

    def forget(self) -> None:
        """Drop what an interrupted schedule has left."""
        for stage in self._stages.values():
            stage.forget()


class _Run:
    """One pass through a schedule."""

    def __init__(
        self, engine: Engine, batch: Batch, kinds: dict[int, TensorKind], *, trains: bool
    ) -> None:
        self._engine, self._batch, self._kinds = engine, batch, kinds
        self._schedule, self._trains = engine._schedule, trains
        self.computed = Computed()
        # What one stage of this rank hands to another one: activations, then gradients.
        self._own: tuple[dict[_Key, torch.Tensor], dict[_Key, torch.Tensor]] = ({}, {})
        starts = [0]
        for size in batch.sizes:
            starts.append(starts[-1] + size)
        self._rows = [slice(start, end) for start, end in pairwise(starts)]
        self._inboxes = {
            (position, is_gradient): self._inbox(position, is_gradient=is_gradient)
            for position in range(self._schedule.num_ranks)
            for is_gradient in (False, True)
        }

    def _inbox(self, position: int, *, is_gradient: bool) -> Inbox:
        """What a rank of the pipeline sends in one direction."""
        order = self._schedule.work if self._trains else self._schedule.forwards
        expected = [
            (self._key(work), self._batch.sizes[work.micro_batch])
            for work in order[position]
            if self._batch.sizes[work.micro_batch]
            and self._sends(work, is_gradient)
            and self._receiver(work) == self._engine._place.position != position
        ]
        links = self._engine._backward if is_gradient else self._engine._forward
        rank = self._engine._place.rank_of[position]
        return Inbox(links, rank, expected, self._kinds, self._engine._wire, self._engine._device)

    def _sends(self, work: Work, is_gradient: bool) -> bool:
        """Whether a piece of work makes an activation, or a gradient, for another stage."""
        if is_gradient:
            is_backward = work.kind in (WorkKind.BACKWARD, WorkKind.INPUT_GRADIENT)
            return is_backward and work.stage > 0
        return work.kind is WorkKind.FORWARD and work.stage < self._schedule.num_stages - 1

    def _receiver(self, work: Work) -> int:
        """The position of the rank that is waiting for a piece of work."""
        step = 1 if work.kind is WorkKind.FORWARD else -1
        return self._schedule.rank_of(work.stage + step)

    def _key(self, work: Work) -> _Key:
        """The boundary at which a piece of work hands something over, and its micro-batch."""
        boundary = work.stage + (1 if work.kind is WorkKind.FORWARD else 0)
        return boundary, work.micro_batch

    def do(self, work: Work) -> None:
        """Do a piece of work, and send what comes out of it."""
        stage = self._engine._stages[work.stage]
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
            given = _leaf(batch.inputs[rows], needs_gradient=batch.input_needs_gradient)
        else:
            given = _leaf(self._receive((work.stage, work.micro_batch), False), needs_gradient=True)
        targets = None
        if is_last and batch.targets is not None:
            targets = [
                _leaf(target[rows], needs_gradient=needs)
                for target, needs in zip(batch.targets, batch.targets_need_gradient, strict=True)
            ]
        with torch.set_grad_enabled(self._trains):
            output = self._timed(work, lambda: stage.forward(work.micro_batch, given, targets))
        if is_last:
            self.computed.outputs[work.micro_batch] = output
        else:
            self._send(work, output)

    def _do_backward(self, work: Work, stage: LayerStage) -> None:
        batch, number = self._batch, work.micro_batch
        if self._is_last(work):
            assert batch.weights is not None
            gradient = batch.weights[self._rows[number]].to(self.computed.outputs[number].dtype)
        else:
            gradient = self._receive((work.stage + 1, number), True)
        backward = stage.backward if work.kind is WorkKind.BACKWARD else stage.input_gradient
        # A caller's autocast is for the forward.
        with torch.autocast(self._engine._device.type, enabled=False):
            gradients = self._timed(work, lambda: backward(number, gradient))
        if work.stage == 0:
            if batch.input_needs_gradient:
                self.computed.input_gradients[number] = gradients.pop(0)
        else:
            self._send(work, gradients.pop(0))
        if self._is_last(work):
            self.computed.target_gradients[number] = gradients

    def _is_last(self, work: Work) -> bool:
        return work.stage == self._schedule.num_stages - 1

    def _receive(self, key: _Key, is_gradient: bool) -> torch.Tensor:
        own = self._own[is_gradient]
        if key in own:
            return own.pop(key)
        sender = self._schedule.rank_of(key[0] if is_gradient else key[0] - 1)
        return self._inboxes[sender, is_gradient].take(key)

    def _send(self, work: Work, tensor: torch.Tensor) -> None:
        key, receiver = self._key(work), self._receiver(work)
        is_gradient = work.kind is not WorkKind.FORWARD
        if receiver == self._engine._place.position:
            self._own[is_gradient][key] = tensor
            return
        links = self._engine._backward if is_gradient else self._engine._forward
        rank = self._engine._place.rank_of[receiver]
        if key[0] not in self._kinds:
            self._kinds[key[0]] = TensorKind.of(tensor)
            links.send_kind(self._kinds[key[0]], rank)
        links.send(tensor.to(self._engine._wire or tensor.dtype), rank)

    def _timed(self, work: Work, action: Any) -> Any:
        started = time.perf_counter()
        result = action()
        seconds = self._engine.busy.seconds_of_stage
        elapsed = time.perf_counter() - started
        if self._trains:
            seconds[work.stage] = seconds.get(work.stage, 0.0) + elapsed
        return result


def _leaf(tensor: torch.Tensor, *, needs_gradient: bool) -> torch.Tensor:
    """A tensor without a graph, of which a backward may ask the gradient."""
    return tensor.detach().requires_grad_(needs_gradient)
