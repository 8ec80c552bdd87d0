"""`save_checkpoint`, background saves, and a folder's newest checkpoint."""

import logging
import re
import shutil
import threading
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import nullcontext
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.optim.keyed import KeyedOptimizer

from torchrec_2dsp.comms.alarm import agreeing
from torchrec_2dsp.comms.groups import world_group
from torchrec_2dsp.errors import CheckpointError, ConfigError
from torchrec_2dsp.parallel.checkpoint.address import Address, Place, place_of
from torchrec_2dsp.parallel.checkpoint.coordination import (
    background_group,
    coordination_group,
    run_dcp,
)
from torchrec_2dsp.parallel.checkpoint.parts import (
    EXTRA,
    MODEL,
    TRAIN_STATE,
    as_tensor,
    check_together,
    encoded,
    live_state,
)
from torchrec_2dsp.parallel.checkpoint.writer import (
    ChecksumWriter,
    PlainDataSavePlanner,
    StagingPlanner,
    holds_checkpoint,
)
from torchrec_2dsp.parallel.model_parallel2d import calling_together
from torchrec_2dsp.shard.parted import groups_of

if TYPE_CHECKING:
    from torchrec_2dsp.parallel.train_state.state import TrainState


class PendingSave(Future[None]):
    """The future that `save_checkpoint` returns with ``asynchronous=True``.

    ``result()`` waits until the checkpoint is complete, and raises a `CheckpointError` on all
    ranks if one of them fails. An error that nobody has asked for is logged, and raised by the
    next save or load.
    """

    def __init__(self, folder: Place) -> None:
        super().__init__()
        self.folder = folder
        """The checkpoint's folder."""
        self._is_seen = False

    def result(self, timeout: float | None = None) -> None:
        """Wait for the checkpoint, at most ``timeout`` seconds."""
        error = self.exception(timeout)
        if error is not None:
            raise error

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for the checkpoint, and return its error, if any."""
        error = super().exception(timeout)
        self._is_seen = True
        return error

    def raise_if_unseen(self) -> None:
        """Wait for the checkpoint, and raise its error unless it has been asked for already."""
        was_seen = self._is_seen
        error = self.exception()
        if error is not None and not was_seen:
            raise CheckpointError(f"an earlier asynchronous save has failed: {error}") from error


def start_save(
    world: dist.ProcessGroup, folder: Place, save: Callable[[], object], is_staged: threading.Event
) -> PendingSave:
    """Run ``save`` in a thread, and return as soon as the state may change again.

    ``save`` may only raise a `CheckpointError`, and sets ``is_staged`` once it has copied what it
    writes. No other save of this world may be running.
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

    # Not a daemon: the interpreter waits for it before exiting.
    thread = threading.Thread(target=run, name=f"save {folder}")
    thread.start()
    _PENDING[world] = pending
    is_staged.wait()
    return pending


def wait_for_save(world: dist.ProcessGroup) -> None:
    """Wait for the running save, if any, and raise its error unless somebody has asked for it."""
    pending = _PENDING.pop(world, None)
    if pending is not None:
        pending.raise_if_unseen()


_PENDING: "weakref.WeakKeyDictionary[dist.ProcessGroup, PendingSave]" = weakref.WeakKeyDictionary()
"""Each world's last asynchronous save."""


@overload
def save_checkpoint(
    path: str | PathLike[str],
    model: DistributedModelParallel,
    optimizer: KeyedOptimizer | None = None,
    *,
    extra: Mapping[str, Any] | None = None,
    train_state: "TrainState | None" = None,
    asynchronous: Literal[False] = False,
) -> None: ...


@overload
def save_checkpoint(
    path: str | PathLike[str],
    model: DistributedModelParallel,
    optimizer: KeyedOptimizer | None = None,
    *,
    extra: Mapping[str, Any] | None = None,
    train_state: "TrainState | None" = None,
    asynchronous: Literal[True],
) -> PendingSave: ...


def save_checkpoint(
    path: str | PathLike[str],
    model: DistributedModelParallel,
    optimizer: KeyedOptimizer | None = None,
    *,
    extra: Mapping[str, Any] | None = None,
    train_state: "TrainState | None" = None,
    asynchronous: bool = False,
) -> PendingSave | None:
    """Write weights, optimizer state and ``extra`` to a new folder; call it on all ranks.

    Each shard is written once, shared out among replica peers, and with a checksum. The checkpoint
    exists once its last file does, and not before.

    Args:
        path: a folder that all ranks see and that holds no checkpoint, or an address that fsspec
            opens, such as ``s3://bucket/run/1000``.
        model: a `ModelParallel2D`, or TorchRec's own `DistributedModelParallel`.
        optimizer: the other parameters' optimizer, whose state is saved; it may contain the
            model's fused optimizer, which is stored once in any case.
        extra: JSON data, equal on all ranks, such as the number of steps done.
        train_state: what this model's run needs to resume, besides weights and optimizer state.
        asynchronous: return as soon as this rank has copied its share of the data, and write it
            while the model trains on. The next save or load waits until the write is complete.

    Returns:
        With ``asynchronous``, a future whose ``result()`` waits for the checkpoint.

    Collectives:
        A sync's, if a backward is pending; then DCP's, which send plans but not weights. With
        ``asynchronous``, DCP's use their own gloo group, created at the first call.

    Example::

        pending = tdsp.save_checkpoint(folder, model, optimizer, asynchronous=True)
        ...  # train on
        pending.result()
    """
    with calling_together(groups_of(model), "save_checkpoint()"):
        group = coordination_group()
        with agreeing(group) as facts:
            wait_for_save(world_group())
            folder = checked_folder(path, optimizer)
            if (folder / ".metadata").exists():
                raise holds_checkpoint(folder)
            check_belongs(train_state, model)
            check_together(model)
            text = encoded(extra or {})
            facts["the checkpoint's path"], facts["extra"] = str(folder), text
            facts["asynchronous"] = str(asynchronous)
            facts["whether there is an optimizer"] = str(optimizer is not None)
            facts["whether there is a train state"] = str(train_state is not None)
        state = live_state(model, optimizer) | {EXTRA: as_tensor(text)}
        if train_state is not None:
            state[TRAIN_STATE] = train_state.state_dict()
        buffers = [f"{MODEL}.{name}" for name, _ in model.named_buffers()]
        if not asynchronous:
            _write(folder, state, PlainDataSavePlanner(buffers), group)
            return None
        background, planner = background_group(), StagingPlanner(buffers)
        return start_save(
            world_group(),
            folder,
            lambda: _write(folder, state, planner, background),
            planner.is_staged,
        )


def _write(
    folder: Place, state: dict[str, Any], planner: PlainDataSavePlanner, group: dist.ProcessGroup
) -> None:
    writer = ChecksumWriter(folder)
    try:
        run_dcp(
            lambda: dcp.save(state, storage_writer=writer, planner=planner, process_group=group),
            f"{folder} couldn't be written and holds no checkpoint",
        )
    finally:
        if writer.lock is not None:
            writer.lock.release()


def check_belongs(train_state: "TrainState | None", model: DistributedModelParallel) -> None:
    """Raise if a train state belongs to another model."""
    if train_state is not None and train_state.model is not model:
        raise CheckpointError(
            "the train state is that of another model; make it by TrainState(model, optimizer)"
        )


def checked_folder(path: str | PathLike[str], optimizer: object) -> Place:
    """Return the folder if it can be opened and the optimizer's state has names."""
    folder = place_of(path)
    if optimizer is not None and not isinstance(optimizer, KeyedOptimizer):
        raise CheckpointError(
            f"the state of a {type(optimizer).__name__} has no names; wrap it in TorchRec's "
            "KeyedOptimizerWrapper"
        )
    return folder


logger = logging.getLogger(__name__)


_FINISHED = ".metadata"
"""The file that a save writes last."""


@overload
def latest_checkpoint(folder: Path) -> Path | None: ...


@overload
def latest_checkpoint(folder: str | PathLike[str]) -> Place | None: ...


def latest_checkpoint(folder: str | PathLike[str]) -> Place | None:
    """Return a folder's newest finished checkpoint, or `None` if there is none.

    Checkpoints are sub-folders whose names end in a number, such as ``1000`` or ``step_1000``; the
    largest number is the newest. Unfinished saves don't count.

    With a process group, call it on all ranks: rank 0's answer is everyone's.

    Args:
        folder: the folder of all checkpoints, or its address; it may not exist yet.

    Raises:
        CheckpointError: rank 0 can't list the folder.

    Collectives:
        An agreement and a broadcast of the name, if there is a process group.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> import torchrec_2dsp as tdsp
        >>> folder = Path(tempfile.mkdtemp())
        >>> for step in (5, 10, 15):
        ...     (folder / str(step)).mkdir()
        >>> for step in (5, 10):
        ...     (folder / str(step) / ".metadata").touch()
        >>> tdsp.latest_checkpoint(folder).name
        '10'
    """
    group = coordination_group() if dist.is_initialized() else None
    names: list[str | None] = [None]
    with agreeing(group) if group else nullcontext():
        if group is None or dist.get_rank() == 0:
            names = [_newest_finished(place_of(folder))]
    if group is not None:
        dist.broadcast_object_list(names, group_src=0, group=group)
    return None if names[0] is None else place_of(folder) / names[0]


def _newest_finished(folder: Place) -> str | None:
    try:
        finished = [path for path in _numbered(folder) if (path / _FINISHED).exists()]
    except OSError as error:
        raise CheckpointError(
            f"the checkpoints in {folder} can't be listed ({error}); check the path, its "
            "permissions, and that it is mounted"
        ) from error
    return finished[-1].name if finished else None


def drop_old_checkpoints(folder: str | PathLike[str], *, keep: int) -> None:
    """Delete all but the newest finished checkpoints in a folder.

    Call it after a save, on all ranks: rank 0 deletes, and warns if it can't. Unfinished saves
    older than the newest kept checkpoint are deleted as well. Nothing else in the folder changes.

    Args:
        folder: the folder of all checkpoints, named as `latest_checkpoint` requires.
        keep: the number of checkpoints to keep.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> import torchrec_2dsp as tdsp
        >>> folder = Path(tempfile.mkdtemp())
        >>> for step in (5, 10, 15):
        ...     (folder / str(step)).mkdir()
        ...     (folder / str(step) / ".metadata").touch()
        >>> tdsp.drop_old_checkpoints(folder, keep=2)
        >>> sorted(path.name for path in folder.iterdir())
        ['10', '15']
    """
    if keep < 1:
        raise ConfigError(f"keep={keep} would leave no checkpoint to go on from; keep 1 or more")
    if dist.is_initialized() and dist.get_rank() != 0:
        return
    try:
        numbered = _numbered(place_of(folder))
        finished = [path for path in numbered if (path / _FINISHED).exists()]
        newest = finished[-keep:]
        for path in numbered[: numbered.index(newest[-1])] if newest else ():
            if path not in newest:
                # Delete the file that marks a checkpoint first, in case deletion is interrupted.
                (path / _FINISHED).unlink(missing_ok=True)
                path.delete() if isinstance(path, Address) else shutil.rmtree(path)
    except Exception as error:  # a file system can raise anything
        # The other ranks go on, so this one must, too.
        logger.warning("old checkpoints in %s can't be deleted, and stay (%s)", folder, error)


def _numbered(folder: Place) -> list[Place]:
    """List the sub-folders whose names end in a number, in ascending order."""
    if not folder.is_dir():
        return []
    numbers = {
        path: int(number[0])
        for path in folder.iterdir()
        if path.is_dir() and (number := re.search(r"\d+$", path.name))
    }
    return sorted(numbers, key=lambda path: (numbers[path], path.name))
