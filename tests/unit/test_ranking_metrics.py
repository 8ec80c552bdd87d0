"""Recall and NDCG by name, of rankings among all items or those of the batch."""

from typing import Any

import pytest
import torch
from pydantic import ValidationError

from torchrec_2dsp.programs.data.dataset import Split
from torchrec_2dsp.programs.data.synthetic_sequences import SyntheticSequencesConfig
from torchrec_2dsp.programs.models.kinds import build_any_model, dataset_for
from torchrec_2dsp.programs.models.ranking import (
    RankingConfig,
    RankingQuality,
    rank_all_items,
    ranking_metrics,
)
from torchrec_2dsp.programs.models.sequence import SequenceModelConfig

CONFIG = SequenceModelConfig(dim=8, max_length=6, num_negatives=4, eval_negatives=12)
DATA = dataset_for(CONFIG, SyntheticSequencesConfig(num_items=60, max_length=6).dataset())


def held_out() -> list[Any]:
    batches = DATA.batches(Split.EVAL, global_batch_size=16, rank=0, world_size=1)
    return [next(batches) for _ in range(3)]


@pytest.mark.parametrize("is_training", [True, False])
def test_metrics_are_those_of_the_places(is_training: bool) -> None:
    model: Any = build_any_model(DATA, CONFIG).train(is_training)
    ranking = RankingConfig(k=(3, 20), chunk_size=7)
    metrics = ranking_metrics(model, held_out(), ranking, group=None)
    assert model.training == is_training
    model.eval()
    quality = RankingQuality.of(rank_all_items(model, held_out()), up_to=20)
    assert metrics == {
        "recall@3": quality.recall(3),
        "ndcg@3": quality.ndcg(3),
        "recall@20": quality.recall(20),
        "ndcg@20": quality.ndcg(20),
    }
    assert 0 < metrics["recall@3"] < metrics["recall@20"] < 1

    sampled = ranking_metrics(model, held_out(), RankingConfig(among="sampled", k=(13,)), None)
    # Among 12 negatives nothing is behind the 13th place, and most is before the 20th of all.
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
