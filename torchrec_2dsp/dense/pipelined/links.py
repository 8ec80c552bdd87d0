"""`Links`: tensors that travel between the ranks of a pipeline, and what they look like there."""

from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_HEADER_SIZE = 16
_SHORTEST = timedelta(milliseconds=1)
_UNUSED_TAG = 1
"""Messages have the tag 0, which is torch's default."""


@dataclass(frozen=True)
class TensorKind:
    """What tensors of one kind have in common, whatever their number of samples."""

    shape: tuple[int, ...]
    """The sizes of all dimensions but the first, which is the batch."""

    dtype: torch.dtype
    """The type of their numbers."""

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "TensorKind":
        """The kind of a tensor."""
        return cls(tuple(tensor.shape[1:]), tensor.dtype)

    def empty(self, num_samples: int, device: torch.device) -> torch.Tensor:
        """A tensor to be filled."""
        return torch.empty(num_samples, *self.shape, dtype=self.dtype, device=device)

    def zeros(self, num_samples: int, device: torch.device) -> torch.Tensor:
        """A tensor of zeros."""
        return torch.zeros(num_samples, *self.shape, dtype=self.dtype, device=device)

    def header(self, device: torch.device) -> torch.Tensor:
        """The kind as numbers, for a rank that doesn't know it."""
        numbers = [_DTYPES.index(self.dtype), len(self.shape), *self.shape]
        padding = [0] * (_HEADER_SIZE - len(numbers))
        return torch.tensor(numbers + padding, device=device)

    @classmethod
    def from_header(cls, header: torch.Tensor) -> "TensorKind":
        """The kind that another rank has sent."""
        dtype, num_dims, *sizes = header.tolist()
        return cls(tuple(sizes[:num_dims]), _DTYPES[dtype])


class Links:
    """Sends and receives of one direction, between ranks of a pipeline.

    Messages from one rank to another arrive in the order in which they were sent, so the receiver
    has to ask for them in that order. Nothing waits for a send before `finish`.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        """
        Args:
            group: the ranks, which use it for nothing else.
            device: where tensors are.
        """
        self._group, self._device = group, device
        self._sent: list[tuple[dist.Work, torch.Tensor]] = []

    def send(self, tensor: torch.Tensor, rank: int) -> None:
        """Send a tensor, unless it is empty.

        Args:
            tensor: what to send; it may not be changed before `finish`.
            rank: of the group.

        Collectives:
            A send of the tensor, not waited for.
        """
        if tensor.numel():
            tensor = tensor.detach().contiguous()
            work = dist.isend(tensor, group=self._group, group_dst=rank)
            assert work is not None
            self._sent.append((work, tensor))

    def receive(self, tensor: torch.Tensor, rank: int) -> dist.Work | None:
        """Let a contiguous tensor be filled by what a rank of the group sends.

        Returns:
            What to wait for; `None` if the tensor is empty.

        Collectives:
            A receive of the tensor, not waited for.
        """
        if not tensor.numel():
            return None
        work = dist.irecv(tensor, group=self._group, group_src=rank)
        assert work is not None
        return work

    def send_kind(self, kind: TensorKind, rank: int) -> None:
        """Send a kind to a rank that waits for it."""
        self.send(kind.header(self._device), rank)

    def receive_kind(self, rank: int) -> TensorKind:
        """Wait for a kind."""
        header = torch.empty(_HEADER_SIZE, dtype=torch.int64, device=self._device)
        work = self.receive(header, rank)
        assert work is not None
        work.wait()
        return TensorKind.from_header(header)

    def finish(self) -> None:
        """Wait until everything that was sent has arrived."""
        for work, _ in self._sent:
            work.wait()
        self._sent.clear()

    def close(self) -> None:
        """Break all connections, so that ranks which wait for this one learn of it at once.

        A receive of gloo's that isn't over in time does that. Tensors in flight are kept alive.
        """
        rank = dist.get_rank(self._group)
        nothing = torch.zeros(1, device=self._device)
        # One timeout breaks all connections, but one that is broken already fails without it.
        for peer in range(dist.get_world_size(self._group)):
            if peer != rank:
                # By a tag that nobody sends: a message on its way must not end the wait.
                with suppress(RuntimeError):
                    work = dist.irecv(nothing, group=self._group, group_src=peer, tag=_UNUSED_TAG)
                    if work is not None:
                        work.wait(_SHORTEST)


class Inbox:
    """What one rank sends to this one during a schedule, in the sender's order."""

    def __init__(
        self,
        links: Links,
        rank: int,
        expected: Iterable[tuple[Any, int]],
        kinds: dict[Any, TensorKind],
        wire: torch.dtype | None,
        device: torch.device,
    ) -> None:
        """
        Args:
            links: by which the tensors come.
            rank: the sender.
            expected: a key and the number of samples of each tensor, in the sender's order.
            kinds: of the tensors by the first part of their keys; what is missing is sent ahead of
                the first tensor, and put there.
            wire: how floating-point numbers travel; `None` for how they are.
            device: where tensors are.
        """
        self._links, self._rank, self._kinds = links, rank, kinds
        self._wire, self._device = wire, device
        self._expected = deque(expected)
        self._arriving: dict[Any, tuple[dist.Work | None, torch.Tensor]] = {}

    def take(self, key: Any) -> torch.Tensor:
        """Wait for a tensor; the next one may arrive meanwhile."""
        while key not in self._arriving:
            self._ask_for_next()
        if self._expected and self._expected[0][0][0] in self._kinds:
            self._ask_for_next()
        work, tensor = self._arriving.pop(key)
        if work is not None:
            work.wait()
        return tensor.to(self._kinds[key[0]].dtype)

    def _ask_for_next(self) -> None:
        key, num_samples = self._expected.popleft()
        name = key[0]
        if name not in self._kinds:
            self._kinds[name] = self._links.receive_kind(self._rank)
        kind = self._kinds[name]
        on_wire = TensorKind(kind.shape, self._wire or kind.dtype)
        tensor = on_wire.empty(num_samples, self._device)
        self._arriving[key] = self._links.receive(tensor, self._rank), tensor


def joined(parts: Sequence[torch.Tensor | None], kind: TensorKind, device: torch.device) -> Any:
    """The tensors of all micro-batches, one after the other."""
    tensors = [part for part in parts if part is not None]
    return torch.cat(tensors) if tensors else kind.zeros(0, device)
