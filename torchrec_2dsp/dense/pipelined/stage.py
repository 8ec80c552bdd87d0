"""`LayerStage`: some layers of a `LayerStack`, and what their backward needs of micro-batches."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from torchrec_2dsp._compat.pipelining import input_gradients, weight_gradients
from torchrec_2dsp.errors import UnsupportedError


@dataclass
class _Graph:
    """What the forward of a micro-batch leaves for the backward."""

    leaves: list[torch.Tensor]
    """The input, then the targets that need gradients."""

    output: torch.Tensor
    """What came out, with its graph."""

    rest: Any = None
    """What the weights' part of a split backward needs."""


class LayerStage:
    """Runs layers on one micro-batch after the other, forward and backward.

    Gradients of weights are added up in the parameters' ``grad``, without running hooks on them.
    """

    def __init__(
        self,
        name: str,
        layers: Sequence[nn.Module],
        loss: nn.Module | None,
        *,
        splits_backward: bool,
    ) -> None:
        """
        Args:
            name: for errors.
            layers: called one after the other.
            loss: of the last stage, called with the output and the targets.
            splits_backward: whether gradients of weights are computed later than those of inputs.
        """
        self.name = name
        """The name, for errors."""
        self.layers, self.loss = list(layers), loss
        modules = [*self.layers, *([] if loss is None else [loss])]
        self.modules = nn.ModuleList(modules)
        """The layers, and the loss of the last stage."""
        self.params: list[nn.Parameter] = []
        """The parameters that are trained."""
        self.take_params()
        self.forward_seconds = [0.0] * len(self.layers)
        """How long the forwards of each layer took in training, the loss not counted."""
        self._splits_backward = splits_backward
        self._graphs: dict[int, _Graph] = {}

    def take_params(self) -> None:
        """Look up the parameters anew, after the modules were given others."""
        self.params = [param for param in self.modules.parameters() if param.requires_grad]

    def forward(
        self, micro_batch: int, given: torch.Tensor, targets: Sequence[torch.Tensor] | None = None
    ) -> torch.Tensor:
        """Run a micro-batch; keep its graph where gradients are enabled.

        Args:
            micro_batch: the number by which the backward finds it.
            given: the input, a leaf.
            targets: of the last stage, leaves; without them the loss isn't computed.
        """
        output = given
        started = time.perf_counter()
        for number, layer in enumerate(self.layers):
            output = layer(output)
            ended = time.perf_counter()
            if torch.is_grad_enabled():
                self.forward_seconds[number] += ended - started
            started = ended
        if targets is not None and self.loss is not None:
            output = self.loss(output, *targets)
            self._check_losses(output, given.shape[0])
        else:
            self._check_output(output, given.shape[0])
        if torch.is_grad_enabled():
            # The split backward cuts outputs off from their graphs, which views don't allow.
            graph_output = output.clone() if self._splits_backward else output
            leaves = [leaf for leaf in (given, *(targets or ())) if leaf.requires_grad]
            self._graphs[micro_batch] = _Graph(leaves, graph_output)
        return output.detach()

    def backward(self, micro_batch: int, gradient: torch.Tensor) -> list[torch.Tensor]:
        """The gradients of a micro-batch's input and targets; those of weights are added up."""
        graph = self._graphs.pop(micro_batch)
        return self._whole_backward(graph, gradient)

    def input_gradient(self, micro_batch: int, gradient: torch.Tensor) -> list[torch.Tensor]:
        """The gradients of a micro-batch's input and targets alone; `weight_gradient` follows."""
        graph = self._graphs[micro_batch]
        if not graph.leaves or not graph.output.requires_grad:
            return self._whole_backward(graph, gradient)
        graph.rest = input_gradients(graph.output, gradient, graph.leaves, self.params)
        return [_gradient_of(leaf) for leaf in graph.leaves]

    def weight_gradient(self, micro_batch: int) -> None:
        """Add up the gradients of the weights, after `input_gradient`."""
        graph = self._graphs.pop(micro_batch)
        if graph.rest is not None:
            weight_gradients(self.params, graph.rest)

    def forget(self) -> None:
        """Drop all graphs, after an error."""
        self._graphs.clear()

    def _whole_backward(self, graph: _Graph, gradient: torch.Tensor) -> list[torch.Tensor]:
        if not graph.output.requires_grad:
            return [torch.zeros_like(leaf) for leaf in graph.leaves]
        gradients = torch.autograd.grad(
            graph.output, [*graph.leaves, *self.params], gradient, allow_unused=True
        )
        num_leaves = len(graph.leaves)
        for param, grad in zip(self.params, gradients[num_leaves:], strict=True):
            if grad is not None:
                param.grad = grad if param.grad is None else param.grad + grad
        return [
            torch.zeros_like(leaf) if grad is None else grad
            for leaf, grad in zip(graph.leaves, gradients, strict=False)
        ]

    def _check_output(self, output: Any, num_samples: int) -> None:
        if (
            isinstance(output, torch.Tensor)
            and output.is_floating_point()
            and output.shape[:1] == (num_samples,)
        ):
            return
        raise UnsupportedError(
            f"{self.name} gives {_described(output)} for {num_samples} samples; let layers give "
            "one tensor of floating-point numbers, whose first dimension is the batch"
        )

    def _check_losses(self, losses: Any, num_samples: int) -> None:
        if isinstance(losses, torch.Tensor) and losses.shape == (num_samples,):
            return
        raise UnsupportedError(
            f"the loss of {self.name} gives {_described(losses)} for {num_samples} samples; let it "
            "give one number for each sample"
        )


def _gradient_of(leaf: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad


def _described(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return (
            f"a tensor of {str(value.dtype).removeprefix('torch.')} of shape {tuple(value.shape)}"
        )
    return f"a {type(value).__name__}"
