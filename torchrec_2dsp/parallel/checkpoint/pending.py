"""`PendingSave`: a save that goes on while the model trains; one at a time in a world."""

import logging
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

import torch.distributed as dist

from torchrec_2dsp.errors import CheckpointError

logger = logging.getLogger(__name__)


class PendingSave(Future[None]):
    """What `save_checkpoint` returns with ``asynchronous=True``: a future.

    ``result()`` waits until the checkpoint is complete, and raises the `CheckpointError` that all
    ranks get if one of them fails. An error that nobody has asked for is logged, and raised by the
    next save or load.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder
        """The folder of the checkpoint."""
        self._is_seen = False

    def result(self, timeout: float | None = None) -> None:
        """Wait for the checkpoint, at most ``timeout`` seconds."""
        error = self.exception(timeout)
        if error is not None:
            raise error

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for the checkpoint, and return what went wrong, if anything."""
        error = super().exception(timeout)
        self._is_seen = True
        return error

    def raise_if_unseen(self) -> None:
        """Wait for the checkpoint, and raise its error unless somebody has asked for it."""
        was_seen = self._is_seen
        error = self.exception()
        if error is not None and not was_seen:
            raise CheckpointError(f"an earlier asynchronous save has failed: {error}") from error


def start_save(
    world: dist.ProcessGroup, folder: Path, save: Callable[[], object], is_staged: threading.Event
) -> PendingSave:
    """Run ``save`` in a thread of its own, and return as soon as the state may change again.

    Args:
        world: all ranks, without another save that is running.
        folder: the folder of the checkpoint.
        save: writes the checkpoint; raises nothing but a `CheckpointError`.
        is_staged: set by ``save`` when it has copied what it writes.
    """
    pending = PendingSave(folder)
    pending.set_running_or_notify_cancel()

    def run() -> None:
        try:
            save()
        except BaseException as error:
            logger.error("%s", error)
            pending.set_exception(error)
        else:
            pending.set_result(None)
        finally:
            is_staged.set()

    # Not a daemon: the interpreter waits for it before it exits.
    thread = threading.Thread(target=run, name=f"save {folder}")
    _PENDING[world] = pending
    thread.start()
    is_staged.wait()
    return pending


def wait_for_save(world: dist.ProcessGroup) -> None:
    """Wait for the save that is running, if any; raise its error if nobody has seen it."""
    pending = _PENDING.pop(world, None)
    if pending is not None:
        pending.raise_if_unseen()


_PENDING: "weakref.WeakKeyDictionary[dist.ProcessGroup, PendingSave]" = weakref.WeakKeyDictionary()
"""The last asynchronous save of each world."""
