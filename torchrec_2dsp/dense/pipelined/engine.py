"""`Engine`: runs what a schedule says that this rank does, with what other ranks send it."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch

from torchrec_2dsp.dense.pipelined.links import Inbox, Links, TensorKind
from torchrec_2dsp.dense.pipelined.schedule import Schedule, Work, WorkKind
from torchrec_2dsp.dense.pipelined.stage import LayerStage

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
        """
        Args:
            schedule: of the pipeline.
            stages: of this rank, with their numbers.
            place: where this rank is.
            forward: the links by which activations travel.
            backward: the links by which gradients travel.
            wire: how numbers travel between stages; `None` for how they are.
            device: where tensors are.
        """
        self._schedule, self._stages, self._place = schedule, dict(stages), place
        self._forward, self._backward = forward, backward
        self._wire, self._device = wire, device
        self.busy = BusyTime()
        """How long this rank has worked."""

    def run(self, batch: Batch, kinds: dict[int, TensorKind], *, trains: bool) -> Computed:
        """Work through the schedule.

        Args:
            batch: the samples.
            kinds: of the tensors between stages; what is missing is added.
            trains: whether there is a backward.

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
