"""A checkpoint's parts, and the model's tensors in each.

There are two kinds of parts. The parts `IN_PLACE` are the model's own tensors, which a load
writes into. The others are small, and are read into new tensors, so that they can be checked.
"""

import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import ShardedTensor
from torchrec.optim.keyed import KeyedOptimizer, OptimizerWrapper

from torchrec_2dsp._compat.ddp import data_parallel_wrapper
from torchrec_2dsp.dense.dense_parts import check_clipping, wrapped_optimizers
from torchrec_2dsp.errors import CheckpointError, ConfigError
from torchrec_2dsp.parallel.checkpoint.stored import StoredCheckpoint

MODEL, FUSED, DENSE, EXTRA = "model", "fused_optimizer", "dense_optimizer", "extra"
TRAIN_STATE = "train_state"
"""The parts of a checkpoint; each entry's name begins with its part."""

IN_PLACE: Mapping[str, str] = MappingProxyType(
    {
        MODEL: "build the model with the tables, rows and dims that were saved",
        FUSED: "shard the model with the fused optimizer that was saved, and freeze and unfreeze "
        "the same tables",
        DENSE: "pass the optimizer that was saved, or none to load all the rest",
    }
)
"""The parts that hold the model's own tensors, with advice for tensors that don't fit."""


def live_state(model: DistributedModelParallel, optimizer: KeyedOptimizer | None) -> dict[str, Any]:
    """Return the parts `IN_PLACE`: writing into their tensors changes the model.

    Collectives:
        A sync's, if a backward is pending.
    """
    weights = {name: value for name, value in model.state_dict().items() if not _is_empty(value)}
    fused = _with_rows(model.fused_optimizer.state_dict()["state"])
    state: dict[str, Any] = {MODEL: weights, FUSED: {"state": fused}}
    if optimizer is not None:
        check_wrappers(optimizer)
        check_clipping(model, optimizer)
        dense, states = dense_params(model, optimizer), optimizer.state_dict()["state"]
        state[DENSE] = {"state": {key: states[key] for key in states if key in dense}}
    return state


def check_wrappers(optimizer: Optimizer) -> None:
    """Refuse a wrapper that keeps state besides the optimizers whose state dict it returns.

    TorchRec's WarmupOptimizer around a CombinedOptimizer does, and would lose its progress.
    """
    parts = wrapped_optimizers(optimizer)
    if isinstance(optimizer, OptimizerWrapper):
        keys = optimizer.params.keys() - {key for part in parts for key in _params_of(part)}
        if keys:
            raise ConfigError(
                f"a {type(optimizer).__name__} around a CombinedOptimizer keeps {min(keys)!r}, "
                "which TorchRec's state dicts leave out, so it would begin anew after a resume; "
                "wrap the optimizers, then combine them"
            )
    for part in parts:
        check_wrappers(part)


def _params_of(optimizer: Any) -> Mapping[str, Any]:
    return optimizer.params if isinstance(optimizer, KeyedOptimizer) else {}


def dense_params(model: DistributedModelParallel, optimizer: KeyedOptimizer) -> dict[str, Any]:
    """Return the optimizer's parameters without the fused optimizer's."""
    fused = {id(param) for param in model.fused_optimizer.params.values()}
    return {key: param for key, param in optimizer.params.items() if id(param) not in fused}


def run_load_hooks(
    model: DistributedModelParallel, optimizer: KeyedOptimizer | None, state: dict[str, Any]
) -> None:
    """Load tensors that hold their new values already, so that caches and hot rows follow."""
    weights = {name: state[MODEL].get(name, torch.empty(0)) for name in model.state_dict()}
    model.load_state_dict(cast(Any, weights))
    for part, loaded in ((FUSED, model.fused_optimizer), (DENSE, optimizer)):
        if loaded is not None:
            whole = loaded.state_dict()
            read = state[part]["state"]
            whole["state"] = {
                param: {**states, **read.get(param, {})} for param, states in whole["state"].items()
            }
            loaded.load_state_dict(whole)


def _with_rows(states: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Drop the states of parameters without rows on this rank.

    DCP identifies a stored piece by its first row, and one column shard's row-wise moments end
    where the next one's begin: an empty piece would replace one with rows.
    """
    with_rows = {
        param: {name: value for name, value in by_name.items() if not _has_no_row(value)}
        for param, by_name in states.items()
    }
    return {param: by_name for param, by_name in with_rows.items() if by_name}


def _has_no_row(value: Any) -> bool:
    shards = _shards_of_table(value)
    return shards is not None and not any(shard.numel() for shard in shards)


def _is_empty(value: Any) -> bool:
    """Return whether this is a table without a shard on this rank.

    DCP takes a checkpoint for an old one when it meets an empty ShardedTensor, and TorchRec gives
    some grid tables' empty DTensors a wrong shape. Both are left out.
    """
    if isinstance(value, ShardedTensor):
        return not value.local_shards()
    return _shards_of_table(value) == []


def _shards_of_table(value: Any) -> list[torch.Tensor] | None:
    """Return this rank's shards if the value is a table's DTensor, else `None`.

    A dense parameter's DTensor holds a plain tensor, which DCP handles by itself.
    """
    if not isinstance(value, DTensor):
        return None
    with torch.no_grad():
        local: Any = value.to_local()
    return list(local.local_shards()) if hasattr(local, "local_shards") else None


def encoded(extra: Mapping[str, Any]) -> str:
    """Encode ``extra`` as JSON with sorted keys, or raise unless decoding restores it."""
    if json.loads(json.dumps(extra, default=repr)) != extra:
        raise CheckpointError(
            f"extra={extra!r} isn't the same after a round trip through JSON; use dicts with "
            "text keys, lists, texts and numbers"
        )
    return json.dumps(extra, sort_keys=True)


def as_tensor(text: str) -> torch.Tensor:
    """Return the text's bytes as a tensor, because DCP pickles everything else."""
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)


def stored_extra(stored: StoredCheckpoint) -> dict[str, Any]:
    """Read the saved ``extra``; empty if another program wrote the checkpoint."""
    if EXTRA not in stored.entries:
        return {}
    try:
        extra = json.loads(stored.tensor(EXTRA).numpy().tobytes())
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{EXTRA!r} isn't JSON in the checkpoint {stored.folder} ({error}); load another one"
        ) from error
    if not isinstance(extra, dict):
        raise CheckpointError(
            f"{EXTRA!r} is a {type(extra).__name__} instead of a dict in the checkpoint "
            f"{stored.folder}; load another one"
        )
    return extra


def check_together(model: nn.Module) -> None:
    """Raise if ranks may have different dense parts now.

    A save would keep only one of them, and a load would leave the wrapper with changes to weights
    that no longer exist. Wrappers that let ranks train apart, such as `LocalDense`, know.
    """
    check = getattr(data_parallel_wrapper(model), "check_together", None)
    if check is not None:
        check()
