"""Interaction logs: each user's items in order, with the last one held out."""

import gc
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import closing
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torchrec.datasets.utils import Batch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from tests.support.logs import (
    Interaction,
    global_batches,
    make_interactions,
    make_rows,
    numbers_of,
    table_config,
    write_interactions,
    write_log,
)
from tests.support.slices import patient
from torchrec_2dsp.errors import ConfigError, InputError
from torchrec_2dsp.programs.config.config_file import make_config
from torchrec_2dsp.programs.data.dataset import Split
from torchrec_2dsp.programs.data.logs.batches import prefetched
from torchrec_2dsp.programs.data.logs.sections import InteractionsConfig
from torchrec_2dsp.programs.data.logs.sequence_data import SequenceData


def interactions(*files: Path, **keys: Any) -> SequenceData:
    tree = {"files": [str(file) for file in files], "num_ahead": 0, **keys}
    return make_config(InteractionsConfig, tree).dataset()


def expected_sequences(log: list[Interaction]) -> list[list[str]]:
    """Return each user's items by time: the oracle."""
    by_user = defaultdict(list)
    for user, item, at in log:
        by_user[user].append((at, item))
    return [
        [item for _, item in sorted(items, key=lambda pair: pair[0])]
        for items in by_user.values()
        if len(items) >= 3
    ]


def sequences(data: SequenceData, split: Split, size: int, **keys: int) -> list[list[list[str]]]:
    """Return all ranks' batches, with the log's item names."""
    names = [value.decode() for value in data.log.item_values.to_pylist()]
    batches = []
    for parts in global_batches(data, split=split, global_batch_size=size, **keys):  # type: ignore[arg-type]
        rows = [row.tolist() for part in parts for row in part.sparse_features["item"].to_dense()]
        batches.append([[names[item] for item in row] for row in rows])
        assert all((part.labels == 1).all() for part in parts)
        assert all(part.dense_features.shape[1] == 0 for part in parts)
    return batches


@pytest.mark.parametrize("ending", ["inter", "parquet"])
@pytest.mark.parametrize("max_length", [4, 100])
def test_sequences_are_the_last_items_in_order(
    tmp_path: Path, ending: str, max_length: int
) -> None:
    log = make_interactions(150)
    files = [
        write_interactions(tmp_path / f"{number}.{ending}", part)
        for number, part in enumerate((log[:70], log[70:]))
    ]
    data = interactions(*files, max_length=max_length, rest="pad", is_shuffled=False)
    expected = expected_sequences(log)
    counts = Counter(item for _, item, _ in log)
    by_frequency = sorted(counts, key=lambda item: (-counts[item], item))
    assert data.log.item_values.to_pylist() == [item.encode() for item in by_frequency]
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
    file = write_interactions(tmp_path / "a.inter", make_interactions(150))
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
    data = interactions(write_interactions(tmp_path / "a.inter", make_interactions(150)))
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


def batch(number: int) -> Batch:
    sparse = KeyedJaggedTensor.empty()
    return Batch(torch.full((2, 1), float(number)), sparse, torch.zeros(2))


def batch_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("batches")]


def wait_for_no_thread() -> None:
    deadline = time.monotonic() + patient(10)
    while batch_threads():
        assert time.monotonic() < deadline, "a thread goes on"
        time.sleep(0.01)


@pytest.mark.parametrize("num_ahead", [0, 1, 3])
def test_batches_come_in_order(num_ahead: int) -> None:
    stream = prefetched(map(batch, range(5)), num_ahead=num_ahead)
    assert [int(part.dense_features[0]) for part in stream] == list(range(5))
    assert list(stream) == []
    wait_for_no_thread()


def endless(made_batches: list[int]) -> Iterator[Batch]:
    """Yield endless batches, and record each."""
    while True:
        made_batches.append(0)
        yield batch(0)


def test_only_a_few_batches_are_made_ahead() -> None:
    made_batches: list[int] = []
    with closing(prefetched(endless(made_batches), num_ahead=2)) as stream:
        next(stream)
        deadline = time.monotonic() + patient(10)
        while len(made_batches) < 3:
            assert time.monotonic() < deadline
        time.sleep(0.05)
        # One was used, and two are ready.
        assert len(made_batches) == 3
    wait_for_no_thread()
    with pytest.raises(StopIteration):
        next(stream)


@pytest.mark.parametrize("num_ahead", [0, 2])
def test_an_error_comes_where_its_batch_would(num_ahead: int) -> None:
    def failing() -> Iterator[Batch]:
        yield batch(0)
        raise ConfigError("the second batch")

    stream = prefetched(failing(), num_ahead=num_ahead)
    next(stream)
    with pytest.raises(ConfigError, match="the second batch"):
        next(stream)
    wait_for_no_thread()


def test_the_thread_ends_when_nobody_has_the_stream() -> None:
    stream = prefetched(endless([]), num_ahead=1)
    next(stream)
    assert batch_threads()
    del stream
    gc.collect()
    wait_for_no_thread()


def test_a_log_is_read_ahead_and_its_files_are_closed(tmp_path: Path) -> None:
    file = write_log(tmp_path / "a.csv", make_rows(100))
    data = table_config(file, num_ahead=2).dataset()
    parts = list(global_batches(data, global_batch_size=10, world_size=2))
    assert [number for part in parts for number in numbers_of(part)] == list(range(100))
    stream = data.batches(Split.TRAIN, global_batch_size=10, rank=0, world_size=1)
    next(stream)
    stream.close()
    wait_for_no_thread()
    stream.close()
