"""Managed collisions train like TorchRec's unsharded module on all ranks' batches."""

from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint
from torchrec.distributed.mc_embedding_modules import (
    BaseShardedManagedCollisionEmbeddingCollection,
)
from torchrec.distributed.mc_embeddingbag import ManagedCollisionEmbeddingBagCollectionSharder
from torchrec.distributed.train_pipeline import EvalPipelineSparseDist, TrainPipelineSparseDist
from torchrec.modules.hash_mc_evictions import HashZchEvictionConfig, HashZchEvictionPolicyName
from torchrec.modules.mc_modules import (
    LFU_EvictionPolicy,
    MCHManagedCollisionModule,
    probabilistic_threshold_filter,
)
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

import torchrec_2dsp as tdsp
from tests.support.drifting_ids import Stream, compare
from tests.support.hash_zch import OneThreadHashZch, at_hour, hash_of
from tests.support.loops import OTHER_BATCH, drain
from tests.support.managed_collisions import (
    BAGS,
    HASHED,
    HOT_IDS,
    LATER_HOT_IDS,
    SEQUENCES,
    STEPS,
    TOLERANCE,
    Case,
    ManagedModel,
    Twin,
    batch_of,
    plan_of,
    replicas_of,
    set_clock_by_batches,
    sharded,
    sharder_of,
    state_gap,
    train,
    train_beside_twin,
)
from tests.support.oracle import local_loss
from tests.support.parity import (
    TWO,
    Cell,
    make_optimizer,
    make_sharder,
    relative_gap,
)
from tests.support.ranks import RankPool, error_of
from torchrec_2dsp.comms.groups import world_group
from torchrec_2dsp.parallel.checkpoint.load import load_weights
from torchrec_2dsp.shard import ids_of_world
from torchrec_2dsp.shard.parted import sharded_tables

BEHIND_LFU = Case(Cell(tdsp.Mesh2D(1, 4), spec=BAGS), "lfu")
CASES = [
    Case(Cell(TWO, "table_wise", BAGS, "sgd"), "lfu", hashed=True),
    Case(Cell(tdsp.Mesh2D(1, 4), spec=SEQUENCES, exchange="row"), loop="prefetch", hashed=True),
    Case(Cell(TWO, "column_wise", BAGS, "sgd"), "lru", resets=False),
    Case(Cell(tdsp.Mesh2D(4, 1), "table_wise", SEQUENCES, "sgd"), "hash reserved", resets=False),
    Case(Cell(tdsp.Mesh2D(1, 4), spec=BAGS, optimizer="lamb"), "lru"),
    Case(Cell(TWO, spec=BAGS, exchange="row", optimizer="partial_lamb"), "lru"),
]
"""Cases that random ones lack."""


@pytest.mark.parametrize("case", CASES, ids=str)
def test_training_equals_torchrecs_module(ranks4: RankPool, case: Case) -> None:
    for loss_gap, gap, counts, _ in ranks4.run(train_beside_twin, case, timeout_s=60):
        assert loss_gap < TOLERANCE
        assert gap < TOLERANCE
        assert counts[0] > 20 or not case.resets or case.policy == "hash"


def sent_ids(rank: int, world_size: int) -> list[list[list[int]]]:
    """Return how many numbers go to each rank in a step's exchanges for the maps."""
    case, by_step = replace(BEHIND_LFU, interval=3), []
    parallel, start = sharded(case), ids_of_world.start_all_to_all_ragged
    for step in range(6):
        with patch.object(ids_of_world, "start_all_to_all_ragged", wraps=start) as noted:
            train(case, parallel, rank, range(step, step + 1))
        by_step.append([[part.numel() for part in call.args[0]] for call in noted.mock_calls])
    return by_step


def test_ids_travel_at_intervals_to_their_maps_owners(ranks4: RankPool) -> None:
    for by_step in ranks4.run(sent_ids, timeout_s=60):
        assert [len(exchanges) for exchanges in by_step] == [0, 0, 2, 0, 0, 2]
        for to_owners, _ in filter(None, by_step):
            # Two maps have one owner or two, as earlier models have left room.
            assert 2 <= to_owners.count(0) < 4


def reload_dense(parallel: tdsp.ModelParallel2D) -> None:
    """Load the dense weights that are there, which leaves id maps and their batches alone."""
    dense = {name: value for name, value in parallel.state_dict().items() if "mc." not in name}
    assert dense
    parallel.load_state_dict(dense, strict=False)  # type: ignore[arg-type]


def go_on(
    rank: int, world_size: int, case: Case, mesh: tdsp.Mesh2D, folder: Path, save_at: int
) -> tuple[float, dict[str, torch.Tensor]]:
    """Train, save while a pipeline holds a batch, and go on with another mesh, beside the twin.

    Hot ids are changed, but not yet for that batch. Returns the largest gap, and the unsharded
    module's state after it loaded the checkpoint.
    """
    parallel, twin = sharded(case), Twin(case)
    optimizer = make_optimizer(parallel)
    stream = (batch_of(case, step, rank) for step in range(STEPS))
    pipeline = TrainPipelineSparseDist(parallel, optimizer, torch.device("cpu"))
    for step in range(save_at):
        pipeline.progress(stream)
        twin.step(step)
    twin.name_hot_ids(refresh(parallel) if case.cell.hot_rows else ())
    state = tdsp.TrainState(parallel, optimizer)
    tdsp.save_checkpoint(folder, parallel, optimizer, train_state=state)
    gap = state_gap(parallel, twin)
    reload_dense(parallel)
    with pytest.raises(tdsp.errors.UnsupportedError, match="a pipeline has batches whose ids"):
        parallel.load_state_dict(parallel.state_dict())  # type: ignore[arg-type]
    older = older_sets(parallel)
    del pipeline
    cold = sharded(replace(case, cell=replace(case.cell, mesh=mesh, hot_rows=())))
    tdsp.load_checkpoint(folder, cold, make_optimizer(cold))
    gap = max(gap, state_gap(cold, twin))
    other = sharded(replace(case, cell=replace(case.cell, mesh=mesh)))
    optimizer = make_optimizer(other)
    tdsp.load_checkpoint(folder, other, optimizer, train_state=tdsp.TrainState(other, optimizer))
    reload_dense(other)
    assert older_sets(other) == older
    steps = range(save_at, STEPS)
    losses = train(replace(case, loop="plain"), other, rank, steps)
    loss_gap = relative_gap(losses, [twin.step(step)[rank] for step in steps])
    assert bool(replicas_of(other, twin)) == bool(case.cell.hot_rows)
    alone = ManagedModel(case)
    load_weights(folder, alone)
    return max(gap, loss_gap, state_gap(other, twin)), alone.state_dict()


def refresh(parallel: tdsp.ModelParallel2D) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Change the hot ids, and return the new ones."""
    parallel.refresh_hot_sets(dict(LATER_HOT_IDS))
    return LATER_HOT_IDS


def older_sets(parallel: tdsp.ModelParallel2D) -> list[Any]:
    """Return the hot ids for batches in flight, which must be the first ones."""
    older = [part.hot_sets.older for part in sharded_tables(parallel) if part.hot_rows]
    first = {table: tdsp.HotSet.of(ids) for table, ids in HOT_IDS}
    assert all(hot_sets and all(sets == first for sets in hot_sets) for hot_sets in older)
    return older


@pytest.mark.parametrize(
    ("policy", "interval", "hot_ids"),
    [
        ("lru", 1, ()),
        ("lru", 3, ()),
        ("hash ttl", 1, ()),
        ("lru", 1, HOT_IDS),
        ("hash ttl", 1, HOT_IDS),
    ],
)
def test_a_checkpoint_goes_on_with_another_mesh(
    ranks4: RankPool, tmp_path: Path, policy: str, interval: int, hot_ids: Any
) -> None:
    case = Case(Cell(TWO, spec=BAGS, exchange="row", hot_rows=hot_ids), policy, interval)
    twin, save_at = Twin(case), 4
    for step in range(save_at):
        twin.step(step)
    args = (case, tdsp.Mesh2D(1, 4), tmp_path / "4", save_at)
    for gap, alone in ranks4.run(go_on, *args, timeout_s=60):
        assert gap < TOLERANCE
        for name, value in twin.model.state_dict().items():
            assert torch.allclose(alone[name].float(), value.float(), atol=TOLERANCE), name


def around_training(rank: int, world_size: int, case: Case) -> list[str]:
    """Pause a pipeline, evaluate, and pass invalid batches; return the errors."""
    errors: list[str] = []
    twin, parallel = Twin(case), sharded(case)
    batches = [batch_of(case, step, rank) for step in range(6)]
    optimizer = make_optimizer(parallel)
    pipeline = TrainPipelineSparseDist(parallel, optimizer, torch.device("cpu"))
    # Some batches come twice in a row, as one object.
    stream = (batches[step] for step in (0, 1, 2, 3, 3, 4, 5, 5))
    for step in (0, 1, 2, 3, 3):
        scores = pipeline.progress(stream)
        assert abs(local_loss(scores).item() - twin.step(step)[rank]) < 1e-5
        with torch.no_grad():
            assert OTHER_BATCH in error_of(lambda: parallel(batches[5]))
        if step in (1, 2):
            pipeline.detach().eval()
            with torch.no_grad():
                # This includes ids in the batch in flight, whose rows aren't theirs yet.
                batch = batches[step + 1]
                expected = twin.model.eval()(batch)[1]
                evaluating = EvalPipelineSparseDist(parallel, optimizer, torch.device("cpu"))
                for scores in (parallel(batch)[1], evaluating.progress(iter([batch]))):
                    assert (scores - expected).abs().max() < 1e-5
                evaluating.detach()
            parallel.train()
            twin.model.train()
    drain(pipeline, stream)
    for step in (4, 5, 5):
        twin.step(step)
    assert state_gap(parallel, twin) < TOLERANCE
    pipeline.detach()
    parallel.eval()
    with torch.inference_mode():
        _, scores = parallel(batches[5])
    _, expected = twin.model.eval()(batches[5])
    assert torch.allclose(scores, expected, atol=1e-5)
    remapped: Any = parallel.module.remapped
    assert remapped.keys() == twin.model.remapped.keys()
    assert torch.equal(remapped.values(), twin.model.remapped.values())
    assert torch.equal(remapped.lengths(), twin.model.remapped.lengths())
    wrong, before = batches[0], map_state(parallel)
    if rank == 1:
        wrong = KeyedJaggedTensor(["f0"], torch.tensor([1]), lengths=torch.tensor([1, 0, 0, 0]))
    parallel.train(rank != 2)
    errors.append(error_of(lambda: parallel(wrong)))
    parallel.train()
    errors.append(error_of(lambda: parallel(wrong)))
    right = batches[0]
    short = KeyedJaggedTensor(right.keys(), right.values(), lengths=right.lengths()[1:])
    errors.append(error_of(lambda: parallel(short if rank == 1 else right)))
    if case.policy in HASHED:
        wrong = batches[0]
        if rank == 2:
            wrong = KeyedJaggedTensor(
                wrong.keys(), torch.full_like(wrong.values(), -1), lengths=wrong.lengths()
            )
        errors.append(error_of(lambda: parallel(wrong)))
        assert errors[-1].startswith("InputError: the batch of rank 2 has an id of feature 'f0'")
        assert error_of(lambda: parallel.eval()(wrong)) == errors.pop()
    assert all(value.equal(before[name]) for name, value in map_state(parallel).items())
    return errors


def looked_up_again(rank: int, world_size: int) -> str:
    case, parallel = ON_THE_WAY, sharded(ON_THE_WAY)
    batch = batch_of(case, 0, rank)
    return error_of(lambda: checkpoint(parallel, batch, use_reentrant=False))


def test_a_lookup_that_would_be_repeated_is_refused(ranks4: RankPool) -> None:
    for text in ranks4.run(looked_up_again):
        assert text.startswith("UnsupportedError: a lookup behind id maps is inside torch")


def map_state(parallel: tdsp.ModelParallel2D) -> dict[str, torch.Tensor]:
    state = parallel.state_dict().items()
    return {name: value.clone() for name, value in state if "_managed_collision_modules" in name}


ON_THE_WAY = Case(Cell(TWO, spec=BAGS, exchange="row", owners="hash"), "lru", loop="sparse dist")
HOT_ON_THE_WAY = replace(ON_THE_WAY, cell=replace(ON_THE_WAY.cell, hot_rows=HOT_IDS))


@pytest.mark.dealt
@pytest.mark.parametrize(
    "case",
    [
        ON_THE_WAY,
        replace(ON_THE_WAY, policy="hash ttl"),
        HOT_ON_THE_WAY,
        replace(HOT_ON_THE_WAY, policy="hash ttl"),
    ],
    ids=str,
)
def test_pauses_evaluations_and_wrong_batches(ranks4: RankPool, case: Case) -> None:
    first, *others = ranks4.run(around_training, case, timeout_s=60)
    assert others == [first] * 3
    assert first[0].startswith("ConfigError: the model trains on rank 0 and is evaluated on rank 2")
    assert first[1].startswith("InputError: this rank's batch has no feature 'f1'")
    assert "lengths, but" in first[2]


def drop_a_batch(
    rank: int, world_size: int, folder: Path, case: Case, reads_state: bool
) -> tuple[float, str]:
    """Drop a pipeline that holds a batch, train on from a checkpoint; then make maps differ."""
    twin, parallel = Twin(case), sharded(case)
    optimizer = make_optimizer(parallel)
    stream = iter([batch_of(case, step, rank) for step in range(6)])
    pipeline = TrainPipelineSparseDist(parallel, optimizer, torch.device("cpu"))
    state = tdsp.TrainState(parallel, optimizer)
    for step in range(3):
        if step == 2:
            tdsp.save_checkpoint(folder, parallel, optimizer, train_state=state)
        pipeline.progress(stream)
        twin.step(step)
    gap = state_gap(parallel, twin) if reads_state else 0.0
    pipeline.detach()
    del pipeline
    if reads_state:
        twin.see(3)
        gap = max(gap, state_gap(parallel, twin))
    twin = Twin(case)
    tdsp.load_checkpoint(folder, parallel, optimizer, train_state=state)
    train(replace(case, loop="plain"), parallel, rank, range(2, 6))
    for step in range(6):
        twin.step(step)
    gap = max(gap, state_gap(parallel, twin))
    weights = parallel.state_dict()
    name = "_hash_zch_identities" if case.policy in HASHED else "_mch_remapped_ids_mapping"
    rows = weights[f"mc._managed_collision_collection._managed_collision_modules.t0.{name}"]
    if rank == 1:
        rows[:2] = rows[:2].flip(0)
    loading: Any = parallel.module if reads_state else parallel
    loading.load_state_dict(weights)
    return gap, error_of(lambda: parallel(batch_of(case, 0, rank)))


@pytest.mark.parametrize(
    ("case", "reads_state"),
    [
        (ON_THE_WAY, True),
        (ON_THE_WAY, False),
        (replace(ON_THE_WAY, policy="hash lru"), True),
        (HOT_ON_THE_WAY, True),
        (replace(HOT_ON_THE_WAY, policy="hash ttl"), False),
    ],
    ids=str,
)
def test_a_batch_that_is_never_looked_up_leaves_nothing_behind(
    ranks4: RankPool, tmp_path: Path, case: Case, reads_state: bool
) -> None:
    for gap, text in ranks4.run(drop_a_batch, tmp_path / "3", case, reads_state, timeout_s=60):
        assert gap < TOLERANCE
        assert text.startswith("SyncError: the id maps differ between ranks")


class OwnMap(MCHManagedCollisionModule):
    """A map class that this package doesn't know."""


def refused(change: str) -> tuple[Case, Any]:
    """Return a case and its model, which can't be sharded."""
    case = Case(Cell(TWO, spec=BAGS), "hash ttl" if "hours" in change else "lfu")
    if change == "late":
        case = replace(case, cell=replace(case.cell, sync=tdsp.GradientSync(delay=1)))
    model = ManagedModel(case)
    (id_map, *_) = model.mc._managed_collision_collection._managed_collision_modules.values()
    if change == "own map":
        id_map.__class__ = OwnMap
    elif change == "probabilistic":
        id_map._eviction_policy._threshold_filtering_func = partial(
            probabilistic_threshold_filter, per_id_probability=0.1
        )
    elif change == "shared map":
        model.mc._managed_collision_collection._managed_collision_modules["t1"] = id_map
    elif change == "own policy":
        id_map._eviction_policy = type("Own", (LFU_EvictionPolicy,), {})()
    elif change == "no hours":
        id_map._eviction_config.single_ttl = None
    elif change == "other hours" and dist.get_rank() == 3:
        id_map._eviction_config.single_ttl = 7
    elif change == "other state" and dist.get_rank() == 3:
        id_map._mch_sorted_raw_ids[0] = 7
    return case, model


def refusal(rank: int, world_size: int, change: str) -> str:
    case, model = refused(change)
    sharder = sharder_of(case)
    plan = plan_of(case, sharder)
    return error_of(lambda: tdsp.ModelParallel2D(model, plan=plan, sharders=[sharder]))


REFUSALS = {
    "late": "UnsupportedError: module 'mc' has managed collisions, whose rows begin anew",
    "own map": "UnsupportedError: the managed collision module of table 't0' in module 'mc' is a ",
    "shared map": "UnsupportedError: tables of module 'mc' share a managed collision module",
    "own policy": "UnsupportedError: the managed collision module of table 't0' in module 'mc' ev",
    "probabilistic": "UnsupportedError: the managed collision module of table 't0' in module 'mc'",
    "no hours": "UnsupportedError: the managed collision module of table 't0' in module 'mc' has",
    "other hours": "ConfigError: the id map of table 't0' differs between ranks: rank 0 has",
    "other state": "ConfigError: the id map of table 't0' differs between ranks: rank 0 has",
}


@pytest.mark.parametrize("change", REFUSALS)
def test_what_would_differ_between_ranks_is_refused(ranks4: RankPool, change: str) -> None:
    for text in ranks4.run(refusal, change):
        assert text.startswith(REFUSALS[change])


def by_one_call(rank: int, world_size: int, case: Case) -> tuple[float, str]:
    parallel = tdsp.parallelize(
        ManagedModel(case),
        batch_size=4,
        optimizer=None,
        sharders=[ManagedCollisionEmbeddingBagCollectionSharder(make_sharder(case.cell))],
        calibration="emulated_200mbit",
    )
    parallel.load_state_dict(ManagedModel(case).state_dict())  # type: ignore[arg-type]
    set_clock_by_batches(parallel)
    assert all(param.requires_grad for param in parallel.dense_parameters())
    twin, losses = Twin(case), train(case, parallel, rank, range(STEPS))
    gap = relative_gap(losses, [twin.step(step)[rank] for step in range(STEPS)])
    model = tdsp.ModelParallel2D(
        ManagedModel(case), plan=parallel.plan, sharders=[sharder_of(case)]
    )
    optimizer = make_optimizer(model)
    text = error_of(lambda: next(tdsp.accumulate(model, [batch_of(case, 0, rank)] * 2)))
    optimizer.zero_grad()
    return gap, text


@pytest.mark.parametrize("policy", ["lfu", "hash ttls"])
def test_parallelize_shards_behind_id_maps(ranks4: RankPool, policy: str) -> None:
    case = replace(BEHIND_LFU, policy=policy)
    for gap, text in ranks4.run(by_one_call, case, timeout_s=60):
        assert gap < TOLERANCE
        assert "managed collisions" in text


@pytest.mark.slow
def test_a_long_stream_trains_as_if_nothing_had_happened(tmp_path: Path) -> None:
    """It survives a kill, a resume, another mesh, and TorchRec's unsharded module."""
    compared = compare(Stream(400, 300, 7), tmp_path, timeout_s=120)
    assert len(compared.gaps) == 3
    assert max(compared.gaps.values()) < 1e-6
    assert compared.maps_are_equal
    assert compared.num_evicted > 300


MERGED_ROWS = 24


def merged(rank: int, world_size: int, ids: list[int]) -> dict[int, float]:
    """Let each rank map its id and write it into the id's row; return the rows after the merge."""
    options: Any = {
        "eviction_policy_name": HashZchEvictionPolicyName.LRU_EVICTION,
        "eviction_config": HashZchEvictionConfig(features=["f"], single_ttl=9),
    }
    id_map = OneThreadHashZch(MERGED_ROWS, torch.device("cpu"), 1, max_probe=4, **options)
    seen = torch.tensor(ids[rank : rank + 1])
    with at_hour(1_000):
        features = {"f": JaggedTensor(seen, lengths=torch.ones_like(seen), weights=torch.ones(1))}
        (row,) = id_map.remap(features)["f"].values()
    weights, state = torch.zeros(MERGED_ROWS, 1), torch.zeros(MERGED_ROWS)
    weights[row] = float(ids[rank])
    kernel = SimpleNamespace(
        split_embedding_weights=lambda: [weights], get_optimizer_state=lambda: [{"sum": state}]
    )
    lookup = torch.ops.fbgemm.zero_collision_hash

    def on_a_cpu(**given: Any) -> Any:
        if given.get("readonly"):
            return lookup(**given)
        return id_map._zero_collision_hash(readonly=False, **given)

    def summed(tensors: dict[torch.dtype, list[torch.Tensor]], *_: object) -> None:
        for tensor in (tensor for of_type in tensors.values() for tensor in of_type):
            dist.all_reduce(tensor, group=world_group())

    with patch.object(torch.ops.fbgemm, "zero_collision_hash", on_a_cpu):
        survived, to_merged = id_map.sync_identities(
            rank == 0, world_size, list(range(world_size)), world_group()
        )
    merge: Any = BaseShardedManagedCollisionEmbeddingCollection.sync_hash_zch_weights
    module = SimpleNamespace(_table_to_tbe_and_index={"t": (kernel, 0)})
    merge(module, "t", to_merged, survived, True, summed)
    slots = id_map._hash_zch_identities[:, 0]
    return {id_: float(weights[slots == id_]) for id_ in ids}


def home(id_: int) -> int:
    return hash_of(id_) % MERGED_ROWS


SAME_HOME = [3, next(id_ for id_ in count(4) if home(id_) == home(3))]
OTHER_HOME = [3, next(id_ for id_ in count(4) if abs(home(id_) - home(3)) > 4)]


def test_torchrec_merges_ids_of_different_homes(ranks2: RankPool) -> None:
    assert ranks2.run(merged, OTHER_HOME) == [{id_: float(id_) for id_ in OTHER_HOME}] * 2


def test_torchrec_loses_an_id_that_moves(ranks2: RankPool) -> None:
    """One id gets the sum of both rows, the other gets none: each had one of the two copies."""
    first, moved = SAME_HOME
    assert ranks2.run(merged, SAME_HOME) == [{first: float(first + moved), moved: 0.0}] * 2
