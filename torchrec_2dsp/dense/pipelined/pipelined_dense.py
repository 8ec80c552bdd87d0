"""`PipelinedDense`: the wrapper that cuts a model's layer stacks over ranks."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor.parallel import ParallelStyle
from torchrec.distributed.types import ShardingEnv

from torchrec_2dsp._compat.ddp import (
    DataParallelWrapper,
    DistributedModelParallel,
    check_embeddings,
    wrapped_module,
)
from torchrec_2dsp._compat.torchrec import get_local_size
from torchrec_2dsp.comms.alarm import agreeing
from torchrec_2dsp.comms.groups import own_mesh
from torchrec_2dsp.dense.dense_parts import (
    broadcast_weights,
    check_unhooked,
    check_untied,
    dense_parts,
    group_of,
    refuse_later_changes,
    refuse_replaced,
    styles_by_part,
)
from torchrec_2dsp.dense.pipelined.cut_stack import CutStack, PipelineTimes, gather_times
from torchrec_2dsp.dense.pipelined.held_layers import check_stages_shareable, local, square_sum
from torchrec_2dsp.dense.pipelined.layer_stack import (
    LayerStack,
    MeasuredCuts,
    agreed_cuts,
    layers_of_stages,
)
from torchrec_2dsp.dense.pipelined.links import PipelineGroups
from torchrec_2dsp.dense.pipelined.moving_layers import (
    check_can_move,
    check_optimizer,
    sort_groups,
)
from torchrec_2dsp.dense.pipelined.pipeline import Reduction
from torchrec_2dsp.dense.pipelined.schedule import Schedule
from torchrec_2dsp.dense.sharded_parts import (
    Unit,
    check_splittable,
    check_units,
    shard_units,
    units_of,
)
from torchrec_2dsp.dense.thresholded_data_parallel import ThresholdedDataParallel
from torchrec_2dsp.errors import ConfigError, check_choice
from torchrec_2dsp.mesh import DenseMesh, RankLayout

_WIRES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


class PipelinedDense(DataParallelWrapper):
    """Runs the layers of each `LayerStack` in a model as a pipeline over ranks.

    Each rank looks up its own batch. A pipeline's ranks send their inputs to the first stage, and
    their targets to the last one; each gets its own samples' losses and input gradients back.
    Tables get one backward and one update for the whole batch, for any schedule: training
    equals DDP's. FSDP2 shards the rest of the dense part over all ranks.

    Args:
        num_stages: the number of parts that the layers are cut into.
        num_micro_batches: the number of parts that the batches of a pipeline's ranks are cut into
            together; the more there are, the less time ranks wait.
        schedule: the ranks' work order: "GPipe", "1F1B", "Interleaved1F1B",
            "InterleavedZeroBubble", "ZBVZeroBubble" or "DualPipeV".
        stages_per_rank: the number of stages that a rank runs; a pipeline has ``num_stages /
            stages_per_rank`` ranks, times ``tp``.
        cuts: each stage's first layer, without the first stage's; "even" for equally many layers;
            or by measured times.
        reduction: the program's reduction of a rank's losses, "mean" or "sum", times one number for
            all ranks. It matters if ranks have different numbers of samples.
        values: wire format between stages: "fp32" for no change, "bf16" or "fp16".
        plan: torch's styles for modules split inside tensor-parallel groups, as in
            `TensorParallelDense`.
        tp: the number of ranks that compute a layer together, on one host.
        layout: contiguous pipelines have neighbouring ranks; strided ones span hosts, so that
            gradients stay inside hosts.
        fully_shard: True if each pipeline keeps a shard of each layer, with its gradient and
            moments, instead of a copy; shards are gathered once per batch.
        gradients: an unused `ThresholdedDataParallel`, if pipelines with copies of the layers
            send each other only its elements; it keeps the counts and residuals.

    Example::

        class Tower(nn.Module):
            def __init__(self, ...):
                self.stack = tdsp.LayerStack(blocks, nn.BCEWithLogitsLoss(reduction="none"))

            def forward(self, features, labels):
                return self.stack(self.joined(self.tables(features)), labels).mean()

        dense = tdsp.PipelinedDense(4, num_micro_batches=16)
    """

    state_kind = ThresholdedDataParallel.__name__
    """The wrapper whose states this one has and restores."""

    def __init__(
        self,
        num_stages: int,
        *,
        num_micro_batches: int,
        schedule: str = "1F1B",
        stages_per_rank: int = 1,
        cuts: Sequence[int] | MeasuredCuts | Literal["even"] = "even",
        reduction: Reduction = "mean",
        values: str = "fp32",
        plan: Mapping[str, ParallelStyle] | None = None,
        tp: int = 1,
        layout: RankLayout = RankLayout.CONTIGUOUS,
        fully_shard: bool = False,
        gradients: ThresholdedDataParallel | None = None,
    ) -> None:
        self._schedule = Schedule(schedule, num_stages, num_micro_batches, stages_per_rank)
        check_choice("reduction", reduction, get_args(Reduction), owner="PipelinedDense")
        check_choice("values", values, _WIRES, owner="PipelinedDense")
        if bool(plan) != (tp != 1):
            raise ConfigError(
                f"PipelinedDense(tp={tp}) with a plan of {len(plan or {})} modules splits nothing; "
                "give both, or neither"
            )
        if gradients is not None and (fully_shard or tp > 1):
            raise ConfigError(
                "PipelinedDense(gradients=...) sends elements of whole layers' gradients, and with "
                "fully_shard=True or tp > 1 ranks have parts of them; leave one of the two out"
            )
        self._gradients = gradients
        self._cuts: Sequence[int] | MeasuredCuts | Literal["even"] = cuts
        self._plan, self._tp = dict(plan or {}), tp
        self._reduction: Reduction = reduction
        self._layout, self._fully_shard = layout, fully_shard
        self._values = values
        self._groups: PipelineGroups | None = None
        self._model: nn.Module | None = None
        self._stacks: dict[str, CutStack] = {}
        self._others: list[nn.Module] = []

    @property
    def cuts(self) -> dict[str, tuple[int, ...]]:
        """Each stage's first layer, without the first stage's, by `LayerStack` name."""
        return {name: stack.cuts for name, stack in self._stacks.items()}

    def wrap(self, dmp: DistributedModelParallel, env: ShardingEnv, device: torch.device) -> None:
        """Cut the layers, and shard the rest of the dense part; TorchRec calls it.

        Collectives:
            Agreements on the settings, process groups, and a broadcast per dense parameter and
            buffer; for `MeasuredCuts` an all-reduce of the times.
        """
        group = group_of(env)
        model = wrapped_module(dmp).to(device)
        before = dict(model.named_parameters())
        with agreeing(group) as facts:
            if self._groups is not None:
                raise ConfigError("this PipelinedDense has a model already; make another one")
            stacks, others = self._checked_parts(model)
            num_ranks = dist.get_world_size(group)
            mesh = DenseMesh.for_world(
                num_ranks,
                tp=self._tp,
                pp=self._schedule.num_ranks,
                layout=self._layout,
                local_world_size=get_local_size(num_ranks),
            )
            styles = styles_by_part(
                self._plan,
                stacks,
                "PipelinedDense: no module of a LayerStack is called {}; the model has the stacks "
                f"{', '.join(stacks)}",
                inside=True,
            )
            for name, stack in stacks.items() if mesh.tp > 1 else ():
                check_splittable(name, stack, styles.get(name, {}), "PipelinedDense")
            facts["the settings of PipelinedDense"] = self._settings()
        for part in (*stacks.values(), *(unit.module for unit in others)):
            broadcast_weights(part, group)
        cuts = agreed_cuts(self._cuts, stacks, self._schedule.num_stages, group)
        with agreeing(group):
            layers = {
                name: layers_of_stages(name, stack, cuts[name], model)
                for name, stack in stacks.items()
            }
            for name, stack in stacks.items() if self._fully_shard else ():
                check_stages_shareable(layers[name], stack)
        self._model, self._groups = model, PipelineGroups(mesh, group, device)
        is_sharded = self._fully_shard and mesh.dp > 1
        layers_mesh = self._groups.layers_mesh() if mesh.tp > 1 or is_sharded else None
        for name, stack in stacks.items():
            self._stacks[name] = CutStack(
                name,
                stack,
                layers[name],
                self._schedule,
                self._groups,
                reduction=self._reduction,
                wire=_WIRES[self._values],
                gradients=self._gradients,
                plan=styles.get(name, {}),
                mesh=layers_mesh,
                is_sharded=is_sharded,
            )
        ranks = torch.tensor(dist.get_process_group_ranks(group))
        everyone = own_mesh(ranks, device.type, ("dp_pp_tp",))
        self._others = [unit.module for unit in others]
        shard_units(others, everyone, "PipelinedDense")
        refuse_later_changes(model, "PipelinedDense", stacks.values())
        refuse_replaced(before, model, "PipelinedDense")

    def _checked_parts(self, model: nn.Module) -> tuple[dict[str, LayerStack], list[Unit]]:
        """Return the stacks, and the other dense units, unless they can't be run this way."""
        check_embeddings(model, "PipelinedDense")
        parts = dict(dense_parts(model, "PipelinedDense", apart=(LayerStack,)))
        stacks = {name: part for name, part in parts.items() if isinstance(part, LayerStack)}
        if not stacks:
            raise ConfigError(
                "PipelinedDense found no LayerStack with parameters in the model; put the "
                "layers that are to be cut, and their loss, into a tdsp.LayerStack"
            )
        if self._gradients is not None:
            self._gradients.check_free()
            if len(stacks) > 1:
                raise ConfigError(
                    f"PipelinedDense(gradients=...) is for one LayerStack, and the model has "
                    f"{len(stacks)}: {', '.join(stacks)}; leave it out"
                )
        others = {name: part for name, part in parts.items() if name not in stacks}
        check_untied(others, "PipelinedDense")
        for name, part in parts.items():
            check_unhooked(part.named_parameters(name), "PipelinedDense")
        units = [unit for name, part in others.items() for unit in units_of(name, part)]
        check_units(units, "PipelinedDense", "modules of their own")
        return stacks, units

    def _settings(self) -> str:
        styles = {name: type(style).__name__ for name, style in self._plan.items()}
        cuts = "measured" if isinstance(self._cuts, MeasuredCuts) else self._cuts
        return (
            f"{self._schedule}, cuts={cuts}, reduction={self._reduction}, values={self._values}, "
            f"{styles}, tp={self._tp}, layout={self._layout.value}, "
            f"fully_shard={self._fully_shard}, "
            f"gradients={self._gradients and self._gradients.settings}"
        )

    def recut(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        cuts: Sequence[int] | None = None,
        least_gain: float = 0.05,
    ) -> bool:
        """Recut the layers, and move them to their new ranks; call it on all ranks.

        Weights, buffers and optimizer state move along, so training goes on as if the layers had
        always been cut this way. Call it between two steps, after gradients are cleared. From then
        on this rank has other dense parameters, in the model and in the optimizer.

        Args:
            optimizer: the optimizer of this rank's dense parameters, torch's or a
                `KeyedOptimizerWrapper` of it, with equally many groups on all ranks.
            cuts: each stage's first layer, without the first stage's, for each `LayerStack`; by
                default, on CPUs, chosen by the layers' times since the last cuts.
            least_gain: the share of its time that the slowest stage must save by chosen cuts.

        Returns:
            True if layers have moved.

        Collectives:
            For chosen cuts an object all-gather; agreements; a send and a receive of objects
            for each layer that moves.
        """
        groups, model = self._model_groups(), self._model
        assert model is not None
        with agreeing(groups.everyone):
            check_optimizer(optimizer)
            check_can_move(groups.mesh, is_sharded=self._fully_shard)
            if cuts is None and groups.device.type != "cpu":
                raise ConfigError(
                    "recut() chooses cuts by the layers' times, and on a GPU only their launches "
                    "are timed; give it cuts"
                )
            if self._gradients is not None:
                raise ConfigError(
                    "recut() can't move what layers with thresholded gradients haven't sent yet; "
                    "make PipelinedDense without gradients=..., or choose cuts when it is made"
                )
        chosen = {
            name: stack.better_cuts(least_gain) if cuts is None else cuts
            for name, stack in self._stacks.items()
        }
        # Nothing moves before all ranks can move everything.
        with agreeing(groups.everyone) as facts:
            facts["the choice of cuts"] = str([[*of_stack] for of_stack in chosen.values()])
            facts["the number of the optimizer's groups"] = str(len(optimizer.param_groups))
            recuts = [
                stack.prepare(chosen[name], optimizer, model)
                for name, stack in self._stacks.items()
            ]
        have_moved = [recut() for recut in recuts]
        sort_groups(optimizer, model)
        return any(have_moved)

    def stage_times(self) -> dict[str, PipelineTimes]:
        """Return each stage's busy time per batch, by `LayerStack` name, on all ranks.

        Times only measure the work on CPUs: accelerators run asynchronously.

        Collectives:
            An object all-gather over all ranks.
        """
        groups = self._model_groups()
        return {
            name: gather_times(stack.pipeline.busy, self._schedule.num_stages, groups)
            for name, stack in self._stacks.items()
        }

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> float:
        """Scale all dense gradients so that their norm is at most ``max_norm``; return the norm.

        torch's function of this name sees one rank's layers, and each rank would scale by another
        factor. Call it on all ranks, after the backward.

        Args:
            max_norm: the largest Euclidean norm over all dense gradients.

        Collectives:
            An 8-byte all-reduce over all ranks, waited for.
        """
        groups = self._model_groups()
        gradients = [
            local(param.grad)
            for part in self._others
            for param in part.parameters()
            if param.grad is not None
        ]
        square = torch.zeros((), dtype=torch.float64, device=groups.device)
        for gradient in gradients:
            square += square_sum(gradient)
        for stack in self._stacks.values():
            square += stack.pipeline.layers.square_norm()
            gradients += stack.pipeline.layers.gradients()
        dist.all_reduce(square, group=groups.everyone)
        norm = float(square.sqrt())
        if norm > max_norm:
            for gradient in gradients:
                gradient.mul_(max_norm / norm)
        return norm

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this rank's thresholded gradients; a `TrainState` stores it."""
        return self._gradients.state_dict() if self._gradients else {}

    def check_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raise if a state has residuals of layers that this rank doesn't have."""
        (self._gradients or ThresholdedDataParallel()).check_state_dict(state)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore this rank's state."""
        self.load_rank_states([state])

    def load_rank_states(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Restore several ranks' summed residuals; there may be none."""
        if self._gradients:
            self._gradients.load_rank_states(states)

    def _model_groups(self) -> PipelineGroups:
        if self._groups is None:
            raise ConfigError(
                "PipelinedDense has no model yet; give it to one as data_parallel_wrapper"
            )
        return self._groups
