"""`HookedDataParallel`: dense gradients through torch's own hooks."""

import enum
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import (
    PowerSGDState,
    powerSGD_hook,
)
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import record_function

from torchrec_2dsp._compat.ddp import robust_hook
from torchrec_2dsp.dense.dense_parts import HookedDDP
from torchrec_2dsp.errors import ConfigError, check_choice

_MEMORIES = ("error_dict", "p_memory_dict", "q_memory_dict")
"""PowerSGD's state per bucket, by bucket number."""


class GradientHook(enum.StrEnum):
    """torch's hooks that are available by name."""

    FP16 = "fp16"
    """Half-precision sums."""

    POWER_SGD = "powersgd"
    """Low-rank matrices instead of gradients, with error feedback."""


class HookedDataParallel(HookedDDP):
    """Runs the dense part in DDP with a hook from torch.

    Args:
        hook: fp16 or powersgd.
        rank: the rank of PowerSGD's matrices.
        warm_up: first steps that PowerSGD leaves dense, at least 2, after which DDP's
            buckets don't change.
        bucket_cap_mb: DDP's bucket size.
        static_graph: as in DDP.
        find_unused_parameters: as in DDP.
    """

    def __init__(
        self,
        hook: GradientHook | str,
        *,
        rank: int = 2,
        warm_up: int = 10,
        bucket_cap_mb: float = 25,
        static_graph: bool = True,
        find_unused_parameters: bool = False,
    ) -> None:
        check_choice("hook", hook, GradientHook, owner="HookedDataParallel")
        if rank < 1 or warm_up < 2:
            raise ConfigError(
                f"HookedDataParallel(rank={rank}, warm_up={warm_up}) can't be; use a rank of 1 or "
                "more and a warm_up of 2 or more"
            )
        self._hook, self._rank, self._warm_up = GradientHook(hook), rank, warm_up
        super().__init__(
            f"{hook}, rank {rank}, warm_up {warm_up}",
            bucket_cap_mb=bucket_cap_mb,
            static_graph=static_graph,
            find_unused_parameters=find_unused_parameters,
        )
        self._power_sgd: PowerSGDState | None = None
        self._names: dict[int, str] = {}
        self._names_in: dict[int, tuple[str, ...]] = {}
        """The parameters that each bucket's state belongs to."""
        self._device = torch.device("cpu")

    def hook_into(
        self, ddp: DistributedDataParallel, group: dist.ProcessGroup, device: torch.device
    ) -> None:
        """Register torch's hook."""
        self._device = device
        self._names = {id(param): name for name, param in ddp.module.named_parameters()}
        if self._hook is GradientHook.POWER_SGD:
            self._power_sgd = PowerSGDState(
                group,
                matrix_approximation_rank=self._rank,
                start_powerSGD_iter=self._warm_up,
            )
            hook = robust_hook(ddp, self._reduce_by_power_sgd)
            ddp.register_comm_hook(self._power_sgd, hook)
        else:
            ddp.register_comm_hook(group, fp16_compress_hook)

    def state_dict(self) -> dict[str, Any]:
        """Return PowerSGD's state on this rank; a `TrainState` stores it by itself."""
        if self._power_sgd is None:
            return {}
        memories = {
            name: {str(bucket): memory for bucket, memory in getattr(self._power_sgd, name).items()}
            for name in _MEMORIES
        }
        # The generator's draws are for buckets that DDP still rearranges.
        draws = {"rng": self._power_sgd.rng.get_state()}
        names = {str(bucket): list(names) for bucket, names in self._names_in.items()}
        return {"iteration": self._power_sgd.iter, "names": names, **draws, **memories}

    def check_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raise if a state has PowerSGD's unsent gradients, and this hook is another one."""
        if self._power_sgd is None and state.get("error_dict"):
            raise ConfigError(
                "it holds what PowerSGD hasn't sent yet; make the model with "
                'HookedDataParallel("powersgd"), as at the save, or load without train_state'
            )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore PowerSGD's state, on the same ranks and buckets."""
        if self._power_sgd is None or not state:
            return
        # Older checkpoints lack them; most have the buckets that DDP has now.
        names = state.get("names", {})
        self._names_in = {int(bucket): tuple(of_bucket) for bucket, of_bucket in names.items()}
        self._power_sgd.iter = int(state["iteration"])
        if "rng" in state:  # Older checkpoints lack it.
            self._power_sgd.rng.set_state(state["rng"])
        for name in _MEMORIES:
            memories = {
                int(bucket): memory.to(self._device) for bucket, memory in state[name].items()
            }
            setattr(self._power_sgd, name, memories)

    def _reduce_by_power_sgd(
        self, state: PowerSGDState, bucket: dist.GradBucket
    ) -> torch.futures.Future[torch.Tensor]:
        """Run torch's hook and wait for it.

        It starts collectives from gloo's threads when earlier ones finish. If ranks went on, they
        would start their own in different orders, and deadlock.

        A bucket's state is dropped on all ranks if the bucket's parameters change: after
        a fresh start DDP rearranges them in the third step, and also after a save before then.
        """
        names = tuple(self._names[id(param)] for param in bucket.parameters())
        if self._names_in.setdefault(bucket.index(), names) != names:
            for memory in _MEMORIES:
                getattr(state, memory).pop(bucket.index(), None)
        self._names_in[bucket.index()] = names
        future = powerSGD_hook(state, bucket)
        with record_function("## dense gradients ##"):
            future.wait()
        return future
