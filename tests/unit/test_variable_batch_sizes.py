"""Samples' bags in batches with one batch size per feature, without ranks."""

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, strategies as st
from torchrec.modules.embedding_configs import EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingCollection
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from tests.support.batches import make_variable_batch, written_out
from tests.support.models import BagModel, ModelSpec, build
from torchrec_2dsp.access.counter import RowCounter
from torchrec_2dsp.shard.batch import distinct_bags

POOLINGS = (ModelSpec(), ModelSpec(pooling="mean"), ModelSpec(weighted=True))
KEYS = [feature for feature, _ in ModelSpec().features]


@given(spec=st.sampled_from(POOLINGS), seed=st.integers(0, 10_000), batch_size=st.integers(1, 7))
def test_samples_get_the_bags_that_they_share(spec: ModelSpec, seed: int, batch_size: int) -> None:
    """Forwards are bitwise equal; a shared bag's gradient is summed before it reaches weights."""
    model = build(spec)
    assert isinstance(model, BagModel)
    batch = make_variable_batch(spec, seed, batch_size, plain_every=0)
    slopes = torch.rand(batch_size, sum(table.dim for _, table in spec.features))
    grads = []
    bags = distinct_bags(batch, KEYS)
    assert bags.of_samples is not None
    assert bags.error is None
    assert bags.features.stride() == max(batch.stride_per_key()) <= batch_size
    expected = model.ebc(written_out(batch))
    actual = bags.of_samples.pooled(model.ebc(bags.features))
    assert actual.keys() == expected.keys()
    assert torch.equal(actual.values(), expected.values())
    for output in (actual, expected):
        model.zero_grad()
        (output.values() * slopes).sum().backward()
        grads.append([param.grad for param in model.ebc.parameters()])
    for left, right in zip(*grads, strict=True):
        torch.testing.assert_close(left, right)


@given(seed=st.integers(0, 10_000), batch_size=st.integers(1, 7))
def test_samples_get_the_sequences_that_they_share(seed: int, batch_size: int) -> None:
    spec = ModelSpec(weighted=False)
    batch = make_variable_batch(spec, seed, batch_size, plain_every=0)
    collection = EmbeddingCollection(
        tables=[
            EmbeddingConfig(
                name=table.name,
                num_embeddings=table.num_rows,
                embedding_dim=8,
                feature_names=list(table.features),
            )
            for table in spec.tables
        ],
        need_indices=True,
    )
    bags = distinct_bags(batch, KEYS)
    assert bags.of_samples is not None
    expected = collection(written_out(batch))
    actual = bags.of_samples.sequences(collection(bags.features))
    assert actual.keys() == expected.keys()
    for name, rows in expected.items():
        assert _lists(actual[name]) == _lists(rows)


def _lists(rows: JaggedTensor) -> list[Sequence[float]]:
    return [rows.values().tolist(), rows.lengths().tolist(), rows.weights().tolist()]


def test_an_ordinary_batch_is_left_as_it_is() -> None:
    batch = KeyedJaggedTensor(["a"], torch.tensor([0, 4]), lengths=torch.tensor([1, 1]))
    bags = distinct_bags(batch, ["a"])
    assert bags.features is batch
    assert bags.of_samples is None


def batch_of(
    indices: list[list[int]] | None,
    sizes: tuple[int, int] = (1, 2),
    names: Sequence[str] = ("a", "b"),
) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(
        ["a", "b"],
        torch.tensor([5, 6, 7]),
        lengths=torch.ones(3, dtype=torch.int64),
        stride_per_key_per_rank=[[size] for size in sizes],
        inverse_indices=None if indices is None else (list(names), torch.tensor(indices)),
    )


def test_features_that_nobody_looks_up_need_no_bags() -> None:
    batch = batch_of([[0, 0, 0]], names=["a"])
    assert distinct_bags(batch, ["a"]).error is None
    batch = batch_of([[0, 0, 0], [9, 9, 9]])
    assert distinct_bags(batch, ["a", "other"]).error is None


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (batch_of(None), "must say which bag each sample has; pass inverse_indices"),
        (batch_of([[0], [0]], sizes=(1, 3)), r"together 4, but there are 3 lengths"),
        (batch_of([[0, 0]]), r"name 2 features, but their tensor has the shape \[1, 2\]"),
        (batch_of([[0, 0]], names=["a"]), "lack the feature 'b'"),
        (batch_of([[0, 0], [1, 2]]), "give sample 1 the bag 2 of feature 'b', which has 2 bags"),
        (batch_of([[-1, 0], [1, 1]]), "give sample 0 the bag -1 of feature 'a', which has 1 bags"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_wrong_is_named(batch: KeyedJaggedTensor, message: str) -> None:
    bags = distinct_bags(batch, ["a", "b"])
    with pytest.raises(IndexError, match=message):
        raise bags.error or AssertionError("nothing was found wrong")
    assert bags.features.keys() == ["a", "b"]
    assert bags.features.values().numel() == 0


def test_a_counter_counts_what_is_looked_up() -> None:
    """A bag that samples share is counted once."""
    counter = RowCounter.for_model(build(ModelSpec()))
    batch = make_variable_batch(ModelSpec(), 1, 6, plain_every=0)
    counter.update(batch)
    table = counter.stats()["t0"]
    assert table.num_samples == 6
    assert table.counts.sum() == batch["f0"].values().numel()
