"""`search_dense`: search the fastest way to run a model's dense part, by predicted cost. Pure."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import inf

from torchrec_2dsp.cost.calibration import Calibration
from torchrec_2dsp.cost.dense import DenseCost, DenseCostModel, DenseLayers
from torchrec_2dsp.errors import PlanError
from torchrec_2dsp.mesh import DenseMesh, RankLayout, divisors
from torchrec_2dsp.plan.dense_plan import DenseKind, DensePlan, cut_layers
from torchrec_2dsp.report.table import Table

_MICRO_BATCHES_PER_RANK = (1, 2, 4)
"""The numbers of parts into which each rank's batch may be cut in a pipeline."""
_SHOWN = 12
_GB, _MS = 1e9, 1e3


@dataclass(frozen=True, kw_only=True)
class DenseCandidate:
    """A way to run the dense part, and its predicted cost."""

    plan: DensePlan

    cost: DenseCost

    memory_bytes: float
    """Bytes on the fullest rank."""


@dataclass(frozen=True, kw_only=True)
class DenseChoices:
    """All searched ways; printed, the best of them with their costs."""

    candidates: Sequence[DenseCandidate]
    """The ways that fit, fastest first."""

    num_too_large: int
    """The number of ways that need more memory than there is."""

    @property
    def best(self) -> DenseCandidate:
        """The fastest way."""
        return self.candidates[0]

    def table(self) -> Table:
        """Return a row for each way, fastest first: the fastest of all, and of each kind."""
        shown = list(self.candidates[:_SHOWN])
        kinds = {candidate.plan.kind for candidate in shown}
        for candidate in self.candidates[_SHOWN:]:
            if candidate.plan.kind not in kinds:
                kinds.add(candidate.plan.kind)
                shown.append(candidate)
        parts = [name for name, _ in DenseCost().parts()]
        return Table(
            ("dense part", "ms", *(name.replace("_", " ") for name in parts), "busy", "GB"),
            [
                (
                    str(candidate.plan),
                    f"{candidate.cost.total_s * _MS:.1f}",
                    *(f"{seconds * _MS:.1f}" for _, seconds in candidate.cost.parts()),
                    f"{candidate.cost.busy_share:.0%}",
                    f"{candidate.memory_bytes / _GB:.2f}",
                )
                for candidate in shown
            ],
            words={"dense part"},
        )

    def __str__(self) -> str:
        """Return the table, and the number of ways left out."""
        rest = len(self.candidates) - len(self.table().rows)
        lines = [self.table().text(120)]
        if rest > 0:
            lines.append(f"{rest} slower ways more.")
        if self.num_too_large:
            lines.append(f"{self.num_too_large} ways take more memory than there is.")
        return "\n".join(lines)


def search_dense(
    work: DenseLayers,
    *,
    calibration: Calibration,
    world_size: int,
    local_world_size: int,
    batch_size: int,
    memory_bytes: float = inf,
    kinds: Collection[DenseKind] = tuple(DenseKind),
) -> DenseChoices:
    """Predict all ways to run a dense part, and sort them by time.

    Args:
        work: the layers, measured or computed.
        calibration: the machines' constants.
        world_size: the number of ranks.
        local_world_size: ranks per host; layers are only split inside hosts.
        batch_size: samples per rank.
        memory_bytes: a rank's memory for the dense part.
        kinds: the wrappers to choose from.

    Raises:
        PlanError: nothing fits into memory.
    """
    model = DenseCostModel(calibration, local_world_size)
    candidates = [
        DenseCandidate(
            plan=plan,
            cost=model.step_cost(work, plan, batch_size),
            memory_bytes=model.memory_bytes(work, plan, batch_size),
        )
        for plan in _plans(work, calibration, world_size, local_world_size, batch_size)
        if plan.kind in kinds
    ]
    fitting = [candidate for candidate in candidates if candidate.memory_bytes <= memory_bytes]
    if not fitting:
        smallest = min(candidates, key=lambda candidate: candidate.memory_bytes)
        raise PlanError(
            f"no way to run the dense part fits into {memory_bytes:,.0f} bytes per rank; the "
            f"smallest, {smallest.plan}, takes {smallest.memory_bytes:,.0f}: use more ranks, a "
            "smaller batch or smaller layers"
        )
    return DenseChoices(
        # Among equal times, the way that needs less memory comes first.
        candidates=sorted(fitting, key=lambda way: (way.cost.total_s, way.memory_bytes)),
        num_too_large=len(candidates) - len(fitting),
    )


def _plans(
    work: DenseLayers,
    calibration: Calibration,
    world_size: int,
    local_world_size: int,
    batch_size: int,
) -> Iterator[DensePlan]:
    """Yield all plans for a world, each once."""
    whole = DenseMesh.for_world(world_size)
    yield DensePlan(kind=DenseKind.DDP, mesh=whole)
    for num_copies in divisors(world_size):
        if num_copies < world_size:
            yield DensePlan(kind=DenseKind.FULLY_SHARDED, mesh=whole, num_copies=num_copies)
    link = calibration.collectives.all_to_all
    s_per_byte = link.link_s_per_byte or link.local_s_per_byte or 0.0
    for tp in divisors(min(world_size, local_world_size)):
        if world_size % tp or (tp > 1 and not work.can_be_split):
            continue
        if tp > 1:
            mesh = DenseMesh.for_world(world_size, tp=tp)
            for num_copies in divisors(mesh.dp):
                yield DensePlan(kind=DenseKind.TENSOR_PARALLEL, mesh=mesh, num_copies=num_copies)
        for pp in divisors(world_size // tp):
            if not 1 < pp <= len(work.layers):
                continue
            layouts = list(RankLayout) if tp * pp < world_size else [RankLayout.CONTIGUOUS]
            for layout, per_rank in product(layouts, _MICRO_BATCHES_PER_RANK):
                if per_rank <= batch_size:
                    mesh = DenseMesh.for_world(world_size, tp=tp, pp=pp, layout=layout)
                    plan = _pipelined(work, mesh, batch_size, per_rank, s_per_byte)
                    yield plan
                    if mesh.dp > 1:
                        yield replace(plan, fully_shard=True)


def _pipelined(
    work: DenseLayers, mesh: DenseMesh, batch_size: int, per_rank: int, s_per_byte: float
) -> DensePlan:
    """Plan a pipeline with equally long stages, and ``per_rank`` micro-batches for each rank."""
    samples = batch_size / per_rank
    return DensePlan(
        kind=DenseKind.PIPELINED,
        mesh=mesh,
        num_micro_batches=per_rank * mesh.pipeline_size,
        cuts=cut_layers(
            [layer.seconds(samples, tp=mesh.tp) for layer in work.layers],
            [samples * layer.output_bytes for layer in work.layers],
            mesh.pp,
            s_per_byte,
        ),
    )
