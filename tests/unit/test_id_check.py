"""Bad ids are found, and corrected bag by bag."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, strategies as st
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_2dsp.shard.batch import BadIds, IdCheck

NUM_ROWS = {"a": 5, "b": 3}
"""By feature; others look nothing up."""
CONFIGS = [
    SimpleNamespace(name="first", num_embeddings=5, feature_names=["a", "b"]),
    SimpleNamespace(name="second", num_embeddings=3, feature_names=["b"]),
]
KEYS = ["a", "other", "b"]

bags_of_ids = st.lists(st.lists(st.integers(-2, 7), max_size=3), min_size=1, max_size=4)


def check_of(policy: BadIds) -> IdCheck:
    return IdCheck(CONFIGS, policy)


def corrected(bag: list[int], key: str, policy: BadIds) -> list[int]:
    limit = NUM_ROWS.get(key)
    if limit is None:
        return bag
    if policy is BadIds.DROP:
        return [value for value in bag if 0 <= value < limit]
    return [min(max(value, 0), limit - 1) for value in bag]


@given(
    features=st.lists(bags_of_ids, min_size=3, max_size=3),
    policy=st.sampled_from([BadIds.DROP, BadIds.CLAMP]),
    dtype=st.sampled_from([torch.int32, torch.int64]),
)
def test_bags_are_corrected(
    features: list[list[list[int]]], policy: BadIds, dtype: torch.dtype
) -> None:
    batch_size = min(len(bags) for bags in features)
    features = [bags[:batch_size] for bags in features]
    flat = [value for bags in features for bag in bags for value in bag]
    batch = KeyedJaggedTensor(
        keys=KEYS,
        values=torch.tensor(flat, dtype=dtype),
        weights=torch.arange(len(flat)).float(),
        lengths=torch.tensor([len(bag) for bags in features for bag in bags]),
        stride=batch_size,
    )
    check = check_of(policy)
    made, error = check(batch)
    assert error is None
    expected = [
        [corrected(bag, key, policy) for bag in bags]
        for key, bags in zip(KEYS, features, strict=True)
    ]
    assert made.values().tolist() == [one for bags in expected for bag in bags for one in bag]
    assert made.values().dtype == dtype
    assert made.lengths().tolist() == [len(bag) for bags in expected for bag in bags]
    assert made.stride() == batch_size
    limits = [
        NUM_ROWS.get(key)
        for key, bags in zip(KEYS, features, strict=True)
        for bag in bags
        for _ in bag
    ]
    is_bad = [
        limit is not None and not 0 <= value < limit
        for value, limit in zip(flat, limits, strict=True)
    ]
    assert check.num_bad == sum(is_bad)
    kept = [i for i, bad in enumerate(is_bad) if not bad or policy is BadIds.CLAMP]
    assert made.weights().tolist() == kept


def test_a_good_batch_is_left_as_it_is() -> None:
    batch = KeyedJaggedTensor(["a"], torch.tensor([0, 4]), lengths=torch.tensor([1, 1]))
    made, _ = check_of(BadIds.CLAMP)(batch)
    assert made is batch


@pytest.mark.parametrize(
    ("ids", "said"),
    [
        ([1, 2, 4, 9], "feature 'b' has the id 4 in sample 1 of"),
        ([9, -1, 0, 0], "feature 'a' has the id 9 in sample 0 of"),
        ([1, 2, 1, -3], "feature 'b' has the id -3 in sample 2 of"),
    ],
)
def test_the_first_bad_id_is_named(ids: list[int], said: str) -> None:
    batch = KeyedJaggedTensor(
        ["a", "b"], torch.tensor(ids), lengths=torch.tensor([1, 0, 1, 0, 1, 1])
    )
    bad = next(i for i, value in enumerate(ids) if not 0 <= value < (5, 5, 3, 3)[i])
    assert str(check_of(BadIds.RAISE)._error(batch, bad)).startswith(said)
