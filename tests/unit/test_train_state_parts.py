"""What a train state is made of: plain values, counters, and finding the newest checkpoint."""

import math
import random
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import torchrec_2dsp as tdsp
from torchrec_2dsp.parallel.train_state.values import (
    from_plain,
    random_state,
    restore_random_state,
    to_plain,
)

PLAIN: list[Any] = [
    {"a": 1, "b": [True, None, "text", 0.1 + 0.2, -math.inf], "c": {}},
    {"milestones": Counter({30: 1, 80: 2}), 3: "a number is a key", (1, 2): "or a tuple"},
    {"$tensor": "is a key of the user's"},
    ((1, (2.5,)), [()]),
    {"a.b": torch.arange(3), "a": {"b": torch.tensor(7.0)}, "header": torch.ones(1)},
    torch.tensor([1.5, -0.0, math.nan], dtype=torch.bfloat16),
    {"empty": torch.empty(0, 4, dtype=torch.int32), "none": b"", "bytes": b"\x00\xff"},
    {"array": np.arange(6, dtype=np.uint32).reshape(2, 3), "no rows": np.empty((0, 2))},
    {"scalar": np.float32(0.5), "int": np.int64(3)},
]


@pytest.mark.parametrize("value", PLAIN, ids=range(len(PLAIN)))
def test_plain_values_come_back(value: Any) -> None:
    tensors = to_plain(value, "rank3.")
    assert all(name.startswith("rank3.") for name in tensors)
    assert all(tensor.numel() for tensor in tensors.values())
    assert_same(from_plain(tensors, "rank3."), value)


def assert_same(actual: Any, expected: Any) -> None:
    if isinstance(expected, torch.Tensor):
        assert actual.dtype == expected.dtype
        bits = [one.reshape(-1).view(torch.uint8).tolist() for one in (actual, expected)]
        assert bits[0] == bits[1]
        assert actual.shape == expected.shape
    elif isinstance(expected, np.ndarray):
        assert actual.dtype == expected.dtype
        np.testing.assert_array_equal(actual, expected)
    elif isinstance(expected, dict):
        assert type(actual) is type(expected)
        assert list(actual) == list(expected)
        for key in expected:
            assert_same(actual[key], expected[key])
    elif isinstance(expected, list | tuple):
        assert type(actual) is type(expected)
        assert len(actual) == len(expected)
        for one, other in zip(actual, expected, strict=True):
            assert_same(one, other)
    else:
        assert actual == expected


def test_what_was_stored_is_a_copy() -> None:
    tensor = torch.zeros(2)
    stored = to_plain({"a": tensor}, "")
    tensor += 1
    assert from_plain(stored, "")["a"].tolist() == [0, 0]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({"a": {"b": {1}}}, r"a.b is a set, which a train state can't hold without a pickle; use"),
        ([object()], "0 is a object"),
        ({"x": np.array([None])}, "x is an array of object"),
    ],
)
def test_other_values_are_refused_by_name(value: object, text: str) -> None:
    with pytest.raises(tdsp.errors.CheckpointError, match=text):
        to_plain(value, "")


@pytest.mark.parametrize(
    "content", [b"[", b'{"$tensor": "x"}', b'{"$unknown": 1}', b'{"$array": 1}', b"\xff"]
)
def test_damaged_values_are_refused(content: bytes) -> None:
    with pytest.raises(tdsp.errors.CheckpointError, match=r"'header' is damaged .*; load another"):
        from_plain({"header": torch.frombuffer(bytearray(content), dtype=torch.uint8)}, "")
    with pytest.raises(tdsp.errors.CheckpointError, match="damaged"):
        from_plain({}, "")


def test_random_numbers_go_on() -> None:
    def draw() -> tuple[float, float, float, float]:
        # A normal number is drawn in pairs, of which numpy and Python keep the second one.
        return torch.rand(1).item(), np.random.normal(), random.gauss(0, 1), random.random()

    draw()
    stored = to_plain(random_state(torch.device("cpu")), "")
    expected = [draw() for _ in range(3)]
    restore_random_state(from_plain(stored, ""), torch.device("cpu"))
    assert [draw() for _ in range(3)] == expected


def counter(sketch_rows: int = 64, rows: int = 5_000) -> tdsp.RowCounter:
    tables = [
        EmbeddingBagConfig(rows, 4, name="large", feature_names=["a"]),
        EmbeddingBagConfig(50, 4, name="small", feature_names=["b"]),
    ]
    return tdsp.RowCounter(tables, exact_rows=100, sketch_rows=sketch_rows, half_life=3)


def count(counts: tdsp.RowCounter, steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        large = (5_000 ** torch.rand(400, generator=generator)).long() - 1
        small = torch.randint(0, 50, (400,), generator=generator)
        ids, lengths = torch.cat([large, small]), torch.ones(800, dtype=torch.int64)
        counts.update(KeyedJaggedTensor(keys=["a", "b"], values=ids, lengths=lengths))


def seen(counts: tdsp.RowCounter) -> list[object]:
    stats = counts.stats()
    return [
        (stats[name].rows.tolist(), stats[name].counts.tolist(), stats[name].num_samples)
        for name in counts.tables
    ]


def test_a_counter_goes_on() -> None:
    """Also a sketch, which has dropped rows, and in the middle of a half life."""
    through, other = counter(), counter()
    count(through, range(10))
    stored = from_plain(to_plain(through.state_dict(), ""), "")
    count(other, range(50, 52))
    other.load_state_dict(stored)
    assert seen(other) == seen(through)
    for steps in (range(10, 14), range(14, 30)):
        count(through, steps)
        count(other, steps)
        assert seen(other) == seen(through)


def test_a_counter_takes_over_several_ranks() -> None:
    ranks = [counter(), counter()]
    for rank, counts in enumerate(ranks):
        count(counts, range(10 * rank, 10 * rank + 2))
    both = counter()
    both.load_rank_states([counts.state_dict() for counts in ranks])
    totals = [
        stats["small"].num_lookups for stats in (both.stats(), *(one.stats() for one in ranks))
    ]
    assert totals[0] == totals[1] + totals[2] == 1600
    assert both.stats()["large"].num_lookups == 1600
    both.load_rank_states([])
    assert both.stats()["small"].num_lookups == 0


def test_a_counter_of_other_tables_is_refused() -> None:
    with pytest.raises(
        tdsp.errors.ConfigError, match="'large' was counted as 5000 rows, by a sketch of"
    ):
        counter(sketch_rows=128).load_state_dict(counter().state_dict())


def test_the_newest_finished_checkpoint_is_found(tmp_path: Path) -> None:
    assert tdsp.latest_checkpoint(tmp_path / "nowhere") is None
    for name in ("step_9", "step_10", "step_11", "best", "notes_12"):
        (tmp_path / name).mkdir()
    (tmp_path / "13").touch()
    assert tdsp.latest_checkpoint(tmp_path) is None
    for name in ("step_9", "step_10", "best"):
        (tmp_path / name / ".metadata").touch()
    assert tdsp.latest_checkpoint(tmp_path) == tmp_path / "step_10"


def test_old_checkpoints_are_dropped_and_nothing_else(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4, 5, 6):
        (tmp_path / str(step)).mkdir()
        (tmp_path / str(step) / "__0_0.distcp").touch()
        if step not in (3, 6):
            (tmp_path / str(step) / ".metadata").touch()
    (tmp_path / "best").mkdir()
    tdsp.drop_old_checkpoints(tmp_path, keep=2)
    # 6 may be a save that goes on; 3 has never been finished.
    assert sorted(path.name for path in tmp_path.iterdir()) == ["4", "5", "6", "best"]
    tdsp.drop_old_checkpoints(tmp_path, keep=7)
    assert len(list(tmp_path.iterdir())) == 4
    with pytest.raises(tdsp.errors.ConfigError, match="keep=0 would leave no checkpoint"):
        tdsp.drop_old_checkpoints(tmp_path, keep=0)
