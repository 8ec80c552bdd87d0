"""Exported sequence models: the next items are those of the trained model with rounded tables."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.exporting import quantized_by_hand, stock_model
from tests.support.ranks import RankPool
from torchrec_2dsp.programs.config.config_file import make_config
from torchrec_2dsp.programs.export.export import export_model
from torchrec_2dsp.programs.export.folder import ExportRecord, ServingInputs
from torchrec_2dsp.programs.export.quality import HeldOutBatches
from torchrec_2dsp.programs.export.serving import load_script
from torchrec_2dsp.programs.export.source import ExportSource
from torchrec_2dsp.programs.launch.world import only_rank
from torchrec_2dsp.programs.models.kinds import dataset_for
from torchrec_2dsp.programs.train.config import TrainConfig
from torchrec_2dsp.programs.train.program import train
from torchrec_2dsp.programs.train.run_folder import RunFolder

NUM_ITEMS, MAX_LENGTH = 60, 9


def train_a_sequence_model(rank: int, world_size: int, folder: Path) -> None:
    config = make_config(
        TrainConfig,
        {
            "data": {
                "kind": "synthetic_sequences",
                "num_items": NUM_ITEMS,
                "min_length": 1,
                "max_length": 12,
            },
            "model": {
                "kind": "sequence",
                "dim": 8,
                "max_length": MAX_LENGTH,
                "num_blocks": 1,
                "num_heads": 2,
                "ranking": {"chunk_size": 16},
            },
            "loop": {"steps": 4, "global_batch_size": 16, "eval_steps": 2, "report_every": 4},
            "checkpoint": {"folder": str(folder / "checkpoints")},
            "output": {"folder": str(folder / "out")},
            "runs": {"main": {"num_groups": 2}},
        },
    )
    train(config, [] if rank else [RunFolder(config.output.folder, config)])


@pytest.fixture(scope="module")
def exported(
    ranks2: RankPool, tmp_path_factory: pytest.TempPathFactory
) -> tuple[ExportSource, Path]:
    folder = tmp_path_factory.mktemp("sequences")
    ranks2.run(train_a_sequence_model, folder)
    source = ExportSource.find(folder / "out")
    with only_rank("export"):
        export_model(source, folder / "served", max_loss=0.1)
    return source, folder / "served"


def by_hand(source: ExportSource) -> Any:
    """The trained model, whose table went through eight bits in plain arithmetic."""
    model: Any = stock_model(source)
    (table,) = model.embeddings.embeddings.children()
    table.weight.copy_(quantized_by_hand(table.weight))
    return model


def a_request(histories: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    items = torch.tensor([item for history in histories for item in history])
    return torch.empty(len(histories), 0), items, torch.tensor([len(h) for h in histories])


def wanted_vectors(model: Any, histories: list[list[int]]) -> torch.Tensor:
    """One history after the other, without filling any up."""
    (table,) = model.embeddings.embeddings.children()
    vectors = [
        model.dense(table.weight[torch.tensor(history[1 - MAX_LENGTH :])].unsqueeze(0))[0, -1]
        for history in histories
    ]
    return torch.stack(vectors)


HISTORIES = [[3], [5, 5, 7], list(range(20)), [59, 0]]
"""A single item, one that comes twice, more than the model takes, and the ends of the table."""


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.parametrize("histories", [HISTORIES, HISTORIES[:1], HISTORIES * 30], ids=len)
def test_vectors_and_items_are_those_of_rounded_tables(
    exported: tuple[ExportSource, Path], histories: list[list[int]]
) -> None:
    source, folder = exported
    model, script = by_hand(source), load_script(folder / "model.pt")
    request = a_request(histories)
    wanted = wanted_vectors(model, histories)
    # A number on the border between two steps may be rounded either way, see the test of scores.
    torch.testing.assert_close(script(*request)["next_vectors"], wanted, atol=5e-3, rtol=0)
    vectors = script.item_vectors(torch.arange(NUM_ITEMS))
    (table,) = model.embeddings.embeddings.children()
    torch.testing.assert_close(vectors, table.weight, atol=2e-3, rtol=0)
    scores = script(*request)["next_vectors"] @ vectors.T
    for exclude_seen in (False, True):
        if exclude_seen:
            for row, history in enumerate(histories):
                scores[row, torch.tensor(history)] = -torch.inf
        best = script.next_items(*request, 5, exclude_seen)
        expected = scores.topk(5, dim=1)
        torch.testing.assert_close(best["scores"], expected.values)
        assert torch.equal(best["items"], expected.indices)


def test_held_out_samples_are_compared_and_ranked(exported: tuple[ExportSource, Path]) -> None:
    source, folder = exported
    record = ExportRecord.load(folder / "export.json")
    assert {"loss", "recall@10", "ndcg@10"} <= record.trained.keys() == record.served.keys()
    assert 0 < record.largest_difference < 0.05
    held_out = HeldOutBatches(
        source.config, dataset_for(source.config.model, source.config.data.dataset())
    )
    lengths = [batch.sparse_features["item"].lengths() for batch in held_out]
    # Only samples with a history before their last item have a score.
    assert record.num_samples == int((torch.cat(lengths) > 1).sum()) > 0
    inputs = ServingInputs.load(folder / "features.json")
    assert inputs.functions == ("item_vectors", "next_items")
    assert (inputs.kind, inputs.outputs) == ("sequence", ("next_vectors",))


@pytest.mark.parametrize(
    ("histories", "count", "said"),
    [
        ([[1], []], 3, "a history is empty"),
        ([[NUM_ITEMS]], 3, "its feature has fewer rows"),
        ([[-1]], 3, "an id is negative"),
        ([[1]], 0, "count=0 is not in 1..60"),
        ([[1]], 61, "count=61 is not in 1..60"),
    ],
)
def test_requests_that_cannot_be_right_are_refused(
    exported: tuple[ExportSource, Path], histories: list[list[int]], count: int, said: str
) -> None:
    script = load_script(exported[1] / "model.pt")
    with pytest.raises(torch.jit.Error, match=said):
        script.next_items(*a_request(histories), count)


def test_where_all_items_are_seen_none_are_left(exported: tuple[ExportSource, Path]) -> None:
    script = load_script(exported[1] / "model.pt")
    best = script.next_items(*a_request([list(range(NUM_ITEMS - 2))]), 4, True)
    assert sorted(best["items"][0].tolist()) == [-1, -1, NUM_ITEMS - 2, NUM_ITEMS - 1]
