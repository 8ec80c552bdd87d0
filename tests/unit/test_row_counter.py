"""Batches counted exactly and by a sketch, against plain Python."""

from collections import Counter
from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from torch import nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import torchrec_2dsp as tdsp
from torchrec_2dsp._compat.fbgemm import TbeShape
from torchrec_2dsp.rows.gradients import RowSum, blocks_of

NUM_ROWS = 10
TABLES = [
    EmbeddingBagConfig(NUM_ROWS, 8, name="ads", feature_names=["shown", "clicked"]),
    EmbeddingBagConfig(NUM_ROWS, 8, name="users", feature_names=["user"]),
]
BAGS = st.lists(st.lists(st.integers(0, NUM_ROWS - 1), max_size=3), min_size=3, max_size=3)
BATCHES = st.lists(BAGS, min_size=1, max_size=5)
EXACT = 2**24
SKETCH = 1


def batch_of(
    bags: list[list[int]], keys: tuple[str, ...] = ("shown", "other", "clicked")
) -> KeyedJaggedTensor:
    """Make a batch with one sample and one bag per key."""
    lengths = torch.tensor([len(bag) for bag in bags])
    return KeyedJaggedTensor(
        list(keys), torch.tensor([row for bag in bags for row in bag]), lengths=lengths
    )


def looked_up(rows: np.ndarray) -> KeyedJaggedTensor:
    """Make a batch whose samples look up one row each by feature "f"."""
    lengths = torch.ones(len(rows), dtype=torch.int64)
    return KeyedJaggedTensor(["f"], torch.from_numpy(rows), lengths=lengths)


@pytest.mark.parametrize("exact_rows", [EXACT, SKETCH])
@given(batches=BATCHES)
def test_every_lookup_is_counted(batches: list[list[list[int]]], exact_rows: int) -> None:
    counter = tdsp.RowCounter(TABLES, exact_rows=exact_rows)
    for bags in batches:
        counter.update(batch_of(bags))
    by_hand = Counter(row for shown, _, clicked in batches for row in [*shown, *clicked])
    ads, users = (counter.stats()[name] for name in ("ads", "users"))

    assert dict(zip(ads.rows.tolist(), ads.counts.tolist(), strict=True)) == by_hand
    assert (ads.num_samples, users.num_samples) == (len(batches), 0)
    assert ads.num_lookups == sum(by_hand.values())
    assert (ads.tail_rows, ads.tail_lookups, ads.max_error) == (0, 0, 0)
    assert users.num_lookups == 0


def test_a_sketch_keeps_the_most_used_rows_within_its_error() -> None:
    random = np.random.default_rng(0)
    num_rows, sketch_rows = 200_000, 1024
    ids = np.minimum(random.zipf(1.2, 300_000), num_rows) - 1
    table = [EmbeddingBagConfig(num_rows, 8, name="t", feature_names=["f"])]
    counter = tdsp.RowCounter(table, exact_rows=1, sketch_rows=sketch_rows)
    exact = tdsp.RowCounter(table)
    for part in ids.reshape(30, -1):
        counter.update(looked_up(part))
        exact.update(looked_up(part))
    sketched, known = counter.stats()["t"], exact.stats()["t"]
    true_counts = np.bincount(ids, minlength=num_rows)
    allowed = 3.5 / sketch_rows * len(ids)

    assert 0 < sketched.max_error <= allowed
    lacking = true_counts[sketched.rows] - sketched.counts
    assert lacking.min() >= 0
    assert lacking.max() <= sketched.max_error
    assert set(np.flatnonzero(true_counts > sketched.max_error)) <= set(sketched.rows.tolist())
    assert sketched.num_lookups == known.num_lookups
    assert sketched.num_used_rows == pytest.approx(known.num_used_rows, rel=0.03)
    for num_drawn in (100, 10_000):
        assert sketched.expected_distinct(num_drawn) >= 0.97 * known.expected_distinct(num_drawn)
    assert sketched.share_of(100) == pytest.approx(known.share_of(100), abs=0.05)


@pytest.mark.parametrize("exact_rows", [EXACT, SKETCH])
def test_old_batches_count_less(exact_rows: int) -> None:
    counter = tdsp.RowCounter(TABLES, exact_rows=exact_rows, half_life=2)
    for shown in ([1] * 8, [], [2] * 4, [], [3], []):
        counter.update(batch_of([shown, [], []]))
    ads = counter.stats()["ads"]

    assert dict(zip(ads.rows.tolist(), ads.counts.tolist(), strict=True)) == {1: 2, 2: 2, 3: 1}
    assert ads.num_samples == 2 + 2 / 2 + 2 / 4
    assert ads.num_lookups == 5


def test_a_halved_sketch_counts_nothing_twice() -> None:
    random = np.random.default_rng(1)
    num_rows = 50_000
    table = [EmbeddingBagConfig(num_rows, 8, name="t", feature_names=["f"])]
    counter = tdsp.RowCounter(table, exact_rows=1, sketch_rows=64, half_life=1)
    true_counts = np.zeros(num_rows)
    # After the last one nothing was dropped, so that only the halved counts are seen.
    for num_lookups in (5_000, 5_000, 0):
        part = np.minimum(random.zipf(1.1, num_lookups), num_rows) - 1
        true_counts = true_counts / 2 + np.bincount(part, minlength=num_rows)
        counter.update(looked_up(part))
    table_access = counter.stats()["t"]

    assert (true_counts[table_access.rows] - table_access.counts).min() >= 0
    assert table_access.num_lookups == true_counts.sum()


def test_what_is_halved_away_stays_in_the_tail() -> None:
    counter = tdsp.RowCounter(TABLES, exact_rows=SKETCH, half_life=1)
    counter.update(batch_of([[1, 1, 2], [], []]))
    counter.update(batch_of([[], [], []]))
    ads = counter.stats()["ads"]

    assert (ads.rows.tolist(), ads.counts.tolist()) == ([1], [1])
    assert (ads.tail_rows, ads.tail_lookups) == (1, 0.5)


def test_all_tables_of_a_model_are_counted() -> None:
    model = nn.Sequential(
        EmbeddingBagCollection(tables=TABLES, device=torch.device("meta")),
        EmbeddingCollection(
            tables=[EmbeddingConfig(5, 8, name="words", feature_names=["word"])],
            device=torch.device("meta"),
        ),
    )
    assert list(tdsp.RowCounter.for_model(model).stats()) == ["ads", "users", "words"]


def test_a_model_without_tables_is_refused() -> None:
    with pytest.raises(tdsp.errors.ConfigError, match="Linear has no EmbeddingBagCollection"):
        tdsp.RowCounter.for_model(nn.Linear(1, 1))


@pytest.mark.parametrize("bad", [-1, NUM_ROWS])
def test_a_bad_id_is_named(bad: int) -> None:
    counter = tdsp.RowCounter(TABLES)
    with pytest.raises(tdsp.errors.InputError, match=f"id {bad} of table 'ads' is out of range"):
        counter.update(batch_of([[1], [], [bad]]))


def test_a_batch_with_a_bad_id_counts_nothing() -> None:
    counter = tdsp.RowCounter(TABLES)
    with pytest.raises(tdsp.errors.InputError, match="table 'users'"):
        counter.update(batch_of([[1], [-1], []], ("shown", "user", "clicked")))
    assert counter.stats()["ads"].num_lookups == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"half_life": 0}, "half_life=0"),
        ({"exact_rows": 1, "sketch_rows": 100}, "sketch_rows=100 must be a power of two"),
    ],
)
def test_arguments_that_make_no_sense(arguments: dict[str, int], message: str) -> None:
    with pytest.raises(tdsp.errors.ConfigError, match=message):
        tdsp.RowCounter(TABLES, **arguments)


def test_two_tables_of_one_name_are_refused() -> None:
    with pytest.raises(tdsp.errors.ConfigError, match="two tables are named 'ads'"):
        tdsp.RowCounter([*TABLES, TABLES[0]])


keys_of_contributions = st.lists(st.integers(0, 9), max_size=12)


@given(keys_of_contributions, st.randoms(use_true_random=False), st.booleans())
def test_contributions_are_added_by_row(keys: list[int], random: Random, weighted: bool) -> None:
    """Whole numbers have exact sums in any order."""
    contributions = torch.arange(2.0 * len(keys)).view(-1, 2)
    places = torch.tensor(random.sample(range(len(keys)), len(keys)), dtype=torch.int64)
    weights = torch.arange(float(len(keys))) if weighted else None
    dense = torch.zeros(10, 2)
    for index, key in enumerate(keys):
        dense[key] += contributions[places[index]] * (index if weighted else 1)

    rows = RowSum(torch.tensor(keys, dtype=torch.int64), places, weights)

    assert rows.keys.tolist() == sorted(set(keys))
    assert torch.equal(rows.of(contributions), dense[rows.keys])


@given(
    st.lists(st.tuples(st.integers(1, 5), st.sampled_from([4, 8])), min_size=1, max_size=5),
    st.randoms(use_true_random=False),
)
def test_a_key_stands_for_one_row(tables: list[tuple[int, int]], random: Random) -> None:
    """Keys map to rows and back, whatever the order of the tables' features."""
    order = random.sample(range(len(tables)), len(tables))
    num_rows, dims = zip(*tables, strict=True)
    blocks = blocks_of(TbeShape(num_rows, dims, tuple(order), False, False))

    actual = {}
    for block in blocks:
        assert {dims[table] for table in block.tables} == {block.dim}
        actual |= zip(block.tables, block.rows_of(torch.arange(block.num_rows)), strict=True)

    assert {table: rows.tolist() for table, rows in actual.items()} == {
        table: list(range(num)) for table, num in enumerate(num_rows)
    }


def test_large_blocks_have_long_keys() -> None:
    for num_rows, dtype in ((2**31 - 1, torch.int32), (2**31, torch.int64)):
        (block,) = blocks_of(TbeShape((num_rows,), (8,), (0,), False, False))
        assert block.key_dtype is dtype
