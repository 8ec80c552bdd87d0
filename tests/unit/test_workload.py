"""What a step has to do, read off a model."""

import numpy as np
import pytest
import torch
from torch import nn
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.modules.embedding_configs import DataType, EmbeddingBagConfig, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection

import torchrec_2dsp as tdsp
from torchrec_2dsp.access.table_access import TableAccess
from torchrec_2dsp.cost.workload import TableWork, Workload
from torchrec_2dsp.programs.data.synthetic import SparseFeature, SyntheticConfig
from torchrec_2dsp.programs.models.planned import true_access


def model() -> nn.Module:
    bags = EmbeddingBagCollection(
        tables=[
            EmbeddingBagConfig(
                name="t_item",
                num_embeddings=1_000,
                embedding_dim=8,
                feature_names=["item", "last_item"],
                data_type=DataType.FP16,
            )
        ],
        device=torch.device("meta"),
    )
    sequences = EmbeddingCollection(
        tables=[
            EmbeddingConfig(
                name="t_word", num_embeddings=500, embedding_dim=16, feature_names=["words"]
            )
        ],
        device=torch.device("meta"),
    )
    return nn.ModuleDict({"bags": bags, "sequences": sequences})


def stats(**tables: TableAccess) -> tdsp.AccessStats:
    return tdsp.AccessStats(tables)


def test_tables_of_bags_and_sequences() -> None:
    found = Workload.of_model(model(), batch_size=32)
    item, word = found.table("t_item"), found.table("t_word")
    assert (item.num_rows, item.dim, item.element_bytes) == (1_000, 8, 2)
    assert (item.num_features, item.ids_per_sample, item.is_sequence) == (2, 2.0, False)
    assert (word.num_features, word.ids_per_sample, word.is_sequence) == (1, 1.0, True)
    assert found.num_without_access == 2


@pytest.mark.parametrize(
    ("constraint", "ids"),
    [
        (ParameterConstraints(pooling_factors=[3.0, 0.5]), 3.5),
        (ParameterConstraints(pooling_factors=[3.0]), 6.0),
        (ParameterConstraints(pooling_factors=[3.0, 0.5], num_poolings=[1.0, 2.0]), 4.0),
        (ParameterConstraints(sharding_types=["row_wise"]), 2.0),
    ],
)
def test_ids_per_sample_follow_pooling_factors(
    constraint: ParameterConstraints, ids: float
) -> None:
    found = Workload.of_model(model(), batch_size=1, constraints={"t_item": constraint})
    assert found.table("t_item").ids_per_sample == ids


@pytest.mark.parametrize(
    ("what", "constraint"),
    [
        ("pooling_factors", ParameterConstraints(pooling_factors=[3.0, 1.0, 2.0])),
        ("num_poolings", ParameterConstraints(pooling_factors=[3.0], num_poolings=[1.0] * 3)),
    ],
)
def test_numbers_for_other_features_are_refused(
    what: str, constraint: ParameterConstraints
) -> None:
    error = f"table 't_item': {what} has 3 numbers, and the table 2 features; give one for each"
    with pytest.raises(tdsp.errors.ConfigError, match=error):
        Workload.of_model(model(), batch_size=1, constraints={"t_item": constraint})


def test_a_log_says_how_many_ids_there_are_where_nobody_else_does() -> None:
    access = stats(t_item=TableAccess.of_counts([30.0, 10.0], num_samples=10))
    counted = Workload.of_model(model(), batch_size=1, access=access)
    assert counted.table("t_item").ids_per_sample == 4.0
    assert counted.num_without_access == 1
    told = ParameterConstraints(pooling_factors=[2.5])
    both = Workload.of_model(model(), batch_size=1, access=access, constraints={"t_item": told})
    assert both.table("t_item").ids_per_sample == 5.0


def test_statistics_of_another_model_are_refused() -> None:
    access = stats(t_user=TableAccess.of_counts([1.0], num_samples=1))
    with pytest.raises(
        tdsp.errors.ConfigError, match="'t_user', which the model doesn't have; it has t_"
    ):
        Workload.of_model(model(), batch_size=1, access=access)


def work(access: TableAccess | None = None) -> TableWork:
    return TableWork(name="t", num_rows=1_000, dim=4, ids_per_sample=1.0, access=access)


@pytest.mark.parametrize("num_hot", [0, 100, 1_000])
def test_without_statistics_rows_are_used_alike(num_hot: int) -> None:
    """Against draws, which are made here."""
    generator = np.random.default_rng(0)
    draws = [set(generator.integers(0, 1_000, 700).tolist()) for _ in range(300)]
    drawn = np.mean([len({row for row in one if row >= num_hot}) for one in draws])
    found = work().expected_distinct(700, num_hot=num_hot)
    assert found == pytest.approx(drawn, rel=0.01, abs=1e-9)
    assert work().hot_share(num_hot) == num_hot / 1_000


def test_with_statistics_hot_rows_are_the_hottest() -> None:
    access = TableAccess.of_counts(1e5 / np.arange(1, 1_001), num_samples=1e6)
    counted = work(access)
    share = float((1 / np.arange(1, 11)).sum() / (1 / np.arange(1, 1_001)).sum())
    assert counted.hot_share(10) == pytest.approx(share)
    whole, cold = counted.expected_distinct(500), counted.expected_distinct(500, num_hot=10)
    # The ten hottest rows are in nearly every 500 lookups.
    assert whole - cold == pytest.approx(10, abs=0.5)
    blocks = counted.distinct_by_block(500, 4)
    assert blocks.sum() == pytest.approx(whole)
    assert blocks[0] > 2 * blocks[1] > 2 * blocks[3] > 0
    assert counted.distinct_by_block(500, 4, num_hot=250)[0] == pytest.approx(0.0)


def test_of_large_tables_the_hottest_rows_are_known_and_the_others_a_tail() -> None:
    """A batch hardly touches fewer rows than with all of them known, and never more of the hot."""
    data = SyntheticConfig(features=(SparseFeature(name="a", num_rows=50_000, skew=1.05),))
    whole, part = (true_access(data, max_rows=known)["t_a"] for known in (50_000, 5_000))
    assert (whole.tail_rows, part.tail_rows, len(part.rows)) == (0, 45_000, 5_000)
    assert part.num_lookups == pytest.approx(whole.num_lookups)
    assert part.lookups_per_sample == pytest.approx(1.0)
    assert part.share_of(100) == pytest.approx(whole.share_of(100))
    for batch in (100, 4_096):
        exact, near = whole.expected_distinct(batch), part.expected_distinct(batch)
        assert exact <= near * (1 + 1e-9) <= 1.02 * exact
