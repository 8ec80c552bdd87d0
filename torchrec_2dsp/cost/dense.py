"""`DenseCostModel`: predict a dense part's step, layer by layer, for each way to run it. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from pydantic import BaseModel, ConfigDict, Field

from torchrec_2dsp.cost.calibration import Calibration, Kernels
from torchrec_2dsp.cost.collectives import Span, Traffic, all_gather, all_reduce, reduce_scatter
from torchrec_2dsp.cost.step_cost import NamedParts, before_last_bucket
from torchrec_2dsp.errors import CalibrationError, ConfigError
from torchrec_2dsp.plan.dense_plan import DenseKind, DensePlan

_FLOAT_BYTES = 4
_CALLS = 6
"""The number of matrix products in a block's forward: keys, queries and values together, attention,
its output, and two in the feed-forward part."""
_BACKWARD = 2
"""The number of products in a product's backward."""
_KEPT_VECTORS = 8
"""The number of vectors of a block's width kept per item for the backward, beside the feed-forward
part's and attention's."""


@dataclass(frozen=True, kw_only=True)
class LayerWork:
    """A step's work with one layer, on one rank."""

    name: str

    forward_s: float
    """Seconds of the forward per sample."""

    backward_s: float
    """Seconds of the backward per sample, with everything except the optimizer."""

    call_s: float = 0.0
    """Seconds of a forward and a backward in addition to their samples'."""

    parameter_bytes: float = 0.0

    output_bytes: float = 0.0
    """Output bytes per sample."""

    kept_bytes: float = 0.0
    """Bytes kept for the backward, per sample."""

    sums: int = 0
    """The output's sums over the ranks that compute the layer together, in a forward and again in a
    backward; 0 for a layer that can't be split."""

    def seconds(self, num_samples: float, *, tp: int = 1) -> float:
        """Return the seconds of a forward and a backward, if ``tp`` ranks share the layer."""
        shared_by = tp if self.sums else 1
        return self.call_s + num_samples * (self.forward_s + self.backward_s) / shared_by


@dataclass(frozen=True, kw_only=True)
class DenseLayers:
    """A dense part's layers in order, and the input bytes at both ends."""

    layers: tuple[LayerWork, ...]
    """The layers; the loss belongs to the last one."""

    input_bytes: float
    """The first layer's input bytes per sample."""

    target_bytes: float
    """The loss's additional input bytes per sample."""

    state_per_weight: float = 2.0
    """The optimizer state's numbers per weight: 2 with Adam, 1 with AdaGrad, 0 with SGD."""

    def __post_init__(self) -> None:
        if not self.layers:
            raise ConfigError("a dense part without layers takes no time; name at least one")

    @property
    def parameter_bytes(self) -> float:
        """All layers' parameter bytes."""
        return sum(layer.parameter_bytes for layer in self.layers)

    @property
    def can_be_split(self) -> bool:
        """True if ranks can compute a layer together."""
        return any(layer.sums for layer in self.layers)

    def stages(self, cuts: Sequence[int]) -> list[tuple[LayerWork, ...]]:
        """Return each stage's layers; ``cuts`` are the first layers of all stages but the first."""
        ends = [*cuts, len(self.layers)]
        return [self.layers[start:end] for start, end in zip([0, *cuts], ends, strict=True)]


class Transformer(BaseModel):
    """A pre-norm transformer over item sequences that hasn't been built or measured yet."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    num_blocks: int = Field(ge=1)
    """The number of blocks."""

    dim: int = Field(ge=1)
    """An item's width between blocks."""

    length: int = Field(ge=1)
    """The number of items per sample."""

    expansion: int = Field(default=4, ge=1)
    """The feed-forward part's inner width divided by its outer one."""

    num_targets: int = Field(default=1, ge=0)
    """The loss's vectors per item: the next item, and the negatives."""

    def layers(self, kernels: Kernels, *, state_per_weight: float = 2.0) -> DenseLayers:
        """Predict the blocks' work from the cost of matrix products.

        Raises:
            CalibrationError: matrix products weren't measured.
        """
        if kernels.matmul is None:
            raise CalibrationError(
                "the calibration is from before products of matrices were measured, so it can't "
                "say what a dense part takes; make one with the calibrate command"
            )
        weights = (4 + 2 * self.expansion) * self.dim**2
        attention = 4 * self.length * self.dim
        operations = self.length * (2 * weights + attention)
        inside = _KEPT_VECTORS + self.expansion
        item_bytes = float(_FLOAT_BYTES * self.length * self.dim)
        moved_bytes = item_bytes * inside
        forward_s = kernels.matmul.seconds(float(operations), moved_bytes)
        block = LayerWork(
            name="block",
            forward_s=forward_s,
            backward_s=_BACKWARD * forward_s,
            call_s=(1 + _BACKWARD) * _CALLS * kernels.matmul.base_s,
            parameter_bytes=float(_FLOAT_BYTES * weights),
            output_bytes=item_bytes,
            kept_bytes=moved_bytes,
            # Attention's output, and the feed-forward part's.
            sums=2,
        )
        return DenseLayers(
            layers=(block,) * self.num_blocks,
            input_bytes=item_bytes,
            target_bytes=self.num_targets * item_bytes,
            state_per_weight=state_per_weight,
        )


@dataclass(frozen=True, kw_only=True)
class DenseCost(NamedParts):
    """A dense part's seconds in a step."""

    unit: ClassVar[str] = "s"

    compute_s: float = 0.0
    """The mean rank's forward and backward."""

    waiting_s: float = 0.0
    """The time in which a pipeline's mean rank is idle: at its start and end, and in
    stages that are faster than the slowest."""

    gather_s: float = 0.0
    """Gathering parameters before their layers run."""

    gradients_s: float = 0.0
    """Summing gradients over ranks."""

    activations_s: float = 0.0
    """The exchange of activations between ranks that compute layers together."""

    hand_off_s: float = 0.0
    """Sending inputs, targets and activations from stage to stage, and their gradients."""

    update_s: float = 0.0
    """The optimizer's pass over the weights that a rank keeps."""

    hidden_s: float = 0.0
    """The time hidden behind compute, as a number that isn't above zero."""

    @property
    def total_s(self) -> float:
        """The sum of all parts."""
        return sum(seconds for _, seconds in self.parts())

    @property
    def busy_share(self) -> float:
        """The share of time that the mean rank computes."""
        return self.compute_s / self.total_s if self.total_s else 1.0


@dataclass(frozen=True)
class DenseCostModel:
    """Predicts a step's dense part from measured layers."""

    calibration: Calibration

    local_world_size: int
    """The number of ranks on a host."""

    def step_cost(self, work: DenseLayers, plan: DensePlan, batch_size: int) -> DenseCost:
        """Predict the step if ranks run the layers by a plan, with ``batch_size`` samples each."""
        if plan.kind is DenseKind.DDP:
            return self._ddp(work, plan, batch_size)
        if plan.kind is DenseKind.FULLY_SHARDED:
            shares = self._shares_cost(work.layers, plan, work.parameter_bytes)
            return replace(shares, compute_s=_compute_s(work.layers, batch_size))
        if plan.kind is DenseKind.TENSOR_PARALLEL:
            return self._tensor_parallel(work, plan, batch_size)
        return self._pipelined(work, plan, batch_size)

    def memory_bytes(self, work: DenseLayers, plan: DensePlan, batch_size: int) -> float:
        """Predict the fullest rank's bytes: weights, gradients, optimizer state, activations."""
        per_weight = 2 + work.state_per_weight
        mesh = plan.mesh
        if plan.kind is DenseKind.PIPELINED:
            samples = mesh.pipeline_size * batch_size / plan.num_micro_batches
            # Shards are joined by whole weights and gradients while a batch is in the schedule.
            per_held = per_weight / mesh.dp + 2 if plan.fully_shard else per_weight
            # The last stage has one micro-batch in flight, the first as many as there are stages.
            return max(
                per_held * _held_bytes(layers, mesh.tp)
                + min(plan.num_micro_batches, mesh.pp - stage)
                * samples
                * _kept_bytes(layers, mesh.tp)
                for stage, layers in enumerate(work.stages(plan.cuts))
            )
        shards = {
            DenseKind.DDP: 1,
            DenseKind.FULLY_SHARDED: mesh.world_size // plan.num_copies,
            DenseKind.TENSOR_PARALLEL: mesh.dp // plan.num_copies,
        }[plan.kind]
        largest = max(layer.parameter_bytes for layer in work.layers) if shards > 1 else 0.0
        return (
            per_weight * _held_bytes(work.layers, mesh.tp) / shards
            + largest
            + mesh.tp * batch_size * _kept_bytes(work.layers, mesh.tp)
        )

    def _ddp(self, work: DenseLayers, plan: DensePlan, batch_size: int) -> DenseCost:
        span = Span.of_world(plan.mesh.world_size, self.local_world_size)
        gradients_s = self._all_reduce_s(span, work.parameter_bytes)
        backward_s = sum(batch_size * layer.backward_s for layer in work.layers)
        return DenseCost(
            compute_s=_compute_s(work.layers, batch_size),
            gradients_s=gradients_s,
            update_s=self._update_s(work.parameter_bytes),
            hidden_s=self._hidden_s(
                before_last_bucket(gradients_s, work.parameter_bytes), backward_s
            ),
        )

    def _tensor_parallel(self, work: DenseLayers, plan: DensePlan, batch_size: int) -> DenseCost:
        mesh = plan.mesh
        joint, together = mesh.tp * batch_size, self._span(mesh.groups())
        both_ends = batch_size * (work.input_bytes + work.target_bytes)
        ends_s = self.calibration.collectives.all_gather.seconds(
            together, all_gather(together, both_ends)
        )
        return replace(
            self._shares_cost(work.layers, plan, _held_bytes(work.layers, mesh.tp)),
            compute_s=_compute_s(work.layers, joint, mesh.tp),
            activations_s=ends_s + self._sums_s(together, work.layers, joint),
        )

    def _shares_cost(
        self, layers: Sequence[LayerWork], plan: DensePlan, held_bytes: float
    ) -> DenseCost:
        """Price sharded parameters: messages inside copies and between them, and the optimizer."""
        world, tp = plan.mesh.world_size, plan.mesh.tp
        size = world // plan.num_copies
        shares = self._span(
            [
                range(start + place, start + size, tp)
                for start in range(0, world, size)
                for place in range(tp)
            ]
        )
        copies = self._span([range(place, world, size) for place in range(size)])
        # A message per layer: parameters are gathered twice, gradients are scattered.
        collectives = self.calibration.collectives
        share = held_bytes / len(layers)
        gathered = all_gather(shares, share / shares.num_ranks)
        scattered = reduce_scatter(shares, share)
        scatter_s = len(layers) * collectives.reduce_scatter.seconds(shares, scattered)
        kept_bytes = held_bytes * tp / size
        return DenseCost(
            gather_s=2 * len(layers) * collectives.all_gather.seconds(shares, gathered),
            gradients_s=scatter_s + self._all_reduce_s(copies, kept_bytes),
            update_s=self._update_s(kept_bytes),
        )

    def _pipelined(self, work: DenseLayers, plan: DensePlan, batch_size: int) -> DenseCost:
        mesh, num_parts = plan.mesh, plan.num_micro_batches
        all_samples = mesh.pipeline_size * batch_size
        samples = all_samples / num_parts
        stages = work.stages(plan.cuts)
        by_stage = [_compute_s(layers, samples, mesh.tp) for layers in stages]
        together = self._span(mesh.groups())
        summed = [self._sums_s(together, layers, samples) for layers in stages]
        compute_s = num_parts * sum(by_stage) / mesh.pp
        slots = [compute + sums for compute, sums in zip(by_stage, summed, strict=True)]
        activations_s = num_parts * sum(summed) / mesh.pp
        through_s = sum(slots) + (num_parts - 1) * max(slots)
        # The widest cut between two stages determines a hand-off's time.
        widest = max(layers[-1].output_bytes for layers in stages[:-1])
        line = self._span(mesh.pipelines())
        once_s = 2 * self._handed_s(line, samples * widest)
        ends_s = 2 * self._handed_s(
            line, all_samples * (work.input_bytes + work.target_bytes), num_messages=2
        )
        held_bytes = max(_held_bytes(layers, mesh.tp) for layers in stages)
        return replace(
            self._copies_cost(plan, held_bytes),
            compute_s=compute_s,
            waiting_s=through_s - compute_s - activations_s,
            activations_s=activations_s,
            hand_off_s=ends_s + (num_parts + mesh.pp - 2) * once_s,
            hidden_s=self._hidden_s((num_parts - 1) * once_s, compute_s),
        )

    def _copies_cost(self, plan: DensePlan, held_bytes: float) -> DenseCost:
        """Price the messages of pipelines that hold the same layers, and the optimizer."""
        span = self._span(plan.mesh.copies())
        if not plan.fully_shard:
            return DenseCost(
                gradients_s=self._all_reduce_s(span, held_bytes),
                update_s=self._update_s(held_bytes),
            )
        collectives = self.calibration.collectives
        gathered = all_gather(span, held_bytes / span.num_ranks)
        return DenseCost(
            gather_s=collectives.all_gather.seconds(span, gathered),
            gradients_s=collectives.reduce_scatter.seconds(span, reduce_scatter(span, held_bytes)),
            update_s=self._update_s(held_bytes / span.num_ranks),
        )

    def _span(self, groups: Sequence[Sequence[int]]) -> Span:
        return Span.of(groups, self.local_world_size)

    def _hidden_s(self, message_s: float, compute_s: float) -> float:
        return -self.calibration.hidden_share * min(message_s, compute_s)

    def _update_s(self, num_bytes: float) -> float:
        return self.calibration.kernels.dense_update.seconds(0.0, num_bytes)

    def _all_reduce_s(self, span: Span, num_bytes: float) -> float:
        return self.calibration.collectives.all_reduce.seconds(span, all_reduce(span, num_bytes))

    def _sums_s(self, span: Span, layers: Sequence[LayerWork], num_samples: float) -> float:
        """Price the output sums of layers that ranks compute together, forward and backward."""
        return sum(
            2 * layer.sums * self._all_reduce_s(span, num_samples * layer.output_bytes)
            for layer in layers
        )

    def _handed_s(self, line: Span, num_bytes: float, *, num_messages: int = 1) -> float:
        """Price sending bytes from rank to rank in a pipeline."""
        cost = self.calibration.collectives.all_to_all
        # Each pipeline that crosses a link sends over it at the same time.
        moved = Traffic(
            local_bytes=0.0 if line.crosses_hosts else num_bytes,
            link_bytes=line.groups_per_host * num_bytes if line.crosses_hosts else 0.0,
        )
        pair = Span(2, 1 if line.crosses_hosts else 2, line.groups_per_host)
        return cost.seconds(pair, moved) + (num_messages - 1) * (cost.base_s + cost.per_peer_s)


def _compute_s(layers: Sequence[LayerWork], num_samples: float, tp: int = 1) -> float:
    return sum(layer.seconds(num_samples, tp=tp) for layer in layers)


def _held_bytes(layers: Sequence[LayerWork], tp: int) -> float:
    """Return the parameter bytes on each of the ranks that compute layers together."""
    return sum(layer.parameter_bytes / (tp if layer.sums else 1) for layer in layers)


def _kept_bytes(layers: Sequence[LayerWork], tp: int) -> float:
    """Return the bytes kept for a sample's backward."""
    return sum(layer.kept_bytes / (tp if layer.sums else 1) for layer in layers)
