"""Hashed id maps assign the same slots as TorchRec's with a one-threaded kernel; maps' cost."""

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.modules.hash_mc_evictions import HashZchEvictionConfig, HashZchEvictionPolicyName
from torchrec.modules.hash_mc_modules import HashZchManagedCollisionModule
from torchrec.sparse.jagged_tensor import JaggedTensor

from tests.support.hash_zch import OneThreadHashZch, at_hour
from tests.support.managed_collisions import POLICIES, behind_maps, sorting_map
from tests.support.planning import BATCH, EXACT, LINK, TWO, calibration, cost, only_the_link
from torchrec_2dsp._compat.hashed_id_map import HashedIdMap
from torchrec_2dsp._compat.id_map_base import Memory, Overwritten, WorldBatch
from torchrec_2dsp._compat.id_maps import SortedIdMap, unequal_on_ranks
from torchrec_2dsp.cost.calibration import KernelCost
from torchrec_2dsp.cost.model import CostSetting
from torchrec_2dsp.cost.workload import DenseWork, IdMapWork, Workload
from torchrec_2dsp.plan.parameter_sharding import Pipeline

CPU = torch.device("cpu")
CONFIG = EmbeddingBagConfig(12, 4, name="t", feature_names=["a", "b"])


def made(kind: Any, policy: str | None, **options: Any) -> Any:
    """Return a map with 24 rows; ids live 2 hours, or 1 and 3 by feature."""
    chosen = None if policy is None else HashZchEvictionPolicyName[policy]
    hours = HashZchEvictionConfig(features=["a", "b"], single_ttl=2, per_feature_ttl=[1, 3])
    options = {"total_num_buckets": 2, "max_probe": 5} | options
    return kind(24, CPU, eviction_policy_name=chosen, eviction_config=hours, **options)


CASES = [
    *((policy, {}) for policy in [None, *HashZchEvictionPolicyName.__members__]),
    ("LRU_EVICTION", {"total_num_buckets": 1, "max_probe": 24}),
    ("SINGLE_TTL_EVICTION", {"max_probe": 30}),
    ("PER_FEATURE_TTL_EVICTION", {"input_hash_size": 100}),
    ("SINGLE_TTL_EVICTION", {"opt_in_prob": 100, "percent_reserved_slots": 20}),
    (None, {"opt_in_prob": 100, "percent_reserved_slots": 20}),
]


NUM_RANKS, OWNER = 3, 1


def seen(maps: list[Any], own: list[list[torch.Tensor]], hour: int = 0) -> tuple[Any, int]:
    """Let ranks' maps see a batch; return the evicted rows and the number of ids sent.

    Args:
        maps: each rank's map.
        own: each rank's ids, by feature.
        hour: the time.
    """
    pairs = list(zip(maps, own, strict=True))
    messages = [id_map.message(ids, hour) for id_map, ids in pairs]
    counts = [[of.numel() for of in feature] for feature in zip(*own, strict=True)]
    has_owner = isinstance(maps[0], SortedIdMap)
    evicted = []
    for rank, (id_map, ids) in enumerate(pairs):
        reads = rank == OWNER or not has_owner
        batch = WorldBatch(ids, messages if reads else [], counts, rank, reads, hour)
        evicted.append(id_map.see(batch, keeps_before=True))
    taken = evicted[OWNER]
    for rank, id_map in enumerate(maps):
        assert (evicted[rank] is None) == (taken is None)
        if taken is not None and has_owner and rank != OWNER:
            assert not evicted[rank].numel()
            id_map.follow(taken, maps[OWNER].ids_of(taken))
        assert taken is None or has_owner or taken.equal(evicted[rank])
    sent = sum(part.numel() for message in messages for part in (message.tally.ids, *message.ids))
    return taken, sent


def drawn(rng: np.random.Generator, num_features: int, below: int) -> list[list[torch.Tensor]]:
    """Draw each rank's ids, by feature."""
    sizes = rng.integers(0, 6, (NUM_RANKS, num_features))
    return [[torch.from_numpy(rng.integers(0, below, size)) for size in of] for of in sizes]


def of_world(own: list[list[torch.Tensor]]) -> list[torch.Tensor]:
    """Return each feature's ids on all ranks."""
    return [torch.cat(feature) for feature in zip(*own, strict=True)]


class Past:
    """A map's states before its last batches, to compare with what the map remembers of them."""

    def __init__(self) -> None:
        self.states: list[tuple[Memory, dict[str, torch.Tensor]]] = []
        self.overwritten: list[Overwritten] = []

    def note(self, id_map: Any) -> None:
        """Note the state before a batch."""
        buffers = {name: of.clone() for name, of in id_map.module.state_dict().items()}
        self.states = [*self.states[-2:], (id_map.memory, buffers)]

    def assert_restored(self, id_map: Any) -> None:
        """Compare all of these states after a batch."""
        self.overwritten = [*self.overwritten[-2:], id_map.overwritten]
        for place, (memory, expected) in enumerate(self.states):
            before = id_map.state_before(self.overwritten[place:])
            actual = id_map.module.state_dict() | before.buffers
            assert before.memory is memory
            assert all(actual[name].equal(value) for name, value in expected.items())


@pytest.mark.parametrize(("policy", "options"), CASES, ids=str)
def test_slots_are_given_as_by_fbgemm_in_one_thread(
    policy: str | None, options: dict[str, Any]
) -> None:
    expected = made(OneThreadHashZch, policy, **options)
    maps = [
        HashedIdMap(made(HashZchManagedCollisionModule, policy, **options))
        for _ in range(NUM_RANKS)
    ]
    rng, num_evicted, num_without, hour = np.random.default_rng(3), 0, 0, 1_000
    num_sent, num_ids, past = 0, 0, Past()
    for _ in range(60):
        hour += int(rng.integers(0, 3))
        own = drawn(rng, 2, 99)
        features = of_world(own)
        ids = torch.cat(features)
        sizes = torch.tensor([len(of) for of in features])
        with at_hour(hour):
            batch = {"t": JaggedTensor(ids, lengths=torch.ones_like(ids), weights=sizes)}
            rows = expected.remap(batch)["t"].values()
        evicted = expected.evict()
        past.note(maps[0])
        actual, sent = seen(maps, own, hour)
        past.assert_restored(maps[0])
        changed = past.overwritten[-1].rows
        assert changed is not None
        assert set(changed.tolist()) <= set(rows.tolist())
        num_sent, num_ids = num_sent + sent, num_ids + len(ids)
        assert actual.tolist() == ([] if evicted is None else evicted.tolist())
        for id_map in maps:
            assert id_map.rows_of(ids, {}).equal(rows)
            assert id_map.fingerprint() == HashedIdMap(id_map.module).fingerprint()
            for name, value in expected.state_dict().items():
                assert value.equal(id_map.module.state_dict()[name]), name
        num_evicted += 0 if evicted is None else evicted.numel()
        ids_of_slots = expected._hash_zch_identities[:, 0]
        # Those above 99 can't have a row.
        owned = maps[0].owned_rows(torch.arange(50, 200))
        assert owned.equal((ids_of_slots >= 50).nonzero().squeeze(1))
        num_without += int((ids_of_slots[rows] != ids).sum())
    maps[0].module.load_state_dict(
        made(HashZchManagedCollisionModule, policy, **options).state_dict()
    )
    maps[0].forget()
    assert maps[0].fingerprint() == HashedIdMap(maps[0].module).fingerprint()
    assert num_without > 20
    assert (num_evicted > 20) == (policy is not None)
    assert num_sent < num_ids


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("interval", [1, 4])
def test_an_owner_gives_rows_to_ids_that_ranks_remember_as_torchrec_does(
    policy: str, interval: int
) -> None:
    """Also if more ids come than TorchRec remembers, and after a move to other ranks."""
    rng = np.random.default_rng(interval)
    expected = sorting_map(CONFIG, policy, interval)
    maps = [SortedIdMap(sorting_map(CONFIG, policy, interval)) for _ in range(NUM_RANKS)]
    num_evicted, num_sent, num_ids, num_forgotten, past = 0, 0, 0, 0, Past()
    for step in range(60):
        own = drawn(rng, 2, 16)
        own = [[ids + step // 2 for ids in features] for features in own]
        if step % 20 > 3:
            own = [[ids.repeat(3) for ids in features] for features in own]
        ids = torch.cat(of_world(own))
        free = int(expected._input_history_buffer_size) - expected._current_history_buffer_offset
        num_forgotten += step > 0 and len(ids) > free
        expected.profile({"t": JaggedTensor(ids, lengths=torch.ones_like(ids))})
        evicted = expected.evict()
        past.note(maps[OWNER])
        actual, sent = seen(maps, own)
        past.assert_restored(maps[OWNER])
        num_sent, num_ids = num_sent + sent, num_ids + len(ids)
        num_evicted += 0 if evicted is None else evicted.numel()
        assert (actual is None) == (evicted is None) == bool((step + 1) % interval)
        assert actual is None or actual.equal(evicted)
        for rank, id_map in enumerate(maps):
            for name, value in expected.state_dict().items():
                is_shared = rank == OWNER or name not in id_map.owned_buffers
                assert not is_shared or value.equal(id_map.module.state_dict()[name]), name
        if step % 7 == 5:
            tallies = [id_map.memory.tally(CPU) for id_map in maps]
            (history, *others) = [id_map.memory.history(tallies) for id_map in maps]
            assert all(history.ids.equal(other.ids) for other in others)
            remembered = expected._current_history_buffer_offset
            assert history.ids.equal(expected._history_accumulator[:remembered].sort().values)
            maps = [maps[OWNER].copied_to(CPU) for _ in maps]
            for id_map in maps:
                id_map.memory = Memory.of(history, CPU)
            past = Past()
    assert num_evicted > 10
    assert num_forgotten > 5
    assert interval == 1 or num_sent < 0.9 * num_ids


REFUSED = [
    ("draws", {"opt_in_prob": 50, "percent_reserved_slots": 20}),
    ("without a reserved row", {"opt_in_prob": 100, "percent_reserved_slots": 1}),
    ("LRU", {"opt_in_prob": 100, "percent_reserved_slots": 20}),
    ("disable_fallback", {"disable_fallback": True}),
    ("no_bag", {"no_bag": True}),
    ("numbers for each id", {"track_id_freq": True}),
    ("numbers for each id", {"write_runtime_meta_dim": 1}),
    ("metrics", {"name": "t", "tb_logging_frequency": 9}),
    ("serving", {"is_inference": True}),
    ("serving", {"inference_dispatch_div_train_world_size": True}),
    ("part of a sharded map", {"end_bucket": 1}),
    ("read-only", {"read_only_suffix": "t"}),
]


@pytest.mark.parametrize(("reason", "options"), REFUSED, ids=str)
def test_what_would_differ_is_refused(reason: str, options: dict[str, Any]) -> None:
    policy = "LRU_EVICTION" if reason == "LRU" else "SINGLE_TTL_EVICTION"
    config = EmbeddingBagConfig(24, 4, name="t", feature_names=["a", "b"])
    assert unequal_on_ranks(made(HashZchManagedCollisionModule, policy), config) is None
    text = unequal_on_ranks(made(HashZchManagedCollisionModule, policy, **options), config)
    assert text is not None
    assert reason in text


@pytest.mark.parametrize("hours", [[1], [1, 2, 3], [1, -1]])
def test_each_feature_needs_hours_to_live(hours: list[int]) -> None:
    config = EmbeddingBagConfig(24, 4, name="t", feature_names=["a", "b"])
    id_map = made(HashZchManagedCollisionModule, "PER_FEATURE_TTL_EVICTION")
    assert unequal_on_ranks(id_map, config) is None
    id_map._eviction_config.per_feature_ttl = hours
    assert "hours to live" in str(unequal_on_ranks(id_map, config))


def test_fbgemm_doesnt_train_maps_on_a_cpu() -> None:
    ids = torch.tensor([3])
    with pytest.raises(RuntimeError, match="readonly"):
        made(HashZchManagedCollisionModule, None).remap({"t": JaggedTensor(ids, lengths=ids - 2)})


@pytest.mark.parametrize("pipeline", Pipeline)
def test_maps_see_the_ids_of_all_ranks_and_nothing_hides_that(pipeline: Pipeline) -> None:
    """Each host's two ranks send 8 bytes per id, half of them to the other host."""
    maps = IdMapWork(ids_per_sample=3.0, num_rows=500.0, num_maps=2)
    dense = DenseWork(forward_s=9.0)
    find = only_the_link(find=KernelCost(base_s=0, per_item_s=1e-6, per_byte_s=0))
    given = {"calibration": find, "pipeline": pipeline, "dense": dense}
    without, priced = cost(mesh=TWO, **given), cost(mesh=TWO, id_maps=maps, **given)  # type: ignore[arg-type]
    expected_s = LINK * BATCH * 3 * 8 + 1e-6 * ((2 + 4 / 2) * BATCH * 3 + 500 / 2)
    assert priced.id_maps_s == pytest.approx(expected_s)
    assert priced.total_s == pytest.approx(without.total_s + expected_s)


def test_a_workload_knows_what_goes_through_maps() -> None:
    tables = [
        EmbeddingBagConfig(name=name, num_embeddings=60, embedding_dim=8, feature_names=[name])
        for name in ("mapped", "plain")
    ]
    mapped, plain = (
        EmbeddingBagCollection([config], device=torch.device("meta")) for config in tables
    )
    module = nn.ModuleList([behind_maps(mapped, partial(sorting_map, interval=4)), plain])
    constraints = {"mapped": ParameterConstraints(pooling_factors=[5.0])}
    workload = Workload.of_model(module, batch_size=BATCH, constraints=constraints)
    assert workload.id_maps == IdMapWork(ids_per_sample=5.0, num_rows=60 / 4)
    hashed = behind_maps(mapped, lambda _: HashZchManagedCollisionModule(60, CPU, 2))
    workload = Workload.of_model(hashed, batch_size=BATCH, constraints=constraints)
    assert workload.id_maps == IdMapWork(ids_per_sample=5.0, num_rows=0.0)
    setting = CostSetting(calibration(), workload, TWO, EXACT, 2)
    assert setting.of_world().workload.id_maps == IdMapWork()
