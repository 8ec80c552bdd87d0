"""The base of id maps, and what maps remember and tell each other about ids.

A map that gives rows to ids at intervals only needs other ranks' ids then. Until then each rank
remembers its own (`Memory`), and finally sends each distinct id once (`Tally`).
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, NamedTuple

import torch

LAST_BATCH = "last_access_iter"
"""TorchRec's name for the batch in which an id came last."""


@dataclass(frozen=True)
class History:
    """An id map's state besides its buffers, as it is saved; TorchRec saves only the buffers."""

    iteration: int
    """The number of batches so far; -1 if the buffers hold it."""
    last_eviction: int
    """The batch after which rows were last given to ids."""
    size: int
    """The number of ids remembered between evictions; -1 before the first batch determines it."""
    ids: torch.Tensor
    """All ranks' ids since the last eviction."""
    metadata: Mapping[str, torch.Tensor]
    """The policy's facts about each of these ids."""


class Tally(NamedTuple):
    """Ids, and how often and when they came."""

    ids: torch.Tensor
    counts: torch.Tensor
    """The number of times that each id came."""
    last_batches: torch.Tensor
    """The batch in which each id came last."""

    @classmethod
    def of(cls, ids: torch.Tensor, batch: int = 0) -> "Tally":
        """Return a batch's ids, each time that they came."""
        return cls(ids, torch.ones_like(ids), torch.full_like(ids, batch))

    @classmethod
    def summed(cls, tallies: Sequence["Tally"]) -> "Tally":
        """Return distinct ids, ascending."""
        ids, counts, batches = map(torch.cat, zip(*tallies, strict=True))
        distinct, places = ids.unique(return_inverse=True)
        zeros = torch.zeros_like(distinct)
        return cls(
            distinct,
            zeros.scatter_add(0, places, counts),
            zeros.scatter_reduce(0, places, batches, "amax"),
        )


class Message(NamedTuple):
    """What a rank tells the others about a map's ids."""

    tally: Tally
    """Remembered ids of earlier batches."""
    ids: Sequence[torch.Tensor]
    """Ids of the new batch, by feature."""

    @property
    def parts(self) -> list[torch.Tensor]:
        """The tensors to send."""
        return [*self.tally, *self.ids]

    @classmethod
    def of(cls, parts: Iterator[torch.Tensor], num_features: int) -> "Message":
        """Take a message's parts."""
        return cls(Tally(*islice(parts, 3)), list(islice(parts, num_features)))


class WorldBatch(NamedTuple):
    """All ranks' batches, as a map sees them."""

    own: Sequence[torch.Tensor]
    """This rank's ids, by feature."""
    messages: Sequence[Message]
    """Each rank's message, empty if this rank doesn't change the map."""
    counts: Sequence[Sequence[int]]
    """Each rank's number of ids, by feature."""
    rank: int
    """This rank."""
    is_owner: bool
    """True if this rank changes the map itself."""
    hour: int

    @property
    def ids(self) -> list[torch.Tensor]:
        """Each feature's ids in the messages, in rank order."""
        by_feature = zip(*(message.ids for message in self.messages), strict=True)
        return [torch.cat(ids) for ids in by_feature]


@dataclass(frozen=True)
class Memory:
    """An id map's state besides its buffers, as one rank holds it."""

    batch: int = -1
    """The number of batches so far; -1 if the buffers hold it."""
    last_eviction: int = -1
    """The batch after which rows were last given to ids."""
    size: int = -1
    """The number of ids remembered between evictions; -1 before the first batch determines it."""
    num_ids: int = 0
    """The number of ids that all ranks together remember."""
    loaded: Tally | None = None
    """Ids that every rank remembers, from a saved state."""
    own: Sequence[tuple[int, torch.Tensor]] = ()
    """This rank's ids of each batch since the last eviction, with the batch's number."""

    @classmethod
    def of(cls, history: History, device: torch.device) -> "Memory":
        """Continue a saved state."""
        ids = history.ids
        last = history.metadata.get(LAST_BATCH, torch.zeros_like(ids))
        loaded = Tally(ids, torch.ones_like(ids), last) if ids.numel() else None
        sizes = history.iteration, history.last_eviction, history.size, ids.numel()
        return cls(*sizes, loaded).on(device)

    def on(self, device: torch.device) -> "Memory":
        """Move what every rank remembers to a device."""
        loaded = self.loaded and Tally(*(part.to(device) for part in self.loaded))
        return replace(self, loaded=loaded)

    def tally(self, device: Any) -> Tally:
        """Return this rank's own ids."""
        none = Tally.of(torch.empty(0, dtype=torch.int64, device=device))
        return Tally.summed([none, *(Tally.of(ids, batch) for batch, ids in self.own)])

    def history(self, tallies: Sequence[Tally]) -> History:
        """Return the state to save, with all ranks' own ids."""
        tally = Tally.summed([*tallies, self.loaded] if self.loaded else tallies)
        ids, last = (
            part.repeat_interleave(tally.counts) for part in (tally.ids, tally.last_batches)
        )
        return History(self.batch, self.last_eviction, self.size, ids, {LAST_BATCH: last})


class Overwritten(NamedTuple):
    """The state of an id map before a batch, as far as the batch may change it."""

    memory: Memory
    buffers: Mapping[str, torch.Tensor]
    rows: torch.Tensor | None = None
    """The rows that the buffers hold; `None` if they are whole."""


class IdMapBase:
    """A TorchRec module, with the operations by which ranks keep its copies equal."""

    def __init__(self, module: Any) -> None:
        self.module = module
        """The TorchRec module."""
        self.memory = Memory()
        """The map's state besides its buffers."""
        self.overwritten: Overwritten | None = None
        """The state before the last batch."""

    def forget(self) -> None:
        """Forget the state besides the buffers, which were replaced."""
        self.memory, self.overwritten = Memory(), None

    def hashed(self, ids: torch.Tensor) -> torch.Tensor:
        """Return ids as the map sees them."""
        return ids

    def takes(self, ids: torch.Tensor) -> bool:
        """Return whether the map can take all ids."""
        return True

    @property
    def rows_per_batch(self) -> float:
        """The mean number of rows that a batch goes through besides those of its ids."""
        return 0.0

    def state_before(self, batches: Sequence[Overwritten]) -> Overwritten:
        """Return the state before the last batches; ``batches`` has what each has overwritten."""
        now, buffers = self.module.state_dict(), {}
        for batch in reversed(batches):
            if batch.rows is None:
                buffers |= batch.buffers
                continue
            for name, values in batch.buffers.items():
                buffer = buffers[name] if name in buffers else now[name].clone()
                buffers[name] = buffer.index_copy_(0, batch.rows, values)
        return Overwritten(batches[0].memory, buffers)

    def described(self: Any) -> str:
        """Return a text of everything that must be equal on all ranks."""
        digest = hashlib.blake2b(digest_size=8)
        state = dict(sorted(self.module.state_dict().items()))
        if self.memory.loaded is not None:
            state["ids"] = self.memory.loaded.ids
        if not any(value.is_meta for value in state.values()):
            for value in state.values():
                digest.update(value.cpu().numpy().tobytes())
        return f"{self.options()}, state {digest.hexdigest()}"

    def copied_to(self: Any, device: torch.device) -> Any:
        """Return a map with the same state on a device; a map on the meta device has no state."""
        copied = type(self)(self.empty_on(device).train(self.module.training))
        state = self.module.state_dict()
        if not any(value.is_meta for value in state.values()):
            copied.module.load_state_dict(state)
            copied.memory = self.memory.on(device)
        return copied
