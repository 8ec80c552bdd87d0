"""An exported sequence model with int8 tables predicts next items like the trained one."""

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from tests.support.exporting import (
    as_views,
    exported,
    half_step,
    plain_rankings,
    printed_alone,
    quantized_by_hand,
    run_config,
    stock_model,
)
from tests.support.ranks import RankPool
from tests.support.train_runs import train_in_folder
from torchrec_2dsp.programs.data.dataset import Split
from torchrec_2dsp.programs.export.export import ExportRecord
from torchrec_2dsp.programs.export.served import load_script
from torchrec_2dsp.programs.export.source import ExportSource

pytestmark = pytest.mark.dealt_file

NUM_ITEMS, MAX_LENGTH, EVAL_STEPS = 60, 6, 3
Histories = list[list[int]]


class Served(NamedTuple):
    """An exported model, and the trained one as TorchRec and torch alone load it."""

    folder: Path
    source: ExportSource
    record: ExportRecord
    script: Any
    model: Any


@pytest.fixture(scope="module")
def served(ranks2: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Served:
    """Return a model that has partly learned which item comes next."""
    folder = tmp_path_factory.mktemp("sequences")
    # A sample with one item has no history, and one with nine is longer than the model's limit.
    data = {
        "kind": "synthetic_sequences",
        "num_items": NUM_ITEMS,
        "min_length": 1,
        "max_length": 9,
        "length_skew": 0.3,
        "num_clusters": 5,
    }
    model = {
        "kind": "sequence",
        "dim": 8,
        "max_length": MAX_LENGTH,
        "num_negatives": 4,
        "ranking": {"exclude_seen": True, "chunk_size": 25},
    }
    config = run_config(folder, data, model, lr=0.1, steps=20, eval_steps=EVAL_STEPS)
    ranks2.run(train_in_folder, config)
    source, output, record = exported(folder, max_loss=0.2)
    return Served(output, source, record, load_script(output / "model.pt"), stock_model(source))


def request(histories: Histories) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    lengths = torch.tensor([len(history) for history in histories])
    values = torch.tensor([item for history in histories for item in history])
    return torch.empty(len(histories), 0), values, lengths


def weight_of(model: Any) -> torch.Tensor:
    return model.embeddings.embeddings["t_item"].weight


def plain_next(model: Any, history: list[int]) -> torch.Tensor:
    """Return the trained layers' output after one unpadded history."""
    rows = weight_of(model)[history[1 - MAX_LENGTH :]]
    return model.dense(rows.unsqueeze(0))[0, -1]


def plain_best(model: Any, history: list[int], exclude_seen: bool) -> list[int]:
    """Return all items after one history, the best one first."""
    scores = (weight_of(model) @ plain_next(model, history)).tolist()
    allowed = set(range(NUM_ITEMS)) - (set(history) if exclude_seen else set())
    return sorted(allowed, key=lambda item: -scores[item])


def held_out(source: ExportSource) -> Histories:
    batches = source.config.data.dataset().batches(
        Split.EVAL, global_batch_size=source.config.loop.batch_size, rank=0, world_size=1
    )
    return [
        row.tolist()
        for _, batch in zip(range(EVAL_STEPS), batches, strict=False)
        for row in batch.sparse_features["item"].to_dense()
    ]


def plain_metrics(model: Any, samples: Histories) -> dict[str, float]:
    """Return recall and NDCG for the last items, ranked among items that a sample lacks."""
    places = []
    for *history, target in samples:
        if history:
            best = plain_best(model, history, exclude_seen=False)
            best = [item for item in best if item == target or item not in history]
            places.append(1 + best.index(target))
    return plain_rankings(places)


def test_the_file_predicts_as_the_trained_layers_do_over_rounded_rows(served: Served) -> None:
    weight = weight_of(served.model)
    exact = weight.clone()
    rows = served.script.item_vectors(torch.arange(NUM_ITEMS))
    span = exact.amax(dim=1, keepdim=True) - exact.amin(dim=1, keepdim=True)
    # A number on the border between two steps may be rounded either way.
    assert ((rows - quantized_by_hand(exact)).abs() <= span / 255 * 1.01).all()
    assert ((rows - exact).abs() <= half_step(exact)).all()
    samples = held_out(served.source)
    lengths = {len(sample) for sample in samples}
    assert 1 in lengths
    assert max(lengths) > MAX_LENGTH
    histories = [sample[:-1] for sample in samples if len(sample) > 1]
    targets = [sample[-1] for sample in samples if len(sample) > 1]
    trained = [plain_next(served.model, history) for history in histories]
    trained_metrics = plain_metrics(served.model, samples)

    weight.copy_(rows)
    expected = torch.stack([plain_next(served.model, history) for history in histories])
    vectors = served.script(*request(histories))["next_vectors"]
    # Float32 rounding: sequences with other lengths are padded beside it.
    torch.testing.assert_close(vectors, expected, atol=2e-5, rtol=1e-5)
    differences = [
        float(abs(vector @ exact[item] - next_vector @ rows[item]))
        for vector, next_vector, item in zip(trained, vectors, targets, strict=True)
    ]
    record = served.record
    assert record.num_samples == len(histories)
    # The rounding of float32.
    assert 0 < record.largest_difference == pytest.approx(max(differences), abs=2e-5)
    assert record.largest_difference < 0.05

    served_metrics = plain_metrics(served.model, samples)
    for metrics, plain in ((record.trained, trained_metrics), (record.served, served_metrics)):
        assert set(metrics) == {"loss", "recall@10", "ndcg@10"}
        assert {name: metrics[name] for name in plain} == pytest.approx(plain, rel=1e-6)
    # An untrained model finds 10 of 60 items.
    assert record.trained["recall@10"] > 0.25
    assert record.metric == "ndcg@10"
    assert record.worse_by == trained_metrics["ndcg@10"] - served_metrics["ndcg@10"]
    # A byte for each of a row's 8 numbers and 4 for scale and offset, padded to 16.
    assert (record.table_bytes, record.served_table_bytes) == (NUM_ITEMS * 32, NUM_ITEMS * 16)
    weight.copy_(exact)


@pytest.mark.parametrize(
    "histories",
    [
        [[3]],
        [[7, 7, 2, 9, 4, 1, 0, 5, 59, 12, 3]],
        [[1], [2, 3, 4, 5, 6], [7, 8]],
        [[item % NUM_ITEMS for item in range(n, 2 * n + 1)] for n in range(40)],
    ],
    ids=["one item", "longer than in training", "several", "many"],
)
@pytest.mark.parametrize("exclude_seen", [False, True])
def test_requests_of_any_size_get_the_best_items(
    histories: Histories, exclude_seen: bool, served: Served
) -> None:
    weight = weight_of(served.model)
    exact = weight.clone()
    weight.copy_(served.script.item_vectors(torch.arange(NUM_ITEMS)))
    # More items than a chunk has.
    answer = served.script.next_items(*request(histories), 40, exclude_seen)
    assert answer["items"].shape == answer["scores"].shape == (len(histories), 40)
    for history, items, scores in zip(histories, answer["items"], answer["scores"], strict=True):
        vector, allowed = plain_next(served.model, history), set(range(NUM_ITEMS))
        allowed -= set(history) if exclude_seen else set()
        given = [item for item in items.tolist() if item >= 0]
        assert len(given) == len(set(given)) == min(40, len(allowed))
        assert set(given) <= allowed
        plain = (weight @ vector)[plain_best(served.model, history, exclude_seen)[:40]]
        # Neighbours with scores equal up to float32 rounding may change places.
        torch.testing.assert_close(scores[: len(given)], plain, atol=5e-5, rtol=1e-5)
        torch.testing.assert_close(scores[: len(given)], weight[given] @ vector, atol=5e-5, rtol=0)
        assert (scores[len(given) :] == -torch.inf).all()
    weight.copy_(exact)


@pytest.mark.parametrize(
    ("histories", "message"),
    [
        ([[1], [], [2]], "a history is empty, and training never predicts a first item"),
        ([], "give a row for each sample, one at least"),
        ([[1, NUM_ITEMS]], "an id is negative, or its feature has fewer rows"),
        ([[-1]], "an id is negative, or its feature has fewer rows"),
    ],
)
def test_histories_that_cannot_be_right_are_refused(
    histories: Histories, message: str, served: Served
) -> None:
    dense, values, lengths = request(histories)
    asked = dense, values.long(), lengths.long()
    with pytest.raises(torch.jit.Error, match=message):
        served.script(*asked)
    with pytest.raises(torch.jit.Error, match=message):
        served.script.next_items(*asked, 3, False)


def test_items_that_the_table_lacks_are_refused(served: Served) -> None:
    for count in (0, NUM_ITEMS + 1):
        with pytest.raises(torch.jit.Error, match=rf"count={count} is not in 1\.\.60"):
            served.script.next_items(*request([[1]]), count, False)
    for item in (-1, NUM_ITEMS):
        with pytest.raises(torch.jit.Error, match=r"an id is not in 0\.\.59"):
            served.script.item_vectors(torch.tensor([item]))


def test_views_of_other_tensors_get_the_answers_of_copies(served: Served) -> None:
    asked = request([[1], [2, 3, 4, 5, 6], [7, 8]])
    best = served.script.next_items(*asked, 5, False)
    views = served.script.next_items(*as_views(*asked), 5, False)
    assert torch.equal(views["items"], best["items"])
    assert torch.equal(views["scores"], best["scores"])
    first = best["items"][:, 0]
    assert not first.is_contiguous()
    vectors = served.script.item_vectors(first)
    assert torch.equal(vectors, served.script.item_vectors(first.clone()))


def test_a_process_without_the_package_says_what_comes_next(served: Served) -> None:
    content = json.loads((served.folder / "features.json").read_text())
    assert content["features"] == [{"name": "item", "table": "t_item", "num_rows": 60, "dim": 8}]
    assert (content["kind"], content["num_dense"]) == ("sequence", 0)
    assert content["outputs"] == ["next_vectors"]
    assert content["functions"] == ["item_vectors", "next_items"]
    items = served.script.next_items(*request([[1, 0, 1], [0]]), 3, True)["items"].tolist()
    assert printed_alone("serve_next_items.py", served.folder) == [
        f"after the first history: {' '.join(map(str, items[0]))}",
        f"after the second history: {' '.join(map(str, items[1]))}",
        "vectors (2, 8) to be multiplied with (60, 8)",
    ]
