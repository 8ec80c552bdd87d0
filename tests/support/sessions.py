"""Batches in which each sample's number stands in every tensor, and what must be true of them."""

import threading
from dataclasses import dataclass
from typing import Any

import torch
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor


@dataclass(frozen=True)
class Sessions:
    """A batch in which each sample's number stands in every tensor."""

    numbers: torch.Tensor
    history: KeyedJaggedTensor
    extra: dict[str, Any]
    step: int
    weight: float = 0.0


def sessions(first: int, lengths: list[int], step: int = 0) -> Sessions:
    """A batch of samples that are numbered from ``first``."""
    numbers = torch.arange(first, first + len(lengths))
    num_ids = torch.tensor(lengths, dtype=torch.int32)
    clicks = (numbers % 3).int()
    values = torch.cat([numbers.repeat_interleave(num_ids), numbers.repeat_interleave(clicks)])
    return Sessions(
        numbers,
        KeyedJaggedTensor(
            keys=["history", "clicks"],
            values=values,
            weights=values.float() / 2,
            lengths=torch.cat([num_ids, clicks]),
        ),
        {
            "jagged": JaggedTensor(numbers.repeat_interleave(clicks), lengths=clicks.long()),
            "dense": numbers.double().view(-1, 1, 1).expand(-1, 2, 3),
            "pair": (numbers % 2 == 0, [numbers.to(torch.int16)]),
            "keyed": KeyedTensor(["a", "b"], [1, 2], numbers.float().view(-1, 1).expand(-1, 3)),
            "scale": torch.tensor(2.5),
            "name": "sessions",
        },
        step,
    )


def check_samples(batch: Sessions) -> list[int]:
    """The numbers of the samples, after a look at all of their tensors."""
    numbers = batch.numbers
    history, clicks = (batch.history[key] for key in ("history", "clicks"))
    assert torch.equal(history.values(), numbers.repeat_interleave(history.lengths()))
    assert torch.equal(clicks.lengths(), (numbers % 3).int())
    assert torch.equal(clicks.values(), numbers.repeat_interleave(clicks.lengths()))
    assert torch.equal(batch.history.weights(), batch.history.values().float() / 2)
    jagged = batch.extra["jagged"]
    assert torch.equal(jagged.lengths(), (numbers % 3).long())
    assert torch.equal(jagged.values(), numbers.repeat_interleave(jagged.lengths()))
    assert torch.equal(batch.extra["dense"], numbers.double().view(-1, 1, 1).expand(-1, 2, 3))
    is_even, [short] = batch.extra["pair"]
    assert torch.equal(is_even, numbers % 2 == 0)
    assert torch.equal(short, numbers.to(torch.int16))
    assert torch.equal(batch.extra["keyed"]["b"], numbers.float().view(-1, 1).expand(-1, 2))
    assert batch.extra["scale"] == 2.5
    assert batch.extra["name"] == "sessions"
    return numbers.tolist()


def count_dealing_threads() -> int:
    """How many threads deal batches."""
    return sum(thread.name == "balanced batches" for thread in threading.enumerate())
