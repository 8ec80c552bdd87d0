"""`load_checkpoint`: a model and its optimizers, read from a folder, in place."""

import json
from collections.abc import Callable
from os import PathLike
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.optim.keyed import KeyedOptimizer

from torchrec_2dsp.comms.agreement import agreeing
from torchrec_2dsp.errors import CheckpointError
from torchrec_2dsp.parallel.checkpoint.dense_state import init_dense_state
from torchrec_2dsp.parallel.checkpoint.failure import run_dcp
from torchrec_2dsp.parallel.checkpoint.fit import Entries, check_fits
from torchrec_2dsp.parallel.checkpoint.group import coordination_group
from torchrec_2dsp.parallel.checkpoint.parts import EXTRA, TRAIN_STATE, live_state, run_load_hooks
from torchrec_2dsp.parallel.checkpoint.save import check_belongs, checked_folder
from torchrec_2dsp.parallel.train_state.state import TrainState


def load_checkpoint(
    path: str | PathLike[str],
    model: DistributedModelParallel,
    optimizer: KeyedOptimizer | None = None,
    *,
    train_state: TrainState | None = None,
) -> dict[str, Any]:
    """Read a checkpoint into a model, in place; call it on all ranks.

    Mesh, layout, sharding types, hot rows and number of ranks may differ from those of the save;
    tables and fused optimizer may not.

    Args:
        path: the folder.
        model: a `ModelParallel2D`, or TorchRec's own `DistributedModelParallel`.
        optimizer: as in `save_checkpoint`; without it, its saved state is left alone.
        train_state: what is to go on beside the model, in place; without it, what was saved of it
            is left alone.

    Returns:
        What was saved as ``extra``.

    Collectives:
        Those of a sync, if a backward is pending; then a gather of names and shapes, and DCP's.
    """
    group = coordination_group()
    with agreeing(group) as facts:
        folder = checked_folder(path, optimizer)
        facts["the checkpoint's path"] = str(folder)
        check_belongs(train_state, model)
        saved = _read_metadata(folder, group)
    go_on = None if train_state is None else _prepared(train_state, folder, saved, group)
    if optimizer is not None:
        init_dense_state(model, optimizer, saved)
    state = live_state(model, optimizer)
    check_fits(group, folder, saved, state)
    if EXTRA in saved:
        state[EXTRA] = torch.empty(cast(Any, saved[EXTRA]).size, dtype=torch.uint8)
    run_dcp(
        lambda: dcp.load(state, checkpoint_id=folder, process_group=group),
        f"{folder} couldn't be read and the model may be loaded in part; load another checkpoint",
    )
    run_load_hooks(model, optimizer, state)
    if go_on is not None:
        go_on()
    return json.loads(bytes(state[EXTRA].tolist())) if EXTRA in state else {}


def _prepared(
    train_state: TrainState, folder: Path, saved: Entries, group: dist.ProcessGroup
) -> Callable[[], None]:
    """Read and check the train state; what lets the run go on once the model is loaded."""
    begin = f"{TRAIN_STATE}."
    names = [name.removeprefix(begin) for name in saved if name.startswith(begin)]
    with agreeing(group):
        if not names:
            raise CheckpointError(
                f"{folder} has no train state, because it was saved without train_state=...; load "
                "it without one, and set the TrainState's step yourself"
            )
    entries: dict[str, Any] = {name: saved[begin + name] for name in names}
    tensors = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in entries.items()
        if train_state.wants(name)
    }
    run_dcp(
        lambda: dcp.load(
            {TRAIN_STATE: cast(Any, tensors)}, checkpoint_id=folder, process_group=group
        ),
        f"the train state in {folder} couldn't be read; load another checkpoint",
    )
    return train_state.prepared(tensors)


def _read_metadata(folder: Path, group: dist.ProcessGroup) -> Entries:
    """What the checkpoint holds, after a look at the sizes of its files."""
    if not (folder / ".metadata").exists():
        raise CheckpointError(f"{folder} has no .metadata; give the folder of a finished save")
    sizes: dict[str, int] = {}
    try:
        metadata = dcp.FileSystemReader(folder).read_metadata()
        for info in metadata.storage_data.values():
            end = info.offset + info.length
            sizes[info.relative_path] = max(end, sizes.get(info.relative_path, 0))
    except Exception as error:  # whatever unpickling damaged bytes can raise
        raise CheckpointError(
            f"{folder}/.metadata is damaged ({type(error).__name__}); load another checkpoint"
        ) from error
    my_share = slice(dist.get_rank(group), None, dist.get_world_size(group))
    for name in sorted(sizes)[my_share]:
        size = (folder / name).stat().st_size if (folder / name).exists() else 0
        if size < sizes[name]:
            raise CheckpointError(
                f"{folder}/{name} has {size} of its {sizes[name]} bytes; load another checkpoint"
            )
    return metadata.state_dict_metadata
