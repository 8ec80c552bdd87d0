"""Names of items in a log of interactions, encoded by what an export has, get trained scores."""

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.support.exporting import stock_model, train_config
from tests.support.ranks import RankPool
from torchrec_2dsp.errors import ConfigError
from torchrec_2dsp.programs.config.config_file import make_config
from torchrec_2dsp.programs.export.export import export_model
from torchrec_2dsp.programs.export.requests import HistoryEncoder, RequestEncoder
from torchrec_2dsp.programs.export.served import load_script
from torchrec_2dsp.programs.export.source import ExportSource
from torchrec_2dsp.programs.launch import only_rank
from torchrec_2dsp.programs.train.config import TrainConfig

MAX_LENGTH = 5


def write_log(path: Path) -> tuple[dict[str, list[str]], list[str]]:
    """A log whose items are numbers, and one a text of two bytes a letter.

    Returns:
        The items of each user in the order of time, and all items, the most frequent first.
    """
    random = np.random.default_rng(0)
    rows = [
        (f"u{random.integers(20)}", ["né", "1193", "12", "7"][min(random.zipf(1.7), 4) - 1], time)
        for time in range(150)
    ]
    lines = ["user_id:token\titem_id:token\ttimestamp:float"]
    lines += [f"{user}\t{item}\t{time}" for user, item, time in rows]
    path.write_text("\n".join(lines))
    items: dict[str, list[str]] = {}
    for user, item, _ in rows:
        items.setdefault(user, []).append(item)
    counts = {item: sum(item == other for _, other, _ in rows) for _, item, _ in rows}
    return items, sorted(counts, key=lambda item: (-counts[item], item))


@pytest.mark.dealt_suite
def test_names_of_items_get_the_scores_of_the_trained_model(
    ranks2: RankPool, tmp_path: Path
) -> None:
    by_user, by_frequency = write_log(tmp_path / "log.inter")
    tree = {
        "data": {
            "kind": "interactions",
            "files": [str(tmp_path / "log.inter")],
            "feature": "movie",
            "epochs": 0,
            "num_ahead": 0,
        },
        "model": {"kind": "sequence", "feature": "movie", "dim": 8, "max_length": MAX_LENGTH},
        "loop": {"steps": 4, "global_batch_size": 16, "eval_steps": 1},
        "checkpoint": {"folder": str(tmp_path / "checkpoints")},
        "output": {"folder": str(tmp_path / "out")},
        "runs": {"main": {"num_groups": 2}},
    }
    ranks2.run(train_config, make_config(TrainConfig, tree))
    source, served = ExportSource.find(tmp_path / "out"), tmp_path / "served"
    with only_rank("export"):
        export_model(source, served, max_loss=1.0)
    model = stock_model(source)
    weight = model.get_parameter("embeddings.embeddings.t_movie.weight")
    script = load_script(served / "model.pt")
    weight.copy_(script.item_vectors(torch.arange(len(by_frequency))))

    (tmp_path / "log.inter").unlink()
    encoder = HistoryEncoder.load(served)
    histories = [*by_user.values(), ["a film that nobody saw", "12", ""], [1193, "né".encode()]]
    known = [*by_user.values(), ["12"], ["1193", "né"]]
    dense, ids, lengths = encoder.encode(histories)
    assert dense.shape == (len(histories), 0)
    assert lengths.tolist() == [len(history) for history in known]
    assert ids.tolist() == [by_frequency.index(item) for history in known for item in history]
    answer = script.next_items(dense, ids, lengths, len(by_frequency), False)
    for history, names, scores in zip(
        known, encoder.names(answer["items"]), answer["scores"], strict=True
    ):
        numbers = [by_frequency.index(item) for item in history][1 - MAX_LENGTH :]
        vector = model.get_submodule("dense")(weight[numbers].unsqueeze(0))[0, -1]
        order = [by_frequency.index(str(name)) for name in names]
        assert sorted(order) == list(range(len(by_frequency)))
        # The rounding of float32.
        torch.testing.assert_close(scores, (weight @ vector)[order], atol=5e-5, rtol=1e-5)
        assert (scores.diff() <= 0).all()
    assert encoder.names(torch.tensor([[1, -1], [-1, 0]])) == [
        [by_frequency[1], None],
        [None, by_frequency[0]],
    ]

    with pytest.raises(ConfigError, match="histories of items; use HistoryEncoder"):
        RequestEncoder.load(served)
    (served / "prepared" / "vocabulary_movie.parquet").unlink()
    with pytest.raises(ConfigError, match=r"lacks .*vocabulary_movie\.parquet; copy it whole"):
        HistoryEncoder.load(served)
    (served / "data.toml").unlink()
    with pytest.raises(ConfigError, match=r"has no data\.toml"):
        HistoryEncoder.load(served)
