"""Checkpoints in the format of torch.distributed.checkpoint (DCP), for any mesh and for stock.

A checkpoint holds whole tables under stock TorchRec's names, whatever the mesh, the hot rows and
the sharding types. One difference is refused by name: TorchRec keeps row-wise moments once per
column shard of a table.
"""

import json
import weakref
from collections.abc import Callable, Mapping
from os import PathLike
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import STORAGE_TYPES, Metadata, TensorStorageMetadata
from torch.distributed.tensor import DTensor
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import ShardedTensor
from torchrec.optim.keyed import KeyedOptimizer

from torchrec_2dsp.comms.agreement import agreeing
from torchrec_2dsp.errors import CheckpointError
from torchrec_2dsp.mesh.groups import world_group
from torchrec_2dsp.parallel.called_by_all import called_by_all

MODEL, FUSED, DENSE, EXTRA = "model", "fused_optimizer", "dense_optimizer", "extra"
"""The parts of a checkpoint, which begin the names in it."""

Entries = dict[str, STORAGE_TYPES]
"""What a checkpoint holds, by name: shapes, types, shards."""


@called_by_all("save_checkpoint()")
def save_checkpoint(
    path: str | PathLike[str],
    model: DistributedModelParallel,
    optimizer: KeyedOptimizer | None = None,
    *,
    extra: Mapping[str, Any] | None = None,
) -> None:
    """Write weights, optimizer state and ``extra`` to a new folder; call it on all ranks.

    Each shard is written once: replica peers share the work.

    Args:
        path: a folder that all ranks see, without a checkpoint in it.
        model: a `ModelParallel2D`, or TorchRec's own `DistributedModelParallel`.
        optimizer: the one of the other parameters, if its state is wanted; it may contain the
            model's fused optimizer, which is stored once in any case.
        extra: JSON, equal on all ranks, such as the number of steps done.

    Collectives:
        Those of a sync, if a backward is pending; then DCP's, of plans but not of weights.
    """
    group = _coordination_group()
    with agreeing(group) as facts:
        folder = _checked(path, optimizer)
        if (folder / ".metadata").exists():
            raise CheckpointError(f"{folder} holds a checkpoint already; save to a new folder")
        encoded = _encoded(extra or {})
        facts["the checkpoint's path"], facts["extra"] = str(folder), encoded
    state = _state(model, optimizer)
    # As a tensor, because DCP pickles everything else.
    state[EXTRA] = torch.frombuffer(bytearray(encoded.encode()), dtype=torch.uint8)
    writer = dcp.FileSystemWriter(folder, overwrite=False)
    _run(
        lambda: dcp.save(state, storage_writer=writer, process_group=group),
        f"{folder} couldn't be written and holds no checkpoint",
    )


@called_by_all("load_checkpoint()")
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
    group = _coordination_group()
    with agreeing(group) as facts:
        folder = _checked(path, optimizer)
        facts["the checkpoint's path"] = str(folder)
        saved = _read_metadata(folder, group)
    if optimizer is not None:
        _init_dense_state(model, optimizer, saved)
    state = _state(model, optimizer)
    _check_fits(group, folder, saved, state)
    if EXTRA in saved:
        state[EXTRA] = torch.empty(cast(Any, saved[EXTRA]).size, dtype=torch.uint8)
    _run(
        lambda: dcp.load(state, checkpoint_id=folder, process_group=group),
        f"{folder} couldn't be read and the model may be loaded in part; load another checkpoint",
    )
    _run_load_hooks(model, optimizer, state)
    return json.loads(bytes(state[EXTRA].tolist())) if EXTRA in state else {}


def _state(model: DistributedModelParallel, optimizer: KeyedOptimizer | None) -> dict[str, Any]:
    """Live weights and optimizer state: writing into these tensors changes the model."""
    weights = {name: value for name, value in model.state_dict().items() if not _is_empty(value)}
    fused = model.fused_optimizer.state_dict()["state"]
    state: dict[str, Any] = {MODEL: weights, FUSED: {"state": fused}}
    if optimizer is not None:
        dense, states = _dense_params(model, optimizer), optimizer.state_dict()["state"]
        state[DENSE] = {"state": {key: states[key] for key in states if key in dense}}
    return state


def _dense_params(model: DistributedModelParallel, optimizer: KeyedOptimizer) -> dict[str, Any]:
    """What ``optimizer`` trains beside the fused one, which it may hold under any name."""
    fused = {id(param) for param in model.fused_optimizer.params.values()}
    return {key: param for key, param in optimizer.params.items() if id(param) not in fused}


def _is_empty(value: Any) -> bool:
    """Whether this is a table of which this rank has no shard.

    DCP takes a checkpoint for an old one when it meets an empty ShardedTensor, and TorchRec gives
    the empty DTensors of some grid tables a wrong shape. They are left out.
    """
    if isinstance(value, ShardedTensor):
        return not value.local_shards()
    with torch.no_grad():
        return isinstance(value, DTensor) and not cast(Any, value.to_local()).local_shards()


def _run_load_hooks(
    model: DistributedModelParallel, optimizer: KeyedOptimizer | None, state: dict[str, Any]
) -> None:
    """Load tensors that hold their new values already, so that caches and hot rows follow."""
    weights = {name: state[MODEL].get(name, torch.empty(0)) for name in model.state_dict()}
    model.load_state_dict(cast(Any, weights))
    for part, loaded in ((FUSED, model.fused_optimizer), (DENSE, optimizer)):
        if loaded is not None:
            whole = loaded.state_dict()
            whole["state"] = {**whole["state"], **state[part]["state"]}
            loaded.load_state_dict(whole)


def _init_dense_state(
    model: DistributedModelParallel, optimizer: KeyedOptimizer, saved: Entries
) -> None:
    """Let optimizers that make their state at the first step make what is saved of it."""
    dense, existing = _dense_params(model, optimizer), optimizer.state
    saved_keys = {name.rpartition(".")[0].removeprefix(f"{DENSE}.state.") for name in saved}
    missing = {key for key in dense if key in saved_keys and dense[key] not in existing}
    if not missing:
        return
    before = [(param, param.detach().clone(), param.grad) for param in dense.values()]
    for key, param in dense.items():
        param.grad = torch.zeros_like(param) if key in missing else None
    optimizer.step()
    with torch.no_grad():
        for param, value, grad in before:
            param.copy_(value)
            param.grad = grad


def _check_fits(group: dist.ProcessGroup, folder: Path, saved: Entries, state: Any) -> None:
    """Raise on all ranks if the checkpoint isn't one that the model could have written."""
    planner = DefaultSavePlanner()
    planner.set_up_planner(state)
    plans: Any = [None] * dist.get_world_size(group) if dist.get_rank(group) == 0 else None
    dist.gather_object(planner.create_local_plan(), plans, group=group, group_dst=0)
    with agreeing(group):
        if plans is not None:
            _, wanted = planner.create_global_plan(plans)
            for part in state:
                _check_part(part, folder, saved, wanted)


def _check_part(part: str, folder: Path, saved: Entries, wanted: Metadata) -> None:
    ours = wanted.state_dict_metadata
    for name in sorted(name for name in saved.keys() | ours if name.startswith(f"{part}.")):
        if part == FUSED and name in saved and name in ours:
            _check_column_shards(folder, name, saved, wanted)
        theirs, mine = _kind(saved.get(name)), _kind(ours.get(name))
        if theirs != mine:
            raise CheckpointError(
                f"{name!r} is {theirs} in the checkpoint {folder}, but {mine} in the model; "
                f"{_REMEDIES[part]}"
            )


_REMEDIES = {
    MODEL: "build the model with the tables, rows and dims that were saved",
    FUSED: "shard the model with the fused optimizer that was saved",
    DENSE: "pass the optimizer that was saved, or none to load all the rest",
}


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
    for name in sorted(sizes)[dist.get_rank(group) :: dist.get_world_size(group)]:
        found = (folder / name).stat().st_size if (folder / name).exists() else 0
        if found < sizes[name]:
            raise CheckpointError(
                f"{folder}/{name} has {found} of its {sizes[name]} bytes; load another checkpoint"
            )
    return metadata.state_dict_metadata


def _run(action: Callable[[], object], failure: str) -> None:
    """Run DCP, which fails on all ranks if it fails on one, and raise our error instead."""
    try:
        action()
    except CheckpointException as error:
        rank, (cause, _) = min(error.failures.items(), key=lambda failed: failed[0])
        raise CheckpointError(f"{failure} (rank {rank}: {cause!r})") from error


_GLOO_GROUPS: "weakref.WeakKeyDictionary[dist.ProcessGroup, Any]" = weakref.WeakKeyDictionary()


def _coordination_group() -> dist.ProcessGroup:
    """All ranks over gloo, so that plans and names don't pass through the accelerators."""
    world = world_group()
    if "gloo" in dist.get_backend_config(world):
        return world
    if world not in _GLOO_GROUPS:
        _GLOO_GROUPS[world] = dist.new_group(backend="gloo")
    return _GLOO_GROUPS[world]


def _checked(path: str | PathLike[str], optimizer: object) -> Path:
    if "://" in str(path):
        raise CheckpointError(f"{path} is an address; give a folder that all ranks have mounted")
    if optimizer is not None and not isinstance(optimizer, KeyedOptimizer):
        raise CheckpointError(
            f"the state of a {type(optimizer).__name__} has no names; wrap it in TorchRec's "
            "KeyedOptimizerWrapper"
        )
    return Path(path)


def _encoded(extra: Mapping[str, Any]) -> str:
    text = json.dumps(extra, default=repr)
    if json.loads(text) != extra:
        raise CheckpointError(
            f"extra={extra!r} isn't the same after a round trip through JSON; use dicts with "
            "text keys, lists, texts and numbers"
        )
    return text
