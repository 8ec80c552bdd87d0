"""`load_checkpoint`: a model and its optimizers, read from a folder, in place."""

import json
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
from torchrec_2dsp.parallel.checkpoint.parts import EXTRA, live_state, run_load_hooks
from torchrec_2dsp.parallel.checkpoint.save import checked_folder


def load_checkpoint(
    path: str | PathLike[str],
    model: DistributedModelParallel,
    optimizer: KeyedOptimizer | None = None,
) -> dict[str, Any]:
    """Read a checkpoint into a model, in place; call it on all ranks.

    Mesh, layout, sharding types, hot rows and number of ranks may differ from those of the save;
    tables and fused optimizer may not.

    Args:
        path: the folder.
        model: a `ModelParallel2D`, or TorchRec's own `DistributedModelParallel`.
        optimizer: as in `save_checkpoint`; without it, its saved state is left alone.

    Returns:
        What was saved as ``extra``.

    Collectives:
        Those of a sync, if a backward is pending; then a gather of names and shapes, and DCP's.
    """
    group = coordination_group()
    with agreeing(group) as facts:
        folder = checked_folder(path, optimizer)
        facts["the checkpoint's path"] = str(folder)
        saved = _read_metadata(folder, group)
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
    return json.loads(bytes(state[EXTRA].tolist())) if EXTRA in state else {}


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
