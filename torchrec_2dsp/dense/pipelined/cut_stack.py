"""`CutStack`: a `LayerStack` cut over ranks, its pipeline, and better cuts by measured times."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from torchrec_2dsp.dense.pipelined.engine import BusyTime, LayerStage
from torchrec_2dsp.dense.pipelined.held_layers import CopiedLayers, ShardedLayers
from torchrec_2dsp.dense.pipelined.layer_stack import LayerStack, StageLayers, layers_of_stages
from torchrec_2dsp.dense.pipelined.links import PipelineGroups
from torchrec_2dsp.dense.pipelined.moving_layers import (
    move_layers,
    moves_between,
    packed_layer,
)
from torchrec_2dsp.dense.pipelined.pipeline import Reduction, StackPipeline
from torchrec_2dsp.dense.pipelined.schedule import Schedule
from torchrec_2dsp.dense.thresholded_data_parallel import ThresholdedDataParallel
from torchrec_2dsp.errors import ConfigError
from torchrec_2dsp.plan.dense_plan import check_cuts, cut_layers


@dataclass(frozen=True)
class PipelineTimes:
    """A batch's times, averaged over all batches and pipelines.

    Example:
        >>> from torchrec_2dsp.dense.pipelined.cut_stack import PipelineTimes
        >>> times = PipelineTimes((3.0, 1.0), total_seconds=4.0, num_ranks=2)
        >>> times.bubble, times.imbalance
        (0.5, 1.5)
    """

    seconds_of_stage: tuple[float, ...]
    """Busy time per stage."""

    total_seconds: float
    """The schedule's time."""

    num_ranks: int
    """The number of ranks that work in parallel."""

    @property
    def bubble(self) -> float:
        """The share of the ranks' time spent waiting."""
        if not self.total_seconds:
            return 0.0
        return 1.0 - sum(self.seconds_of_stage) / (self.total_seconds * self.num_ranks)

    @property
    def imbalance(self) -> float:
        """The slowest stage's time relative to the mean; 1 if cuts are optimal."""
        mean = sum(self.seconds_of_stage) / len(self.seconds_of_stage)
        return max(self.seconds_of_stage) / mean if mean else 1.0


def gather_times(busy: BusyTime, num_stages: int, groups: PipelineGroups) -> PipelineTimes:
    """Gather all ranks' times.

    Collectives:
        An object all-gather over all ranks.
    """
    gathered: list[BusyTime] = [busy] * dist.get_world_size(groups.everyone)
    dist.all_gather_object(gathered, busy, group=groups.everyone)
    # All ranks of a stage count, including those that compute it together.
    num_each = groups.mesh.dp * groups.mesh.tp
    seconds = [
        sum(times.seconds_of_stage.get(stage, 0.0) / max(1, times.num_steps) for times in gathered)
        / num_each
        for stage in range(num_stages)
    ]
    totals = [times.total_seconds / max(1, times.num_steps) for times in gathered]
    return PipelineTimes(tuple(seconds), sum(totals) / len(totals), groups.mesh.pp)


def better_cuts(
    seconds: Sequence[float], cuts: Sequence[int], least_gain: float
) -> tuple[int, ...]:
    """Return cuts whose slowest stage takes less time, or the current ones.

    Example:
        >>> from torchrec_2dsp.dense.pipelined.cut_stack import better_cuts
        >>> better_cuts([1.0, 1.0, 1.0, 3.0], [2], least_gain=0.05)
        (3,)
        >>> better_cuts([1.0, 1.0, 1.0, 1.01], [2], least_gain=0.05)
        (2,)
    """
    num_layers, num_stages = len(seconds), len(cuts) + 1
    best = cut_layers(seconds, [0.0] * num_layers, num_stages)
    is_better = _slowest(seconds, best) <= (1 - least_gain) * _slowest(seconds, cuts)
    return best if is_better else tuple(cuts)


def _slowest(seconds: Sequence[float], cuts: Sequence[int]) -> float:
    ends = (0, *cuts, len(seconds))
    return max(sum(seconds[first:last]) for first, last in pairwise(ends))


class CutStack:
    """Runs a stack by the layers that its ranks hold, and moves layers when it is recut."""

    def __init__(
        self,
        name: str,
        stack: LayerStack,
        layers: Sequence[StageLayers],
        schedule: Schedule,
        groups: PipelineGroups,
        *,
        reduction: Reduction,
        wire: torch.dtype | None,
        gradients: ThresholdedDataParallel | None,
        plan: Mapping[str, ParallelStyle],
        mesh: DeviceMesh | None,
        is_sharded: bool,
    ) -> None:
        self._name, self._stack, self._layers = name, stack, list(layers)
        self._schedule, self._groups = schedule, groups
        self._reduction: Reduction = reduction
        self._wire = wire
        self._shares = mesh["copy"] if mesh is not None and is_sharded else None
        self._keeps_loss = schedule.num_stages - 1 in self._own_stages
        stack.keep_layers(
            self._own_layers,
            keeps_loss=self._keeps_loss,
            run=lambda *given: self.pipeline.run(*given),
        )
        names = {id(param): f"{name}.{key}" for key, param in stack.named_parameters()}
        self._thresholded = gradients and gradients.over_copies(
            names, groups.copies, groups.everyone, groups.device
        )
        if mesh is not None and groups.mesh.tp > 1:
            self._split(plan, mesh["tp"])
        self._build_pipeline()

    @property
    def cuts(self) -> tuple[int, ...]:
        """Each stage's first layer, without the first stage's."""
        return tuple(stage.numbers.start for stage in self._layers[1:])

    @property
    def _own_stages(self) -> tuple[int, ...]:
        return self._schedule.stages_of(self._groups.position)

    @property
    def _own_layers(self) -> list[int]:
        return [number for stage in self._own_stages for number in self._layers[stage].numbers]

    def _split(self, plan: Mapping[str, ParallelStyle], mesh: DeviceMesh) -> None:
        """Split this rank's layers over its tensor-parallel group."""
        here = {f"layers.{number}" for number in self._own_layers}
        held = {
            module: style
            for module, style in plan.items()
            if ".".join(module.split(".")[:2]) in here
            or (module.split(".")[0] == "loss" and self._keeps_loss)
        }
        parallelize_module(self._stack, mesh, held)

    def better_cuts(self, least_gain: float) -> tuple[int, ...]:
        """Return better cuts for the measured layer times, or the current ones.

        Collectives:
            An object all-gather.
        """
        own, group = self._layer_seconds(), self._groups.everyone
        gathered: list[dict[int, float]] = [own] * dist.get_world_size(group)
        dist.all_gather_object(gathered, own, group=group)
        times = [
            [of_rank[layer] for of_rank in gathered if layer in of_rank]
            for layer in range(len(self._stack.layers))
        ]
        if not any(map(sum, times)):
            raise ConfigError(
                "no layer has been timed since the model was cut, so no cuts can be chosen; train "
                "a batch, or give cuts"
            )
        seconds = [sum(of_layer) / len(of_layer) for of_layer in times]
        return better_cuts(seconds, self.cuts, least_gain)

    def prepare(
        self, cuts: Sequence[int], optimizer: torch.optim.Optimizer, model: nn.Module
    ) -> Callable[[], bool]:
        """Check cuts and pack the layers that would leave this rank; nothing moves yet.

        Returns:
            A function that moves the layers, and returns whether there are any.

        Collectives:
            The returned function's, as in `move_layers`.
        """
        num_layers = len(self._stack.layers)
        checked_cuts = check_cuts(cuts, num_layers, self._schedule.num_stages)
        layers = layers_of_stages(self._name, self._stack, checked_cuts, model)
        moves = moves_between(self.cuts, checked_cuts, num_layers, self._schedule)
        packed = {
            move.layer: packed_layer(self._name, self._stack, move.layer, optimizer)
            for move in moves
            if move.source == self._groups.position
        }

        def recut() -> bool:
            """Move layers and build a new pipeline; return whether any layer has moved."""
            move_layers(self._stack, moves, packed, optimizer, self._groups)
            self._layers = layers
            # The new pipeline's clocks start over: new times determine the next cuts.
            self._build_pipeline()
            return bool(moves)

        return recut

    def _layer_seconds(self) -> dict[int, float]:
        """Return a batch's time in each of this rank's layers, by layer number.

        Only forwards are timed layer by layer; a stage's whole time is divided in proportion.
        """
        busy, seconds = self.pipeline.busy, {}
        for number, stage in self._stages.items():
            whole = busy.seconds_of_stage.get(number, 0.0) / max(1, busy.num_steps)
            forward = sum(stage.forward_seconds)
            first = self._layers[number].numbers.start
            for layer, of_layer in enumerate(stage.forward_seconds, first):
                seconds[layer] = whole * of_layer / forward if forward else 0.0
        return seconds

    def _build_pipeline(self) -> None:
        last = self._schedule.num_stages - 1
        self._stages = {
            stage: LayerStage(
                self._layers[stage].name,
                [self._stack.layers[number] for number in self._layers[stage].numbers],
                self._stack.loss if stage == last else None,
            )
            for stage in self._own_stages
        }
        stages = list(self._stages.values())
        self.pipeline = StackPipeline(
            self._schedule,
            self._stages,
            CopiedLayers(stages, self._groups, self._thresholded)
            if self._shares is None
            else ShardedLayers(stages, self._groups, self._shares),
            self._groups,
            reduction=self._reduction,
            wire=self._wire,
        )
