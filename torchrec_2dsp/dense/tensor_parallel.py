"""`TensorParallelDense`: layers of the dense part that several ranks compute together."""

from collections.abc import Mapping
from fnmatch import fnmatchcase

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module
from torchrec.distributed.types import ShardingEnv

from torchrec_2dsp._compat.data_parallel import (
    DataParallelWrapper,
    DistributedModelParallel,
    wrapped_module,
)
from torchrec_2dsp._compat.torchrec import get_local_size
from torchrec_2dsp.comms.agreement import agreeing
from torchrec_2dsp.dense.copies_mesh import check_num_copies, copies_mesh, shares_of
from torchrec_2dsp.dense.dense_parts import broadcast_weights, dense_parts, group_of
from torchrec_2dsp.dense.joint_batch import JointBatch
from torchrec_2dsp.errors import ConfigError
from torchrec_2dsp.mesh.dense_mesh import DenseMesh


class TensorParallelDense(DataParallelWrapper):
    """Splits layers of the dense part over neighbouring ranks, and shards what is left by FSDP2.

    Each rank looks up its own batch. The ranks of a tensor-parallel group gather what the split
    part of the model is given, compute it together on all of their samples, and each takes its own
    samples' results back. So a step is that of DDP, and nothing else of the model changes. A stock
    `DistributedModelParallel` takes it as well as `ModelParallel2D`.

    Example::

        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

        dense = tdsp.TensorParallelDense(
            {"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()}, tp=2
        )
        model = tdsp.ModelParallel2D(
            model, plan=plan, sharders=sharders, data_parallel_wrapper=dense
        )
    """

    def __init__(self, plan: Mapping[str, ParallelStyle], *, tp: int, num_copies: int = 1) -> None:
        """
        Args:
            plan: how each module is split, by its name in the model, with `*` for any part of a
                name: torch's styles, such as `ColwiseParallel` and `RowwiseParallel`.
            tp: how many ranks compute a layer together; they have to be on one host.
            num_copies: how many times the ranks hold the dense part, as in `FullyShardedDense`:
                with as many copies as hosts, gradients alone travel between these.
        """
        if not plan:
            raise ConfigError("TensorParallelDense(plan={}) splits nothing; name some modules")
        check_num_copies("TensorParallelDense", num_copies)
        self._plan, self._tp, self._num_copies = dict(plan), tp, num_copies

    def wrap(self, dmp: DistributedModelParallel, env: ShardingEnv, device: torch.device) -> None:
        """Split and shard what isn't in tables; TorchRec calls it.

        Collectives:
            An agreement of all ranks on the settings, process groups, and a broadcast of each
            parameter and buffer of the dense part.
        """
        group = group_of(env)
        model = wrapped_module(dmp).to(device)
        with agreeing(group) as facts:
            parts = dict(dense_parts(model, "TensorParallelDense"))
            num_ranks = dist.get_world_size(group)
            mesh = DenseMesh.for_world(
                num_ranks, tp=self._tp, local_world_size=get_local_size(num_ranks)
            )
            if mesh.dp % self._num_copies:
                counts = [count for count in range(1, mesh.dp + 1) if mesh.dp % count == 0]
                raise ConfigError(
                    f"TensorParallelDense(num_copies={self._num_copies}) doesn't divide {mesh.dp} "
                    f"groups of tp={mesh.tp} ranks; use one of {', '.join(map(str, counts))}"
                )
            plans = self._by_part(parts)
            names = {name: type(style).__name__ for name, style in self._plan.items()}
            facts["the settings of TensorParallelDense"] = (
                f"{names}, tp={self._tp}, num_copies={self._num_copies}"
            )
        ranks = torch.tensor(dist.get_process_group_ranks(group))
        in_groups = ranks.view(self._num_copies, -1, mesh.tp)
        # FSDP2 wants the axes of shares and of splits in one mesh.
        grid = copies_mesh(in_groups, device.type, ("tp",))
        everyone = copies_mesh(ranks.view(self._num_copies, -1), device.type)
        for name, part in parts.items():
            broadcast_weights(part, group)
            if name not in plans:
                fully_shard(part, mesh=everyone)
                continue
            parallelize_module(part, grid["tp"], plans[name])
            if mesh.dp > 1:
                fully_shard(part, mesh=shares_of(grid))
            JointBatch(name, part, grid["tp"].get_group())

    def _by_part(self, parts: Mapping[str, nn.Module]) -> dict[str, dict[str, ParallelStyle]]:
        """The plan of each dense part, with the names that modules have in it."""
        plans: dict[str, dict[str, ParallelStyle]] = {}
        for pattern, style in self._plan.items():
            modules = [
                (part_name, name)
                for part_name, part in parts.items()
                for name, _ in part.named_modules()
                if fnmatchcase(f"{part_name}.{name}" if name else part_name, pattern)
            ]
            if not modules:
                raise ConfigError(
                    f"TensorParallelDense: no module of the dense part is called {pattern!r}; the "
                    f"dense part has {', '.join(parts) or 'no modules'}"
                )
            for part_name, name in modules:
                if not name:
                    raise ConfigError(
                        f"TensorParallelDense: {part_name!r} is a part of the model that holds no "
                        "tables, and runs on the batches of several ranks as a whole; put it into "
                        "a module, and name it there"
                    )
                plans.setdefault(part_name, {})[name] = style
        return plans
