"""`load_weights`: the weights of a checkpoint, read into a model that isn't sharded."""

import warnings
from os import PathLike
from pathlib import Path

import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from torchrec_2dsp.parallel.checkpoint.failure import run_dcp
from torchrec_2dsp.parallel.checkpoint.fit import check_part
from torchrec_2dsp.parallel.checkpoint.parts import MODEL
from torchrec_2dsp.parallel.checkpoint.reader import KnownMetadataReader, PlainDataPlanner
from torchrec_2dsp.parallel.checkpoint.stored import StoredCheckpoint


def load_weights(path: str | PathLike[str], model: nn.Module) -> StoredCheckpoint:
    """Read the weights of a checkpoint into an unsharded model, in place and in this process alone.

    All bytes are compared with their checksums first, and the names and shapes of the weights with
    those of the model. Nothing in a checkpoint can run code.

    Args:
        path: the folder of a checkpoint, written by `save_checkpoint` on any number of ranks.
        model: the model as it was before it was sharded.

    Returns:
        The checkpoint, for whoever needs more of it.

    Raises:
        CheckpointError: the save didn't finish, a file is damaged, or it is another model's.
    """
    folder = Path(path)
    stored = StoredCheckpoint.open(folder)
    stored.check_sizes(0, 1)
    stored.verify([MODEL], 0, 1)
    state = {MODEL: model.state_dict()}
    planner = DefaultSavePlanner()
    planner.set_up_planner(state)
    _, expected = planner.create_global_plan([planner.create_local_plan()])
    check_part(MODEL, folder, stored.entries, expected)
    reader = KnownMetadataReader(folder, stored.metadata)
    with warnings.catch_warnings():
        # It is meant.
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        run_dcp(
            lambda: dcp.load(
                state, storage_reader=reader, planner=PlainDataPlanner(), no_dist=True
            ),
            f"{folder} couldn't be read and the model may be loaded in part; load another "
            "checkpoint",
        )
    return stored
