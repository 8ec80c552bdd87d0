"""A gloo backend whose all-to-all sends and receives at the same time.

Gloo's own all-to-all posts a send before the matching receive, and two hosts then often
take turns: the exchange takes twice as long as the link needs. Here all receives are posted before
the first send. In all other respects the backend is gloo. Sharding groups use it where the plan
has ``full_duplex``. A whole world uses it by its name, which is registered on first use:

    from torchrec_2dsp.comms.full_duplex import full_duplex_backend

    torch.distributed.init_process_group(full_duplex_backend())
"""

import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.futures import Future

from torchrec_2dsp._compat.c10d import is_dispatch_watched, pass_on_to, tensors_in, timeout_of_gloo
from torchrec_2dsp.comms.counting import note


def parts_of(tensor: torch.Tensor, sizes: Sequence[int], num_ranks: int) -> Sequence[torch.Tensor]:
    """Split the first dim into one part per rank, sharing memory with ``tensor``."""
    num_rows = tensor.shape[0] if tensor.dim() else 1
    if not sizes and (num_rows % num_ranks or not tensor.dim()):
        raise RuntimeError(
            f"Tensor's dim 0 of shape {tuple(tensor.shape)} does not divide equally across group "
            f"size {num_ranks}; pass split sizes"
        )
    if not sizes:
        sizes = [num_rows // num_ranks] * num_ranks
    if len(sizes) != num_ranks:
        raise RuntimeError(
            f"Number of tensor splits not equal to group size: {len(sizes)} for {num_ranks} ranks; "
            "pass one size per rank"
        )
    if sum(sizes) != num_rows or min(sizes) < 0:
        raise RuntimeError(
            f"Split sizes doesn't match total dim 0 size: {list(sizes)} for {num_rows}; "
            "pass sizes of zero or more that add up to it"
        )
    return tensor.detach().split_with_sizes(list(sizes))


def check_own_parts(received: torch.Tensor, sent: torch.Tensor) -> None:
    """Raise unless the part that a rank keeps fits its place in the output."""
    if received.dtype != sent.dtype:
        raise ValueError(
            f"tensors of different dtypes: {received.dtype} and {sent.dtype}; convert one"
        )
    if received.numel() != sent.numel():
        raise RuntimeError(
            f"this rank sends {sent.numel()} elements to itself and expects {received.numel()}; "
            "give its own parts the same size"
        )


class GlooGroup(dist.ProcessGroup):
    """Forwards every operation to gloo.

    Python forwards every operation that torch calls on a Python class. `ProcessGroup`'s own
    operations hold the interpreter's lock, and sometimes wait forever for a gloo thread that needs
    the lock to free a tensor.
    """

    def __init__(self, gloo: dist.ProcessGroupGloo) -> None:
        super().__init__(gloo.rank(), gloo.size())  # type: ignore[call-arg]
        self._gloo: Any = gloo  # torch's stubs lack its send and recv
        pass_on_to(self, gloo)

    def getBackendName(self) -> str:
        """Return the name in logs and profiles."""
        return "gloo"


GLOO_NAMES = {
    "all_gather_single": "_allgather_base",
    "all_to_all_single": "alltoall_base",
    "reduce_scatter_single": "_reduce_scatter_base",
}
"""Collectives that have another name in a backend than in a group, which knows both names."""

_OPS = {
    "_allgather_base": "all_gather_into_tensor",
    "_reduce_scatter_base": "reduce_scatter_tensor",
    "allgather": "all_gather",
    "allreduce": "all_reduce",
    "allreduce_coalesced": "all_reduce_coalesced",
    "alltoall": "all_to_all",
    "alltoall_base": "all_to_all_single",
    "barrier": "barrier",
    "broadcast": "broadcast",
    "recv": "recv",
    "reduce_scatter": "reduce_scatter",
    "send": "send",
}
OPERATIONS = (*GLOO_NAMES, *_OPS)
"""A group's operations that Python forwards."""

_INPUT_FIRST = ("allreduce", "allreduce_coalesced", "broadcast", "send")


def _input_bytes(self: GlooGroup, name: str, arguments: tuple[Any, ...]) -> int:
    if name in ("barrier", "recv"):
        return 0
    if name == "broadcast" and arguments[1].rootRank != self.rank():
        return 0
    inputs = arguments[0] if name in _INPUT_FIRST else arguments[1]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors_in(inputs))


def _passed_on(name: str) -> Callable[..., dist.Work]:
    def operation(self: GlooGroup, *arguments: Any, **options: Any) -> dist.Work:
        # `count_collectives` sees functional collectives by itself, and isn't active inside them.
        if is_dispatch_watched():
            note(_OPS[name], self, _input_bytes(self, name, arguments))
        if name == "alltoall_base" and len(arguments) < 5:
            arguments = (*arguments, dist.AllToAllOptions())
        return getattr(self._gloo, name)(*arguments, **options)

    return operation


for _name in OPERATIONS:
    setattr(GlooGroup, _name, _passed_on(GLOO_NAMES.get(_name, _name)))


_NAME = "gloo_full_duplex"

_FIRST_TAG = 2**30
_NUM_TAGS = 2**30
"""Our messages' tags: the upper half of gloo's, away from those of a user's ``send``."""

_NO_TIMEOUT = timedelta(0)
"""The value by which torch passes the group's own timeout."""


class FullDuplexGroup(GlooGroup):
    """A gloo group with a full-duplex all-to-all; everything else is gloo's.

    Results equal gloo's bit for bit. The differences: a non-contiguous output is refused
    instead of filled in the wrong order, sizes that don't divide or are negative are refused, and a
    timeout passed to ``wait`` breaks the connections when it expires, as gloo's
    ``recv`` does.
    """

    def __init__(self, gloo: dist.ProcessGroupGloo) -> None:
        super().__init__(gloo)
        self._num_exchanges = 0
        self._failed: list[_Exchange] = []

    def getBackendName(self) -> str:
        """Return the name in logs and profiles."""
        return _NAME

    def all_to_all_single(  # type: ignore[override]
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: Sequence[int] = (),
        input_split_sizes: Sequence[int] = (),
        opts: object = None,
    ) -> dist.Work:
        """Run the all-to-all behind `dist.all_to_all_single` and functional collectives.

        Collectives:
            One send to and one receive from every peer, except for parts without elements.
        """
        for tensor in (output, input):
            if not tensor.is_contiguous():
                raise ValueError(
                    "Tensors must be contiguous; all_to_all_single got one of shape "
                    f"{tuple(tensor.shape)} and strides {tensor.stride()}; call .contiguous()"
                )
        received = parts_of(output, output_split_sizes, self.size())
        sent = parts_of(input, input_split_sizes, self.size())
        return self._exchange("all_to_all_single", received, sent, result=[output])

    alltoall_base = all_to_all_single  # type: ignore[assignment]
    """The name before torch 2.13, which some callers still use."""

    def alltoall(  # type: ignore[override]
        self,
        output_tensors: Sequence[torch.Tensor],
        input_tensors: Sequence[torch.Tensor],
        opts: object = None,
    ) -> dist.Work:
        """Run the all-to-all behind `torch.distributed.all_to_all`; tensors may differ in size.

        Collectives:
            One send to and one receive from every peer, except for empty tensors.
        """
        for name, tensors in (("output", output_tensors), ("input", input_tensors)):
            if len(tensors) != self.size():
                raise RuntimeError(
                    f"{name} tensor list size {len(tensors)} does not match world size "
                    f"{self.size()}; pass one tensor per rank"
                )
        outputs = [tensor.detach() for tensor in output_tensors]
        sent = [tensor.detach().contiguous() for tensor in input_tensors]
        # A receive needs contiguous memory; a strided output is copied from it at the end.
        received = [tensor.contiguous() for tensor in outputs]
        copies = [pair for pair in zip(outputs, received, strict=True) if pair[0] is not pair[1]]
        result = list(output_tensors)
        return self._exchange("all_to_all", received, sent, result=result, copies=copies)

    def _exchange(
        self,
        op: str,
        received: Sequence[torch.Tensor],
        sent: Sequence[torch.Tensor],
        result: list[torch.Tensor],
        copies: Sequence[tuple[torch.Tensor, torch.Tensor]] = (),
    ) -> dist.Work:
        rank, size = self.rank(), self.size()
        check_own_parts(received[rank], sent[rank])
        if is_dispatch_watched():
            note(op, self, sum(part.nbytes for part in sent))
        # All ranks issue their exchanges in the same order, so equal numbers match.
        tag = _FIRST_TAG + self._num_exchanges % _NUM_TAGS
        self._num_exchanges += 1
        exchange = _Exchange(timeout_of_gloo(self._gloo), result, copies, self._failed)
        _BEGUN.add(exchange)
        # Every rank starts with a different peer, so that not all send to the same rank at once.
        peers = [(rank + step) % size for step in range(1, size)]
        for peer in reversed(peers):
            exchange.post(self._gloo.recv, received[peer], peer, tag)
        for peer in peers:
            exchange.post(self._gloo.send, sent[peer], peer, tag)
        received[rank].view(-1).copy_(sent[rank].view(-1))
        return ExchangeWork(exchange)


class ExchangeWork(dist.Work):
    """The handle of an all-to-all in flight.

    `wait` blocks in the caller's thread. Polling, asking for the future or dropping the handle
    starts a thread that waits, because gloo only tells waiting threads about the end.
    """

    def __init__(self, exchange: "_Exchange") -> None:
        super().__init__()
        self._exchange = exchange

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        """Block until all messages have arrived and left; an error names the peer's rank."""
        self._exchange.finish(timeout)
        self._exchange.future.wait()
        return True

    def is_completed(self) -> bool:
        """Return whether the exchange is over, successfully or not."""
        self._exchange.watch()
        return self._exchange.future.done()

    def is_success(self) -> bool:
        """Return whether the exchange is over and successful."""
        return self.is_completed() and self._exchange.error is None

    def get_future(self) -> Future[Any]:
        """Return a future of the output tensors."""
        self._exchange.watch()
        return self._exchange.future

    def __del__(self) -> None:
        # A dropped receive would leave the peer's message without a destination.
        if not sys.is_finalizing():
            self._exchange.watch()


class _Exchange:
    """Messages in flight, and their tensors.

    Gloo hangs if a buffer is freed while its message is in flight, and then even a timeout doesn't
    end the wait. So every message is waited for, and after a failure the remaining ones are kept
    alive as long as the group.
    """

    def __init__(
        self,
        group_timeout: timedelta,
        result: list[torch.Tensor],
        copies: Sequence[tuple[torch.Tensor, torch.Tensor]],
        failed: "list[_Exchange]",
    ) -> None:
        self.future: Future[Any] = Future()
        self.error: RuntimeError | None = None
        self._group_timeout = group_timeout
        self._result = result
        self._copies = copies
        self._failed = failed
        self._messages: deque[tuple[int, dist.Work]] = deque()
        self._lock = threading.RLock()
        self._is_watched = False

    def post(
        self, transfer: Callable[..., dist.Work], tensor: torch.Tensor, peer: int, tag: int
    ) -> None:
        """Start a message, unless it is empty; `finish` reports its error."""
        if self.error is None and tensor.numel():
            try:
                self._messages.append((peer, transfer([tensor], peer, tag)))
            except RuntimeError as error:
                self._fail(peer, error)

    def finish(self, timeout: timedelta) -> None:
        """Wait for all messages and complete the future; a second thread waits for the first."""
        timeout = timeout or self._group_timeout
        deadline = time.monotonic() + timeout.total_seconds()
        if not self._lock.acquire(timeout=timeout.total_seconds()):
            raise RuntimeError(f"an all-to-all isn't over after {timeout}; wait longer")
        try:
            if self.future.done():
                return
            while self._messages and self.error is None:
                self._wait_for_next(deadline)
            if self.error is not None:
                self._failed.append(self)
                self.future.set_exception(self.error)
                return
            for target, source in self._copies:
                target.copy_(source)
            self.future.set_result(self._result)
        finally:
            self._lock.release()

    def watch(self) -> None:
        """Call `finish` in a thread, unless the exchange is over or watched."""
        if not self._is_watched and not self.future.done():
            self._is_watched = True
            threading.Thread(target=self.finish, args=(_NO_TIMEOUT,)).start()

    def _wait_for_next(self, deadline: float) -> None:
        peer, message = self._messages.popleft()
        # A timeout of zero would mean no timeout.
        seconds_left = max(deadline - time.monotonic(), 0.001)
        try:
            message.wait(timedelta(seconds=seconds_left))
        except RuntimeError as error:
            self._fail(peer, error)

    def _fail(self, peer: int, error: RuntimeError) -> None:
        if self.error is None:
            self.error = RuntimeError(f"all-to-all with rank {peer} of the group failed: {error}")
            self.error.__cause__ = error


_BEGUN: "weakref.WeakSet[_Exchange]" = weakref.WeakSet()
"""This process's all-to-alls with live handles."""


def wait_for_exchanges() -> None:
    """Wait for all all-to-alls that this process has begun.

    Call it when all ranks have begun theirs.
    """
    for exchange in list(_BEGUN):
        exchange.finish(_NO_TIMEOUT)


def _create(store: dist.Store, rank: int, size: int, timeout: timedelta) -> FullDuplexGroup:
    return FullDuplexGroup(dist.ProcessGroupGloo(store, rank, size, timeout))


def full_duplex_backend(create: Callable[..., FullDuplexGroup] = _create) -> str:
    """Return the backend's name, registered on first use; ``create`` builds its groups."""
    if _NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(_NAME, create, devices=["cpu"])
    return _NAME
