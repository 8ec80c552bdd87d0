"""The launched ranks, as far as they must agree on what happens next."""

import os
import pickle
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

Value = TypeVar("Value")


class Control:
    """Talks over torchrun's store, which outlives every contestant and its process groups."""

    def __init__(self, timeout_s: float) -> None:
        """
        Args:
            timeout_s: how long ranks may be apart; more than a contestant's deadline.
        """
        store, self.rank, self.world_size = next(rendezvous("env://"))
        self._store: dist.Store = dist.PrefixStore("torchrec_2dsp_bench", store)
        self._timeout = timedelta(seconds=timeout_s)
        self._exchanges = 0

    def exchange(self, value: Value) -> list[Value]:
        """Every rank's value; also a barrier. All ranks call it equally often."""
        self._exchanges += 1
        name = f"exchange/{self._exchanges}"
        self._store.set(f"{name}/{self.rank}", pickle.dumps(value))  # type: ignore[arg-type]
        keys = [f"{name}/{rank}" for rank in range(self.world_size)]
        self._store.wait(keys, self._timeout)
        return [pickle.loads(value) for value in self._store.multi_get(keys)]

    def raise_flag(self, name: str) -> None:
        """Let every rank know something, now."""
        self._store.set(f"flag/{name}", "raised")

    def flag(self, name: str) -> bool:
        """Whether a rank has raised this flag."""
        return self._store.check([f"flag/{name}"])


def contestant_store(number: int, timeout_s: float) -> dist.Store:
    """A store for the process groups of a contestant, which needs a connection of its own.

    Called in the contestant's process.
    """
    store = dist.TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=False,
        timeout=timedelta(seconds=timeout_s),
    )
    return dist.PrefixStore(f"contestant_{number}", store)
