"""The wrapper of a model's dense part, by its config or by predictions."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor.parallel import ParallelStyle, RowwiseParallel
from torchrec.distributed.model_parallel import DataParallelWrapper
from torchrec.optim.keyed import KeyedOptimizer

from torchrec_2dsp._compat.ddp import DefaultDataParallelWrapper, data_parallel_wrapper
from torchrec_2dsp._compat.torchrec import get_local_size
from torchrec_2dsp.comms.alarm import agreeing
from torchrec_2dsp.comms.groups import world_group
from torchrec_2dsp.cost.calibration import Calibration
from torchrec_2dsp.cost.dense import DenseLayers, LayerWork
from torchrec_2dsp.cost.measuring.clock import group_device
from torchrec_2dsp.dense.delayed_dense import DelayedDense
from torchrec_2dsp.dense.gradient_sums import GradientReport
from torchrec_2dsp.dense.hooked_data_parallel import HookedDataParallel
from torchrec_2dsp.dense.local_dense import LocalDense
from torchrec_2dsp.dense.pipelined.layer_stack import LayerStack, LayerTime, measure_layers
from torchrec_2dsp.dense.pipelined.pipelined_dense import PipelinedDense
from torchrec_2dsp.dense.sharded_dense import FullyShardedDense, TensorParallelDense
from torchrec_2dsp.dense.thresholded_data_parallel import ThresholdedDataParallel
from torchrec_2dsp.errors import ConfigError
from torchrec_2dsp.plan.dense_plan import DenseKind, DensePlan
from torchrec_2dsp.planner.dense_search import DenseChoices, search_dense
from torchrec_2dsp.programs.config.dense import (
    DDPConfig,
    DelayedConfig,
    DenseKinds,
    FP16Config,
    FullyShardedConfig,
    LocalConfig,
    PipelinedConfig,
    PlannedDenseConfig,
    PowerSGDConfig,
    TensorParallelConfig,
    ThresholdedConfig,
)

Sample = tuple[torch.Tensor, Sequence[torch.Tensor]]
"""A `LayerStack`'s inputs and targets."""

_SMALLER = 4
"""The factor between the two batch sizes on which layers are measured."""


@dataclass(frozen=True, kw_only=True)
class Layered:
    """The layers that a model's ranks may share."""

    stack: LayerStack
    name: str
    """The stack's name in the model."""

    units: tuple[type[nn.Module], ...]
    """Modules whose parameters are gathered together when sharded."""

    tensor_plan: Mapping[str, ParallelStyle]
    """Tensor-parallel styles, by module names in the model."""

    sample: Callable[[int], Sample]
    """Makes samples that have the right sizes."""

    def work(
        self, batch_size: int, world: dist.ProcessGroup, *, state_per_weight: float
    ) -> DenseLayers:
        """Measure all layers on this rank's device, where they stay, while other ranks do the same.

        Collectives:
            One all-reduce per layer, with four numbers.
        """
        device = group_device(world)
        self.stack.to(device)
        small = max(1, batch_size // _SMALLER)
        inputs, targets = self._sample(batch_size)
        few = [tensor[:small] for tensor in (inputs, *targets)]
        timed = [
            measure_layers(self.stack, inputs, targets),
            measure_layers(self.stack, few[0], few[1:]),
        ]
        seconds = torch.tensor(
            [[(t.forward_seconds, t.backward_seconds) for t in times] for times in timed],
            dtype=torch.float64,
            device=device,
        )
        dist.all_reduce(seconds, group=world)
        seconds = seconds.cpu() / dist.get_world_size(world)
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

    def _sample(self, num_samples: int) -> Sample:
        """Make samples on the layers' device."""
        inputs, targets = self.sample(num_samples)
        device = next(self.stack.parameters(), inputs).device
        return inputs.to(device), [target.to(device) for target in targets]

    def _layer(
        self, number: int, seconds: torch.Tensor, sizes: tuple[int, int], timed: LayerTime
    ) -> LayerWork:
        """Fit a layer's times by a constant and a term per sample."""
        layer, (many, few) = self.stack.layers[number], sizes
        total = seconds.sum(dim=1)
        per_sample = float(total[0] - total[1]) / (many - few) if many > few else 0.0
        # Where noise makes the fit implausible, all time belongs to the samples.
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
        """Count a layer's modules that end in a sum if it is split."""
        prefix = f"{self.name}.layers.{number}"
        names = [f"{prefix}.{name}" for name, _ in self.stack.layers[number].named_modules()]
        return sum(
            isinstance(style, RowwiseParallel) and fnmatchcase(name, pattern)
            for pattern, style in self.tensor_plan.items()
            for name in names
        )

    def _kept_bytes(self, number: int) -> float:
        """Return the bytes that a layer keeps per sample for its backward."""
        given, _ = self._sample(1)
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


def dense_wrapper(
    config: DenseKinds, layered: Layered | None, *, static_graph: bool = True
) -> DataParallelWrapper | None:
    """Build the wrapper; `None` for TorchRec's own, which is DDP.

    Raises:
        ConfigError: the model has no layers to share.
    """
    match config:
        case DDPConfig():
            return None if static_graph else DefaultDataParallelWrapper(static_graph=False)
        case FP16Config():
            return HookedDataParallel(config.kind, static_graph=static_graph)
        case PowerSGDConfig():
            return HookedDataParallel(
                config.kind, rank=config.rank, warm_up=config.warm_up, static_graph=static_graph
            )
        case ThresholdedConfig():
            return ThresholdedDataParallel(
                config.density,
                values=config.values,
                route=config.route,
                preconditioner=config.preconditioner,
                warm_up=config.warm_up,
                static_graph=static_graph,
            )
        case DelayedConfig():
            return DelayedDense(warm_up=config.warm_up)
        case FullyShardedConfig():
            units = layered.units if layered else ()
            return FullyShardedDense(units, num_copies=config.num_copies)
        case LocalConfig():
            return LocalDense(density=config.meeting_density, values=config.values)
        case TensorParallelConfig():
            plan = _layers(config.kind, layered).tensor_plan
            return TensorParallelDense(plan, tp=config.tp, num_copies=config.num_copies)
        case PipelinedConfig():
            layered = _layers(config.kind, layered)
            check_one_length(config.kind, layered)
            return PipelinedDense(
                config.num_stages,
                num_micro_batches=config.num_micro_batches,
                schedule=config.schedule,
                reduction="sum",
                plan=layered.tensor_plan if config.tp > 1 else None,
                tp=config.tp,
                layout=config.layout,
                fully_shard=config.fully_shard,
            )
        case PlannedDenseConfig():
            raise AssertionError("dense_part plans it")


def _layers(kind: str, layered: Layered | None) -> Layered:
    if layered is None:
        raise ConfigError(
            f'dense.kind="{kind}" is for models with a LayerStack, such as model.kind="sequence"'
        )
    return layered


def check_one_length(kind: str, layered: Layered) -> None:
    """Refuse sequences with several lengths, which no pipeline takes."""
    if getattr(layered.stack, "num_chunks", 1) > 1:
        raise ConfigError(
            f'dense.kind="{kind}" needs sequences of one length, and model.length_chunks > 1 '
            "fills them up to several; set model.length_chunks=1, or use another kind"
        )


def autocast_(model: nn.Module, config: DenseKinds, device: torch.device) -> None:
    """Let a model's forward compute in the dense part's `autocast` type while it trains, in place.

    Lookups have no operator that autocast changes, and tables keep their types.
    """
    if getattr(config, "autocast", "fp32") == "fp32":
        return
    forward = model.forward

    def run(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast(device.type, torch.bfloat16, enabled=model.training):
            return forward(*args, **kwargs)

    # Pipelines' tracers read the class, and the parts that they look for stay unchanged.
    model.forward = run


def thresholded_gradients(model: nn.Module) -> ThresholdedDataParallel | None:
    """Return the model's wrapper, if it thresholds dense gradients."""
    wrapper = data_parallel_wrapper(model)
    return wrapper if isinstance(wrapper, ThresholdedDataParallel) else None


def apply_late_gradients(model: nn.Module, optimizer: KeyedOptimizer) -> bool:
    """Apply the dense gradients in flight, if the wrapper delays them; return whether any were.

    Collectives:
        Same as `DelayedDense.flush`.
    """
    wrapper = data_parallel_wrapper(model)
    return isinstance(wrapper, DelayedDense) and wrapper.flush(optimizer)


def dense_total(model: nn.Module) -> GradientReport:
    """Return the report on a model's thresholded dense gradients; empty if it has none."""
    wrapper = thresholded_gradients(model)
    return wrapper.total if wrapper else GradientReport()


@dataclass(frozen=True)
class DensePart:
    """The runner of a model's dense part."""

    wrapper: DataParallelWrapper | None
    """`None` for TorchRec's own, which is DDP."""

    choices: DenseChoices | None = None
    """The candidates for a planned one, equal on all ranks."""


def dense_part(
    config: DenseKinds,
    layered: Layered | None,
    *,
    calibration: str,
    batch_size: int,
    state_per_weight: float,
    static_graph: bool = True,
) -> DensePart:
    """Build the dense part's runner; for a planned one, measure the layers on these ranks.

    Raises:
        ConfigError: the model can't run this way.

    Collectives:
        For a planned one, those in `Layered.work`, and an agreement on the fastest way.
    """
    if config.kind != "planned":
        return DensePart(dense_wrapper(config, layered, static_graph=static_graph))
    layered = _layers(config.kind, layered)
    check_one_length(config.kind, layered)
    world = world_group()
    world_size = dist.get_world_size(world)
    work = layered.work(batch_size, world, state_per_weight=state_per_weight)
    with agreeing(world) as facts:
        choices = search_dense(
            work,
            calibration=Calibration.load(calibration),
            world_size=world_size,
            local_world_size=get_local_size(world_size),
            batch_size=batch_size,
        )
        facts["the plan of the dense part"] = str(choices.best.plan)
    plan = choices.best.plan
    return DensePart(wrapper_of(plan, layered, static_graph=static_graph), choices)


def wrapper_of(
    plan: DensePlan, layered: Layered, *, static_graph: bool = True
) -> DataParallelWrapper | None:
    """Build a plan's wrapper, as `dense_wrapper` does."""
    mesh = plan.mesh
    if plan.kind is DenseKind.DDP:
        return dense_wrapper(DDPConfig(), layered, static_graph=static_graph)
    if plan.kind is DenseKind.FULLY_SHARDED:
        return FullyShardedDense(layered.units, num_copies=plan.num_copies)
    if plan.kind is DenseKind.TENSOR_PARALLEL:
        return TensorParallelDense(layered.tensor_plan, tp=mesh.tp, num_copies=plan.num_copies)
    return PipelinedDense(
        mesh.pp,
        num_micro_batches=plan.num_micro_batches,
        cuts=plan.cuts,
        reduction="sum",
        plan=layered.tensor_plan if mesh.tp > 1 else None,
        tp=mesh.tp,
        layout=mesh.layout,
        fully_shard=plan.fully_shard,
    )
