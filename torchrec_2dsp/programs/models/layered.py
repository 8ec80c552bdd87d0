"""`Layered`: what a wrapper of the dense part has to know of a model's layers."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor.parallel import ParallelStyle, RowwiseParallel

from torchrec_2dsp.cost.dense.layers import DenseLayers, LayerWork
from torchrec_2dsp.dense.layer_stack import LayerStack
from torchrec_2dsp.dense.pipelined.measure import LayerTime, measure_layers
from torchrec_2dsp.errors import ConfigError

Sample = tuple[torch.Tensor, Sequence[torch.Tensor]]
"""Inputs and targets of a `LayerStack`."""

_SMALLER = 4
"""How many times smaller the second batch is on which layers are measured."""


@dataclass(frozen=True, kw_only=True)
class Layered:
    """The layers of a model that its ranks may share; a model without any has an empty one."""

    stack: LayerStack | None = None
    """The layers."""

    name: str = ""
    """The name that they have in the model."""

    units: tuple[type[nn.Module], ...] = ()
    """The modules whose parameters are gathered together, if each rank holds a share."""

    tensor_plan: Mapping[str, ParallelStyle] = field(default_factory=dict)
    """How layers are split over ranks, by the names that modules have in the model."""

    sample: Callable[[int], Sample] | None = None
    """Makes so many samples, of which nothing but the sizes matters."""

    def work(
        self, batch_size: int, world: dist.ProcessGroup, *, state_per_weight: float
    ) -> DenseLayers:
        """Measure all layers on this machine, while the other ranks do the same.

        Args:
            batch_size: samples per rank.
            world: all ranks, of whose times the means count.
            state_per_weight: numbers of optimizer state for each weight.

        Raises:
            ConfigError: the model has no layers that could be shared.

        Collectives:
            One all-reduce of four numbers for each layer.
        """
        if self.stack is None or self.sample is None:
            raise ConfigError(
                "the model has no LayerStack, so its dense part can't be planned; use another "
                "kind of dense part, or the sequence model"
            )
        small = max(1, batch_size // _SMALLER)
        inputs, targets = self.sample(batch_size)
        few = [tensor[:small] for tensor in (inputs, *targets)]
        timed = [
            measure_layers(self.stack, inputs, targets),
            measure_layers(self.stack, few[0], few[1:]),
        ]
        seconds = torch.tensor(
            [[(t.forward_seconds, t.backward_seconds) for t in times] for times in timed],
            dtype=torch.float64,
        )
        dist.all_reduce(seconds, group=world)
        seconds /= dist.get_world_size(world)
        layers = [
            self._layer(number, seconds[:, number], (batch_size, small), timed[0][number])
            for number in range(len(self.stack.layers))
        ]
        return DenseLayers(
            layers=tuple(layers),
            input_bytes=inputs[0].nbytes,
            target_bytes=sum(target[0].nbytes for target in targets),
            state_per_weight=state_per_weight,
        )

    def _layer(
        self, number: int, seconds: torch.Tensor, sizes: tuple[int, int], timed: LayerTime
    ) -> LayerWork:
        """The work with a layer, whose times are a constant and so much for each sample."""
        assert self.stack is not None
        layer, (many, few) = self.stack.layers[number], sizes
        total = seconds.sum(dim=1)
        per_sample = float(total[0] - total[1]) / (many - few) if many > few else 0.0
        # A second batch that took longer by chance: then all belongs to the samples.
        per_sample = (
            per_sample if 0 < per_sample < float(total[0]) / many else float(total[0]) / many
        )
        forward_share = float(seconds[0, 0] / total[0]) if total[0] else 0.0
        return LayerWork(
            name=f"{self.name}.layers.{number}",
            forward_s=per_sample * forward_share,
            backward_s=per_sample * (1 - forward_share),
            call_s=float(total[0]) - per_sample * many,
            parameter_bytes=float(sum(param.nbytes for param in layer.parameters())),
            output_bytes=timed.output_bytes / many,
            kept_bytes=self._kept_bytes(number),
            sums=self._sums(number),
        )

    def _sums(self, number: int) -> int:
        """How many modules of a layer give sums if it is split."""
        assert self.stack is not None
        prefix = f"{self.name}.layers.{number}"
        names = [f"{prefix}.{name}" for name, _ in self.stack.layers[number].named_modules()]
        return sum(
            isinstance(style, RowwiseParallel) and fnmatchcase(name, pattern)
            for pattern, style in self.tensor_plan.items()
            for name in names
        )

    def _kept_bytes(self, number: int) -> float:
        """Bytes that a layer keeps of one sample for its backward."""
        assert self.stack is not None
        assert self.sample is not None
        given, _ = self.sample(1)
        params = {param.data_ptr() for param in self.stack.parameters()}
        sizes: dict[int, int] = {}

        def note(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.data_ptr() not in params:
                sizes[tensor.data_ptr()] = tensor.nbytes
            return tensor

        with torch.no_grad():
            for layer in self.stack.layers[:number]:
                given = layer(given)
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            self.stack.layers[number](given.requires_grad_())
        return float(sum(sizes.values()))
