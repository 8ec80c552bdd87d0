"""Whether a checkpoint is one that the model could have written."""

from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import STORAGE_TYPES, Metadata, TensorStorageMetadata

from torchrec_2dsp.comms.agreement import agreeing
from torchrec_2dsp.errors import CheckpointError
from torchrec_2dsp.parallel.checkpoint.parts import FUSED, IN_PLACE, MODEL

Entries = dict[str, STORAGE_TYPES]
"""What a checkpoint holds, by name: shapes, types, shards."""


def check_fits(group: dist.ProcessGroup, folder: Path, saved: Entries, state: Any) -> None:
    """Raise on all ranks if the checkpoint isn't one that the model could have written.

    Collectives:
        A gather of names and shapes, and an agreement.
    """
    planner = DefaultSavePlanner()
    planner.set_up_planner(state)
    plans: Any = [None] * dist.get_world_size(group) if dist.get_rank(group) == 0 else None
    dist.gather_object(planner.create_local_plan(), plans, group=group, group_dst=0)
    with agreeing(group):
        if plans is not None:
            _, wanted = planner.create_global_plan(plans)
            for part in state:
                check_part(part, folder, saved, wanted)


def check_part(part: str, folder: Path, saved: Entries, wanted: Metadata) -> None:
    """Compare all entries of one part; ``wanted`` is what a save of the model would write."""
    ours = wanted.state_dict_metadata
    for name in sorted(name for name in saved.keys() | ours if name.startswith(f"{part}.")):
        if part == FUSED and name in saved and name in ours:
            _check_column_shards(folder, name, saved, wanted)
        saved_kind, model_kind = _kind(saved.get(name)), _kind(ours.get(name))
        if saved_kind != model_kind:
            raise CheckpointError(
                f"{name!r} is {saved_kind} in the checkpoint {folder}, but {model_kind} in the "
                f"model; {IN_PLACE[part]}"
            )


def _check_column_shards(folder: Path, name: str, saved: Entries, wanted: Metadata) -> None:
    """Moments per row are stored for one column shard after the other."""
    ours, param = wanted.state_dict_metadata, wanted.planner_data[name][2]
    if not all(len(getattr(entries[name], "size", ())) == 1 for entries in (saved, ours)):
        return
    before, now = (_column_widths(entries[f"{MODEL}.{param}"]) for entries in (saved, ours))
    if before != now:
        raise CheckpointError(
            f"the row-wise moments of {param!r} are stored for columns {before} in the checkpoint "
            f"{folder}, but the plan splits the columns {now}: TorchRec keeps one moment per row "
            f"and column shard; plan the table with column shards {before}"
        )


def _column_widths(weight: Any) -> str:
    columns = sorted({(chunk.offsets[1], chunk.sizes[1]) for chunk in weight.chunks})
    return "+".join(str(width) for _, width in columns)


def _kind(entry: STORAGE_TYPES | None) -> str:
    if not isinstance(entry, TensorStorageMetadata):
        return "missing" if entry is None else "an object"
    return f"{tuple(entry.size)} {entry.properties.dtype}"
