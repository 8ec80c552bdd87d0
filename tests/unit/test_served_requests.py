"""Requests that a served file refuses with a named error, raised by TorchScript."""

import math
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from torchrec_2dsp.errors import ConfigError
from torchrec_2dsp.programs.data.dataset import Split
from torchrec_2dsp.programs.data.logs.sections import AvazuConfig, CriteoConfig
from torchrec_2dsp.programs.data.synthetic_sequences import SyntheticSequencesConfig
from torchrec_2dsp.programs.export.requests import dense_columns
from torchrec_2dsp.programs.export.served import RequestCheck, ServedFeature
from torchrec_2dsp.programs.models.kinds import build_any_model, dataset_for
from torchrec_2dsp.programs.models.ranking import (
    RankingConfig,
    RankingQuality,
    places_of,
    rank_all_items,
    ranking_metrics,
)
from torchrec_2dsp.programs.models.sequence import SequenceModelConfig

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
FEATURES = [
    ServedFeature(name=name, table="t", num_rows=rows, dim=4) for name, rows in (("a", 9), ("b", 5))
]
DENSE = torch.zeros(2, 3)
VALUES = torch.tensor([1, 8, 2, 4])
LENGTHS = torch.tensor([1, 1, 0, 2])


@pytest.fixture(scope="module")
def check() -> torch.jit.ScriptModule:
    return torch.jit.script(RequestCheck(FEATURES, 3))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_a_request_passes(check: torch.jit.ScriptModule, dtype: torch.dtype) -> None:
    check(DENSE, VALUES.to(dtype), LENGTHS.to(dtype))


@pytest.mark.parametrize(
    ("request_tensors", "message"),
    [
        ((DENSE.double(), VALUES, LENGTHS), "dense isn't float32"),
        ((torch.tensor(1.0), VALUES, LENGTHS), r"dense has the shape \[\]"),
        ((torch.zeros(2, 4), VALUES, LENGTHS), "and 3 numbers in each row"),
        ((DENSE, VALUES.float(), LENGTHS), "values isn't int64 or int32"),
        ((DENSE, VALUES.bool(), LENGTHS), "values isn't int64 or int32"),
        (
            (DENSE, VALUES.view(2, 2), LENGTHS),
            r"values has the shape \[2, 2\]; give all ids in one row",
        ),
        ((DENSE, VALUES, LENGTHS.float()), "lengths isn't int64 or int32"),
        ((DENSE, VALUES, LENGTHS.view(2, 2)), r"lengths has the shape \[2, 2\]; give 4 numbers"),
        ((DENSE, VALUES, torch.tensor([1, 1, 0, 3])), "lengths add up to 5"),
        ((DENSE, VALUES, torch.tensor([3, 1, 1, -1])), "no negative length"),
        ((DENSE[:0], VALUES[:0], LENGTHS[:0]), "give a row for each sample, one at least"),
        ((DENSE, torch.tensor([1, 9, 2, 4]), LENGTHS), "an id is negative, or its feature has"),
    ],
)
def test_a_tensor_of_another_type_or_shape_is_named(
    check: torch.jit.ScriptModule, request_tensors: Tensors, message: str
) -> None:
    with pytest.raises(Exception, match=message) as refusal:
        check(*request_tensors)
    assert "ValueError" in str(refusal.value) or isinstance(refusal.value, ValueError)


def test_places_are_those_of_sorting() -> None:
    generator = torch.Generator().manual_seed(0)
    scores = torch.rand(40, 25, generator=generator)
    targets = torch.randint(0, 25, (40,), generator=generator)
    others = torch.arange(25) != targets.unsqueeze(1)
    places = places_of(scores.gather(1, targets.unsqueeze(1)).squeeze(1), scores, others)
    for place, row, target in zip(places.tolist(), scores.tolist(), targets.tolist(), strict=True):
        assert sorted(range(25), key=lambda item: -row[item]).index(target) == place - 1
    assert places.unique().numel() > 10


def test_what_knows_nothing_ends_last() -> None:
    nan = math.nan
    constant = places_of(torch.zeros(2), torch.zeros(2, 9))
    assert constant.tolist() == [10, 10]
    # A target without a number, and competitors without one.
    assert places_of(torch.tensor([nan, 1.0]), torch.tensor([[0.0, 1.0], [nan, 0.0]])).tolist() == [
        3,
        2,
    ]


@pytest.mark.parametrize("k", [1, 3, 10])
def test_metrics_are_those_of_plain_loops(k: int) -> None:
    places = torch.tensor([1, 4, 0, 2, 11, 10, 3, 1, 0, 500])
    quality = RankingQuality.of(places, up_to=10)
    real = [place for place in places.tolist() if place]
    assert quality.num_targets == 8
    assert quality.recall(k) == pytest.approx(sum(place <= k for place in real) / 8)
    gains = [1 / math.log2(place + 1) if place <= k else 0.0 for place in real]
    assert quality.ndcg(k) == pytest.approx(sum(gains) / 8)


def test_no_target_has_no_quality() -> None:
    quality = RankingQuality.of(torch.zeros(3, dtype=torch.int64), up_to=5)
    assert math.isnan(quality.recall(5))
    assert math.isnan(quality.ndcg(1))


def test_wrong_places_are_refused() -> None:
    with pytest.raises(ConfigError, match="up_to=0 is no place; use 1 or more"):
        RankingQuality.of(torch.tensor([1]), up_to=0)
    quality = RankingQuality.of(torch.tensor([1]), up_to=5)
    for k in (0, 6):
        with pytest.raises(ConfigError, match=rf"k={k} is not in 1\.\.5"):
            quality.recall(k)


@pytest.mark.parametrize(
    ("data", "columns"),
    [
        (CriteoConfig(files=("train.txt",)), [f"I{number}" for number in range(1, 14)]),
        (AvazuConfig(files=("train.gz",)), ["C15", "C16"]),
        (SyntheticSequencesConfig(num_items=60), []),
    ],
)
def test_dense_columns_are_named_in_order(data: Any, columns: list[str]) -> None:
    assert list(dense_columns(data)) == columns


CONFIG = SequenceModelConfig(dim=8, max_length=6, num_negatives=4, eval_negatives=12)
DATA = dataset_for(CONFIG, SyntheticSequencesConfig(num_items=60, max_length=6).dataset())


def held_out() -> list[Any]:
    batches = DATA.batches(Split.EVAL, global_batch_size=16, rank=0, world_size=1)
    return [next(batches) for _ in range(3)]


def test_metrics_are_those_of_the_places() -> None:
    model: Any = build_any_model(DATA, CONFIG).eval()
    metrics = ranking_metrics(model, held_out(), RankingConfig(k=(3, 20), chunk_size=7), group=None)
    quality = RankingQuality.of(rank_all_items(model, held_out()), up_to=20)
    assert metrics == {
        "recall@3": quality.recall(3),
        "ndcg@3": quality.ndcg(3),
        "recall@20": quality.recall(20),
        "ndcg@20": quality.ndcg(20),
    }
    assert 0 < metrics["recall@3"] < metrics["recall@20"] < 1

    sampled = ranking_metrics(model, held_out(), RankingConfig(among="sampled", k=(13,)), None)
    # With 12 negatives nothing ranks behind the 13th place, and most are in the first 20 of all.
    assert sampled["recall@13"] == 1
    with torch.no_grad():
        places = torch.cat([model(batch)[1][1] for batch in held_out()])
    assert sampled["ndcg@13"] == RankingQuality.of(places, 13).ndcg(13) < 1


def test_nothing_is_ranked_on_request() -> None:
    model = build_any_model(DATA, CONFIG)
    assert ranking_metrics(model, held_out(), RankingConfig(among="none"), None) == {}


@pytest.mark.parametrize("options", [{"k": []}, {"among": "some"}, {"chunk_size": 0}])
def test_wrong_options_are_refused(options: dict[str, Any]) -> None:
    (name,) = options
    with pytest.raises(ValidationError, match=name):
        RankingConfig.model_validate(options)
