"""A model's state besides weights: policy steps, hot sets, id maps' histories, DDP's buckets."""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed.types import ShardedModule
from torchrec.distributed.utils import append_prefix

from torchrec_2dsp._compat.ddp import gradient_order, start_in_order
from torchrec_2dsp._compat.fbgemm import (
    iteration_of,
    learning_rate_of,
    set_iteration,
    set_learning_rate,
)
from torchrec_2dsp._compat.id_map_base import History
from torchrec_2dsp.access.table_access import HotSet
from torchrec_2dsp.comms.groups import world_group
from torchrec_2dsp.errors import CheckpointError, ConfigError, PlanError
from torchrec_2dsp.plan.plan2d import Plan2D
from torchrec_2dsp.plan.serialize import to_json
from torchrec_2dsp.shard.managed_collisions import managed_collisions
from torchrec_2dsp.shard.parted import frozen_names, sharded_tables
from torchrec_2dsp.shard.tables import SyncedOptimizer


def complete_model(model: nn.Module) -> None:
    """Apply all pending updates.

    Collectives:
        A sync's, if a backward is pending.
    """
    for tables in sharded_tables(model):
        tables.complete_state()


def check_names(model: nn.Module) -> None:
    """Raise `ConfigError` unless tables, by whose names state is saved, have different names."""
    names = [name for tables in sharded_tables(model) for name in tables.table_names]
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(
            f"a TrainState saves state by table name, and several tables are called {repeated[0]!r}"
            "; rename one"
        )


def whole_state(model: nn.Module) -> dict[str, Any]:
    """Return the state that is equal on all ranks, by table name.

    Collectives:
        With id maps, their `histories`'.
    """
    all_tables = sharded_tables(model)
    return {
        "policy_steps": {
            name: tables.sync_point.policy_step
            for tables in all_tables
            for name in tables.table_names
        },
        "hot_sets": {
            name: {
                "newest": hot_set.tensor(),
                "older": [older[name].tensor() for older in tables.hot_sets.older],
            }
            for tables in all_tables
            for name, hot_set in tables.hot_sets.by_table.items()
        },
        "id_maps": {
            table: dict(vars(history))
            for module in managed_collisions(model)
            for table, history in module.histories().items()
        },
        "gradient_orders": {name: gradient_order(ddp) for name, ddp in _ddps(model)},
        "training": _training(model),
    }


def _training(model: nn.Module) -> dict[str, Any]:
    """Return the frozen tables' names and each `unfreeze`'s, whose tables count steps apart."""
    return {"frozen": frozen_names(model), "unfrozen": getattr(model, "unfrozen", [])}


def rank_state(model: nn.Module) -> dict[str, Any]:
    """Return this rank's state, which only fits the same plan on the same rank."""
    return {
        "plan": plan_digest(model),
        "progress": [
            {
                "actions": tables.sync_point.state_dict(),
                "iterations": [iteration_of(tbe) for tbe in tables.tbes()],
                "learning_rates": [learning_rate_of(tbe) for tbe in tables.tbes()],
            }
            for tables in sharded_tables(model)
        ],
        "num_bad_ids": {
            tables.table_names[0]: tables.num_bad_ids for tables in sharded_tables(model)
        },
    }


def iterations(model: nn.Module) -> dict[str, int]:
    """Return each table's number of forwards, as counted by this rank's kernels."""
    return {
        name: max((iteration_of(tbe) for tbe in tables.tbes()), default=0)
        for tables in sharded_tables(model)
        for name in tables.table_names
    }


def plan_digest(model: Any) -> str:
    """Digest the plan without its train pipeline and hot rows' ids; empty without a `Plan2D`."""
    plan = getattr(model, "plan", None)
    if not isinstance(plan, Plan2D):
        return ""
    content = json.loads(to_json(plan))
    del content["pipeline"], content["full_duplex"]
    for tables in content["modules"].values():
        for table in tables.values():
            table["hot_rows"] = len(table["hot_rows"] or ())
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _training_text(trained: Mapping[str, Any]) -> str:
    calls = [f"unfreeze({', '.join(map(repr, names))})" for names in trained["unfrozen"]]
    frozen = ", ".join(map(repr, trained["frozen"])) or "no tables"
    return f"{frozen} frozen after {', '.join(calls) or 'no unfreeze()'}"


def check_whole_state(model: nn.Module, saved: dict[str, Any]) -> None:
    """Raise unless the same tables are trained and the hot rows in use fit."""
    trained, own = saved.get("training"), _training(model)
    if trained is not None and trained != own:
        saved_text, own_text = map(_training_text, (trained, own))
        raise CheckpointError(
            f"the train state was saved with {saved_text}, but the model has {own_text}; freeze "
            "the same tables before you shard, then make the same calls before you load"
        )
    for tables in sharded_tables(model):
        for name in tables.hot_sets.by_table.keys() & saved["hot_sets"].keys():
            stored = saved["hot_sets"][name]
            for rows in (stored["newest"], *stored["older"]):
                try:
                    tables.hot_sets.check({name: HotSet.of(rows)})
                except PlanError as error:
                    raise CheckpointError(
                        f"the hot rows that were in use at the save don't fit: {error}"
                    ) from error


def restore_whole_state(model: nn.Module, saved: dict[str, Any], *, step: int) -> None:
    """Write `whole_state` back into a model of any plan; tables without saved state keep theirs.

    Policies count from ``step`` if the saved run had none.
    """
    for tables in sharded_tables(model):
        steps = [saved["policy_steps"].get(name, 0) for name in tables.table_names]
        tables.sync_point.count_from(max(steps) or step)
        own = tables.hot_sets.by_table
        saved_sets = {name: sets for name, sets in saved["hot_sets"].items() if name in own}
        newest = {name: HotSet.of(hot_sets["newest"]) for name, hot_sets in saved_sets.items()}
        tables.hot_sets.renew(newest)
        num_older = max((len(hot_sets["older"]) for hot_sets in saved_sets.values()), default=0)
        tables.hot_sets.put_before_newest(
            [
                {name: HotSet.of(hot_sets["older"][batch]) for name, hot_sets in saved_sets.items()}
                for batch in range(num_older)
            ]
        )
    histories = {name: History(**saved_map) for name, saved_map in saved.get("id_maps", {}).items()}
    for module in managed_collisions(model):
        module.set_histories(histories)


def restore_rank_state(model: nn.Module, saved: dict[str, Any]) -> None:
    """Write this rank's state back; the plan must be the saved one."""
    for tables, progress in zip(sharded_tables(model), saved["progress"], strict=True):
        tables.sync_point.load_state_dict(progress["actions"])
        for tbe, iteration, learning_rate in zip(
            tables.tbes(), progress["iterations"], progress["learning_rates"], strict=True
        ):
            set_iteration(tbe, iteration)
            set_learning_rate(tbe, learning_rate)


def restore_optimizer_arguments(model: nn.Module) -> None:
    """Pass the restored hyper-parameters of the optimizers' groups to the kernels."""
    for tables in sharded_tables(model):
        optimizer = tables.module.fused_optimizer
        if isinstance(optimizer, SyncedOptimizer):
            optimizer.restore_hyper_parameters()


def restore_iterations(model: nn.Module, saved: dict[str, int]) -> None:
    """Set all kernels' forward counts, for a plan other than the saved one."""
    for tables in sharded_tables(model):
        iteration = max(saved.get(name, 0) for name in tables.table_names)
        for tbe in tables.tbes():
            set_iteration(tbe, iteration)


def restore_bad_ids(model: nn.Module, saved: Sequence[dict[str, int]]) -> None:
    """Continue counting bad ids from the sum of the counts that this rank takes over."""
    for tables in sharded_tables(model):
        counts = [counted.get(name, 0) for counted in saved for name in tables.table_names]
        tables.num_bad_ids = sum(counts)


def restore_gradient_orders(model: nn.Module, saved: dict[str, list[str] | None]) -> None:
    """Make DDP add gradients in the saved order; call it on all ranks.

    Collectives:
        `start_in_order`'s, for each DDP module.
    """
    for name, ddp in _ddps(model):
        if name in saved:
            start_in_order(ddp, saved[name])


def settle(model: nn.Module) -> None:
    """Bring ranks into the state from which a resumed run starts; call it on all ranks.

    DDP starts over if it hasn't settled on an order: in its first steps it uses one and records
    another, which can't be read from outside. Buffers that ranks compute separately, such as batch
    norm's statistics, take the values of the first rank that has them, which a checkpoint keeps.

    Collectives:
        An all-gather of the dense buffers' names, and a broadcast of each buffer.
    """
    for _, ddp in _ddps(model):
        if gradient_order(ddp) is None:
            start_in_order(ddp, None)
    own, world = dict(_dense_buffers(model)), world_group()
    of_ranks: list[dict[str, int]] = [{}] * dist.get_world_size(world)
    dist.all_gather_object(of_ranks, {name: own[name].nbytes for name in own}, group=world)
    device = next(model.parameters()).device
    for name in sorted(set().union(*of_ranks)):
        first = next(rank for rank, sizes in enumerate(of_ranks) if name in sizes)
        data = torch.empty(of_ranks[first][name], dtype=torch.uint8, device=device)
        buffer = own.get(name)
        if buffer is not None:
            data = buffer.contiguous().reshape(-1).view(torch.uint8)
        dist.broadcast(data, group_src=first, group=world)
        if buffer is not None:
            buffer.copy_(data.view(buffer.dtype).view(buffer.shape))


def _dense_buffers(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the buffers outside sharded modules by name."""
    if not isinstance(module, ShardedModule):
        for name, buffer in module.named_buffers(prefix, recurse=False):
            local = buffer.to_local() if isinstance(buffer, DTensor) else buffer
            if local.numel():
                yield name, local.detach()
        for name, child in module.named_children():
            yield from _dense_buffers(child, append_prefix(prefix, name))


def _ddps(model: nn.Module) -> Iterator[tuple[str, DistributedDataParallel]]:
    """Yield all DDP modules by name."""
    for name, module in model.named_modules():
        if isinstance(module, DistributedDataParallel):
            yield name, module
