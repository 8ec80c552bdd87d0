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
from tests.support.managed_collisions import behind_maps, sorting_map
from tests.support.planning import BATCH, EXACT, LINK, TWO, calibration, cost, only_the_link
from torchrec_2dsp._compat.id_maps import HashedIdMap, unequal_on_ranks
from torchrec_2dsp.cost.calibration import KernelCost
from torchrec_2dsp.cost.model import CostSetting
from torchrec_2dsp.cost.workload import DenseWork, IdMapWork, Workload
from torchrec_2dsp.plan.parameter_sharding import Pipeline

CPU = torch.device("cpu")


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


@pytest.mark.parametrize(("policy", "options"), CASES, ids=str)
def test_slots_are_given_as_by_fbgemm_in_one_thread(
    policy: str | None, options: dict[str, Any]
) -> None:
    expected = made(OneThreadHashZch, policy, **options)
    id_map = HashedIdMap(made(HashZchManagedCollisionModule, policy, **options))
    rng, num_evicted, num_without, hour = np.random.default_rng(3), 0, 0, 1_000
    for _ in range(60):
        hour += int(rng.integers(0, 3))
        features = [torch.from_numpy(rng.integers(0, 99, size)) for size in rng.integers(0, 16, 2)]
        ids = torch.cat(features)
        sizes = torch.tensor([len(of) for of in features])
        with at_hour(hour):
            batch = {"t": JaggedTensor(ids, lengths=torch.ones_like(ids), weights=sizes)}
            rows = expected.remap(batch)["t"].values()
        evicted = expected.evict()
        actual = id_map.see(features, hour)
        assert actual is not None
        assert actual.tolist() == ([] if evicted is None else evicted.tolist())
        assert id_map.rows_of(ids, {}).equal(rows)
        for name, value in expected.state_dict().items():
            assert value.equal(id_map.module.state_dict()[name]), name
        num_evicted += actual.numel()
        ids_of_slots = expected._hash_zch_identities[:, 0]
        # Those above 99 can't have a row.
        owned = id_map.owned_rows(torch.arange(50, 200))
        assert owned.equal((ids_of_slots >= 50).nonzero().squeeze(1))
        num_without += int((ids_of_slots[rows] != ids).sum())
    assert num_without > 20
    assert (num_evicted > 20) == (policy is not None)


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
    """Each host's two ranks send 8 bytes per id to two ranks on the other host."""
    maps, dense = IdMapWork(ids_per_sample=3.0, num_rows=500.0), DenseWork(forward_s=9.0)
    find = only_the_link(find=KernelCost(base_s=0, per_item_s=1e-6, per_byte_s=0))
    given = {"calibration": find, "pipeline": pipeline, "dense": dense}
    without, priced = cost(mesh=TWO, **given), cost(mesh=TWO, id_maps=maps, **given)  # type: ignore[arg-type]
    expected_s = LINK * 2 * 2 * BATCH * 3 * 8 + 1e-6 * (2 * 4 * BATCH * 3 + 500)
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
    setting = CostSetting(calibration(), workload, TWO, EXACT, 2)
    assert setting.of_world().workload.id_maps == IdMapWork()
