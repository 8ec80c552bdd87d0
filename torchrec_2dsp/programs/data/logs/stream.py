"""`BatchStream`: batches that a thread makes ahead of time."""

import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from torchrec.datasets.utils import Batch

_POLL_S = 0.1
"""How often a thread that waits looks whether it is still needed."""


@dataclass
class _Done:
    """The last thing in the queue: the end of the batches, or an error."""

    error: BaseException | None


@dataclass
class _Shared:
    """The part of a stream that its thread knows; the stream itself can be collected."""

    ready: "queue.Queue[Batch | _Done]"
    is_closed: threading.Event = field(default_factory=threading.Event)
    num_rows: int = 0
    busy_s: float = 0.0


class BatchStream(Iterator[Batch]):
    """An iterator over batches, of which a few are always ready.

    The thread ends with the batches, after an error, when the stream is closed, and when nobody
    has the stream any more. An error of the thread is raised where its batch would have come.

    Example:
        >>> import torch
        >>> from torchrec.datasets.utils import Batch
        >>> from torchrec_2dsp.programs.data.logs.stream import BatchStream
        >>> with BatchStream(lambda: iter(["a", "b"]), num_ahead=1, count=len) as stream:
        ...     list(stream), stream.num_rows
        (['a', 'b'], 2)
    """

    def __init__(
        self,
        batches: Callable[[], Iterator[Batch]],
        *,
        num_ahead: int,
        count: Callable[[Batch], int] = lambda batch: batch.labels.numel(),
    ) -> None:
        """
        Args:
            batches: makes the iterator, on the thread.
            num_ahead: how many batches wait to be used; 0 for none, and no thread.
            count: how many rows a batch has.
        """
        self._shared = _Shared(queue.Queue(num_ahead))
        self._local: Iterator[Batch] | None = None
        self._done: _Done | None = None
        self._thread: threading.Thread | None = None
        work = _timed(batches, count, self._shared)
        if num_ahead:
            self._thread = threading.Thread(
                target=_fill, args=(work, self._shared), name="batches", daemon=True
            )
            weakref.finalize(self, self._shared.is_closed.set)
            self._thread.start()
        else:
            self._local = work

    @property
    def num_rows(self) -> int:
        """How many rows were made into batches."""
        return self._shared.num_rows

    @property
    def rows_per_s(self) -> float:
        """Rows per second of making batches, waiting for those who use them left out."""
        return self._shared.num_rows / self._shared.busy_s if self._shared.busy_s else 0.0

    def __next__(self) -> Batch:
        if self._local is not None:
            return next(self._local)
        while self._done is None:
            if self._shared.is_closed.is_set():
                raise StopIteration
            try:
                entry = self._shared.ready.get(timeout=_POLL_S)
            except queue.Empty:
                continue
            if not isinstance(entry, _Done):
                return entry
            self._done = entry
        if self._done.error is not None:
            raise self._done.error
        raise StopIteration

    def close(self) -> None:
        """End the thread; no more batches come."""
        self._shared.is_closed.set()
        if self._thread is not None:
            self._thread.join()
        self._local = None
        self._done = self._done or _Done(None)

    def __enter__(self) -> "BatchStream":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _timed(
    batches: Callable[[], Iterator[Batch]], count: Callable[[Batch], int], shared: _Shared
) -> Iterator[Batch]:
    """The batches; what making them takes is noted."""
    start = time.perf_counter()
    for batch in batches():
        shared.busy_s += time.perf_counter() - start
        shared.num_rows += count(batch)
        yield batch
        start = time.perf_counter()


def _fill(batches: Iterator[Batch], shared: _Shared) -> None:
    """Put batches into the queue until they end or nobody needs them."""
    done = _Done(None)
    try:
        for batch in batches:
            if not _put(batch, shared):
                return
    except BaseException as error:
        done = _Done(error)
    _put(done, shared)


def _put(entry: Batch | _Done, shared: _Shared) -> bool:
    while not shared.is_closed.is_set():
        try:
            shared.ready.put(entry, timeout=_POLL_S)
        except queue.Full:
            continue
        return True
    return False
