"""The arithmetic of the dense part in the oracle: its scores, and gradients written out by hand."""

from dataclasses import dataclass

import torch

from tests.fuzz.case import Case
from tests.fuzz.weights import initial_dense


@dataclass(frozen=True)
class NetPass:
    """What a forward has come to."""

    inputs: list[torch.Tensor]
    """What each layer was given; the first is what was looked up."""
    scores: torch.Tensor
    uses_shortcut: bool


class DenseNet:
    """Layers with a tanh between any two, and maybe a shortcut beside all of them."""

    def __init__(self, case: Case) -> None:
        """
        Args:
            case: says how many there are.
        """
        self._shapes = [param.shape for param in initial_dense(case).values()]
        self._num_layers = len(case.dense.hidden) + 1
        self._has_shortcut = case.dense.has_shortcut

    def forward(self, values: torch.Tensor, inputs: torch.Tensor, uses_shortcut: bool) -> NetPass:
        """The scores of a batch.

        Args:
            values: of all parameters, flat.
            inputs: of the first layer.
            uses_shortcut: whether the shortcut counts, if there is one.
        """
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
        self, values: torch.Tensor, made: NetPass, score_grads: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The gradients of all parameters, flat, and those of the inputs.

        Args:
            values: as in `forward`.
            made: what it has given.
            score_grads: of its scores.
        """
        layers, shortcut = self._split(values)
        output_grads, grads = score_grads[:, None], []
        for (weight, _), inputs in zip(layers[::-1], made.inputs[::-1], strict=True):
            grads += [output_grads.sum(dim=0), output_grads.T @ inputs]
            output_grads = output_grads @ weight
            if inputs is not made.inputs[0]:
                output_grads = output_grads * (1 - inputs.square())
        grads.reverse()
        input_grads = output_grads
        if shortcut is not None:
            share = float(made.uses_shortcut)
            grads.append(share * score_grads[None] @ made.inputs[0])
            input_grads = input_grads + share * score_grads[:, None] * shortcut
        return torch.cat([grad.flatten() for grad in grads]), input_grads

    def _split(
        self, values: torch.Tensor
    ) -> tuple[list[tuple[torch.Tensor, torch.Tensor]], torch.Tensor | None]:
        """Weight and bias of each layer, and the weight of the shortcut."""
        sizes = [shape.numel() for shape in self._shapes]
        params = [
            part.view(shape) for part, shape in zip(values.split(sizes), self._shapes, strict=True)
        ]
        ends = range(0, 2 * self._num_layers, 2)
        layers = [(params[place], params[place + 1]) for place in ends]
        return layers, params[-1] if self._has_shortcut else None
