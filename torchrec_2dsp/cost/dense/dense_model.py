"""`DenseCostModel`: what a dense part takes by a plan, on calibrated machines. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torchrec_2dsp.cost.calibration import Calibration
from torchrec_2dsp.cost.dense.dense_cost import DenseCost
from torchrec_2dsp.cost.dense.layers import DenseLayers, LayerWork
from torchrec_2dsp.cost.span import Span
from torchrec_2dsp.cost.traffic import Traffic, all_gather, all_reduce, reduce_scatter
from torchrec_2dsp.plan.dense_plan import DenseKind, DensePlan

_DDP_BUCKET_BYTES = 25 * 2**20
"""The size of a gradient bucket of torch's `DistributedDataParallel`."""


@dataclass(frozen=True)
class DenseCostModel:
    """Predicts the dense part of a step from layers that were measured.

    Example:
        >>> import torchrec_2dsp as tdsp
        >>> from torchrec_2dsp.cost.dense.dense_model import DenseCostModel
        >>> from torchrec_2dsp.cost.dense.layers import DenseLayers, LayerWork
        >>> from torchrec_2dsp.mesh import DenseMesh
        >>> from torchrec_2dsp.plan.dense_plan import DenseKind, DensePlan
        >>> block = LayerWork(name="block", forward_s=1e-5, backward_s=2e-5, parameter_bytes=1e6)
        >>> work = DenseLayers(layers=(block,) * 4, input_bytes=256, target_bytes=4)
        >>> calibration = tdsp.Calibration.load("configs/hardware/emulated_1gbit.toml")
        >>> model = DenseCostModel(calibration, local_world_size=2)
        >>> ddp = DensePlan(kind=DenseKind.DDP, mesh=DenseMesh.for_world(4))
        >>> cost = model.step_cost(work, ddp, batch_size=100)
        >>> round(cost.compute_s, 6), cost.gradients_s > 0
        (0.012, True)
    """

    calibration: Calibration
    """The constants of the machines."""

    local_world_size: int
    """How many ranks a host has."""

    def step_cost(self, work: DenseLayers, plan: DensePlan, batch_size: int) -> DenseCost:
        """The cost of a step.

        Args:
            work: the layers.
            plan: how ranks run them.
            batch_size: samples per rank.
        """
        if plan.kind is DenseKind.DDP:
            return self._ddp(work, plan, batch_size)
        if plan.kind is DenseKind.FULLY_SHARDED:
            return self._fully_sharded(work, plan, batch_size)
        if plan.kind is DenseKind.TENSOR_PARALLEL:
            return self._tensor_parallel(work, plan, batch_size)
        return self._pipelined(work, plan, batch_size)

    def memory_bytes(self, work: DenseLayers, plan: DensePlan, batch_size: int) -> float:
        """The bytes that the fullest rank takes: weights, gradients, optimizer state, and what the
        backward needs."""
        per_weight = 2 + work.state_per_weight
        mesh = plan.mesh
        if plan.kind is DenseKind.PIPELINED:
            samples = mesh.pipeline_size * batch_size / plan.num_micro_batches
            # Shares are joined by whole weights and gradients while a batch is in the schedule.
            per_held = per_weight / mesh.dp + 2 if plan.fully_shard else per_weight
            # Of the last stage one micro-batch is on its way, of the first as many as stages.
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
        num_buckets = 1 + work.parameter_bytes // _DDP_BUCKET_BYTES
        return DenseCost(
            compute_s=sum(layer.seconds(batch_size) for layer in work.layers),
            gradients_s=gradients_s,
            update_s=self._update_s(work.parameter_bytes),
            hidden_s=self._hidden_s(gradients_s * (1 - 1 / num_buckets), backward_s),
        )

    def _fully_sharded(self, work: DenseLayers, plan: DensePlan, batch_size: int) -> DenseCost:
        shares = self._shares_cost(work.layers, plan, work.parameter_bytes)
        return replace(shares, compute_s=sum(layer.seconds(batch_size) for layer in work.layers))

    def _tensor_parallel(self, work: DenseLayers, plan: DensePlan, batch_size: int) -> DenseCost:
        mesh = plan.mesh
        joint, together = mesh.tp * batch_size, self._span(mesh.groups())
        both_ends = batch_size * (work.input_bytes + work.target_bytes)
        ends_s = self.calibration.collectives.all_gather.seconds(
            together, all_gather(together, both_ends)
        )
        return replace(
            self._shares_cost(work.layers, plan, _held_bytes(work.layers, mesh.tp)),
            compute_s=sum(layer.seconds(joint, tp=mesh.tp) for layer in work.layers),
            activations_s=ends_s + self._sums_s(together, work.layers, joint),
        )

    def _shares_cost(
        self, layers: Sequence[LayerWork], plan: DensePlan, held_bytes: float
    ) -> DenseCost:
        """Seconds of what ranks that keep shares send, inside copies and between them, and of the
        optimizer."""
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
        gather_s, scatter_s = self._sharded_s(shares, layers, held_bytes)
        kept_bytes = held_bytes * tp / size
        return DenseCost(
            gather_s=gather_s,
            gradients_s=scatter_s + self._all_reduce_s(copies, kept_bytes),
            update_s=self._update_s(kept_bytes),
        )

    def _pipelined(self, work: DenseLayers, plan: DensePlan, batch_size: int) -> DenseCost:
        mesh, num_parts = plan.mesh, plan.num_micro_batches
        all_samples = mesh.pipeline_size * batch_size
        samples = all_samples / num_parts
        stages = work.stages(plan.cuts)
        by_stage = [
            sum(layer.seconds(samples, tp=mesh.tp) for layer in layers) for layers in stages
        ]
        together = self._span(mesh.groups())
        summed = [self._sums_s(together, layers, samples) for layers in stages]
        compute_s = num_parts * sum(by_stage) / mesh.pp
        slots = [compute + sums for compute, sums in zip(by_stage, summed, strict=True)]
        activations_s = num_parts * sum(summed) / mesh.pp
        through_s = sum(slots) + (num_parts - 1) * max(slots)
        # The widest place between two stages says how long a hand-off takes.
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
        """Seconds of what the pipelines that hold the same layers send each other, and of the
        optimizer."""
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

    def _sharded_s(
        self, span: Span, layers: Sequence[LayerWork], num_bytes: float
    ) -> tuple[float, float]:
        """Seconds in which parameters come together twice, and gradients are added up where they
        are kept; a message for each layer."""
        collectives = self.calibration.collectives
        share = num_bytes / len(layers)
        gathered = all_gather(span, share / span.num_ranks)
        scattered = reduce_scatter(span, share)
        return (
            2 * len(layers) * collectives.all_gather.seconds(span, gathered),
            len(layers) * collectives.reduce_scatter.seconds(span, scattered),
        )

    def _sums_s(self, span: Span, layers: Sequence[LayerWork], num_samples: float) -> float:
        """Seconds in which ranks that compute layers together add up what comes out of them, in the
        forward and in the backward."""
        return sum(
            2 * layer.sums * self._all_reduce_s(span, num_samples * layer.output_bytes)
            for layer in layers
        )

    def _handed_s(self, line: Span, num_bytes: float, *, num_messages: int = 1) -> float:
        """Seconds of bytes that go from one rank of a pipeline to another."""
        cost = self.calibration.collectives.all_to_all
        # Stages are as many messages on a link as pipelines that cross it.
        moved = Traffic(
            local_bytes=0.0 if line.crosses_hosts else num_bytes,
            link_bytes=line.groups_per_host * num_bytes if line.crosses_hosts else 0.0,
        )
        pair = Span(2, 1 if line.crosses_hosts else 2, line.groups_per_host)
        return cost.seconds(pair, moved) + (num_messages - 1) * (cost.base_s + cost.per_peer_s)


def _held_bytes(layers: Sequence[LayerWork], tp: int) -> float:
    """Bytes of parameters of ranks that compute layers together."""
    return sum(layer.parameter_bytes / (tp if layer.sums else 1) for layer in layers)


def _kept_bytes(layers: Sequence[LayerWork], tp: int) -> float:
    """Bytes that are kept for the backward of a sample."""
    return sum(layer.kept_bytes / (tp if layer.sums else 1) for layer in layers)
