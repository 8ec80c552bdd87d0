"""`load_checkpoint`: a model and its optimizers, read from a folder, in place."""

import logging
from os import PathLike
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.optim.keyed import KeyedOptimizer

from torchrec_2dsp.comms.alarm import agreeing
from torchrec_2dsp.comms.groups import world_group
from torchrec_2dsp.errors import CheckpointError
from torchrec_2dsp.parallel.called_by_all import called_by_all
from torchrec_2dsp.parallel.checkpoint.dense_state import dense_state_made
from torchrec_2dsp.parallel.checkpoint.extra import stored_extra
from torchrec_2dsp.parallel.checkpoint.failure import run_dcp
from torchrec_2dsp.parallel.checkpoint.fit import check_fits
from torchrec_2dsp.parallel.checkpoint.group import coordination_group
from torchrec_2dsp.parallel.checkpoint.parts import (
    DENSE,
    EXTRA,
    FUSED,
    MODEL,
    TRAIN_STATE,
    live_state,
    run_load_hooks,
)
from torchrec_2dsp.parallel.checkpoint.pending import wait_for_save
from torchrec_2dsp.parallel.checkpoint.reader import KnownMetadataReader, PlainDataPlanner
from torchrec_2dsp.parallel.checkpoint.save import check_belongs, checked_folder
from torchrec_2dsp.parallel.checkpoint.stored import StoredCheckpoint
from torchrec_2dsp.parallel.checkpoint.together import check_together

if TYPE_CHECKING:
    from torchrec_2dsp.parallel.train_state.state import TrainState

logger = logging.getLogger(__name__)


@called_by_all("load_checkpoint()")
def load_checkpoint(
    path: str | PathLike[str],
    model: DistributedModelParallel,
    optimizer: KeyedOptimizer | None = None,
    *,
    train_state: "TrainState | None" = None,
) -> dict[str, Any]:
    """Read a checkpoint into a model, in place; call it on all ranks.

    Mesh, layout, sharding types, hot rows and number of ranks may differ from those of the save;
    tables and fused optimizer may not. Everything is checked before the first tensor is written: if
    it raises, model and optimizer are as they were. Nothing in a checkpoint can run code.

    Args:
        path: the folder.
        model: a `ModelParallel2D`, or TorchRec's own `DistributedModelParallel`.
        optimizer: as in `save_checkpoint`; without it, its saved state is left alone.
        train_state: the train state to load, in place; without it, the saved one is left alone.

    Returns:
        What was saved as ``extra``.

    Collectives:
        Agreements on what each rank has checked; those of a sync, if a backward is pending; then
        a gather of names and shapes, and DCP's.
    """
    group = coordination_group()
    with agreeing(group) as facts:
        wait_for_save(world_group())
        folder = checked_folder(path, optimizer)
        facts["the checkpoint's path"] = str(folder)
        check_belongs(train_state, model)
        if train_state is None:
            check_together(model)
        stored = StoredCheckpoint.open(folder)
        facts[f"{folder}/.metadata"] = stored.fingerprint
        rank, num_ranks = dist.get_rank(group), dist.get_world_size(group)
        stored.check_sizes(rank, num_ranks)
    with agreeing(group):
        in_place = (MODEL, FUSED) if optimizer is None else (MODEL, FUSED, DENSE)
        stored.verify([*in_place, EXTRA, TRAIN_STATE], rank, num_ranks)
    with agreeing(group):
        extra = stored_extra(stored)
        saved_state = None if train_state is None else _saved_state(train_state, stored)
    restore_train_state = None
    if train_state is not None and saved_state is not None:
        restore_train_state = train_state.prepared(saved_state)
    if stored.checksums is None and rank == 0:
        logger.warning("%s has no checksums: flipped bits in its tables go unnoticed", folder)
    with dense_state_made(model, optimizer, stored.entries):
        state = live_state(model, optimizer)
        check_fits(group, folder, stored.entries, state)
    reader = KnownMetadataReader(folder, stored.metadata)
    run_dcp(
        lambda: dcp.load(
            state, storage_reader=reader, planner=PlainDataPlanner(), process_group=group
        ),
        f"{folder} couldn't be read and the model may be loaded in part; load another checkpoint",
    )
    run_load_hooks(model, optimizer, state)
    if restore_train_state is not None:
        restore_train_state()
    return extra


def _saved_state(train_state: "TrainState", stored: StoredCheckpoint) -> dict[str, torch.Tensor]:
    """The entries of a checkpoint's train state that this rank needs."""
    if not stored.names(TRAIN_STATE):
        raise CheckpointError(
            f"{stored.folder} has no train state, because it was saved without train_state=...; "
            "load it without one, and set the TrainState's step yourself"
        )
    return stored.tensors(TRAIN_STATE, only=train_state.wants)
