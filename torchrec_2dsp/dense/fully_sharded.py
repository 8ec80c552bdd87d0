"""`FullyShardedDense`: a dense part of which each rank holds a share, by torch's FSDP2."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torchrec.distributed.types import ShardingEnv

from torchrec_2dsp._compat.data_parallel import (
    DataParallelWrapper,
    DistributedModelParallel,
    wrapped_module,
)
from torchrec_2dsp.comms.agreement import agreeing
from torchrec_2dsp.dense.copies_mesh import check_num_copies, copies_mesh
from torchrec_2dsp.dense.dense_parts import broadcast_weights, dense_parts, group_of
from torchrec_2dsp.errors import ConfigError


class FullyShardedDense(DataParallelWrapper):
    """Shards the parameters of what isn't in tables over the ranks, with gradients and moments.

    Each rank keeps a share; the parameters of a module are gathered when it runs, and its gradients
    are added up where they are kept. Training is that of DDP. A stock `DistributedModelParallel`
    takes it as well as `ModelParallel2D`.

    Example::

        dense = tdsp.FullyShardedDense(units=[TransformerBlock])
        model = tdsp.ModelParallel2D(
            model, plan=plan, sharders=sharders, data_parallel_wrapper=dense
        )
    """

    def __init__(
        self,
        units: Sequence[type[nn.Module]] = (),
        *,
        num_copies: int = 1,
        reshard_after_forward: bool = True,
        mixed_precision: MixedPrecisionPolicy | None = None,
    ) -> None:
        """
        Args:
            units: the modules whose parameters are gathered together, and freed before the next
                ones', such as a transformer's blocks; without any, all at once.
            num_copies: how many times the ranks hold the parameters: with as many copies as hosts,
                parameters are gathered inside hosts, and gradients alone travel between them.
            reshard_after_forward: whether parameters are freed after the forward, and gathered
                again in the backward.
            mixed_precision: as FSDP2's ``mp_policy``.
        """
        check_num_copies("FullyShardedDense", num_copies)
        self._units = tuple(units)
        self._num_copies = num_copies
        self._reshards = reshard_after_forward
        self._precision = mixed_precision or MixedPrecisionPolicy()

    def wrap(self, dmp: DistributedModelParallel, env: ShardingEnv, device: torch.device) -> None:
        """Shard what isn't in tables; TorchRec calls it.

        Collectives:
            An agreement of all ranks on the settings, process groups, and a broadcast of each
            parameter and buffer of the dense part.
        """
        group = group_of(env)
        model = wrapped_module(dmp).to(device)
        with agreeing(group) as facts:
            parts = list(dense_parts(model, "FullyShardedDense"))
            num_ranks = dist.get_world_size(group)
            if num_ranks % self._num_copies:
                counts = [count for count in range(1, num_ranks + 1) if num_ranks % count == 0]
                raise ConfigError(
                    f"FullyShardedDense(num_copies={self._num_copies}) doesn't divide {num_ranks} "
                    f"ranks; use one of {', '.join(map(str, counts))}"
                )
            facts["the settings of FullyShardedDense"] = (
                f"{self._units}, {self._num_copies}, {self._reshards}, {self._precision}"
            )
        ranks = torch.tensor(dist.get_process_group_ranks(group)).view(self._num_copies, -1)
        mesh = copies_mesh(ranks, device.type)
        for _, part in parts:
            broadcast_weights(part, group)
            units = [unit for unit in part.modules() if isinstance(unit, self._units)]
            for module in [*(unit for unit in units if unit is not part), part]:
                fully_shard(
                    module,
                    mesh=mesh,
                    reshard_after_forward=self._reshards,
                    mp_policy=self._precision,
                )
