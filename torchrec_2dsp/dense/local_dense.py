"""`LocalDense` and `DiLoCo`: ranks train their own dense parts for some steps, then meet."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer
from torch.profiler import record_function
from torchrec.distributed.types import ShardingEnv
from torchrec.distributed.utils import append_prefix

from torchrec_2dsp._compat.ddp import (
    DataParallelWrapper,
    DistributedModelParallel,
    wrapped_module,
)
from torchrec_2dsp._compat.tensors import held_weakly
from torchrec_2dsp.codecs.rows import FlatCodec, Transport
from torchrec_2dsp.codecs.sparse import Entries, ErrorFeedback, Threshold, ThresholdRule
from torchrec_2dsp.comms.alarm import agree, agreeing
from torchrec_2dsp.dense.dense_parts import (
    broadcast_weights,
    check_stepped_later,
    dense_parts,
    group_of,
)
from torchrec_2dsp.dense.gradient_sums import BucketSize, GradientReport, GradientRoute, gather_sum
from torchrec_2dsp.dense.thresholded_gradients import BucketLayout, by_part
from torchrec_2dsp.errors import ConfigError, NotFiniteError, SyncError, TwoDError, check_choice


class LocalDense(DataParallelWrapper):
    """Runs the dense part on each rank alone; `DiLoCo` brings the ranks together.

    All ranks train tables in every step, as usual. Training isn't exact: compare its quality with
    DDP's.

    Args:
        density: the share of each parameter's changes that ranks send when they meet, above 0; 1
            sends all, in float32. Unsent changes are added the next time.
        values: wire format of changes at a density below 1: fp32, bf16, fp16, int8 or int4.
        residual_decay: factor for unsent changes from one meeting to the next, at most 1.

    Example::

        dense = tdsp.LocalDense(density=0.02)
        params = dict(in_backward_optimizer_filter(model.named_parameters()))
        local = KeyedOptimizerWrapper(params, lambda values: torch.optim.AdamW(values))
        outer = KeyedOptimizerWrapper(params, lambda values: tdsp.DiLoCo(values, dense))
        optimizer = CombinedOptimizer(
            [
                model.fused_optimizer,
                SemisyncOptimizer(params.values(), local, outer, num_local_steps=16),
            ]
        )
    """

    def __init__(
        self,
        *,
        density: float = 1.0,
        values: Transport | str = Transport.BF16,
        residual_decay: float = 1.0,
    ) -> None:
        if not 0 < density <= 1:
            raise ConfigError(f"LocalDense(density={density!r}) is no share; use one of 0 to 1")
        check_choice("values", values, Transport, owner="LocalDense")
        if not 0 < residual_decay <= 1:
            raise ConfigError(
                f"LocalDense(residual_decay={residual_decay!r}) is no factor; use one above 0, at "
                "most 1"
            )
        self._density, self._decay = density, residual_decay
        self._codec = FlatCodec(Transport(values).codec)
        self._settings = f"density={density}, values={values}, residual_decay={residual_decay}"
        self._feedback = ErrorFeedback()
        self._group: dist.ProcessGroup | None = None
        self._names: dict[torch.Tensor, str] = {}
        """The dense parameters' names."""
        self._watched: set[torch.Tensor] = set()
        """Parameters whose gradients are watched."""
        self._is_apart = False
        self._met: set[torch.Tensor] = set()
        """Parameters that have been equal on all ranks since these last trained apart."""
        self._before_apart: list[Callable[[], None]] = []
        self.total = GradientReport()
        """Everything that this rank has sent so far."""

    def wrap(self, dmp: DistributedModelParallel, env: ShardingEnv, device: torch.device) -> None:
        """Give all ranks the same weights; TorchRec calls it.

        Collectives:
            An agreement on the settings, and a broadcast per dense parameter and buffer.
        """
        group = group_of(env)
        with agreeing(group) as facts:
            if self._group is not None:
                raise ConfigError("this LocalDense has a model already; make another one")
            check_stepped_later(wrapped_module(dmp), "LocalDense")
            parts = list(dense_parts(wrapped_module(dmp), "LocalDense"))
            for path, part in parts:
                _check_float32(path, part)
            facts["the settings of LocalDense"] = self._settings
        self._group = group
        model = wrapped_module(dmp).to(device)
        for path, part in parts:
            broadcast_weights(part, group)
            for name, param in part.named_parameters():
                self._names[param] = append_prefix(path, name)
        model.register_forward_hook(self._after_forward)

    def _after_forward(self, module: torch.nn.Module, *_: Any) -> None:
        """Note that ranks are about to train apart, unless the batch was refused.

        In eval mode they only do so if a backward follows.
        """
        if module.training and torch.is_grad_enabled():
            self._begin_apart()
        for param in self._names if not module.training and torch.is_grad_enabled() else ():
            if param.requires_grad and param not in self._watched:
                self._watched.add(param)
                param.register_post_accumulate_grad_hook(held_weakly(self._begin_apart))

    def _begin_apart(self, _: torch.Tensor | None = None) -> None:
        if not self._is_apart:
            self._check_all_met()
            for note in self._before_apart:
                note()
            self._is_apart, self._met = True, set()

    def before_apart(self, note: Callable[[], None], params: Iterable[torch.Tensor]) -> None:
        """Register a callback for when ranks are about to train apart, and the caller of `mean`.

        All ranks have the same weights then, whatever was loaded since they last met.
        """
        self._before_apart.append(note)
        if not self._is_apart:
            self._met.update(params)

    def _check_all_met(self) -> None:
        """Refuse trained parameters that no meeting makes equal, once there is a `DiLoCo`."""
        for param, name in self._names.items() if self._before_apart else ():
            if param.requires_grad and param not in self._met:
                raise ConfigError(
                    f"{name!r} is trained, but in no DiLoCo that meets when the others do; give "
                    "all dense parameters to one, in groups if their rates differ, or freeze this "
                    "one with requires_grad_(False)"
                )

    @torch.no_grad()
    def mean(
        self, changes: Mapping[torch.Tensor, torch.Tensor]
    ) -> dict[torch.Tensor, torch.Tensor]:
        """Average all ranks' changes by parameter, or their largest; bitwise equal on all ranks.

        `DiLoCo` calls it. From then on ranks are together, until the next training forward.

        Raises:
            NotFiniteError: on all ranks, if a parameter's changes aren't finite; nothing was sent.

        Collectives:
            An agreement; then one all-reduce of all changes, or one all-gather of the largest,
            waited for.
        """
        if self._group is None:
            raise SyncError("LocalDense has no model yet; give it to one as data_parallel_wrapper")
        agree(self._group, error=self._problem(changes))
        flat = torch.cat([change.reshape(-1).float() for change in changes.values()])
        num_ranks = dist.get_world_size(self._group)
        layout = BucketLayout.of(
            (self._names[param], param.numel(), max(1, round(self._density * param.numel())))
            for param in changes
        )
        size = BucketSize(flat.numel(), layout.capacity, num_ranks, self._codec)
        dense_bytes = size.sent_bytes(GradientRoute.DENSE)
        for part in layout.parts:
            residual = self._feedback.drain(part.name, flat.device)
            if residual is not None:
                flat[part.place] += self._decay * residual
        if self._density == 1:
            dist.all_reduce(flat, group=self._group)
            self.total += GradientReport(num_bytes=dense_bytes, dense_bytes=dense_bytes)
        else:
            flat = self._sum_of_largest(flat, layout, size)
            self.total += GradientReport(
                num_steps=1,
                num_thresholded_steps=1,
                num_bytes=size.sent_bytes(GradientRoute.GATHER),
                dense_bytes=dense_bytes,
            )
        self._is_apart = False
        self._met.update(changes)
        flat /= num_ranks
        return {
            param: flat[part.place].view_as(param)
            for param, part in zip(changes, layout.parts, strict=True)
        }

    def _sum_of_largest(
        self, flat: torch.Tensor, layout: BucketLayout, size: BucketSize
    ) -> torch.Tensor:
        assert self._group is not None
        chosen = []
        for part in layout.parts:
            threshold = Threshold(ThresholdRule(is_exact=True), part.capacity)
            positions, values = threshold.choose(self._feedback.add(part.name, flat[part.place]))
            chosen.append((positions + part.start, values))
        entries = Entries(*(torch.cat(tensors) for tensors in zip(*chosen, strict=True)))
        started = gather_sum(entries, flat, size.gather_codec, self._group)
        with record_function("## dense gradients ##"):
            total = started.total.wait()
        for name, positions, sent in by_part(started.sent, layout):
            self._feedback.take_off(name, positions, sent)
        self.total += GradientReport(
            num_entries=entries.positions.numel(), num_elements=flat.numel()
        )
        return total

    def residual_norm(self) -> float:
        """Return the Euclidean norm over this rank's unsent changes."""
        return self._feedback.square_norm() ** 0.5

    def check_together(self) -> None:
        """Raise if ranks may have different weights.

        Raises:
            SyncError: they have trained apart since they last met.
            ConfigError: some parameters didn't meet.
        """
        if self._is_apart:
            raise SyncError(
                "ranks have trained their own dense parts since they last met; save and load after "
                "a multiple of num_local_steps"
            )
        self._check_all_met()

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's unsent changes; a `TrainState` stores them by itself.

        Raises:
            SyncError: ranks have different weights now, and a checkpoint would keep one rank's.
        """
        self.check_together()
        return {"residuals": self._feedback.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore this rank's state."""
        self.load_rank_states([state])

    def load_rank_states(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Restore several ranks' summed unsent changes; there may be none."""
        # Earlier states have one entry for all parameters together.
        named = set(self._names.values())
        self._feedback.load_sum(
            [
                {name: residual for name, residual in state["residuals"].items() if name in named}
                for state in states
                if state
            ]
        )
        self._is_apart, self._met = False, set(self._names)

    def _problem(self, changes: Mapping[torch.Tensor, torch.Tensor]) -> TwoDError | None:
        for number, (param, change) in enumerate(changes.items()):
            if param not in self._names:
                return ConfigError(
                    f"parameter {number} of the outer optimizer isn't in the dense part of "
                    "LocalDense's model; give DiLoCo that model's dense parameters"
                )
            if not change.isfinite().all():
                return NotFiniteError(
                    f"{self._names[param]!r} has changed by numbers that are not finite since the "
                    "ranks last met; nothing was sent. Lower the learning rate, or clip gradients"
                )
        return None


def _check_float32(path: str, part: torch.nn.Module) -> None:
    """Refuse trained parameters whose changes float32 can't hold."""
    for name, param in part.named_parameters():
        if param.requires_grad and torch.promote_types(param.dtype, torch.float32) != torch.float32:
            raise ConfigError(
                f"{append_prefix(path, name)!r} is trained in {param.dtype}, which LocalDense "
                "would send as float32; choose float32 or a smaller type"
            )


class DiLoCo(Optimizer):
    """Moves the weights that all ranks share by the mean change from each rank's own steps.

    The mean change replaces the gradient in SGD with Nesterov momentum. It is the global optimizer
    for TorchRec's `SemisyncOptimizer`: see `LocalDense` for an example.

    Args:
        params: the dense part's parameters.
        dense: the model's wrapper, over whose ranks changes are averaged.
        lr: rate for the mean change; 1 without momentum averages weights.
        momentum: factor for earlier changes, below 1.

    Reference: A. Douillard et al., DiLoCo: distributed low-communication training of language
    models, 2023 (arXiv 2311.08105); with a density below 1, A. Sarfi et al., SparseLoCo, 2025
    (arXiv 2508.15706).
    """

    def __init__(
        self,
        params: Iterable[torch.Tensor],
        dense: LocalDense,
        lr: float = 0.7,
        *,
        momentum: float = 0.9,
    ) -> None:
        if lr <= 0 or not 0 <= momentum < 1:
            raise ConfigError(
                f"DiLoCo(lr={lr}, momentum={momentum}) can't be; use a rate above 0 and a momentum "
                "of 0 or more, below 1"
            )
        super().__init__(params, {"lr": lr, "momentum": momentum})
        self._dense = dense
        for param in self._params():
            self.state[param]["shared"] = param.detach().clone()
            self.state[param]["momentum"] = torch.zeros_like(param)
        dense.before_apart(self._note_shared, self._params())

    @torch.no_grad()
    def _note_shared(self) -> None:
        """Keep the weights that all ranks share, before they train apart."""
        for param in self._params():
            self.state[param]["shared"].copy_(param)

    def _params(self) -> list[torch.Tensor]:
        return [param for group in self.param_groups for param in group["params"]]

    @torch.no_grad()
    def global_step(
        self, local_step: torch.Tensor, closure: Callable[[], float] | None = None
    ) -> None:
        """Let the ranks meet; `SemisyncOptimizer` calls it every ``num_local_steps`` steps.

        Args:
            local_step: the number of steps.
            closure: not called.

        Collectives:
            `LocalDense.mean`'s.
        """
        changes = self._dense.mean(
            {param: self.state[param]["shared"] - param for param in self._params()}
        )
        for group in self.param_groups:
            for param in group["params"]:
                state, change = self.state[param], changes[param].to(param.dtype)
                state["momentum"].mul_(group["momentum"]).add_(change)
                change = change + group["momentum"] * state["momentum"]
                state["shared"].sub_(change, alpha=group["lr"])
                param.copy_(state["shared"])

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Raise an error: ranks meet in `global_step`."""
        raise ConfigError(
            "DiLoCo is an outer optimizer; give it to TorchRec's SemisyncOptimizer, or call "
            "global_step every few steps"
        )
