"""The oracle's dense part: scores, hand-written gradients, and each rank's values."""

import copy
import itertools
from dataclasses import dataclass

import torch

from tests.fuzz.batches import Lookups
from tests.fuzz.case import Case
from tests.fuzz.state import (
    EPS,
    OUTER_LR,
    OUTER_MOMENTUM,
    Noise,
    initial_dense,
    initial_layers,
    initial_positions,
)


@dataclass(frozen=True)
class NetPass:
    """A forward's inputs and outputs."""

    inputs: list[torch.Tensor]
    """Each layer's input; the first has the looked up vectors."""
    scores: torch.Tensor
    uses_shortcut: bool


class PositionWeights:
    """Position weights; trained ones come first among all dense parameters."""

    def __init__(self, case: Case) -> None:
        self._initial = initial_positions(case)
        keys = [key for key in self._initial if case.modules[key[0]].trains_positions]
        sizes = [self._initial[key].numel() for key in keys]
        self._starts = dict(zip(keys, itertools.accumulate(sizes, initial=0), strict=False))
        self.num_trained = sum(sizes)
        """The number of them that are trained."""

    def of(self, values: torch.Tensor, key: tuple[int, int], lookups: Lookups) -> torch.Tensor:
        """Return each id's position weight, its row's factor; lookups hold positions as weights."""
        if key not in self._initial:
            return values.new_ones(lookups.ids.numel())
        weights = self._initial[key].to(values)
        if (start := self._starts.get(key)) is not None:
            weights = values[start : start + weights.numel()]
        return weights[lookups.weights.long()]

    def add_gradients_(
        self, totals: torch.Tensor, key: tuple[int, int], lookups: Lookups, grads: torch.Tensor
    ) -> None:
        """Add each id's gradient in place to its weight's total, if that weight is trained."""
        if (start := self._starts.get(key)) is not None:
            totals.index_add_(0, start + lookups.weights.long(), grads)


class DenseNet:
    """Layers with a tanh between any two, and an optional shortcut from input to score."""

    def __init__(self, case: Case) -> None:
        self._shapes = [param.shape for param in initial_layers(case).values()]
        self._num_layers = len(case.dense.hidden) + 1
        self._has_shortcut = case.dense.has_shortcut

    def forward(self, values: torch.Tensor, inputs: torch.Tensor, uses_shortcut: bool) -> NetPass:
        """Return a batch's scores, given all layers' parameters as one flat tensor."""
        layers, shortcut = self._split(values)
        of_layers = [inputs]
        for weight, bias in layers[:-1]:
            of_layers.append((of_layers[-1] @ weight.T + bias).tanh())
        weight, bias = layers[-1]
        scores = of_layers[-1] @ weight[0] + bias
        uses_shortcut = uses_shortcut and shortcut is not None
        if shortcut is not None and uses_shortcut:
            scores = scores + inputs @ shortcut[0]
        return NetPass(of_layers, scores, uses_shortcut)

    def backward(
        self, values: torch.Tensor, result: NetPass, score_grads: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the gradients for the layers' parameters, flat, and for the inputs."""
        layers, shortcut = self._split(values)
        output_grads, grads = score_grads[:, None], []
        for (weight, _), inputs in zip(layers[::-1], result.inputs[::-1], strict=True):
            grads += [output_grads.sum(dim=0), output_grads.T @ inputs]
            output_grads = output_grads @ weight
            if inputs is not result.inputs[0]:
                output_grads = output_grads * (1 - inputs.square())
        grads.reverse()
        input_grads = output_grads
        if shortcut is not None:
            share = float(result.uses_shortcut)
            grads.append(share * score_grads[None] @ result.inputs[0])
            input_grads = input_grads + share * score_grads[:, None] * shortcut
        return torch.cat([grad.flatten() for grad in grads]), input_grads

    def _split(
        self, values: torch.Tensor
    ) -> tuple[list[tuple[torch.Tensor, torch.Tensor]], torch.Tensor | None]:
        """Return each layer's weight and bias, and the shortcut's weight."""
        sizes = [shape.numel() for shape in self._shapes]
        params = [
            part.view(shape)
            for part, shape in zip(values[-sum(sizes) :].split(sizes), self._shapes, strict=True)
        ]
        ends = range(0, 2 * self._num_layers, 2)
        layers = [(params[place], params[place + 1]) for place in ends]
        return layers, params[-1] if self._has_shortcut else None


_BETAS = (0.9, 0.999)
"""Adam's, as torch has them."""


class DenseState:
    """The dense part's training state: its parameters, concatenated."""

    def __init__(self, case: Case, noise: Noise) -> None:
        self._case, self._dense, self._noise = case, case.dense, noise
        params = initial_dense(case).values()
        values = torch.cat([param.flatten() for param in params]).to(noise.dtype)
        self.values = values.expand(case.world_size, -1).clone()
        """The values of each rank: ``[ranks, number of them]``."""
        self._optimizer = _Optimizer(case.dense.optimizer, self.values)
        self._num_steps = 0
        self._sends_all = False
        self.sent_whole = True
        """True if the last step left nothing out that was to be sent, whatever the density."""
        self.left_out = torch.zeros_like(values)
        """The part of the mean gradients that hasn't been sent so far."""
        self._in_flight: torch.Tensor | None = None
        """The mean gradient of a step that the next one applies."""
        self._outer_lr = OUTER_LR
        self._outer_momentum = torch.zeros_like(values)
        self._is_apart = False
        self._shared = values

    def before_lookup(self) -> None:
        """Let ranks that have met diverge again, before a training lookup."""
        if not self._is_apart:
            self._shared = self.values[0].clone()
            self._is_apart = True

    def train(self, grads: torch.Tensor, lr: float, applied: torch.Tensor | None = None) -> None:
        """Step by all ranks' gradients, or by the mean that they chose to send and ``applied``."""
        kind, num_ranks = self._dense.kind, self._case.world_size
        if kind == "fp16":
            grads = self._noise.rounded(grads, torch.float16)
        mean = grads.sum(dim=0)
        if kind == "fp16":
            mean = self._noise.rounded(mean[None], torch.float16)[0]
        if kind == "delayed" and self._num_steps >= self._dense.warm_up:
            in_flight = torch.zeros_like(mean) if self._in_flight is None else self._in_flight
            self._in_flight, mean = mean, in_flight
        if kind == "thresholded":
            mean = self._sent(mean, applied)
        self._num_steps += 1
        self._update(num_ranks * grads if kind == "local" else mean.expand(num_ranks, -1), lr)
        if kind == "local":
            self.sent_whole = bool(self._num_steps % self._dense.local_steps)
            if not self.sent_whole:
                self._meet(applied)

    def flush(self, lr: float) -> None:
        """Apply the gradient in flight by one more step, or let the next step send everything."""
        self._sends_all = True
        if self._in_flight is not None:
            self._update(self._in_flight.expand_as(self.values), lr)
            self._in_flight = None

    def halve_learning_rate(self) -> None:
        """Halve the outer learning rate; ranks' own rate is an argument to `train`."""
        self._outer_lr /= 2

    def copy(self) -> "DenseState":
        """Return a copy of the state, which further training doesn't change."""
        other = copy.copy(self)
        other.values, other._optimizer = self.values.clone(), self._optimizer.copy()
        other._outer_momentum = self._outer_momentum.clone()
        return other

    def restore(self, other: "DenseState") -> None:
        """Load a checkpoint's state; gradients in flight and learning rates stay."""
        saved = other.copy()
        self.values, self._optimizer = saved.values, saved._optimizer
        self._outer_momentum = saved._outer_momentum

    def _sent(self, mean: torch.Tensor, applied: torch.Tensor | None) -> torch.Tensor:
        """Return the mean gradient that ranks sent: all due elements, or the ones they chose."""
        due = self.left_out + mean
        # A rank that is alone sends nothing, so it leaves nothing out.
        self.sent_whole = (
            self._sends_all or self._num_steps < self._dense.warm_up or len(self.values) == 1
        )
        sent = due if self.sent_whole or applied is None else applied.to(due)
        self.left_out, self._sends_all = due - sent, False
        return sent

    def _update(self, grads: torch.Tensor, lr: float) -> None:
        if self._dense.max_norm:
            norms = grads.norm(dim=1, keepdim=True)
            grads = grads * (self._dense.max_norm / (norms + 1e-6)).clamp(max=1)
        self.values = self.values - lr * self._optimizer.direction(grads)

    def _meet(self, applied: torch.Tensor | None) -> None:
        """Move the last shared values by the ranks' mean change."""
        due = self._dense.residual_decay * self.left_out + (self._shared - self.values).mean(dim=0)
        change = due if applied is None else applied.to(due)
        self.left_out = due - change
        self._outer_momentum = OUTER_MOMENTUM * self._outer_momentum + change
        moved = self._outer_lr * (change + OUTER_MOMENTUM * self._outer_momentum)
        self.values = (self._shared - moved).expand_as(self.values).clone()
        self._is_apart = False


class _Optimizer:
    """A dense optimizer's rule and moments."""

    def __init__(self, kind: str, values: torch.Tensor) -> None:
        self._kind, self._num_updates = kind, 0
        self._means, self._squares = torch.zeros_like(values), torch.zeros_like(values)

    def copy(self) -> "_Optimizer":
        """Return a copy with the same moments; they are replaced and never written into."""
        return copy.copy(self)

    def direction(self, grads: torch.Tensor) -> torch.Tensor:
        """Return the decrease of the values for a learning rate of 1."""
        self._num_updates += 1
        if self._kind == "sgd":
            return grads
        if self._kind == "adagrad":
            self._squares = self._squares + grads.square()
            return grads / (self._squares.sqrt() + EPS)
        first, second = _BETAS
        self._means = first * self._means + (1 - first) * grads
        self._squares = second * self._squares + (1 - second) * grads.square()
        mean = self._means / (1 - first**self._num_updates)
        square = self._squares / (1 - second**self._num_updates)
        return mean / (square.sqrt() + EPS)
