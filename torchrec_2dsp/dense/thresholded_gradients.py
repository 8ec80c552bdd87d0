"""`BucketLayout`: which parameters of one of DDP's buckets are thresholded, and where. Pure."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from torchrec_2dsp.codecs.rows import FlatCodec
from torchrec_2dsp.codecs.sparse import Entries, ErrorFeedback, Threshold, ThresholdRule
from torchrec_2dsp.comms.alarm import agree
from torchrec_2dsp.dense.gradient_sums import (
    BucketSize,
    GatheredSum,
    GradientReport,
    GradientRoute,
    OwnedSum,
    UnusedParameters,
)
from torchrec_2dsp.errors import SyncError

_THRESHOLDED_TYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Part:
    """A parameter in a bucket, which is flat."""

    name: str
    """The parameter's name."""

    start: int
    """Where the parameter begins in the bucket."""

    size: int
    """How many elements the parameter has."""

    capacity: int
    """How many of them may be sent; 0 if the parameter is sent as a whole."""

    @property
    def place(self) -> slice:
        """The parameter's elements in the bucket."""
        return slice(self.start, self.start + self.size)


@dataclass(frozen=True)
class BucketLayout:
    """The parameters of a bucket, in its order."""

    parts: tuple[Part, ...]
    """All parameters."""

    @classmethod
    def of(
        cls,
        params: Sequence[tuple[str, torch.Tensor]],
        *,
        density: float,
        dense_below: int,
    ) -> "BucketLayout":
        """The layout of parameters."""
        parts, start = [], 0
        for name, param in params:
            size = param.numel()
            is_thresholded = (
                density < 1 and size >= dense_below and param.dtype in _THRESHOLDED_TYPES
            )
            capacity = math.ceil(density * size) if is_thresholded else 0
            parts.append(Part(name, start, size, capacity))
            start += size
        return cls(tuple(parts))

    @property
    def thresholded(self) -> list[Part]:
        """The parameters of which entries are sent."""
        return [part for part in self.parts if part.capacity]

    @property
    def whole(self) -> list[Part]:
        """The parameters that are sent as a whole."""
        return [part for part in self.parts if not part.capacity]

    @property
    def capacity(self) -> int:
        """How many entries may be sent of the bucket."""
        return sum(part.capacity for part in self.parts)

    @property
    def num_elements(self) -> int:
        """The size of the bucket."""
        return sum(part.size for part in self.parts)

    @property
    def num_thresholded(self) -> int:
        """The elements of all parameters of which entries are sent."""
        return sum(part.size for part in self.thresholded)

    @property
    def num_whole(self) -> int:
        """The elements of all parameters that are sent as a whole."""
        return self.num_elements - self.num_thresholded


_Future = torch.futures.Future[torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class ThresholdSettings:
    """What is sent of gradients, when and how."""

    density: float
    """The share of a parameter's elements that may be sent in a step."""

    warm_up: int
    """How many first steps are dense."""

    dense_below: int
    """Parameters with fewer elements are sent as a whole."""

    values: FlatCodec
    """How values travel."""

    rule: ThresholdRule
    """How thresholds are found."""

    route: GradientRoute | None
    """How sums are made; `None` for the route that sends least."""


@dataclass(frozen=True)
class _Standing:
    """Where all ranks are, as they have told each other."""

    step: int
    wants_dense: bool


class ThresholdedGradients:
    """Sums of the gradients of all ranks, by few of their elements."""

    def __init__(
        self,
        settings: ThresholdSettings,
        names: Mapping[int, str],
        group: dist.ProcessGroup,
    ) -> None:
        self._settings, self._names, self._group = settings, names, group
        self._num_ranks = dist.get_world_size(group)
        self._feedback = ErrorFeedback()
        self._thresholds: dict[str, Threshold] = {}
        self._stored_thresholds: dict[str, Any] = {}
        self._layouts: dict[tuple[str, ...], BucketLayout] = {}
        self._step = 0
        self._has_reduced = self._goes_on = False
        self._is_flush_due = self._is_flushing = False
        self.total = GradientReport()
        """What this rank has sent so far."""

    def flush(self) -> None:
        """Let the next step be dense and take the residuals along."""
        self._is_flush_due = True

    def begin_batch(self, *, is_first: bool) -> None:
        """Prepare for the backward of a training batch.

        DDP adds up after each of the batches that `accumulate` gives in the first step. These are
        one step, which is dense as a whole, or not.
        """
        if is_first:
            self._has_reduced = False
        self._goes_on = self._has_reduced

    def residual_norm(self) -> float:
        """The Euclidean norm of all residuals of this rank."""
        return self._feedback.square_norm() ** 0.5

    def reduce(self, _: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Replace the gradients of a bucket by their mean over the ranks; DDP calls it.

        Collectives:
            One all-reduce of 24 bytes, waited for; then an all-reduce of the bucket, or those of
            the route and an all-reduce of what is sent as a whole, not waited for.
        """
        layout, buffer, unused = self._layout(bucket), bucket.buffer(), UnusedParameters(bucket)
        standing = self._agree(buffer, layout)
        size = BucketSize(
            layout.num_elements, layout.capacity, self._num_ranks, self._settings.values
        )
        route = self._route(size, layout)
        if standing.wants_dense or standing.step < self._settings.warm_up:
            route = GradientRoute.DENSE
        report = GradientReport(dense_bytes=size.sent_bytes(GradientRoute.DENSE))
        if route is GradientRoute.DENSE:
            future = self._reduce_all(buffer, layout)
            report += GradientReport(num_bytes=report.dense_bytes)
        else:
            future, num_entries = self._reduce_entries(buffer, layout, size, route)
            whole = BucketSize(layout.num_whole, 0, self._num_ranks, self._settings.values)
            report += GradientReport(
                num_bytes=size.sent_bytes(route) + whole.sent_bytes(GradientRoute.DENSE),
                num_entries=num_entries,
                num_elements=layout.num_thresholded,
            )
        if bucket.is_last():
            self._step = standing.step + 1
            self._is_flush_due, self._is_flushing = False, standing.wants_dense
            self._has_reduced = True
            is_thresholded = route is not GradientRoute.DENSE
            if not self._goes_on:
                report += GradientReport(num_steps=1, num_thresholded_steps=int(is_thresholded))
        self.total += report
        return future.then(lambda arrived: unused.give(arrived.value()))

    def _layout(self, bucket: dist.GradBucket) -> BucketLayout:
        params = [(self._names[id(param)], param) for param in bucket.parameters()]
        key = tuple(name for name, _ in params)
        if key not in self._layouts:
            self._layouts[key] = BucketLayout.of(
                params, density=self._settings.density, dense_below=self._settings.dense_below
            )
        return self._layouts[key]

    def _route(self, size: BucketSize, layout: BucketLayout) -> GradientRoute:
        if not layout.thresholded or self._num_ranks == 1:
            return GradientRoute.DENSE
        return self._settings.route or size.cheapest_route()

    def _agree(self, buffer: torch.Tensor, layout: BucketLayout) -> _Standing:
        """Learn where the others are; if a rank's gradients aren't finite, raise on all ranks."""
        is_finite = buffer.sum(dtype=torch.float32).isfinite().long()
        own = torch.tensor([0, self._step, self._is_flush_due], device=buffer.device)
        own[0] = 1 - is_finite
        dist.all_reduce(own, dist.ReduceOp.MAX, group=self._group)
        has_failed, step, wants_dense = own.tolist()
        if has_failed:
            agree(self._group, error=None if is_finite else self._not_finite(buffer, layout))
        if self._goes_on:
            return _Standing(step - 1, bool(wants_dense) or self._is_flushing)
        return _Standing(step, bool(wants_dense))

    def _not_finite(self, buffer: torch.Tensor, layout: BucketLayout) -> SyncError:
        names = [part.name for part in layout.parts if not buffer[part.place].isfinite().all()]
        which = f"gradients of {names[0]!r} are" if names else "the sum of all gradients is"
        return SyncError(
            f"{which} not finite in step {self._step}; nothing of the bucket was sent, and no "
            "dense weight has changed. Lower the learning rate, or clip gradients"
        )

    def _reduce_all(self, buffer: torch.Tensor, layout: BucketLayout) -> _Future:
        """DDP's own arithmetic, after the residuals were added."""
        for part in layout.thresholded:
            residual = self._feedback.drain(part.name, buffer.device)
            if residual is not None:
                buffer[part.place] += residual
        return _all_reduce(buffer.div_(self._num_ranks), self._group)

    def _reduce_entries(
        self, buffer: torch.Tensor, layout: BucketLayout, size: BucketSize, route: GradientRoute
    ) -> tuple[_Future, int]:
        """Add up the largest elements; returns how many this rank has chosen, too."""
        entries = self._choose(buffer, layout)
        whole = torch.cat([buffer.new_empty(0), *(buffer[part.place] for part in layout.whole)])
        is_owned = route is GradientRoute.OWNERS
        way = OwnedSum if is_owned else GatheredSum
        codec = size.owner_codec if is_owned else size.gather_codec
        # The gradients have been added to the residuals, so their room is free for the sum.
        total = buffer if buffer.dtype is torch.float32 else buffer.float()
        started = way(codec, self._group).start(entries, total)
        for name, positions, sent in _by_part(started.sent, layout):
            self._feedback.take_off(name, positions, sent)
        for name, positions, left_out in _by_part(started.left_out, layout):
            self._feedback.give_back(name, positions, left_out)
        futures = [started.total]
        if whole.numel():
            futures.append(_all_reduce(whole.div_(self._num_ranks), self._group))

        def finish(arrived: torch.futures.Future[list[_Future]]) -> torch.Tensor:
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
        """The largest elements of all parameters, as entries of the bucket."""
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
        """The residuals and thresholds of this rank."""
        return {
            "step": self._step,
            "num_ranks": self._num_ranks,
            "residuals": self._feedback.state_dict(),
            "thresholds": {
                **self._stored_thresholds,
                **{name: threshold.state_dict() for name, threshold in self._thresholds.items()},
            },
        }

    def load_rank_states(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Take over the residuals of several ranks, whose sum is kept.

        With other ranks than at the save, thresholds are measured again. A rank that takes over
        none learns from the others how far the run is.
        """
        is_same = len(states) == 1 and states[0]["num_ranks"] == self._num_ranks
        self._step = max((state["step"] for state in states), default=0)
        # Each rank's gradients count for one in so many, of which there are others now.
        self._feedback.load_sum(
            [
                {
                    name: residual * (self._num_ranks / state["num_ranks"])
                    for name, residual in state["residuals"].items()
                }
                for state in states
            ]
        )
        self._thresholds = {}
        self._stored_thresholds = dict(states[0]["thresholds"]) if is_same else {}


def _by_part(
    entries: Entries, layout: BucketLayout
) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """Entries of a bucket by parameter: the name, positions in the parameter, values."""
    parts = layout.thresholded
    ends = torch.tensor([part.place.stop for part in parts], device=entries.positions.device)
    ends = torch.searchsorted(entries.positions, ends).tolist()
    for part, start, end in zip(parts, [0, *ends], ends, strict=False):
        yield part.name, entries.positions[start:end] - part.start, entries.values[start:end]


def _all_reduce(values: torch.Tensor, group: dist.ProcessGroup) -> _Future:
    work = dist.all_reduce(values, group=group, async_op=True)
    assert work is not None
    return work.get_future().then(lambda future: future.value()[0])
