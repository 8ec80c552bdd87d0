"""`check_fits`: whether a checkpoint is one that the model could have written."""

from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import STORAGE_TYPES, Metadata, TensorStorageMetadata

from torchrec_2dsp.comms.alarm import agreeing
from torchrec_2dsp.errors import CheckpointError
from torchrec_2dsp.parallel.checkpoint.parts import FUSED, IN_PLACE, MODEL

Entries = dict[str, STORAGE_TYPES]
"""The shape, type and shards of everything in a checkpoint, by name."""


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
            _, expected = planner.create_global_plan(plans)
            for part in state:
                check_part(part, folder, saved, expected)


def check_part(part: str, folder: Path, saved: Entries, expected: Metadata) -> None:
    """Compare all entries of one part; ``expected`` is what a save of the model would write."""
    live = expected.state_dict_metadata
    for name in sorted(name for name in saved.keys() | live if name.startswith(f"{part}.")):
        if part == FUSED and name in saved and name in live:
            _check_column_shards(folder, name, saved, expected)
        saved_kind, model_kind = _kind(saved.get(name)), _kind(live.get(name))
        if saved_kind != model_kind:
            raise CheckpointError(
                f"{name!r} is {saved_kind} in the checkpoint {folder}, but {model_kind} in the "
                f"model; {IN_PLACE[part]}"
            )


def _check_column_shards(folder: Path, name: str, saved: Entries, expected: Metadata) -> None:
    """Raise if row-wise moments are stored for other column shards than the plan has."""
    live, param = expected.state_dict_metadata, expected.planner_data[name][2]
    if not all(len(getattr(entries[name], "size", ())) == 1 for entries in (saved, live)):
        return
    stored, planned = (_column_widths(entries[f"{MODEL}.{param}"]) for entries in (saved, live))
    if stored != planned:
        raise CheckpointError(
            f"the row-wise moments of {param!r} are stored for columns {stored} in the checkpoint "
            f"{folder}, but the plan splits the columns {planned}: TorchRec keeps one moment per "
            f"row and column shard; plan the table with column shards {stored}"
        )


def _column_widths(weight: Any) -> str:
    columns = sorted({(chunk.offsets[1], chunk.sizes[1]) for chunk in weight.chunks})
    return "+".join(str(width) for _, width in columns)


def _kind(entry: STORAGE_TYPES | None) -> str:
    if not isinstance(entry, TensorStorageMetadata):
        return "missing" if entry is None else "an object"
    return f"{tuple(entry.size)} {entry.properties.dtype}"
