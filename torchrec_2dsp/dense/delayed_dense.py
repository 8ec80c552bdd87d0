"""`DelayedDense`: dense gradients that travel while the next step computes."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed.types import ShardingEnv

from torchrec_2dsp._compat.data_parallel import (
    DataParallelWrapper,
    DefaultDataParallelWrapper,
    DistributedModelParallel,
    data_parallel_module,
)
from torchrec_2dsp.comms.agreement import agreeing
from torchrec_2dsp.comms.own_group import own_group
from torchrec_2dsp.dense.dense_parts import group_of
from torchrec_2dsp.dense.gradient_report import GradientReport
from torchrec_2dsp.dense.late_gradients import LateGradients
from torchrec_2dsp.errors import ConfigError


class DelayedDense(DataParallelWrapper):
    """Runs what isn't sharded in DDP, and updates it by the gradients of the step before.

    The all-reduce of a step's dense gradients travels while the next step computes, so nobody waits
    for it. Weights stay equal on all ranks, bit for bit, and tables are exact. Training is another
    algorithm, in which dense gradients are one step late: compare its quality with DDP's.

    A stock `DistributedModelParallel` takes it as well as `ModelParallel2D`.

    Example::

        dense = tdsp.DelayedDense(warm_up=500)
        model = tdsp.ModelParallel2D(
            model, plan=plan, sharders=sharders, data_parallel_wrapper=dense
        )
        ...
        dense.flush(optimizer)  # at the end of the training
    """

    def __init__(
        self,
        *,
        warm_up: int = 1,
        bucket_cap_mb: int = 25,
        static_graph: bool = True,
        find_unused_parameters: bool = False,
    ) -> None:
        """
        Args:
            warm_up: how many first steps use their own gradients, at least one, in which DDP learns
                the graph.
            bucket_cap_mb: the size of DDP's buckets.
            static_graph: as in DDP.
            find_unused_parameters: as in DDP.
        """
        if isinstance(warm_up, bool) or not isinstance(warm_up, int) or warm_up < 1:
            raise ConfigError(f"DelayedDense(warm_up={warm_up!r}) is no count; use 1 or more")
        self._warm_up = warm_up
        self._wrapper = DefaultDataParallelWrapper(
            bucket_cap_mb=bucket_cap_mb,
            static_graph=static_graph,
            find_unused_parameters=find_unused_parameters,
        )
        self._gradients: LateGradients | None = None
        self._params: dict[str, nn.Parameter] = {}
        self._has_model = self._adds_locally = False

    def wrap(self, dmp: DistributedModelParallel, env: ShardingEnv, device: torch.device) -> None:
        """Wrap what isn't sharded; TorchRec calls it.

        Collectives:
            An agreement of all ranks on the settings, DDP's broadcast of parameters, and the
            creation of a process group.
        """
        group = group_of(env)
        with agreeing(group) as facts:
            if self._has_model:
                raise ConfigError(
                    "this DelayedDense has a model already; make another one, because it keeps "
                    "that model's gradients"
                )
            facts["the settings of DelayedDense"] = f"warm_up={self._warm_up}"
        self._has_model = True
        self._wrapper.wrap(dmp, env, device)
        ddp = data_parallel_module(dmp)
        if ddp is None:
            return
        self._params = {
            name: param
            for name, param in ddp.module.named_parameters()
            if param.requires_grad and name not in ddp.parameters_to_ignore
        }
        names = {id(param): name for name, param in self._params.items()}
        own = own_group(group, device, "delayed_dense")
        self._gradients = LateGradients(self._warm_up, names, own, device)
        ddp.register_comm_hook(None, self._gradients.reduce)
        ddp.register_forward_pre_hook(self._before_forward)

    def _before_forward(self, module: nn.Module, _: tuple[Any, ...]) -> None:
        """Tell apart steps, and the batches of a step.

        Gradients that are there already come from earlier batches of the step. If they stayed on
        the rank, they travel with those of the last batch. If they came from other ranks, they are
        late ones, which must not travel again.
        """
        if not (module.training and torch.is_grad_enabled()):
            return
        assert self._gradients is not None
        assert isinstance(module, DistributedDataParallel)
        is_fresh = not any(
            param.grad is not None and param.grad.any() for param in self._params.values()
        )
        if not module.require_backward_grad_sync:
            self._adds_locally |= is_fresh
            return
        if is_fresh or self._adds_locally:
            self._gradients.begin_step()
        elif self._gradients.is_late:
            raise ConfigError(
                "a step's gradients are there before its forward, and DelayedDense would send them "
                "twice; call optimizer.zero_grad() in each step, or give the batches of one step "
                "by accumulate()"
            )
        self._adds_locally = False

    @property
    def total(self) -> GradientReport:
        """What this rank has sent so far, late or not."""
        return self._gradients.total if self._gradients else GradientReport()

    @property
    def num_late_steps(self) -> int:
        """How many steps have used the gradients of the step before."""
        return self._gradients.num_late_steps if self._gradients else 0

    def flush(self, optimizer: Any) -> bool:
        """Apply the gradients that are in flight, with one more step of the optimizer.

        Call it on all ranks between two steps: at the end of the training, and before a checkpoint
        without a `TrainState`. The step after it has no earlier gradients to apply.

        Args:
            optimizer: of the dense part; it may contain the model's fused one.

        Returns:
            Whether there were any, without which nothing happens.

        Collectives:
            The all-reduces in flight, waited for.
        """
        means = self._gradients.drain() if self._gradients else {}
        if not means:
            return False
        optimizer.zero_grad()
        for name, mean in means.items():
            param = self._params[name]
            param.grad = mean.view_as(param).clone()
        optimizer.step()
        optimizer.zero_grad()
        return True

    def state_dict(self) -> dict[str, Any]:
        """The gradients in flight; a `TrainState` stores them by itself.

        Collectives:
            The all-reduces in flight, waited for.
        """
        return self._gradients.state_dict() if self._gradients else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over the gradients that were in flight at a save, on any number of ranks."""
        if self._gradients:
            self._gradients.load_state_dict(state)
