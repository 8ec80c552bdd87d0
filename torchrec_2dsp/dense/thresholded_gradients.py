"""`ThresholdedGradients`: sends the largest gradient elements, in a DDP hook or over pipelines.

For each bucket, ranks agree that gradients are finite and on their step; then residuals are added,
the largest elements chosen, encoded and summed over the ranks, and the rest stays in the residuals.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from torchrec_2dsp.codecs.rows import FlatCodec
from torchrec_2dsp.codecs.sparse import Entries, ErrorFeedback, Threshold, ThresholdRule
from torchrec_2dsp.comms.alarm import agree
from torchrec_2dsp.dense.dense_parts import have_gradients
from torchrec_2dsp.dense.gradient_sums import (
    BucketSize,
    GradientReport,
    GradientRoute,
    TensorFuture,
    UnusedParameters,
    all_reduce,
    gather_sum,
    owners_sum,
)
from torchrec_2dsp.dense.preconditioner import Preconditioner, Preconditioning
from torchrec_2dsp.errors import ConfigError, NotFiniteError

_THRESHOLDED_TYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Part:
    """A parameter in a flat bucket."""

    name: str
    start: int
    size: int
    capacity: int
    """The number of elements that may be sent; 0 sends the parameter whole."""

    @property
    def place(self) -> slice:
        """The parameter's slice of the bucket."""
        return slice(self.start, self.start + self.size)


@dataclass(frozen=True)
class BucketLayout:
    """A bucket's parameters, in order."""

    parts: tuple[Part, ...]

    @classmethod
    def of(cls, sizes: Iterable[tuple[str, int, int]]) -> "BucketLayout":
        """Lay out parameters by name, size and capacity."""
        parts, start = [], 0
        for name, size, capacity in sizes:
            parts.append(Part(name, start, size, capacity))
            start += size
        return cls(tuple(parts))

    @property
    def thresholded(self) -> list[Part]:
        """The parameters that send entries."""
        return [part for part in self.parts if part.capacity]

    @property
    def whole(self) -> list[Part]:
        """The parameters that are sent whole."""
        return [part for part in self.parts if not part.capacity]

    @property
    def capacity(self) -> int:
        """The most entries that the bucket sends."""
        return sum(part.capacity for part in self.parts)

    @property
    def num_elements(self) -> int:
        """The bucket's size."""
        return sum(part.size for part in self.parts)


@dataclass(frozen=True, kw_only=True)
class ThresholdSettings:
    """`ThresholdedDataParallel`'s settings."""

    density: float
    warm_up: int
    dense_below: int
    values: FlatCodec
    rule: ThresholdRule
    route: GradientRoute | None
    """The route; `None` for the one that sends least."""

    preconditioner: Preconditioning = Preconditioning.NONE


class ThresholdedGradients:
    """Sums few elements of all ranks' gradients."""

    def __init__(
        self,
        settings: ThresholdSettings,
        names: Mapping[int, str],
        group: dist.ProcessGroup,
        everyone: dist.ProcessGroup | None = None,
        device: torch.device | None = None,
    ) -> None:
        """Prepare to sum gradients over ``group``; ``everyone`` agrees on steps and errors.

        ``device`` is the groups', for a rank without parameters.
        """
        self._settings, self._names, self._group = settings, names, group
        self._everyone = group if everyone is None else everyone
        self._num_ranks, self._device = dist.get_world_size(group), device
        self._feedback = ErrorFeedback()
        self._preconditioner = Preconditioner(settings.preconditioner)
        self._thresholds: dict[str, Threshold] = {}
        self._stored_thresholds: dict[str, Any] = {}
        self._layouts: dict[tuple[str, ...], BucketLayout] = {}
        self._step = 0
        self._has_reduced = self._goes_on = self._has_thresholded = False
        self._is_levelling = False
        self._is_flush_due = self._is_flushing = False
        self.total = GradientReport()

    def flush(self) -> None:
        """Make the next step dense, residuals included."""
        self._is_flush_due = True

    def begin_batch(self, *, is_first: bool) -> None:
        """Prepare for a training batch's backward.

        DDP reduces after each batch that `accumulate` yields in the first step. They form one step,
        which is dense as a whole, or not at all.
        """
        if is_first:
            self._has_reduced = False
        self._goes_on, self._has_thresholded = self._has_reduced, False

    def residual_norm(self) -> float:
        """Return the Euclidean norm over all residuals on this rank."""
        return self._feedback.square_norm() ** 0.5

    @property
    def names(self) -> set[str]:
        """The parameters' names."""
        return set(self._names.values())

    def reduce(self, _: object, bucket: dist.GradBucket) -> TensorFuture:
        """Replace a bucket's gradients by their mean over the ranks, or the mean of updates.

        DDP calls it.

        Collectives:
            One 32-byte all-reduce, waited for; then an all-reduce of the bucket, or the route's
            and an all-reduce of whole parameters, not waited for. In the first step on
            another number of ranks than at the save, also one per preconditioned parameter.
        """
        layout, unused = self._layout(bucket.parameters()), UnusedParameters(bucket)
        means = self._mean(layout, bucket.buffer(), is_last=bucket.is_last())
        return means.then(lambda arrived: unused.give(arrived.value()))

    def means(
        self, params: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Return the means of a batch's gradients over the ranks, without DDP.

        Collectives:
            `reduce`'s, waited for.
        """
        self.begin_batch(is_first=not have_gradients(params))
        parts = [gradient.reshape(-1).float() for gradient in gradients]
        buffer = torch.cat(parts or [torch.empty(0, device=self._device)])
        means = self._mean(self._layout(params), buffer, is_last=True).wait()
        return [
            part.view_as(gradient).to(gradient.dtype)
            for part, gradient in zip(means.split([*map(len, parts)]), gradients, strict=True)
        ]

    def _mean(self, layout: BucketLayout, buffer: torch.Tensor, *, is_last: bool) -> TensorFuture:
        step, wants_dense = self._agree(buffer, layout)
        size = BucketSize(
            layout.num_elements, layout.capacity, self._num_ranks, self._settings.values
        )
        route = self._route(size, layout)
        is_warm = step >= self._settings.warm_up
        divided = layout.thresholded if is_warm and route is not GradientRoute.DENSE else []
        if self._is_levelling:
            for part in layout.parts:
                self._preconditioner.level(part.name, buffer[part.place], self._group)
        for part in divided:
            self._precondition(buffer, part, self._num_ranks)
        if wants_dense or not is_warm:
            route = GradientRoute.DENSE
        report = GradientReport(dense_bytes=size.sent_bytes(GradientRoute.DENSE))
        if route is GradientRoute.DENSE:
            future = self._reduce_all(buffer, layout)
            report += GradientReport(num_bytes=report.dense_bytes)
        else:
            self._has_thresholded = True
            future, num_entries = self._reduce_entries(buffer, layout, size, route)
            num_thresholded = sum(part.size for part in layout.thresholded)
            num_whole = layout.num_elements - num_thresholded
            whole = BucketSize(num_whole, 0, self._num_ranks, self._settings.values)
            report += GradientReport(
                num_bytes=size.sent_bytes(route) + whole.sent_bytes(GradientRoute.DENSE),
                num_entries=num_entries,
                num_elements=num_thresholded,
            )
        if is_last:
            self._step = step + 1
            self._is_flush_due, self._is_flushing = False, wants_dense
            self._has_reduced, self._is_levelling = True, False
            if not self._goes_on:
                report += GradientReport(
                    num_steps=1, num_thresholded_steps=int(self._has_thresholded)
                )
        self.total += report

        def finish(arrived: TensorFuture) -> torch.Tensor:
            means = arrived.value()
            for part in layout.parts:
                if part not in divided:
                    self._precondition(means, part, 1)
            return means

        return future.then(finish)

    def _precondition(self, buffer: torch.Tensor, part: Part, num_ranks: int) -> None:
        """Replace a gradient by its update, in place."""
        if self._settings.preconditioner is not Preconditioning.NONE:
            update = self._preconditioner.update(part.name, buffer[part.place], num_ranks)
            buffer[part.place] = update

    def _layout(self, params: Sequence[torch.Tensor]) -> BucketLayout:
        names = tuple(self._names[id(param)] for param in params)
        if names not in self._layouts:
            self._layouts[names] = BucketLayout.of(
                (name, param.numel(), self._capacity(param))
                for name, param in zip(names, params, strict=True)
            )
        return self._layouts[names]

    def _capacity(self, param: torch.Tensor) -> int:
        settings, size = self._settings, param.numel()
        is_whole = settings.density == 1 or size < settings.dense_below
        if is_whole or param.dtype not in _THRESHOLDED_TYPES:
            return 0
        return math.ceil(settings.density * size)

    def _route(self, size: BucketSize, layout: BucketLayout) -> GradientRoute:
        if not layout.thresholded or self._num_ranks == 1:
            return GradientRoute.DENSE
        route = self._settings.route or size.cheapest_route()
        # An owner without elements has no place for its message's unused room.
        has_owners = size.num_elements >= self._num_ranks
        return route if route is not GradientRoute.OWNERS or has_owners else GradientRoute.GATHER

    def _agree(self, buffer: torch.Tensor, layout: BucketLayout) -> tuple[int, bool]:
        """Agree on the step, and if it is dense; raise on all ranks if gradients aren't finite."""
        is_finite = buffer.sum(dtype=torch.float32).isfinite().long()
        own = torch.tensor([0, self._step, self._is_flush_due, self._goes_on], device=buffer.device)
        own[0] = 1 - is_finite
        dist.all_reduce(own, dist.ReduceOp.MAX, group=self._everyone)
        has_failed, step, wants_dense, goes_on = own.tolist()
        if has_failed:
            agree(self._everyone, error=None if is_finite else self._not_finite(buffer, layout))
        # A rank whose layers have no parameters can't tell.
        self._goes_on = bool(goes_on)
        if self._goes_on:
            if self._settings.preconditioner is not Preconditioning.NONE:
                raise ConfigError(
                    "ThresholdedDataParallel's preconditioner needs the sum of a step's batches: "
                    "with pipelines, give a step one batch; otherwise a static graph reduces each "
                    "of them in DDP's first step; set static_graph=False"
                )
            return step - 1, bool(wants_dense) or self._is_flushing
        return step, bool(wants_dense)

    def _not_finite(self, buffer: torch.Tensor, layout: BucketLayout) -> NotFiniteError:
        names = [part.name for part in layout.parts if not buffer[part.place].isfinite().all()]
        which = f"gradients of {names[0]!r} are" if names else "the sum of all gradients is"
        return NotFiniteError(
            f"{which} not finite in step {self._step}; nothing of the bucket was sent, and no "
            "dense weight has changed. Lower the learning rate, or clip gradients"
        )

    def _reduce_all(self, buffer: torch.Tensor, layout: BucketLayout) -> TensorFuture:
        """Add residuals, then compute as DDP does."""
        for part in layout.thresholded:
            residual = self._feedback.drain(part.name, buffer.device)
            if residual is not None:
                buffer[part.place] += residual
        return all_reduce(buffer.div_(self._num_ranks), self._group)

    def _reduce_entries(
        self, buffer: torch.Tensor, layout: BucketLayout, size: BucketSize, route: GradientRoute
    ) -> tuple[TensorFuture, int]:
        """Sum the largest elements; also return the number that this rank chose."""
        entries = self._choose(buffer, layout)
        whole = torch.cat([buffer.new_empty(0), *(buffer[part.place] for part in layout.whole)])
        # The gradients have been added to the residuals, so their memory is free for the sum.
        total = buffer if buffer.dtype is torch.float32 else buffer.float()
        if route is GradientRoute.OWNERS:
            started = owners_sum(entries, total, size.owner_codec, self._group)
        else:
            started = gather_sum(entries, total, size.gather_codec, self._group)
        for name, positions, sent in by_part(started.sent, layout):
            self._feedback.take_off(name, positions, sent)
        for name, positions, left_out in by_part(started.left_out, layout):
            self._feedback.give_back(name, positions, left_out)
        futures = [started.total]
        if whole.numel():
            futures.append(all_reduce(whole.div_(self._num_ranks), self._group))

        def finish(arrived: torch.futures.Future[list[TensorFuture]]) -> torch.Tensor:
            arrived.wait()
            mean = started.total.value().div_(self._num_ranks)
            if mean is not buffer:
                buffer.copy_(mean)
            for part, values in zip(
                layout.whole, whole.split([part.size for part in layout.whole]), strict=True
            ):
                buffer[part.place] = values
            return buffer

        return torch.futures.collect_all(futures).then(finish), entries.positions.numel()

    def _choose(self, buffer: torch.Tensor, layout: BucketLayout) -> Entries:
        """Choose all parameters' largest elements, as entries of the bucket."""
        chosen = []
        for part in layout.thresholded:
            due = self._feedback.add(part.name, buffer[part.place])
            threshold = self._thresholds.get(part.name)
            if threshold is None:
                threshold = Threshold(self._settings.rule, part.capacity)
                stored = self._stored_thresholds.pop(part.name, None)
                if stored is not None:
                    threshold.load_state_dict(stored)
                self._thresholds[part.name] = threshold
            positions, values = threshold.choose(due)
            chosen.append((positions + part.start, values))
        return Entries(*(torch.cat(tensors) for tensors in zip(*chosen, strict=True)))

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's residuals and thresholds."""
        return {
            "step": self._step,
            "num_ranks": self._num_ranks,
            "residuals": self._feedback.state_dict(),
            "moments": self._preconditioner.state_dict(),
            "thresholds": {
                **self._stored_thresholds,
                **{name: threshold.state_dict() for name, threshold in self._thresholds.items()},
            },
        }

    def load_rank_states(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Restore several ranks' summed residuals, and moments.

        On another number of ranks than at the save, thresholds are measured again. A rank without
        states learns the step from the others.
        """
        is_same = len(states) == 1 and states[0]["num_ranks"] == self._num_ranks
        self._step = max((state["step"] for state in states), default=0)
        # Each rank's gradients are divided by the number of ranks, which has changed.
        self._feedback.load_sum(
            [
                {
                    name: residual * (self._num_ranks / state["num_ranks"])
                    for name, residual in state["residuals"].items()
                }
                for state in states
            ]
        )
        # One of several states' moments suffices: ranks share the mean of those they have.
        self._preconditioner.load_state_dict(states[0].get("moments", {}) if states else {})
        is_preconditioned = self._settings.preconditioner is not Preconditioning.NONE
        self._is_levelling = is_preconditioned and not is_same
        self._thresholds = {}
        self._stored_thresholds = dict(states[0]["thresholds"]) if is_same else {}


def by_part(
    entries: Entries, layout: BucketLayout
) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """Split a bucket's entries by parameter: name, positions in it, values."""
    parts = layout.thresholded
    ends = torch.tensor([part.place.stop for part in parts], device=entries.positions.device)
    ends = torch.searchsorted(entries.positions, ends).tolist()
    for part, start, end in zip(parts, [0, *ends], ends, strict=False):
        yield part.name, entries.positions[start:end] - part.start, entries.values[start:end]
