"""`HotSet`: sorted, distinct, in range."""

from dataclasses import dataclass
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from torchrec.distributed.types import EmbeddingModuleShardingPlan, ShardingPlan
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_2dsp import HotSet, Mesh2D, Plan2D, pin
from torchrec_2dsp.errors import PlanError
from torchrec_2dsp.shard.batch import BadIds, IdCheck
from torchrec_2dsp.shard.hot_rows import split_hot_rows
from torchrec_2dsp.shard.stages import HotBatch, HotIds

ids = st.integers(0, 2**40)


@given(st.lists(ids, min_size=1))
def test_ids_come_in_any_order(values: list[int]) -> None:
    hot_set = HotSet.of(values)
    assert hot_set.row_ids == tuple(sorted(set(values)))
    assert len(hot_set) == len(set(values))
    assert hot_set == HotSet.of(torch.tensor(values)) == HotSet.of(reversed(values))
    assert hash(hot_set) == hash(HotSet.of(values))
    assert hot_set.tensor().dtype == torch.int64
    assert HotSet.of(hot_set.tensor()) == hot_set


@pytest.mark.parametrize(
    ("row_ids", "message"),
    [
        ((), "needs at least one row id; leave the hot set out instead"),
        ((3, 1), r"must be ascending and distinct; use HotSet\.of\(ids\)"),
        ((1, 1), r"must be ascending and distinct; use HotSet\.of\(ids\)"),
    ],
)
def test_bad_ids_are_refused(row_ids: tuple[int, ...], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        HotSet(row_ids)


@pytest.mark.parametrize(
    "rows",
    [
        torch.tensor([True, False]),
        torch.tensor([3.0, 4.0]),
        np.array([True]),
        np.array([1.5]),
        [torch.tensor(2.0)],
        [True],
        torch.tensor([[3]]),
    ],
)
def test_a_mask_or_counts_are_no_ids(rows: Any) -> None:
    stock = ShardingPlan({"ebc": EmbeddingModuleShardingPlan({})})
    plan = Plan2D.from_stock(stock, Mesh2D(1, 2))
    for build in (HotSet.of, lambda rows: pin(plan, "t", hot_rows=rows)):
        with pytest.raises(PlanError, match=r"^hot row .* is a (bool|float|list), not a row id; "):
            build(rows)


def test_ids_may_be_integers_of_any_kind() -> None:
    of_kinds = [
        np.array([3, 7]),
        np.array([7, 3], np.int32),
        [torch.tensor(7), np.int64(3)],
        {7, 3},
    ]
    assert {HotSet.of(rows) for rows in of_kinds} == {HotSet((3, 7))}


def test_ids_have_to_fit_the_table() -> None:
    hot_set = HotSet.of([0, 9])
    hot_set.check_fits("t_user", 10)
    with pytest.raises(
        PlanError,
        match=r"^hot row 9 of table 't_user' is out of range: the table has 9 rows \(0\.\.8\)$",
    ):
        hot_set.check_fits("t_user", 9)
    # Behind an id map it could be an id.
    with pytest.raises(PlanError, match="hot row -2 of table"):
        HotSet.of([0, -2]).check_fits("t_user", 9)


@dataclass(frozen=True)
class Example:
    """A batch as nested lists (ids by feature and sample) and the hot rows by feature."""

    bags: dict[str, list[list[int]]]
    hot: dict[str, list[int]]
    weighted: bool = False
    id_type: torch.dtype = torch.int64

    def batch(self) -> KeyedJaggedTensor:
        flat = [bag for bags in self.bags.values() for bag in bags]
        ids = torch.tensor([value for bag in flat for value in bag], dtype=self.id_type)
        return KeyedJaggedTensor(
            keys=list(self.bags),
            values=ids,
            lengths=torch.tensor([len(bag) for bag in flat], dtype=torch.int32),
            # Different for every id, so that a swap shows.
            weights=torch.arange(ids.numel()).float() if self.weighted else None,
        )

    def split(self, batch: KeyedJaggedTensor | None = None) -> tuple[KeyedJaggedTensor, HotBatch]:
        hot = {feature: torch.tensor(ids) for feature, ids in self.hot.items()}
        return split_hot_rows(self.batch() if batch is None else batch, HotIds({}, hot))


@st.composite
def examples(draw: st.DrawFn) -> Example:
    features = draw(st.lists(st.sampled_from("abcd"), min_size=1, max_size=4, unique=True))
    batch_size = draw(st.integers(1, 5))
    bag = st.lists(st.integers(0, 9), max_size=5)
    hot_ids = st.lists(st.integers(0, 12), min_size=1, max_size=6, unique=True).map(sorted)
    return Example(
        bags={
            feature: draw(st.lists(bag, min_size=batch_size, max_size=batch_size))
            for feature in features
        },
        hot={feature: draw(hot_ids) for feature in features if draw(st.booleans())},
        weighted=draw(st.booleans()),
        id_type=draw(st.sampled_from([torch.int32, torch.int64])),
    )


def bags_of(batch: KeyedJaggedTensor) -> dict[str, list[list[tuple[int, float]]]]:
    """Return ``(id, weight)`` pairs by feature and sample."""
    weights = batch.weights_or_none()
    pairs = list(
        zip(
            batch.values().tolist(),
            [0.0] * batch.values().numel() if weights is None else weights.tolist(),
            strict=True,
        )
    )
    bounds = batch.offsets().tolist()
    bags = [pairs[start:stop] for start, stop in pairwise(bounds)]
    size = batch.stride()
    return {key: bags[index * size : (index + 1) * size] for index, key in enumerate(batch.keys())}


@given(examples())
def test_every_id_is_either_hot_or_cold(example: Example) -> None:
    """Order, weights and bags are kept on both sides."""
    batch = example.batch()
    before = bags_of(batch)
    cold, hot = example.split(batch)
    assert bags_of(batch) == before
    assert cold.values().dtype == batch.values().dtype
    assert cold.lengths().dtype == batch.lengths().dtype
    assert cold.stride() == batch.stride()
    after = bags_of(cold)
    assert cold.keys() == list(example.bags)
    assert set(hot.features) == set(example.hot)
    for feature, bags in before.items():
        ids = example.hot.get(feature, [])
        assert after[feature] == [[pair for pair in bag if pair[0] not in ids] for bag in bags]
        if feature not in example.hot:
            continue
        expected = [[pair for pair in bag if pair[0] in ids] for bag in bags]
        actual = hot.features[feature]
        assert actual.slots.dtype == torch.int64
        assert actual.lengths.tolist() == [len(bag) for bag in expected]
        assert [ids[slot] for slot in actual.slots.tolist()] == [
            pair[0] for bag in expected for pair in bag
        ]
        assert (actual.weights is not None) == example.weighted
        if actual.weights is not None:
            assert actual.weights.tolist() == [pair[1] for bag in expected for pair in bag]


def test_no_ids_and_no_samples() -> None:
    for bags in ([[], []], []):
        cold, hot = Example({"a": bags, "b": bags}, {"b": [0]}).split()
        assert cold.values().numel() == hot.features["b"].slots.numel() == 0
        assert cold.lengths().numel() == 2 * len(bags)


def test_weights_do_not_need_a_gradient() -> None:
    """TorchRec's own id exchange gives per-sample weights no gradient either."""
    batch = Example({"a": [[0, 1]]}, {}, weighted=True).batch()
    weights = batch.weights().requires_grad_()
    batch = KeyedJaggedTensor(["a"], batch.values(), weights, batch.lengths())
    _, hot = split_hot_rows(batch, HotIds({}, {"a": torch.tensor([0])}))
    actual = hot.features["a"].weights
    assert actual is not None
    assert not actual.requires_grad


NUM_ROWS = {"a": 5, "b": 3}
"""The row counts by feature; others look nothing up."""
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
    result, error = check(batch)
    assert error is None
    expected = [
        [corrected(bag, key, policy) for bag in bags]
        for key, bags in zip(KEYS, features, strict=True)
    ]
    assert result.values().tolist() == [entry for bags in expected for bag in bags for entry in bag]
    assert result.values().dtype == dtype
    assert result.lengths().tolist() == [len(bag) for bags in expected for bag in bags]
    assert result.stride() == batch_size
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
    assert result.weights().tolist() == kept


def test_a_good_batch_is_left_as_it_is() -> None:
    batch = KeyedJaggedTensor(["a"], torch.tensor([0, 4]), lengths=torch.tensor([1, 1]))
    result, _ = check_of(BadIds.CLAMP)(batch)
    assert result is batch


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([1, 2, 4, 9], "feature 'b' has the id 4 in sample 1 of"),
        ([9, -1, 0, 0], "feature 'a' has the id 9 in sample 0 of"),
        ([1, 2, 1, -3], "feature 'b' has the id -3 in sample 2 of"),
    ],
)
def test_the_first_bad_id_is_named(ids: list[int], message: str) -> None:
    batch = KeyedJaggedTensor(
        ["a", "b"], torch.tensor(ids), lengths=torch.tensor([1, 0, 1, 0, 1, 1])
    )
    bad = next(i for i, value in enumerate(ids) if not 0 <= value < (5, 5, 3, 3)[i])
    assert str(check_of(BadIds.RAISE)._error(batch, bad)).startswith(message)
