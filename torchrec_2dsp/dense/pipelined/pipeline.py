"""`StackPipeline`: runs a cut `LayerStack`, forward and backward; fails on all ranks together."""

import copy
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from torchrec.distributed.types import LazyAwaitable

from torchrec_2dsp.comms.alarm import agree
from torchrec_2dsp.comms.breaking import described, is_broken_connection
from torchrec_2dsp.dense.dense_parts import differentiable_once, drawing_from
from torchrec_2dsp.dense.pipelined.activations import TensorKind
from torchrec_2dsp.dense.pipelined.engine import (
    Batch,
    BusyTime,
    Computed,
    Engine,
    LayerStage,
)
from torchrec_2dsp.dense.pipelined.held_layers import HeldLayers
from torchrec_2dsp.dense.pipelined.links import (
    Given,
    GivenTogether,
    Links,
    PipelineGroups,
    exchange,
    send_back,
    send_together,
)
from torchrec_2dsp.dense.pipelined.schedule import Schedule
from torchrec_2dsp.errors import RankError, TwoDError, UnsupportedError


class Together(AbstractContextManager[None]):
    """A context that raises one rank's error on all ranks of a pipeline.

    A rank with an error breaks the connections that carry activations and gradients, so that ranks
    waiting for it fail immediately. Then all agree on the error. The interrupted work can't resume,
    so every later use raises the error again.
    """

    def __init__(self, group: dist.ProcessGroup, links: Sequence[Links]) -> None:
        self._group, self._links = group, links
        self._failure: TwoDError | None = None

    def __enter__(self) -> None:
        self.raise_failure()

    def raise_failure(self) -> None:
        """Raise the error that has broken the connections, if any."""
        if self._failure is not None:
            raise copy.copy(self._failure).with_traceback(None)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not isinstance(error, Exception):
            return
        for links in self._links:
            links.close()
        own = None if is_broken_connection(error) else _naming_rank(error)
        self._failure = RankError(
            "the connections of a pipeline of layers broke, and no rank of it says why; "
            f"{described(error)}. Start the ranks again"
        )
        try:
            agree(self._group, error=own)
        except TwoDError as agreed:
            self._failure = agreed
        except RuntimeError:
            # A dead rank doesn't agree either; whoever catches the error asks which rank it is.
            return
        if own is None:
            raise copy.copy(self._failure).with_traceback(None) from error


def _naming_rank(error: Exception) -> TwoDError:
    """Return this package's error, or wrap another error with this rank's number."""
    if isinstance(error, TwoDError):
        return error
    rank = dist.get_rank()
    return RankError(f"rank {rank} failed in a pipeline of layers: {described(error)}", (rank,))


_TOLERANCE = 1e-6
"""The relative difference between two factors: a mean's gradient is rounded to float32."""


def common_factors(
    factors: torch.Tensor, groups: PipelineGroups, reduction: str
) -> tuple[float, float]:
    """Return this rank's samples' factor, and that of its pipeline's first samples.

    A factor is a loss gradient relative to the schedule's assumption.

    Raises:
        UnsupportedError: on all ranks, if a pipeline's factors differ.

    Collectives:
        A 24-byte all-gather over all ranks, waited for.
    """
    own = torch.zeros(3, dtype=torch.float64, device=groups.device)
    if factors.numel():
        own[:] = torch.stack((torch.ones_like(factors[0]), *factors.aminmax()))
    num_ranks = dist.get_world_size(groups.everyone)
    gathered = own.new_empty(num_ranks * 3)
    dist.all_gather_single(gathered, own, group=groups.everyone)
    of_rank = gathered.view(num_ranks, 3).tolist()
    pipeline_factors = {}
    for ranks in groups.mesh.pipelines():
        with_samples = [rank for rank in ranks if of_rank[rank][0]]
        for rank in with_samples:
            _check(of_rank[rank], rank, of_rank[with_samples[0]], with_samples[0], reduction)
        factor = of_rank[with_samples[0]][1] if with_samples else 0.0
        pipeline_factors.update(dict.fromkeys(ranks, factor))
    rank = dist.get_rank(groups.everyone)
    return of_rank[rank][1], pipeline_factors[rank]


def _check(
    own: list[float], rank: int, first: list[float], first_rank: int, reduction: str
) -> None:
    reference = first[1]
    for factor in own[1:]:
        if not abs(factor - reference) <= _TOLERANCE * abs(reference):
            error = UnsupportedError(
                "the losses of a pipeline's samples don't count alike: relative to the "
                f"{reduction} of a rank's losses, one of rank {first_rank} counts {reference:g}, "
                f"one of rank {rank} {factor:g}. Train by that {reduction} times one number on all "
                "ranks, give PipelinedDense another reduction, or give weights of samples to the "
                "LayerStack's loss as a target"
            )
            error.is_on_all_ranks = True
            raise error


Reduction = Literal["mean", "sum"]
"""The program's reduction of a rank's losses."""

_MAX_CALLS = 64
"""The most kinds of calls to remember."""
_RESULT = -1
"""The key of the last stage's output among the kinds of tensors between stages."""


class StackPipeline:
    """Runs a `LayerStack` over a pipeline's ranks, on all their batches.

    In training all forwards and backwards happen inside one autograd function's forward. It gives
    each rank its own samples' losses and keeps gradients; its backward multiplies these by the
    losses' gradient, which must be the same number for all samples.
    """

    def __init__(
        self,
        schedule: Schedule,
        stages: Mapping[int, LayerStage],
        layers: HeldLayers,
        groups: PipelineGroups,
        *,
        reduction: Reduction,
        wire: torch.dtype | None,
    ) -> None:
        self._schedule, self._groups, self._reduction = schedule, groups, reduction
        self._last = schedule.rank_of(schedule.num_stages - 1)
        self._forward = Links(groups.forward, groups.device)
        self._backward = Links(groups.backward, groups.device)
        links = self._forward, self._backward
        self._engine = Engine(schedule, stages, groups, links, wire)
        self.layers = layers
        self._kinds: dict[Any, dict[int, TensorKind]] = {}
        self._together = Together(groups.agreements, links)

    @property
    def busy(self) -> BusyTime:
        """This rank's busy time."""
        return self._engine.busy

    def run(self, inputs: Any, *targets: Any) -> torch.Tensor:
        """Return this rank's losses; without targets, its rows of the last stage's output.

        Collectives:
            An object all-gather in the pipeline; sends of samples to the first and the last
            stage; the schedule's; sends of results and gradients back.
        """
        inputs, targets = _arrived(inputs), tuple(_arrived(target) for target in targets)
        trains = torch.is_grad_enabled() and bool(targets)
        self._together.raise_failure()
        own = Given.of(
            [inputs, *targets],
            trains=torch.is_grad_enabled(),
            trains_layers=any(stage.is_trained for stage in self._engine.stages.values()),
            densities=[of for stage in self._engine.stages.values() for of in stage.densities],
        )
        given = exchange(own, self._groups.agreements)
        if not trains:
            with self._together, self.layers.whole():
                return self._outputs(self._compute(inputs, targets, given, trains=False), given)
        # Without it, autograd wouldn't ask for weight gradients if no input needs one.
        anchor = torch.zeros((), requires_grad=True)
        return _Trained.apply(self, given, anchor, inputs, *targets)  # type: ignore[return-value]

    def train(
        self, inputs: torch.Tensor, targets: Sequence[torch.Tensor], given: GivenTogether
    ) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
        """Run a batch's forwards and backwards; return this rank's losses, and all gradients.

        Gradients are the input's, then each target's, then the weights'.
        """
        with self._together:
            # Ranks that compute a stage together draw the same numbers, other stages draw others.
            draws = drawing_from(given.first.seed + self._groups.position, self._groups.device)
            with draws, self.layers.gradients_set_aside() as weight_gradients:
                computed = self._compute(inputs, targets, given, trains=True)
            losses = self._outputs(computed, given)
            gradients = self._gradients(computed, given)
            self.layers.broadcast_buffers()
        return losses, [*gradients, *weight_gradients]

    def _compute(
        self,
        inputs: torch.Tensor,
        targets: Sequence[torch.Tensor],
        given: GivenTogether,
        *,
        trains: bool,
    ) -> Computed:
        groups, kinds = self._groups, given.first.kinds
        to_first = send_together([inputs], kinds[:1], given, 0, groups, self._forward)
        to_last = send_together(targets, kinds[1:], given, self._last, groups, self._forward)
        needs = given.need_gradients
        batch = Batch(
            _even_sizes(given.num_samples, self._schedule.num_micro_batches),
            inputs=None if to_first is None else to_first[0],
            input_needs_gradient=needs[0],
            targets=to_last if targets else None,
            targets_need_gradient=needs[1:],
            weights=self._weights(given) if to_last is not None else None,
        )
        return self._engine.run(batch, self._known_kinds(given), trains=trains)

    def _known_kinds(self, given: GivenTogether) -> dict[int, TensorKind]:
        of_ranks = tuple((rank.trains_layers, rank.densities) for rank in given.ranks)
        call = given.first.call, of_ranks
        if call not in self._kinds and len(self._kinds) == _MAX_CALLS:
            # A density may change in each step.
            self._kinds.clear()
        return self._kinds.setdefault(call, {})

    def _weights(self, given: GivenTogether) -> torch.Tensor:
        """Return each sample's loss weight."""
        by_rank = [
            torch.full((size,), 1.0 if self._reduction == "sum" or not size else 1.0 / size)
            for size in given.sizes
        ]
        return torch.cat(by_rank).to(self._groups.device)

    def _outputs(self, computed: Computed, given: GivenTogether) -> torch.Tensor:
        """Return this rank's rows from the last stage's output."""
        kinds = self._known_kinds(given)
        if not given.num_samples:
            kind = kinds.get(_RESULT, TensorKind((), torch.float32))
            return kind.empty(0, self._groups.device)
        is_last = self._groups.position == self._last
        together = (
            torch.cat([part for _, part in sorted(computed.outputs.items())]) if is_last else None
        )
        rows, kinds[_RESULT] = send_back(
            together, kinds.get(_RESULT), given, self._last, self._groups, self._backward
        )
        self._backward.finish()
        return rows

    def _gradients(self, computed: Computed, given: GivenTogether) -> list[torch.Tensor | None]:
        """Return this rank's input gradients, then its target gradients."""
        gradients: list[torch.Tensor | None] = []
        column = 0
        for number, (kind, needs) in enumerate(
            zip(given.first.kinds, given.need_gradients, strict=True)
        ):
            if not needs:
                gradients.append(None)
                continue
            if number == 0:
                position, parts = 0, list(computed.input_gradients.values())
            else:
                position = self._last
                parts = [rows[column] for rows in computed.target_gradients.values()]
                column += 1
            together = None
            if self._groups.position == position:
                together = torch.cat(parts) if parts else kind.empty(0, self._groups.device)
            rows, _ = send_back(together, kind, given, position, self._groups, self._backward)
            gradients.append(rows)
        self._backward.finish()
        return gradients

    def apply_factors(
        self, saved: Sequence[torch.Tensor | None], given: GivenTogether, gradient: torch.Tensor
    ) -> list[Any]:
        """Sum weight gradients over copies; return this rank's input and target gradients.

        ``saved`` are `train`'s gradients, ``gradient`` is its losses' gradient.

        Collectives:
            A 24-byte all-gather over all ranks, and `HeldLayers.add_mean`'s.
        """
        expected = 1.0 if self._reduction == "sum" else 1.0 / max(1, gradient.numel())
        factor, pipeline_factor = common_factors(
            gradient.double() / expected, self._groups, self._reduction
        )
        needs = given.ranks[self._groups.rank].need_gradients
        weight_gradients = cast(Sequence[torch.Tensor], saved[len(needs) :])
        self.layers.add_mean(weight_gradients, pipeline_factor / self._groups.size)
        return [
            None if rows is None or not is_needed else rows * factor
            for rows, is_needed in zip(saved[: len(needs)], needs, strict=True)
        ]


class _Trained(torch.autograd.Function):
    """A batch's losses, whose backward has already run."""

    @staticmethod
    def forward(
        ctx: Any,
        pipeline: "StackPipeline",
        given: GivenTogether,
        _: torch.Tensor,
        inputs: torch.Tensor,
        *targets: torch.Tensor,
    ) -> torch.Tensor:
        losses, gradients = pipeline.train(inputs, targets, given)
        ctx.pipeline, ctx.given = pipeline, given
        # If saved, the backward frees them; a context that held the losses would be in a cycle.
        ctx.save_for_backward(*gradients)
        return losses

    @staticmethod
    @differentiable_once("a pipelined LayerStack")
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        applied = ctx.pipeline.apply_factors(ctx.saved_tensors, ctx.given, gradients[0])
        return None, None, None, *applied


def _arrived(tensor: Any) -> torch.Tensor:
    """Wait for a lookup that TorchRec's tables have left lazy."""
    return tensor.wait() if isinstance(tensor, LazyAwaitable) else tensor


def _even_sizes(num_samples: int, num_parts: int) -> list[int]:
    size, rest = divmod(num_samples, num_parts)
    return [size + (part < rest) for part in range(num_parts)]
