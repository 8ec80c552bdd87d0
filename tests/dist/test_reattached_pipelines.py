"""Pipelines that are detached and resume, and calls that they refuse meanwhile."""

import gc
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torchrec.distributed.train_pipeline import EvalPipelineSparseDist, TrainPipelineSparseDist
from torchrec.distributed.train_pipeline.runtime_forwards import (
    EmbeddingPipelinedForward,
    InSyncEmbeddingPipelinedForward,
    PipelinedForward,
)
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.streamable import Pipelineable

import torchrec_2dsp as tdsp
from tests.support.devices import rank_device
from tests.support.loops import OTHER_BATCH, LossModel, drain, shard
from tests.support.managed_collisions import (
    BAGS as MAPPED_BAGS,
    Case,
    ManagedModel,
    StayingBatch,
    Twin,
    batch_of,
    sharded as sharded_behind_maps,
    state_gap,
)
from tests.support.models import SEQUENCES, ModelSpec
from tests.support.oracle import batches_of, local_loss
from tests.support.parity import TWO, Cell, make_optimizer, relative_gap
from tests.support.prefetching import sharded
from tests.support.ranks import RankPool, error_of
from tests.support.slices import Deal
from torchrec_2dsp._compat.shardings import distributed_ahead
from torchrec_2dsp.parallel.pipelines import TrainPipelineInStep

STEPS = 5
PIPELINES = (TrainPipelineSparseDist, tdsp.TrainPipelineRowPrefetch)
PIPELINES_OF_PLANS = (TrainPipelineInStep, tdsp.TrainPipelineRowPrefetch)
BAGS = [
    Cell(tdsp.Mesh2D(1, 2), sharding, exchange=exchange, batch_sizes=sizes)
    for sharding, exchange in (
        ("row_wise", "pooled"),
        ("row_wise", "nonempty"),
        ("row_wise", "row"),
        ("table_wise", "pooled"),
        ("column_wise", "nonempty"),
        ("grid_shard", "pooled"),
    )
    for sizes in ((6, 6), (6, 2))
]
SEQUENCE_CELLS = [
    Cell(tdsp.Mesh2D(1, 2), sharding, spec=SEQUENCES, exchange=exchange, batch_sizes=(6, 2))
    for sharding, exchange in (
        ("row_wise", "pooled"),
        ("table_wise", "pooled"),
        ("row_wise", "row"),
    )
]


@dataclass
class BuiltAnew(Pipelineable):
    """A batch that rebuilds its features at each access."""

    parts: tuple[list[str], torch.Tensor, torch.Tensor]

    @property
    def features(self) -> KeyedJaggedTensor:
        """The features, with newly copied tensors."""
        keys, ids, lengths = self.parts
        return KeyedJaggedTensor(keys, ids.clone(), lengths=lengths.clone())

    def to(self, device: torch.device, non_blocking: bool = False) -> "BuiltAnew":
        return self

    def pin_memory(self) -> "BuiltAnew":
        return self

    def record_stream(self, stream: Any) -> None:
        """Do nothing on a CPU."""


class BehindMaps(ManagedModel):
    """Looks up ids in the batch's ``features`` attribute."""

    def forward(self, features: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return super().forward(features.features)


def pause_behind_maps(rank: int, world_size: int, case: Case) -> float:
    """Detach a pipeline that holds a batch with rebuilt features; return the gap."""
    twin, parallel, gap = Twin(case), sharded_behind_maps(case, BehindMaps), 0.0
    pipeline = TrainPipelineSparseDist(
        parallel, make_optimizer(parallel), torch.device("cpu"), pipeline_postproc=True
    )
    batches = (batch_of(case, step, rank) for step in range(STEPS))
    stream = (BuiltAnew((part.keys(), part.values(), part.lengths())) for part in batches)
    for step in range(STEPS):
        scores = pipeline.progress(stream)
        gap = max(gap, abs(local_loss(scores).item() - twin.step(step)[rank]))
        if step % 2:
            pipeline.detach()
    return max(gap, state_gap(parallel, twin))


@pytest.mark.parametrize("policy", ["lfu", "hash ttl"])
def test_id_maps_see_a_batch_once_whose_features_are_built_anew(
    ranks4: RankPool, policy: str
) -> None:
    case = Case(Cell(TWO, spec=MAPPED_BAGS), policy)
    assert max(ranks4.run(pause_behind_maps, case, timeout_s=60)) < 1e-5


def begin_anew(rank: int, world_size: int, case: Case, evaluates: bool) -> list[bytes]:
    """Drop a pipeline; its batch comes first in the next one on a single rank. Return the maps.

    Elsewhere another batch comes first, so ranks disagree whether the batch is repeated. That
    rank has garbage collection off, while others collect at once.
    """
    parallel, seen = sharded_behind_maps(case), []
    try:
        for first, second in ((0, 1), (1 if rank == 0 else 2, 3)):
            pipeline = TrainPipelineSparseDist(
                parallel, make_optimizer(parallel), torch.device("cpu")
            )
            pipeline.progress(iter([batch_of(case, first, rank), batch_of(case, second, rank)]))
            pipeline.detach()
            del pipeline
            gc.disable() if rank == 0 else gc.collect()
        if evaluates:
            with torch.no_grad():
                seen = list(parallel.eval()(batch_of(case, 3, 0)))
        state = parallel.state_dict().items()
    finally:
        gc.enable()
    seen += [value for name, value in state if "_managed_collision_m" in name]
    return [value.numpy().tobytes() for value in seen]


@pytest.mark.parametrize("evaluates", [False, True])
@pytest.mark.parametrize("policy", ["lru", "hash ttl"])
def test_ranks_agree_whether_a_batch_comes_again(
    ranks4: RankPool, policy: str, evaluates: bool
) -> None:
    case = Case(Cell(TWO, spec=MAPPED_BAGS), policy)
    first, *others = ranks4.run(begin_anew, case, evaluates, timeout_s=60)
    assert others == [first] * 3


def likened(batch: KeyedJaggedTensor, kind: type[Any]) -> Any:
    """Copy a batch."""
    return kind(batch.keys(), batch.values().clone(), lengths=batch.lengths().clone())


@dataclass(frozen=True)
class Anew:
    """Drops a pipeline that holds batches 1 and 2, or only 1, and begins another."""

    kind: type[Any]
    given: str = "same"
    """The other pipeline's form of these batches: the same object, rebuilt, or moved."""
    steps: tuple[int, ...] = (1, 2, 3, 4)
    """The batch numbers that the other pipeline trains."""
    frees_on: tuple[int, ...] = ()
    """The ranks on which Python has freed the first one."""
    is_kept: bool = False
    meanwhile: str = ""

    @property
    def left_out(self) -> range:
        """Steps whose batches the maps see, but that are never looked up."""
        ahead = range(1, 2 if self.kind is TrainPipelineSparseDist else 3)
        come_again = self.steps[0] in ahead and not self.meanwhile
        return range(1, self.steps[0]) if come_again else ahead


def gap_anew(rank: int, world_size: int, case: Case, anew: Anew) -> float:
    """Return the largest gap between an unsharded model and one trained in two pipelines."""
    twin, parallel = Twin(case), sharded_behind_maps(case)
    optimizer, cpu = make_optimizer(parallel), torch.device("cpu")
    batches = [batch_of(case, step, rank) for step in range(STEPS)]
    if anew.given == "moved":
        batches = [likened(batch, KeyedJaggedTensor) for batch in batches]
    others = [batches[step] for step in anew.steps]
    if anew.given == "built":
        others = [likened(batch, StayingBatch) for batch in others]
    initial = {name: value.clone() for name, value in parallel.state_dict().items()}
    losses: list[float] = []
    gc.disable()
    try:
        pipeline = anew.kind(parallel, optimizer, cpu)
        losses.append(local_loss(pipeline.progress(iter(batches[:3]))).item())
        pipeline.detach()
        holders = [pipeline] if anew.is_kept else []
        del pipeline
        if rank in anew.frees_on:
            gc.collect()
        if anew.meanwhile == "reads":
            parallel.state_dict()
        elif anew.meanwhile == "loads":
            parallel.load_state_dict(initial)  # type: ignore[arg-type]
        elif anew.meanwhile == "evaluates":
            with torch.no_grad():
                parallel.eval()(batches[4])
            parallel.train()
        pipeline = anew.kind(parallel, optimizer, cpu)
        losses += [local_loss(scores).item() for scores in drain(pipeline, others)]
        assert len(holders) == anew.is_kept
    finally:
        gc.enable()
    expected = [twin.step(0)[rank]]
    for step in anew.left_out:
        twin.see(step)
    if anew.meanwhile == "loads":
        twin = Twin(case)
    expected += [twin.step(step)[rank] for step in anew.steps]
    return max(relative_gap(losses, expected), state_gap(parallel, twin))


IN_PART = Case(Cell(tdsp.Mesh2D(1, 2), spec=MAPPED_BAGS, optimizer="sgd"), "lru", empty_on=(0,))
"""Batches that are all equal on rank 0."""


@pytest.mark.parametrize("steps", [(1, 2, 3, 4), (2, 3, 4), (2, 1, 3, 4), (3, 1, 2, 4)], ids=str)
@pytest.mark.parametrize("given", ["same", "built", "moved"])
def test_a_new_pipeline_goes_on_with_batches_of_a_dropped_one(
    ranks2: RankPool, dealt: Deal, given: str, steps: tuple[int, ...]
) -> None:
    drops = [((), False), ((1,), False), ((0, 1), False), ((), True)]
    for kind, (frees_on, is_kept) in dealt(list(product(PIPELINES, drops))):
        anew = Anew(kind, given, steps, frees_on, is_kept)
        assert max(ranks2.run(gap_anew, IN_PART, anew)) < 1e-5, anew


@pytest.mark.parametrize("meanwhile", ["reads", "loads", "evaluates"])
def test_what_came_between_two_pipelines_is_not_undone(
    ranks2: RankPool, dealt: Deal, meanwhile: str
) -> None:
    for kind, frees_on in dealt(list(product(PIPELINES, [(), (1,), (0, 1)]))):
        anew = Anew(kind, frees_on=frees_on, meanwhile=meanwhile)
        assert max(ranks2.run(gap_anew, IN_PART, anew)) < 1e-5, anew


def even_batch(case: Case, step: int, rank: int, kind: type[Any]) -> Any:
    """Draw a batch with a fixed number of ids, in bags with varying sizes."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    keys = [feature for feature, _ in case.cell.spec.features]
    lengths = torch.randperm(4 * len(keys), generator=generator) % 3
    ids = torch.randint(6 * step, 6 * step + 12, (int(lengths.sum()),), generator=generator)
    return kind(keys, ids, lengths=lengths)


def train_two_epochs(
    rank: int, world_size: int, case: Case, kinds: tuple[Any, ...], steps: range, reuses: bool
) -> list[float]:
    """Train in a pipeline that is dropped, then other batches in another; return the losses.

    The second loader may refill the first one's batches, each with another step.
    """
    kind, batch_kind = kinds
    parallel = sharded_behind_maps(case)
    optimizer = make_optimizer(parallel)
    first = [even_batch(case, step, rank, batch_kind) for step in range(3)]
    pipeline = kind(parallel, optimizer, torch.device("cpu"))
    losses = [local_loss(pipeline.progress(iter(first))).item()]
    pipeline.detach()
    del pipeline
    others = [even_batch(case, step, rank, batch_kind) for step in steps]
    for step, batch in zip(steps, others, strict=True) if reuses else ():
        memory = first[(step + 1) % 3]
        memory.values().copy_(batch.values())
        memory.lengths().copy_(batch.lengths())
    if reuses:
        others = [first[(step + 1) % 3] for step in steps]
    pipeline = kind(parallel, optimizer, torch.device("cpu"))
    return losses + [local_loss(scores).item() for scores in drain(pipeline, others)]


@pytest.mark.parametrize("steps", [range(3, 6), range(1, 4)], ids=["others", "again"])
def test_a_loader_fills_the_memory_of_a_dropped_pipeline(ranks2: RankPool, steps: range) -> None:
    case = replace(IN_PART, empty_on=())
    for kinds in product(PIPELINES, (KeyedJaggedTensor, StayingBatch)):
        fresh = ranks2.run(train_two_epochs, case, kinds, steps, False)
        assert ranks2.run(train_two_epochs, case, kinds, steps, True) == fresh, kinds


def train_what_was_evaluated(rank: int, world_size: int, case: Case, kind: type[Any]) -> float:
    """Evaluate in a pipeline, drop it, and train the batches that it had mapped."""
    twin, parallel = Twin(case), sharded_behind_maps(case)
    optimizer = make_optimizer(parallel)
    batches = [batch_of(case, step, rank) for step in range(STEPS)]
    evaluating = EvalPipelineSparseDist(parallel.eval(), optimizer, torch.device("cpu"))
    evaluating.progress(iter(batches))
    evaluating.detach()
    pipeline = kind(parallel.train(), optimizer, torch.device("cpu"))
    losses = [local_loss(scores).item() for scores in drain(pipeline, batches[1:])]
    expected = [twin.step(step)[rank] for step in range(1, STEPS)]
    return max(relative_gap(losses, expected), state_gap(parallel, twin))


@pytest.mark.parametrize("kind", PIPELINES)
def test_maps_see_batches_that_were_evaluated(ranks2: RankPool, kind: type[Any]) -> None:
    assert max(ranks2.run(train_what_was_evaluated, IN_PART, kind)) < 1e-5


def pause_at_equal_batches(rank: int, world_size: int, case: Case, kind: type[Any]) -> float:
    """Detach a pipeline that holds equal batches several times, and end with evaluations."""
    twin, parallel = Twin(case), sharded_behind_maps(case)
    pipeline = kind(parallel, make_optimizer(parallel), torch.device("cpu"))
    batches = [batch_of(case, step, rank) for step in range(4)]
    steps = (0, 1, 1, 1, 1, 2, 2)
    stream, losses = iter([batches[step] for step in (*steps, 3)]), []
    for number in range(5):
        losses.append(local_loss(pipeline.progress(stream)).item())
        if number < 4:
            pipeline.detach()
    parallel.eval()
    with torch.no_grad():
        *_, scores = drain(pipeline, stream)
    gap = relative_gap(losses, [twin.step(step)[rank] for step in steps[:5]])
    for step in steps[5 : 6 if kind is TrainPipelineSparseDist else 7]:
        twin.see(step)
    expected = twin.model.eval()(batches[3])[1]
    return max(gap, (scores - expected).abs().max().item(), state_gap(parallel, twin))


@pytest.mark.parametrize("kind", PIPELINES)
def test_a_paused_pipeline_holds_equal_batches(ranks2: RankPool, kind: type[Any]) -> None:
    assert max(ranks2.run(pause_at_equal_batches, IN_PART, kind)) < 1e-5


class LookedUpTwice(LossModel):
    """Looks its tables up twice in a forward."""

    def forward(self, features: KeyedJaggedTensor) -> tuple[torch.Tensor, torch.Tensor]:
        (first, _), (second, output) = super().forward(features), super().forward(features)
        return first + second, output


class Branching(LossModel):
    """A model whose forward depends on a batch's values."""

    def forward(self, features: KeyedJaggedTensor) -> tuple[torch.Tensor, torch.Tensor]:
        loss, output = super().forward(features)
        return (loss if loss > 0 else -loss), output


def errors_of_pipelines(rank: int, world_size: int, cell: Cell) -> list[str]:
    """Return the errors for models that can't run in a pipeline which distributes ids ahead."""
    errors: list[str] = []
    for kind, pipeline_of in product((LookedUpTwice, Branching), PIPELINES_OF_PLANS):
        parallel = shard(cell, model=kind(cell.spec))
        pipeline = pipeline_of(parallel, make_optimizer(parallel), rank_device())
        batch = batches_of(cell.spec, cell.seed, cell.batch_sizes, cell.max_length, 0)[rank]
        errors.append(error_of(partial(pipeline.progress, iter([batch]))))
    return errors


def test_a_model_that_no_pipeline_can_run_is_named(ranks2: RankPool) -> None:
    for errors in ranks2.run(errors_of_pipelines, BAGS[2]):
        for twice, branching in zip(errors[:2], errors[2:], strict=True):
            assert twice.startswith("UnsupportedError: the model looks a collection up twice in a")
            assert branching.startswith("UnsupportedError: the model's forward can't be traced by")


def errors_of_a_direct_lookup(rank: int, world_size: int, cell: Cell, kind: type[Any]) -> list[str]:
    """Evaluate other batches, and the pipeline's own, while a pipeline is attached."""
    parallel = sharded(cell)
    pipeline = kind(parallel, make_optimizer(parallel), rank_device())
    batches = [
        batches_of(cell.spec, cell.seed, cell.batch_sizes, cell.max_length, step)[rank]
        for step in range(STEPS)
    ]
    pipeline.progress(iter(batches))
    with torch.no_grad():
        return [error_of(partial(parallel, batches[step])) for step in (3, 1)]


def test_a_batch_past_the_pipeline_is_refused(ranks2: RankPool, dealt: Deal) -> None:
    processed = replace(BAGS[0], spec=ModelSpec(weighted=True, positions="collection"))
    hot = replace(BAGS[1], hot_rows=(("t0", (0, 1, 5)),))
    cells = (BAGS[0], BAGS[4], SEQUENCE_CELLS[2], hot, processed)
    for cell, kind in dealt(list(product(cells, PIPELINES))):
        for other, next_one in ranks2.run(errors_of_a_direct_lookup, cell, kind):
            assert OTHER_BATCH in other, f"{cell} {kind.__name__}"
            assert not next_one


@pytest.mark.parametrize(
    "kind", [PipelinedForward, EmbeddingPipelinedForward, InSyncEmbeddingPipelinedForward]
)
def test_pipelines_that_need_a_gpu_know_the_next_batch_as_well(kind: Any) -> None:
    context = SimpleNamespace(module_contexts={"ebc": "its context"})
    module: Any = SimpleNamespace(forward=kind("ebc", None, None, context))
    assert distributed_ahead(module) == "its context"
