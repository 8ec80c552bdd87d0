"""`save_checkpoint`: a model and its optimizers, written to a new folder."""

from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.optim.keyed import KeyedOptimizer

from torchrec_2dsp.comms.alarm import agreeing
from torchrec_2dsp.comms.groups import world_group
from torchrec_2dsp.errors import CheckpointError
from torchrec_2dsp.parallel.called_by_all import called_by_all
from torchrec_2dsp.parallel.checkpoint.extra import as_tensor, encoded
from torchrec_2dsp.parallel.checkpoint.failure import run_dcp
from torchrec_2dsp.parallel.checkpoint.group import background_group, coordination_group
from torchrec_2dsp.parallel.checkpoint.parts import EXTRA, TRAIN_STATE, live_state
from torchrec_2dsp.parallel.checkpoint.pending import PendingSave, start_save, wait_for_save
from torchrec_2dsp.parallel.checkpoint.planner import PlainDataSavePlanner, StagingPlanner
from torchrec_2dsp.parallel.checkpoint.together import check_together
from torchrec_2dsp.parallel.checkpoint.writer import ChecksumWriter, holds_checkpoint

if TYPE_CHECKING:
    from torchrec_2dsp.parallel.train_state.state import TrainState


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


@called_by_all("save_checkpoint()")
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

    Each shard is written once: replica peers share the work. A checksum of everything is written
    with it. The checkpoint exists when its last file does, and not before.

    Args:
        path: a folder that all ranks see, without a checkpoint in it.
        model: a `ModelParallel2D`, or TorchRec's own `DistributedModelParallel`.
        optimizer: the optimizer of the other parameters, to save its state; it may contain the
            model's fused optimizer, which is stored once in any case.
        extra: JSON, equal on all ranks, such as the number of steps done.
        train_state: what a run of this model needs to go on beside weights and optimizer state.
        asynchronous: return as soon as this rank has copied what it is to write, and write while
            the model trains on. The next save or load waits until that is done.

    Returns:
        With ``asynchronous``, a future whose ``result()`` waits for the checkpoint.

    Collectives:
        Those of a sync, if a backward is pending; then DCP's, of plans but not of weights. With
        ``asynchronous``, the latter are on a gloo group of their own, created at the first call.

    Example::

        pending = tdsp.save_checkpoint(folder, model, optimizer, asynchronous=True)
        ...  # train on
        pending.result()
    """
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
    state = live_state(model, optimizer) | {EXTRA: as_tensor(text)}
    if train_state is not None:
        state[TRAIN_STATE] = train_state.state_dict()
    if not asynchronous:
        _write(folder, state, PlainDataSavePlanner(), group)
        return None
    background, planner = background_group(), StagingPlanner()
    return start_save(
        world_group(), folder, lambda: _write(folder, state, planner, background), planner.is_staged
    )


def _write(
    folder: Path, state: dict[str, Any], planner: PlainDataSavePlanner, group: dist.ProcessGroup
) -> None:
    writer = ChecksumWriter(folder)
    try:
        run_dcp(
            lambda: dcp.save(state, storage_writer=writer, planner=planner, process_group=group),
            f"{folder} couldn't be written and holds no checkpoint",
        )
    finally:
        writer.lock.release()


def check_belongs(train_state: "TrainState | None", model: DistributedModelParallel) -> None:
    """Raise if a train state belongs to another model."""
    if train_state is not None and train_state.model is not model:
        raise CheckpointError(
            "the train state is that of another model; make it by TrainState(model, optimizer)"
        )


def checked_folder(path: str | PathLike[str], optimizer: object) -> Path:
    """The folder, if it and the optimizer are of a kind that can be saved and loaded."""
    if "://" in str(path):
        raise CheckpointError(f"{path} is an address; give a folder that all ranks have mounted")
    if optimizer is not None and not isinstance(optimizer, KeyedOptimizer):
        raise CheckpointError(
            f"the state of a {type(optimizer).__name__} has no names; wrap it in TorchRec's "
            "KeyedOptimizerWrapper"
        )
    return Path(path)
