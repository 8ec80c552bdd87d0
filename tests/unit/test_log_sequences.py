"""Logs of interactions: each user's items in order, the last one held out."""

from collections import Counter, defaultdict
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.support.logs import REAL_LOGS, global_batches
from torchrec_2dsp.errors import ConfigError, InputError
from torchrec_2dsp.programs.config.config_file import make_config
from torchrec_2dsp.programs.data.dataset import Split
from torchrec_2dsp.programs.data.logs.sections import InteractionsConfig
from torchrec_2dsp.programs.data.logs.sequence_data import SequenceData

MOVIES = REAL_LOGS / "movielens100k/ml-100k.inter"
Interaction = tuple[str, str, int]


def make_log(num_rows: int, seed: int = 0) -> list[Interaction]:
    random = np.random.default_rng(seed)
    return [
        (f"u{random.integers(12)}", f"i{random.zipf(1.5) % 30}", int(random.integers(50)))
        for _ in range(num_rows)
    ]


def write_interactions(path: Path, log: list[Interaction]) -> Path:
    if path.suffix == ".parquet":
        users, items, times = zip(*log, strict=True)
        table = {"user_id:token": users, "item_id:token": items, "timestamp:float": times}
        pq.write_table(pa.table(table), path, row_group_size=9)
        return path
    lines = [f"{item}\t{time}\t{user}" for user, item, time in log]
    path.write_text("\n".join(["item_id:token\ttimestamp:float\tuser_id:token", *lines]))
    return path


def interactions(*files: Path, **keys: Any) -> SequenceData:
    tree = {"files": [str(file) for file in files], "num_ahead": 0, **keys}
    return make_config(InteractionsConfig, tree).dataset()


def expected_sequences(log: list[Interaction]) -> list[list[str]]:
    """Return each user's items in the order of time: the oracle."""
    by_user = defaultdict(list)
    for user, item, time in log:
        by_user[user].append((time, item))
    return [
        [item for _, item in sorted(items, key=lambda pair: pair[0])]
        for items in by_user.values()
        if len(items) >= 3
    ]


def sequences(data: SequenceData, split: Split, size: int, **keys: int) -> list[list[list[str]]]:
    """Return the batches of all ranks, with the items as the log names them."""
    batches = []
    for parts in global_batches(data, split=split, global_batch_size=size, **keys):  # type: ignore[arg-type]
        rows = [row.tolist() for part in parts for row in part.sparse_features["item"].to_dense()]
        batches.append([[data.log.item_names[item] for item in row] for row in rows])
        assert all((part.labels == 1).all() for part in parts)
        assert all(part.dense_features.shape[1] == 0 for part in parts)
    return batches


@pytest.mark.parametrize("ending", ["inter", "parquet"])
@pytest.mark.parametrize("max_length", [4, 100])
def test_sequences_are_the_last_items_in_order(
    tmp_path: Path, ending: str, max_length: int
) -> None:
    log = make_log(150)
    files = [
        write_interactions(tmp_path / f"{number}.{ending}", part)
        for number, part in enumerate((log[:70], log[70:]))
    ]
    data = interactions(*files, max_length=max_length, rest="pad", is_shuffled=False)
    expected = expected_sequences(log)
    counts = Counter(item for _, item, _ in log)
    by_frequency = sorted(counts, key=lambda item: (-counts[item], item))
    assert list(data.log.item_names) == by_frequency
    assert data.num_rows(Split.TRAIN) == len(expected)
    for world_size in (1, 2, 4):
        trained = [
            row for part in sequences(data, Split.TRAIN, 4, world_size=world_size) for row in part
        ]
        held_out = [
            row for part in sequences(data, Split.EVAL, 4, world_size=world_size) for row in part
        ]
        assert trained[: len(expected)] == [row[:-1][-max_length:] for row in expected]
        assert held_out[: len(expected)] == [row[-max_length:] for row in expected]
        assert len(trained) == len(held_out) == 4 * data.num_batches(Split.TRAIN, 4)
        # A batch is filled from the beginning.
        assert trained[len(expected) :] == trained[: len(trained) - len(expected)]
    mean = np.mean([min(len(row) - 1, max_length) for row in expected])
    (feature,) = data.features
    assert (feature.name, feature.num_rows) == ("item", len(counts))
    assert feature.mean_ids == pytest.approx(mean)


def test_epochs_are_shuffled_alike_on_all_ranks_and_go_on_from_any_batch(tmp_path: Path) -> None:
    file = write_interactions(tmp_path / "a.inter", make_log(150))
    data = interactions(file, epochs=3)
    whole = sequences(data, Split.TRAIN, 4, world_size=1)
    assert len(whole) == 9
    for world_size in (2, 4):
        assert sequences(data, Split.TRAIN, 4, world_size=world_size, start=4) == whole[4:]
    first, second = whole[:3], whole[3:6]
    assert first != second
    assert sorted(chain(*first)) == sorted(chain(*second))
    assert (
        sequences(interactions(file, epochs=1, seed=1), Split.TRAIN, 4, world_size=1) != whole[:3]
    )


def test_every_user_once(tmp_path: Path) -> None:
    data = interactions(write_interactions(tmp_path / "a.inter", make_log(150)))
    numbers = [
        sum(
            batch.labels.numel()
            for batch in data.samples_once(Split.TRAIN, rank=rank, world_size=2)
        )
        for rank in range(2)
    ]
    assert sum(numbers) == data.log.num_users
    assert abs(numbers[0] - numbers[1]) <= 1


def test_users_with_few_items_are_left_out(tmp_path: Path) -> None:
    log = [("a", "x", 1), ("a", "y", 2), ("b", "x", 3), ("b", "z", 2), ("b", "z", 1)]
    file = write_interactions(tmp_path / "a.inter", log)
    data = interactions(file)
    assert (data.log.num_users, data.log.num_left_out) == (1, 1)
    assert sequences(data, Split.EVAL, 1, world_size=1) == [[["z", "z", "x"]]]
    with pytest.raises(ConfigError, match="no user has min_items=4 items: the longest sequence ha"):
        interactions(file, min_items=4)


def test_rows_that_lack_a_value(tmp_path: Path) -> None:
    log = [("a", "x", 1), ("", "y", 2), ("a", "y", 2), ("a", "z", 3)]
    file = write_interactions(tmp_path / "a.inter", log)
    with pytest.raises(InputError, match="1 rows lack a user, an item or a time, the first"):
        interactions(file)
    data = interactions(file, malformed_limit=1)
    assert sequences(data, Split.EVAL, 1, world_size=1) == [[["x", "y", "z"]]]


@pytest.mark.skipif(not MOVIES.exists(), reason="the log isn't here")
def test_movielens() -> None:
    data = interactions(MOVIES, rest="pad")
    lines = [line.split("\t") for line in MOVIES.read_text().splitlines()[1:]]
    log = [(user, item, int(time)) for user, item, _, time in lines]
    expected = expected_sequences(log)
    assert data.log.num_users == len(expected) == 943
    held_out = list(chain(*sequences(data, Split.EVAL, 200, world_size=2)))
    assert held_out[: len(expected)] == [row[-50:] for row in expected]
