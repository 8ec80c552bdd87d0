"""`DelayedDense`: dense gradients that travel while the next step computes.

step t          own gradients  --all-reduce-->  in flight
step t + 1      own gradients  --all-reduce-->  in flight     step t's mean  --> optimizer
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import record_function

from torchrec_2dsp._compat.ddp import ddp_params, robust_hook
from torchrec_2dsp.comms.alarm import agree
from torchrec_2dsp.comms.groups import own_group
from torchrec_2dsp.dense.dense_parts import HookedDDP, at_backwards, have_gradients
from torchrec_2dsp.dense.gradient_sums import (
    GradientReport,
    TensorFuture,
    UnusedParameters,
    all_reduce,
    done,
)
from torchrec_2dsp.errors import ConfigError, NotFiniteError, check_count


@dataclass(frozen=True)
class _InFlight:
    """A bucket's gradients while they are averaged over all ranks."""

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    mean: torch.Tensor
    """A flat tensor, which holds the mean once `work` is done."""
    work: dist.Work | None
    """The all-reduce; `None` once the mean has arrived."""
    is_finite: torch.Tensor
    """True if this rank's own gradients were finite, as a tensor."""

    def parts(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield each parameter's name and flat gradient."""
        return zip(self.names, self.mean.split(self.sizes), strict=True)


class LateGradients:
    """A DDP hook that gives each step the gradients from the step before."""

    def __init__(
        self,
        warm_up: int,
        names: Mapping[int, str],
        group: dist.ProcessGroup,
        device: torch.device,
    ) -> None:
        self._warm_up, self._names, self._group = warm_up, names, group
        self._device = device
        self._num_ranks = dist.get_world_size(group)
        self._in_flight: list[_InFlight] = []
        self._step = 0
        self.is_late = False
        """True if the current step uses the previous step's gradients."""
        self.num_late_steps = 0
        self.total = GradientReport()

    def begin_step(self) -> None:
        """Begin a step, which may have several backwards."""
        self.is_late = self._step >= self._warm_up
        self._step += 1
        self.num_late_steps += self.is_late
        self.total += GradientReport(num_steps=1)

    def reduce(self, _: object, bucket: dist.GradBucket) -> TensorFuture:
        """Send a bucket's gradients and return those that have arrived; DDP calls it.

        Collectives:
            The bucket's all-reduce; in a late step the next step waits for it.
        """
        params = bucket.parameters()
        own = bucket.buffer() / self._num_ranks
        own_bytes = 2 * (self._num_ranks - 1) / self._num_ranks * own.nbytes
        self.total += GradientReport(num_bytes=own_bytes, dense_bytes=own_bytes)
        names = tuple(self._names[id(param)] for param in params)
        sizes = tuple(param.numel() for param in params)
        if not self.is_late:
            return all_reduce(own, self._group)
        late = self._arrived(names, sizes, own)
        is_finite = own.sum(dtype=torch.float32).isfinite()
        work = dist.all_reduce(own, group=self._group, async_op=True)
        self._in_flight.append(_InFlight(names, sizes, own, work, is_finite))
        return done(UnusedParameters(bucket).give(late))

    def _arrived(
        self, names: tuple[str, ...], sizes: tuple[int, ...], like: torch.Tensor
    ) -> torch.Tensor:
        """Return these parameters' means, or zeros if nothing was in flight.

        DDP rearranges its buckets after its first steps, and after a run is resumed.
        """
        needed = set(names)
        sent = [flight for flight in self._in_flight if needed & set(flight.names)]
        if not sent:
            return torch.zeros_like(like)
        others = [flight for flight in self._in_flight if not needed & set(flight.names)]
        arrived = [self._wait(flight) for flight in sent]
        self._in_flight = others
        if len(arrived) == 1 and arrived[0].names == names:
            return arrived[0].mean
        by_name = dict(part for flight in arrived for part in flight.parts())
        for flight in arrived:
            later = {name: part for name, part in flight.parts() if name not in needed}
            self._in_flight += _arrived_means(later)
        means = [
            by_name[name] if name in by_name else like.new_zeros(size)
            for name, size in zip(names, sizes, strict=True)
        ]
        return torch.cat(means)

    def _wait(self, flight: _InFlight) -> _InFlight:
        """Wait for means; raise on all ranks if they aren't finite.

        Collectives:
            An agreement if there is an error; all ranks have the same sum.
        """
        if flight.work is None:
            return flight
        with record_function("## dense gradients ##"):
            flight.work.wait()
        if not flight.mean.sum(dtype=torch.float32).isfinite():
            names = [name for name, part in flight.parts() if not part.isfinite().all()]
            if names:
                self._drop()
                error = self._not_finite(names[0])
                agree(self._group, error=None if flight.is_finite else error)
                raise error
        return replace(flight, work=None)

    def _not_finite(self, name: str) -> NotFiniteError:
        return NotFiniteError(
            f"gradients of {name!r} are not finite in the step before step {self._step - 1}; no "
            "dense weight has changed by them. Lower the learning rate, or clip gradients"
        )

    def drain(self) -> dict[str, torch.Tensor]:
        """Return all means in flight, flat, by parameter; nothing is in flight afterwards.

        Collectives:
            The ones in flight, waited for.
        """
        arrived = [self._wait(flight) for flight in self._in_flight]
        self._in_flight = []
        return dict(part for flight in arrived for part in flight.parts())

    def _drop(self) -> None:
        """Drop the gradients in flight, once they have arrived."""
        for flight in self._in_flight:
            if flight.work is not None:
                flight.work.wait()
        self._in_flight = []

    def state_dict(self) -> dict[str, Any]:
        """Return the step and the means in flight, which are equal on all ranks."""
        means = self.drain()
        self._in_flight = _arrived_means(means)
        return {
            "step": self._step,
            "in_flight": {name: mean.clone() for name, mean in means.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the gradients in flight at a save; drop those in flight now."""
        self._drop()
        means = {
            name: mean.to(self._device, copy=True)
            for name, mean in state.get("in_flight", {}).items()
        }
        self._in_flight = _arrived_means(means)
        self._step = int(state.get("step", 0))


def _arrived_means(means: Mapping[str, torch.Tensor]) -> list[_InFlight]:
    return [
        _InFlight((name,), (mean.numel(),), mean, None, torch.tensor(True))
        for name, mean in means.items()
    ]


class DelayedDense(HookedDDP):
    """Runs the dense part in DDP and updates it by the previous step's gradients.

    The all-reduce overlaps with the next step, so nobody waits for it. Weights stay equal on all
    ranks, bit for bit, and tables are exact. Dense gradients are one step late, which is another
    algorithm: compare its quality with DDP's.

    Args:
        warm_up: the number of first steps that use their own gradients, at least one, in which DDP
            learns the graph.
        bucket_cap_mb: DDP's bucket size.
        static_graph: as in DDP.
        find_unused_parameters: as in DDP.
    """

    def __init__(
        self,
        *,
        warm_up: int = 1,
        bucket_cap_mb: float = 25,
        static_graph: bool = True,
        find_unused_parameters: bool = False,
    ) -> None:
        check_count("warm_up", warm_up, owner="DelayedDense")
        super().__init__(
            f"warm_up={warm_up}",
            bucket_cap_mb=bucket_cap_mb,
            static_graph=static_graph,
            find_unused_parameters=find_unused_parameters,
        )
        self._warm_up = warm_up
        self._gradients: LateGradients | None = None
        self._params: dict[str, nn.Parameter] = {}
        self._adds_locally = False

    def hook_into(
        self, ddp: DistributedDataParallel, group: dist.ProcessGroup, device: torch.device
    ) -> None:
        """Let DDP apply late gradients.

        Collectives:
            Creates a process group.
        """
        self._params = ddp_params(ddp)
        names = {id(param): name for name, param in self._params.items()}
        own = own_group(group, device, "delayed_dense")
        self._gradients = LateGradients(self._warm_up, names, own, device)
        ddp.register_comm_hook(None, robust_hook(ddp, self._gradients.reduce))
        at_backwards(ddp, self._begin_backward)

    def _begin_backward(self, is_reduced: bool) -> None:
        """Tell steps apart, and a step's batches.

        Existing gradients come from the step's earlier batches. If they stayed on the
        rank, they travel with the last batch's. If they came from other ranks, they are late ones,
        which must not travel again.
        """
        assert self._gradients is not None
        is_fresh = not have_gradients(self._params.values())
        if not is_reduced:
            self._adds_locally |= is_fresh
            return
        if is_fresh or self._adds_locally:
            self._gradients.begin_step()
        elif self._gradients.is_late:
            raise ConfigError(
                "a step's gradients are there before its backward, and DelayedDense would send "
                "them twice; call optimizer.zero_grad() in each step, or give the batches of one "
                "step by accumulate()"
            )
        self._adds_locally = False

    @property
    def total(self) -> GradientReport:
        """Everything that this rank has sent so far, late or not."""
        return self._gradients.total if self._gradients else GradientReport()

    @property
    def num_late_steps(self) -> int:
        """The number of steps that used the previous step's gradients."""
        return self._gradients.num_late_steps if self._gradients else 0

    def flush(self, optimizer: Any) -> bool:
        """Apply the gradients in flight with one more optimizer step.

        Call it on all ranks between two steps: at the end of training, and before a checkpoint
        without a `TrainState`. The step after it has no earlier gradients to apply.

        Args:
            optimizer: the dense part's optimizer; it may contain the model's fused one.

        Returns:
            True if any were in flight; otherwise nothing happens.

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
        """Return the gradients in flight; a `TrainState` stores them by itself.

        Collectives:
            The all-reduces in flight, waited for.
        """
        return self._gradients.state_dict() if self._gradients else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the gradients in flight at a save, on any number of ranks."""
        if self._gradients:
            self._gradients.load_state_dict(state)
