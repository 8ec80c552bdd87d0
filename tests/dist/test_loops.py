"""Training loops and TorchRec's pipelines give the same numbers, whichever runs the model."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import cycle
from typing import Any, cast
from unittest import mock

import pytest
import torch
from torchrec.distributed import comm_ops
from torchrec.optim.clipping import GradientClipping, GradientClippingOptimizer
from torchrec.optim.keyed import KeyedOptimizerWrapper
from torchrec.optim.warmup import WarmupOptimizer, WarmupPolicy, WarmupStage
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import torchrec_2dsp as tdsp
from tests.support.devices import KERNEL_ROUNDING, rank_device
from tests.support.loop_oracles import LoopOracle
from tests.support.loops import (
    PIPELINES,
    counting_syncs,
    drain,
    largest_gap,
    make_stream,
    pipeline_loop,
    plain_loop,
    shard,
    shard_loss_model,
    snapshot,
    train,
)
from tests.support.models import HOT_ROWS, SEQUENCES, BagModel, ModelSpec, make_batch
from tests.support.oracle import local_loss
from tests.support.parity import FUSED, LR, TWO, Cell, compare, make_optimizer
from tests.support.ranks import RankPool, error_of
from tests.support.slices import Deal
from torchrec_2dsp.comms import alarm, failure_detection
from torchrec_2dsp.comms.failure_detection import NoticeBoard
from torchrec_2dsp.plan.parameter_sharding import Pipeline

EXACT = Cell(TWO)
AVERAGED = replace(EXACT, sync=tdsp.WeightSync())
HOT = replace(EXACT, sharding="table_wise", hot_rows=HOT_ROWS)
BOTH = replace(HOT, sync=tdsp.WeightSync())
PARTED = replace(EXACT, hot_rows=HOT_ROWS, in_world=("t1",))
"""A table with one copy in the world beside two with one in each group."""
SPREAD = Cell(tdsp.Mesh2D(1, 4), exchange="row", owners="hash")
STEPS = 4

ROUNDING = 1e-6
"""The oracle adds gradients in another order: some float32 roundings of values below 1."""


def oracle_of(cell: Cell, model: BagModel | None = None) -> LoopOracle:
    return LoopOracle(cell.spec, optimizer=cell.optimizer, lr=LR, eps=cell.eps, model=model)


def all_loops(rank: int, world_size: int, cell: Cell) -> list[float]:
    """Return the gaps to the plain loop: a second one, each pipeline, and stock wrappers."""
    stream = make_stream(cell, STEPS)
    plain = train(cell, rank, stream)
    stock = replace(cell, stock_wrapper=True)
    others = [train(cell, rank, stream, kind) for kind in ("plain", *PIPELINES)]
    # It calls no sync.
    others += [train(stock, rank, stream, kind) for kind in ("plain", "sparse dist")]
    return [largest_gap(other, plain) for other in others]


def test_every_loop_trains_the_same_bit_for_bit(ranks4: RankPool, dealt: Deal) -> None:
    """This includes a repetition from the same seed, and streams run to their end."""
    cells = [EXACT, AVERAGED, HOT, BOTH, PARTED, replace(SPREAD, hot_rows=HOT_ROWS)]
    cells += [replace(HOT, exchange="nonempty"), replace(HOT, variable=True)]
    for cell in dealt(cells):
        for gaps in ranks4.run(all_loops, cell):
            assert len(gaps) == len(PIPELINES) + 3
            assert max(gaps) <= KERNEL_ROUNDING, cell


def by_the_plan(rank: int, world_size: int, cell: Cell, kind: Pipeline) -> tuple[str, float]:
    """Train by the plan's pipeline; return its class and the gap to the plain loop."""
    stream = make_stream(cell, STEPS)
    parallel = shard_loss_model(replace(cell, pipeline=kind))
    assert isinstance(parallel, tdsp.ModelParallel2D)
    of_dense = [name for name, _ in parallel.named_parameters() if "ebc" not in name]
    optimizer = torch.optim.SGD(parallel.dense_parameters(), lr=LR)
    pipeline: Any = parallel.pipeline(optimizer)
    own = [step[rank] for step in stream]
    counted = iter(own[:2])
    for _ in own[:2]:  # As many as there are, without asking for more.
        pipeline.progress(counted)
    for epoch in (own[2:3], own[3:]):
        assert len(drain(pipeline, epoch)) == len(epoch) > 0
        assert pipeline.detach() is parallel
    combined = parallel.combined_optimizer(optimizer)
    assert list(combined.params)[-len(of_dense) :] == of_dense
    assert len(parallel.dense_parameters()) == len(of_dense) > 1
    assert parallel.combined_optimizer(combined) is combined
    named = dict(parallel.named_parameters())
    plain = torch.optim.SGD(named.values(), lr=LR)
    for of_all in (plain, KeyedOptimizerWrapper(named, lambda _: plain)):
        with pytest.raises(tdsp.errors.ConfigError, match=r"3 of the optimizer's \d+ parameters"):
            parallel.pipeline(of_all)
    return type(pipeline).__name__, largest_gap(snapshot(parallel), train(cell, rank, stream))


KINDS = {
    Pipeline.BASE: "TrainPipelinePlain",
    Pipeline.SPARSE_DIST: "TrainPipelineInStep",
    Pipeline.ROW_PREFETCH: "TrainPipelineRowPrefetch",
}


@pytest.mark.parametrize(("kind", "name"), KINDS.items())
def test_the_plan_chooses_the_pipeline(ranks4: RankPool, kind: Pipeline, name: str) -> None:
    cell = Cell(tdsp.Mesh2D(1, 4), exchange="row", hot_rows=HOT_ROWS)
    for chosen, gap in ranks4.run(by_the_plan, cell, kind):
        assert chosen == name
        assert gap <= KERNEL_ROUNDING


def with_fewer_batches(rank: int, world_size: int, kind: Pipeline) -> str:
    """Train two epochs with one rank's first epoch a batch shorter; return the error."""
    parallel = shard_loss_model(replace(EXACT, pipeline=kind))
    assert isinstance(parallel, tdsp.ModelParallel2D)
    pipeline = parallel.pipeline(torch.optim.SGD(parallel.dense_parameters(), lr=LR))
    own = [step[rank] for step in make_stream(EXACT, STEPS)]
    text = error_of(lambda: [drain(pipeline, own[: 3 - (rank == 1)]), drain(pipeline, own)])
    pipeline.reset()
    parallel.sync_now()
    return text


@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_with_fewer_batches_is_named_on_all(ranks4: RankPool, kind: Pipeline) -> None:
    for text in ranks4.run(with_fewer_batches, kind):
        assert text.startswith("RankError: no batch is left after 2 for rank 1, but one for ranks")


def trained_after_reset(rank: int, world_size: int, kind: Pipeline) -> int:
    """Reset a pipeline that holds batches; count the batches it trains from another stream."""
    parallel = shard_loss_model(replace(EXACT, pipeline=kind))
    assert isinstance(parallel, tdsp.ModelParallel2D)
    pipeline = parallel.pipeline(torch.optim.SGD(parallel.dense_parameters(), lr=LR))
    own = [step[rank] for step in make_stream(EXACT, STEPS)]
    pipeline.progress(iter(own))
    pipeline.reset()
    return len(drain(pipeline, own[:2]))


@pytest.mark.parametrize("kind", KINDS)
def test_a_reset_drops_batches_taken_ahead(ranks4: RankPool, kind: Pipeline) -> None:
    assert ranks4.run(trained_after_reset, kind) == [2] * 4


def syncs_in_a_pipeline(rank: int, world_size: int, cell: Cell, interval: int) -> int:
    parallel = shard_loss_model(cell)
    batches = [step[rank] for step in make_stream(cell, STEPS)]
    with counting_syncs(parallel) as reports:
        pipeline_loop(
            "sparse dist",
            parallel,
            make_optimizer(parallel),
            batches,
            dmp_collection_sync_interval_batches=interval,
        )
        # The last row gradients travel until someone needs the rows.
        cast(tdsp.ModelParallel2D, parallel).sync_now()
        return len(reports)


@pytest.mark.parametrize("interval", [1, 2, 3])
def test_a_pipelines_interval_skips_no_sync(ranks4: RankPool, interval: int) -> None:
    for cell in (EXACT, AVERAGED):
        assert ranks4.run(syncs_in_a_pipeline, cell, interval) == [STEPS] * 4


def accumulated(rank: int, world_size: int, cell: Cell, steps: int) -> float:
    parallel, oracle, stream = shard(cell), oracle_of(cell), make_stream(cell, STEPS)
    batches = [step[rank] for step in stream]
    plain_loop(parallel, make_optimizer(parallel), batches, accumulate=steps)
    for first in range(0, STEPS, steps):
        oracle.accumulate(stream[first : first + steps])
    return compare(parallel, oracle).worst


@pytest.mark.dealt_file
def test_gradient_accumulation(ranks4: RankPool) -> None:
    """The fused update runs in every backward, the dense one in every one or every second."""
    for cell in (EXACT, HOT, replace(AVERAGED, optimizer="sgd")):
        for steps in (1, 2):
            assert max(ranks4.run(accumulated, cell, steps)) < ROUNDING


def late(rank: int, world_size: int, pause_s: float) -> list[float]:
    """Return two models' losses; rank 1 is late whenever ranks wait outside a step."""
    models = [shard(SPREAD), shard(SPREAD)]
    optimizers = [make_optimizer(model) for model in models]
    *batches, other = (step[rank] for step in make_stream(SPREAD, 3))
    plain_loop(models[1], optimizers[1], [other] * 3)
    losses = []
    with mock.patch.object(alarm, "_PATIENCE_S", 0.05):
        for batch in batches:
            for model, optimizer in zip(models, optimizers, strict=True):
                optimizer.zero_grad()
                loss = local_loss(model(batch))
                losses.append(loss.item())
                time.sleep(pause_s if rank == 1 else 0.0)
                model.state_dict()
                loss.backward()
                time.sleep(pause_s if rank == 1 else 0.0)
                with torch.no_grad():
                    losses.append(local_loss(model(other)).item())
                local_loss(model(batch))  # No backward follows.
                time.sleep(pause_s if rank == 1 else 0.0)
                optimizer.step()
    return losses


def test_a_late_rank_is_waited_for(ranks4: RankPool) -> None:
    assert ranks4.run(late, 0.3) == ranks4.run(late, 0.0)


def late_with_another_model(rank: int, world_size: int) -> None:
    """Be late on rank 1, whose only readable notices are about an earlier model."""
    model, batches = shard(SPREAD), [step[rank] for step in make_stream(SPREAD, 3)]
    with tdsp.failing_together(model):
        plain_loop(model, make_optimizer(model), batches)
    model = shard(SPREAD)
    with (
        mock.patch.multiple(alarm, _PATIENCE_S=0.05, GRACE_S=0.05),
        mock.patch.object(failure_detection, "ANSWER_S", 0.5),
        mock.patch.object(NoticeBoard, "_post_if_asked", return_value=False),
    ):
        time.sleep(2.0 if rank == 1 else 0.0)
        cast(tdsp.ModelParallel2D, model).sync_now()


def test_counts_of_an_earlier_model_say_nothing(ranks4: RankPool) -> None:
    ranks4.run(late_with_another_model)


def dense_clipped(rank: int, world_size: int, cell: Cell) -> float:
    parallel, oracle, stream = shard(cell), oracle_of(cell), make_stream(cell, STEPS)
    optimizer = GradientClippingOptimizer(
        make_optimizer(parallel), clipping=GradientClipping.NORM, max_gradient=0.1
    )
    plain_loop(parallel, optimizer, [step[rank] for step in stream])
    oracle.max_norm = 0.1
    for batches in stream:
        oracle.accumulate([batches])
    return compare(parallel, oracle).worst


def warmed_up(rank: int, world_size: int, cell: Cell) -> float:
    parallel, oracle, stream = shard(cell), oracle_of(cell), make_stream(cell, STEPS)
    stage = WarmupStage(WarmupPolicy.LINEAR, max_iters=2, value=0.1)
    optimizer = WarmupOptimizer(make_optimizer(parallel), [stage], lr=LR)
    plain_loop(parallel, optimizer, [step[rank] for step in stream])
    for factor, batches in zip((0.1, 0.55, 1.0, 1.0), stream, strict=True):
        oracle.lr = LR * factor
        oracle.accumulate([batches])
    return compare(parallel, oracle).worst


@pytest.mark.dealt_file
def test_wrapped_optimizers(ranks4: RankPool) -> None:
    """TorchRec's wrappers can be put around the combined optimizer."""
    for cell in (EXACT, HOT, replace(AVERAGED, optimizer="sgd")):
        assert max(ranks4.run(dense_clipped, cell)) < ROUNDING
        assert max(ranks4.run(warmed_up, cell)) < ROUNDING


class ScalingModel(BagModel):
    """Scales all bags' gradients by a hook."""

    def joined(self, features: KeyedJaggedTensor) -> torch.Tensor:
        pooled = self.ebc(features)
        pooled.values().register_hook(lambda grad: SCALE * grad)
        return torch.cat([pooled[name] for name in self.features], dim=1)


class ClippedModel(BagModel):
    """Then clips every bag's gradient, as FBGEMM's kernels clip their output's gradient."""

    bound: float

    def joined(self, features: KeyedJaggedTensor) -> torch.Tensor:
        pooled = self.ebc(features)
        parts = [pooled[name] for name in self.features]
        for part in parts:
            part.register_hook(lambda grad: (SCALE * grad).clamp(-self.bound, self.bound))
        return torch.cat(parts, dim=1)


MAX_GRADIENT, SCALE = 0.02, 1.5


def fused_clipped(
    rank: int, world_size: int, cell: Cell, divides: bool = True
) -> tuple[float, float]:
    """Return the gaps to a clipping oracle and to a plain one."""
    params = {"gradient_clipping": True, "max_gradient": MAX_GRADIENT}
    params |= {"learning_rate": LR, "eps": cell.eps}
    sharder = tdsp.EmbeddingBagCollectionSharder2D(FUSED[cell.optimizer], fused_params=params)
    sharder.accumulates = cell.accumulates
    torch.manual_seed(0)
    parallel, stream = shard(cell, sharder, ScalingModel(cell.spec)), make_stream(cell, STEPS)
    comm_ops.set_gradient_division(divides)
    try:
        plain_loop(parallel, make_optimizer(parallel), [step[rank] for step in stream])
    finally:
        comm_ops.set_gradient_division(True)
    torch.manual_seed(0)
    model = ClippedModel(cell.spec)
    clipping, plain = oracle_of(cell, model), oracle_of(cell)
    # Kernels clip their inputs: gradients of the ranks' own losses, if nothing divides them.
    factor = 1 if divides else world_size
    clipping.table_factor = plain.table_factor = float(factor)
    model.bound = MAX_GRADIENT / factor
    for oracle in (clipping, plain):
        for batches in stream:
            oracle.accumulate([batches])
    return compare(parallel, clipping).worst, compare(parallel, plain).worst


ONE_GROUP = replace(EXACT, mesh=tdsp.Mesh2D(1, 4))
MEANS = ModelSpec(pooling="mean")


@pytest.mark.parametrize(
    "cell",
    [
        ONE_GROUP,
        replace(ONE_GROUP, accumulates=True),
        EXACT,
        HOT,
        replace(HOT, mesh=tdsp.Mesh2D(1, 4)),
        replace(ONE_GROUP, exchange="row"),
        replace(EXACT, exchange="row", hot_rows=HOT_ROWS, spec=MEANS),
        replace(ONE_GROUP, spec=MEANS),
        replace(HOT, spec=MEANS),
    ],
    ids=str,
)
def test_fused_clipping(ranks4: RankPool, cell: Cell) -> None:
    """The bound is the same as in one group, whatever the mesh."""
    for clipped, plain in ranks4.run(fused_clipped, cell):
        assert clipped < ROUNDING < plain


@pytest.mark.parametrize("cell", [EXACT, replace(ONE_GROUP, exchange="row")], ids=str)
def test_fused_clipping_of_gradients_that_are_summed(ranks4: RankPool, cell: Cell) -> None:
    for clipped, plain in ranks4.run(fused_clipped, cell, False):
        # Gradients, and so their roundings, are four times as large as elsewhere.
        assert clipped < 4 * ROUNDING < plain


def clipped_in_part(rank: int, world_size: int) -> None:
    """Train a single feature where a collection clips all its features' gradients."""
    params = {"gradient_clipping": True, "max_gradient": MAX_GRADIENT}
    cell = replace(ONE_GROUP, spec=SEQUENCES)
    sharder: Any = tdsp.EmbeddingCollectionSharder2D(FUSED["sgd"], fused_params=params)
    collection: Any = shard(cell, sharder).module.ec
    before = snapshot(collection)
    collection(make_batch(cell.spec, rank))["f0"].values().sum().backward()
    changed = {
        name for name, value in snapshot(collection).items() if (value != before[name]).any()
    }
    assert changed
    assert all("t0" in name for name in changed)


def test_clipping_knows_features_without_a_loss(ranks4: RankPool) -> None:
    ranks4.run(clipped_in_part)


def in_two_buffers(batches: Sequence[KeyedJaggedTensor]) -> Iterator[KeyedJaggedTensor]:
    """Yield batches in two alternating memory buffers."""
    num_ids, num_lengths = (
        max(part.numel() for part in parts)
        for parts in zip(*((batch.values(), batch.lengths()) for batch in batches), strict=True)
    )
    like = batches[0]
    buffers = [
        (like.values().new_empty(num_ids), like.lengths().new_empty(num_lengths)) for _ in range(2)
    ]
    for (ids, lengths), batch in zip(cycle(buffers), batches):
        ids = ids[: batch.values().numel()].copy_(batch.values())
        yield KeyedJaggedTensor(batch.keys(), ids, lengths=lengths.copy_(batch.lengths()))


def reuse_memory(rank: int, world_size: int, cell: Cell) -> float:
    """Return the gap caused by a loader that reuses its memory."""
    stream = make_stream(cell, STEPS)
    parallel = shard_loss_model(cell)
    pipeline = PIPELINES["sparse dist"](parallel, make_optimizer(parallel), rank_device())
    drain(pipeline, in_two_buffers([step[rank] for step in stream]))
    return largest_gap(snapshot(parallel), train(cell, rank, stream, "sparse dist"))


@pytest.mark.parametrize(
    "cell",
    [
        replace(ONE_GROUP, spec=MEANS),
        replace(EXACT, spec=MEANS, exchange="row", hot_rows=HOT_ROWS),
        replace(HOT, spec=MEANS, exchange="nonempty"),
    ],
    ids=str,
)
def test_a_loader_may_reuse_memory_as_with_torchrec(ranks4: RankPool, cell: Cell) -> None:
    assert max(ranks4.run(reuse_memory, cell)) == 0
