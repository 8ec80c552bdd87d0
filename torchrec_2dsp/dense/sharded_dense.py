"""`FullyShardedDense` and `TensorParallelDense`: dense parts sharded or split over ranks."""

from collections.abc import Mapping, Sequence
from typing import cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module
from torchrec.distributed.types import ShardingEnv

from torchrec_2dsp._compat.ddp import (
    DataParallelWrapper,
    DistributedModelParallel,
    check_embeddings,
    wrapped_module,
)
from torchrec_2dsp._compat.torchrec import get_local_size
from torchrec_2dsp.comms.alarm import agreeing
from torchrec_2dsp.dense.dense_parts import (
    broadcast_weights,
    check_copies_fit,
    check_untied,
    copies_mesh,
    dense_parts,
    group_of,
    refuse_later_changes,
    refuse_replaced,
    styles_by_part,
)
from torchrec_2dsp.dense.joint_batch import JointBatch
from torchrec_2dsp.dense.sharded_parts import (
    OwnCalls,
    Unit,
    check_callable,
    check_splittable,
    check_units,
    shard_module,
    shard_units,
    units_of,
)
from torchrec_2dsp.errors import ConfigError, check_count
from torchrec_2dsp.mesh import DenseMesh


class FullyShardedDense(DataParallelWrapper):
    """Shards the dense part's parameters, gradients and moments over the ranks by FSDP2.

    Each rank keeps a shard; a module's parameters are gathered when it runs, and its gradients are
    reduced to their shards. Training equals DDP's.

    Args:
        units: modules whose parameters are gathered together, and freed before the next ones',
            such as a transformer's blocks; by default, all at once.
        num_copies: the number of copies that the ranks hold: with a copy per host, parameters are
            gathered inside hosts, and only gradients travel between them.
        reshard_after_forward: True to free parameters after the forward, and gather them
            again in the backward; evaluations free them in any case.
        mixed_precision: as FSDP2's ``mp_policy``.
    """

    def __init__(
        self,
        units: Sequence[type[nn.Module]] = (),
        *,
        num_copies: int = 1,
        reshard_after_forward: bool = True,
        mixed_precision: MixedPrecisionPolicy | None = None,
    ) -> None:
        check_count("num_copies", num_copies, owner="FullyShardedDense")
        self._units = tuple(units)
        self._num_copies = num_copies
        self._reshards = reshard_after_forward
        self._precision = mixed_precision or MixedPrecisionPolicy()

    def wrap(self, dmp: DistributedModelParallel, env: ShardingEnv, device: torch.device) -> None:
        """Shard the dense part; TorchRec calls it.

        Collectives:
            An agreement on the settings, process groups, and a broadcast per dense parameter
            and buffer.
        """
        group = group_of(env)
        model = wrapped_module(dmp).to(device)
        before = dict(model.named_parameters())
        with agreeing(group) as facts:
            check_embeddings(model, "FullyShardedDense")
            parts = dict(dense_parts(model, "FullyShardedDense"))
            check_untied(parts, "FullyShardedDense")
            num_ranks = dist.get_world_size(group)
            check_copies_fit("FullyShardedDense", self._num_copies, num_ranks, "ranks")
            units = [
                unit for name, part in parts.items() for unit in units_of(name, part, self._units)
            ]
            self._check_kinds(parts)
            check_units(units, "FullyShardedDense", "units that part them")
            facts["the settings of FullyShardedDense"] = (
                f"{self._units}, {self._num_copies}, {self._reshards}, {self._precision}"
            )
        ranks = torch.tensor(dist.get_process_group_ranks(group)).view(self._num_copies, -1)
        mesh = copies_mesh(ranks, device.type)
        for part in parts.values():
            broadcast_weights(part, group)
        shard_units(
            units,
            mesh,
            "FullyShardedDense",
            reshard_after_forward=self._reshards,
            mp_policy=self._precision,
        )
        refuse_later_changes(model, "FullyShardedDense")
        refuse_replaced(before, model, "FullyShardedDense")

    def _check_kinds(self, parts: Mapping[str, nn.Module]) -> None:
        modules = [module for part in parts.values() for module in part.modules()]
        for unit in self._units:
            if not any(isinstance(module, unit) for module in modules):
                kinds = ", ".join(sorted({type(module).__name__ for module in modules}))
                raise ConfigError(
                    f"FullyShardedDense(units=...): no module of the dense part is a "
                    f"{unit.__name__}; use some of {kinds}, or leave it out"
                )


class TensorParallelDense(DataParallelWrapper):
    """Splits dense layers over neighbouring ranks, and shards the rest by FSDP2.

    Each rank looks up its own batch. The ranks of a tensor-parallel group gather the split
    module's inputs, compute it together on all their samples, and each takes its own results back.
    A step equals DDP's, and nothing else in the model changes.

    Args:
        plan: torch's style for each module, such as `ColwiseParallel` and `RowwiseParallel`, by
            the module's name in the model, with `*` for any part.
        tp: the number of ranks that compute a layer together, on one host.
        num_copies: the number of copies that the ranks hold, as in `FullyShardedDense`: with a copy
            per host, only gradients travel between hosts.

    Example::

        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

        dense = tdsp.TensorParallelDense(
            {"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()}, tp=2
        )
    """

    def __init__(self, plan: Mapping[str, ParallelStyle], *, tp: int, num_copies: int = 1) -> None:
        if not plan:
            raise ConfigError("TensorParallelDense(plan={}) splits nothing; name some modules")
        check_count("num_copies", num_copies, owner="TensorParallelDense")
        self._plan, self._tp, self._num_copies = dict(plan), tp, num_copies

    def wrap(self, dmp: DistributedModelParallel, env: ShardingEnv, device: torch.device) -> None:
        """Split and shard the dense part; TorchRec calls it.

        Collectives:
            An agreement on the settings, process groups, and a broadcast per dense parameter
            and buffer.
        """
        group = group_of(env)
        model = wrapped_module(dmp).to(device)
        before = dict(model.named_parameters())
        with agreeing(group) as facts:
            check_embeddings(model, "TensorParallelDense")
            parts = dict(dense_parts(model, "TensorParallelDense"))
            check_untied(parts, "TensorParallelDense")
            num_ranks = dist.get_world_size(group)
            mesh = DenseMesh.for_world(
                num_ranks, tp=self._tp, local_world_size=get_local_size(num_ranks)
            )
            in_words = f"groups of tp={mesh.tp} ranks"
            check_copies_fit("TensorParallelDense", self._num_copies, mesh.dp, in_words)
            plans = self._by_part(parts)
            units = {name: units_of(name, part) for name, part in parts.items()}
            self._check_parts(units, plans, mesh)
            names = {name: type(style).__name__ for name, style in self._plan.items()}
            facts["the settings of TensorParallelDense"] = (
                f"{names}, tp={self._tp}, num_copies={self._num_copies}"
            )
        ranks = torch.tensor(dist.get_process_group_ranks(group))
        in_groups = ranks.view(self._num_copies, -1, mesh.tp)
        # FSDP2 requires the axes for shards and splits in one mesh.
        grid = copies_mesh(in_groups, device.type, ("tp",))
        axes_of_shares = cast(tuple[str, ...], grid.mesh_dim_names)[:-1]
        everyone = copies_mesh(ranks.view(self._num_copies, -1), device.type)
        for name, part in parts.items():
            broadcast_weights(part, group)
            if name not in plans:
                shard_units(units[name], everyone, "TensorParallelDense")
                continue
            parallelize_module(part, grid["tp"], plans[name])
            if mesh.dp > 1:
                shard_module(part, grid[axes_of_shares])
            JointBatch(name, part, grid["tp"].get_group())
            (unit,) = units[name]
            OwnCalls(unit, "TensorParallelDense joins the ranks' batches")
        without_shares = [parts[name] for name in plans] if mesh.dp == 1 else []
        refuse_later_changes(model, "TensorParallelDense", without_shares)
        refuse_replaced(before, model, "TensorParallelDense")

    def _check_parts(
        self,
        units: Mapping[str, Sequence[Unit]],
        plans: Mapping[str, Mapping[str, ParallelStyle]],
        mesh: DenseMesh,
    ) -> None:
        for name, of_part in units.items():
            (unit,) = of_part
            if name in plans:
                check_splittable(name, unit.module, plans[name], "TensorParallelDense")
            if name in plans and mesh.dp == 1:
                check_callable(of_part, "TensorParallelDense")
            else:
                check_units(of_part, "TensorParallelDense", "modules of their own")

    def _by_part(self, parts: Mapping[str, nn.Module]) -> dict[str, dict[str, ParallelStyle]]:
        """Sort the plan by dense part, with module names relative to it."""
        plans = styles_by_part(
            self._plan,
            parts,
            "TensorParallelDense: no module of the dense part is called {}; the dense part has "
            f"{', '.join(parts) or 'no modules'}",
        )
        for part_name, styles in plans.items():
            if "" in styles:
                raise ConfigError(
                    f"TensorParallelDense: {part_name!r} is a part of the model that holds no "
                    "tables, and runs on the batches of several ranks as a whole; put it into "
                    "a module, and name it there"
                )
        return plans
