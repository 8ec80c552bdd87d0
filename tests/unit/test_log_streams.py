"""Batches that a thread makes ahead: their errors, and the end of the thread."""

import gc
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torchrec.datasets.utils import Batch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from tests.support.logs import global_batches, make_rows, numbers_of, table_config, write_log
from tests.support.slices import patient
from torchrec_2dsp.errors import ConfigError
from torchrec_2dsp.programs.data.dataset import Split
from torchrec_2dsp.programs.data.logs.batches import BatchStream


def batch(number: int) -> Batch:
    sparse = KeyedJaggedTensor.empty()
    return Batch(torch.full((2, 1), float(number)), sparse, torch.zeros(2))


def batch_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "batches"]


def wait_for_no_thread() -> None:
    deadline = time.monotonic() + patient(10)
    while batch_threads():
        assert time.monotonic() < deadline, "a thread goes on"
        time.sleep(0.01)


@pytest.mark.parametrize("num_ahead", [0, 1, 3])
def test_batches_come_in_order_and_are_counted(num_ahead: int) -> None:
    stream = BatchStream(lambda: map(batch, range(5)), num_ahead=num_ahead)
    assert [int(part.dense_features[0]) for part in stream] == list(range(5))
    assert list(stream) == []
    assert stream.num_rows == 10
    assert stream.rows_per_s > 0
    wait_for_no_thread()


def test_only_a_few_batches_are_made_ahead() -> None:
    made_batches: list[int] = []

    def endless() -> Iterator[Batch]:
        while True:
            made_batches.append(0)
            yield batch(0)

    with BatchStream(endless, num_ahead=2) as stream:
        next(stream)
        deadline = time.monotonic() + patient(10)
        while len(made_batches) < 4:
            assert time.monotonic() < deadline
        time.sleep(0.05)
        # One was used, two are ready, and one waits for a place.
        assert len(made_batches) == 4
    wait_for_no_thread()
    with pytest.raises(StopIteration):
        next(stream)


@pytest.mark.parametrize("num_ahead", [0, 2])
def test_an_error_comes_where_its_batch_would(num_ahead: int) -> None:
    def failing() -> Iterator[Batch]:
        yield batch(0)
        raise ConfigError("the second batch")

    stream = BatchStream(failing, num_ahead=num_ahead)
    next(stream)
    with pytest.raises(ConfigError, match="the second batch"):
        next(stream)
    wait_for_no_thread()


def test_the_thread_ends_when_nobody_has_the_stream() -> None:
    def endless() -> Iterator[Batch]:
        while True:
            yield batch(0)

    stream = BatchStream(endless, num_ahead=1)
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
