"""What balanced batches refuse, on all ranks, and calls that run ahead."""

import threading
from collections.abc import Iterator
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torchrec.datasets.utils import Batch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import torchrec_2dsp as tdsp
from tests.support.batches import Sessions, check_samples, count_dealing_threads, sessions
from tests.support.ranks import RankPool
from torchrec_2dsp.errors import ConfigError, InputError, RankError, TwoDError, UnsupportedError
from torchrec_2dsp.samples.balanced_batches import Ahead


def error_of(call: Any) -> tuple[type[Exception], str]:
    try:
        call()
    except Exception as error:
        return type(error), str(error)
    raise AssertionError("no error")


def failing_loader(rank: int) -> Iterator[Sessions]:
    yield sessions(0, [1, 2])
    yield sessions(0, [1, 2])
    if rank == 1:
        raise OSError("no such file")
    yield sessions(0, [1, 2])
    yield sessions(0, [1, 2])


def fail(rank: int, world_size: int) -> dict[str, tuple[type[Exception], str]]:
    def run(batches: Any, **options: Any) -> Any:
        return lambda: list(tdsp.BalancedBatches(batches, **options))

    good = sessions(0, [1, 2])
    balanced = tdsp.BalancedBatches(failing_loader(rank))
    assert [len(next(balanced).numbers) for _ in range(2)] == [2, 2]
    errors = {"loader": error_of(lambda: next(balanced)), "again": error_of(lambda: next(balanced))}
    other = Batch(torch.ones(2, 3), good.history, torch.ones(2))
    two_sizes = Batch(torch.ones(3, 3), good.history, torch.ones(2))
    variable = KeyedJaggedTensor(
        ["a", "b"],
        torch.arange(3),
        lengths=torch.ones(3, dtype=torch.int64),
        stride_per_key_per_rank=[[1], [2]],
        inverse_indices=(["a", "b"], torch.zeros(2, 2, dtype=torch.int64)),
    )
    cases = {
        "forms": run([good if rank else other]),
        "never": run([good] if rank else []),
        "sizes": run([two_sizes]),
        "object": run([good if rank else {"a": torch.ones(2), "b": object()}]),
        "nothing": run([{"a": 1}]),
        "device": run([torch.ones(2, device="meta")]),
        "gradient": run([torch.ones(2, requires_grad=True)]),
        "variable": run([variable]),
        "feature": run([good], lengths=["future"]),
        "no lengths": run([torch.ones(2)]),
        "function": run([good], lengths=lambda _: torch.ones(3)),
        "shared": run([good], shared_ids=1.0),
        "smoothing": run([good], smoothing=0.0),
        "speeds": run([good], rank_speeds=[1.0]),
        "no speed": run([good], rank_speeds=[1.0, 0.0]),
        "settings": run([good], shared_ids=0.1 * rank),
        "seconds": lambda: tdsp.BalancedBatches([good]).note_seconds(-1.0),
    }
    errors |= {name: error_of(call) for name, call in cases.items()}
    # Whatever has failed leaves the group of ranks as it was.
    assert sum(len(batch.numbers) for batch in tdsp.BalancedBatches([good, good])) == 4
    assert count_dealing_threads() == 0
    return errors


def test_errors_are_the_same_on_all_ranks_or_name_the_rank(ranks2: RankPool) -> None:
    first, second = ranks2.run(fail)
    assert first["loader"] == first["again"]
    assert first["loader"][0] is RankError
    assert first["loader"][1].endswith(
        "rank 1 failed as it took its next batch: OSError: no such file"
    )
    assert second["loader"] == second["again"] == (OSError, "no such file")
    assert first["object"][0] is UnsupportedError
    assert "a batch holds a value of type object" in first["object"][1]
    assert "failed as it took its next batch: UnsupportedError" in second["object"][1]
    expected: dict[str, tuple[type[TwoDError], str]] = {
        "forms": (ConfigError, "the form of the batches of BalancedBatches differs between ranks"),
        "never": (ConfigError, "had no batch at all"),
        "sizes": (InputError, "the tensors of a batch have 3, 2, 2 samples"),
        "nothing": (UnsupportedError, "a batch of type dict has no tensors, so it has no samples"),
        "device": (UnsupportedError, "a batch is on meta already; balance it on the CPU"),
        "gradient": (UnsupportedError, "a batch holds a tensor that needs a gradient"),
        "variable": (UnsupportedError, "a batch size for each feature can't be balanced"),
        "feature": (InputError, "the batch has no feature 'future'; use some of history, clicks"),
        "no lengths": (InputError, "a batch without jagged tensors has no lengths"),
        "function": (InputError, "lengths() gave a tensor of shape (3,) for 2 samples"),
        "shared": (ConfigError, "BalancedBatches(shared_ids=1.0) is no share"),
        "smoothing": (ConfigError, "BalancedBatches(smoothing=0.0) is no factor"),
        "speeds": (ConfigError, "BalancedBatches(rank_speeds=[1.0]) doesn't fit 2 ranks"),
        "no speed": (ConfigError, "rank_speeds: 0.0 is no speed"),
        "settings": (ConfigError, "the settings of BalancedBatches differs between ranks"),
        "seconds": (ConfigError, "note_seconds(-1.0) is no time"),
    }
    assert set(expected) == set(first) - {"loader", "again", "object"}
    for name, (kind, text) in expected.items():
        for error in (first[name], second[name]):
            assert error[0] is kind, (name, error)
            assert text in error[1], (name, error)


def test_a_call_ahead_waits_for_the_one_before_and_hands_over_errors() -> None:
    order: list[str] = []
    gate = threading.Event()

    def first_call() -> None:
        gate.wait(10)
        order.append("first")
        raise ValueError("first")

    first = Ahead(first_call, None)
    second = Ahead(lambda: order.append("second"), first)
    assert order == []
    gate.set()
    second.result()
    assert order == ["first", "second"]
    with pytest.raises(ValueError, match="first"):
        first.result()


def alone(rank: int, world_size: int) -> None:
    group = dist.new_group([rank], use_local_synchronization=True)
    batches = [sessions(0, [1, 2]), sessions(2, [3])]
    balanced = tdsp.BalancedBatches(batches, group=cast(Any, group))
    assert [check_samples(batch) for batch in balanced] == [[0, 1], [2]]
    assert balanced.loss_weight == 1.0


def test_a_rank_that_is_alone_gets_its_own_batches(ranks2: RankPool) -> None:
    ranks2.run(alone)
