"""`move_layers`: move layers between ranks, together with their optimizer state."""

import io
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizer

from torchrec_2dsp.dense.pipelined.layer_stack import LayerElsewhere, LayerStack
from torchrec_2dsp.dense.pipelined.links import PipelineGroups
from torchrec_2dsp.dense.pipelined.schedule import Schedule
from torchrec_2dsp.errors import ConfigError, UnsupportedError
from torchrec_2dsp.mesh import DenseMesh


@dataclass(frozen=True)
class Move:
    """A layer's move from one pipeline position to another."""

    layer: int
    """The layer's number in its `LayerStack`."""

    source: int
    target: int


def moves_between(
    before: Sequence[int], after: Sequence[int], num_layers: int, schedule: Schedule
) -> list[Move]:
    """List the moves from one set of cuts to another.

    Example:
        >>> from torchrec_2dsp.dense.pipelined.moving_layers import moves_between
        >>> from torchrec_2dsp.dense.pipelined.schedule import Schedule
        >>> moves_between([2], [3], 4, Schedule("1F1B", 2, num_micro_batches=2))
        [Move(layer=2, source=1, target=0)]
    """
    positions = [
        [schedule.rank_of(sum(layer >= cut for cut in cuts)) for layer in range(num_layers)]
        for cuts in (before, after)
    ]
    return [
        Move(layer, source, target)
        for layer, (source, target) in enumerate(zip(*positions, strict=True))
        if source != target
    ]


@dataclass(frozen=True)
class _PackedLayer:
    """A layer packed for sending, with each parameter's place in the optimizer."""

    layer: nn.Module
    groups: list[int | None]
    """Each parameter's optimizer group."""
    names: list[str | None]
    """Each parameter's name in a keyed optimizer."""
    states: list[dict[str, Any]]


def check_can_move(mesh: DenseMesh, *, is_sharded: bool) -> None:
    """Refuse to move layers that are split or sharded over ranks."""
    if mesh.tp > 1:
        parts = f"layers that tp={mesh.tp} ranks compute together"
    elif is_sharded and mesh.dp > 1:
        parts = f"layers of which {mesh.dp} pipelines keep a share each"
    else:
        return
    raise UnsupportedError(
        f"{parts} can't be moved; save a checkpoint, choose other cuts, and load it"
    )


def move_layers(
    stack: LayerStack,
    moves: Sequence[Move],
    packed: Mapping[int, bytes],
    optimizer: torch.optim.Optimizer,
    groups: PipelineGroups,
) -> None:
    """Move layers inside each pipeline, and their places in the optimizers.

    Collectives:
        An object send and receive for each layer.
    """
    for move in moves:
        if move.source == groups.position:
            _drop(stack, move.layer, optimizer)
            target = groups.rank_at(move.target)
            layer = [packed[move.layer]]
            dist.send_object_list(layer, group=groups.agreements, group_dst=target)
        elif move.target == groups.position:
            arrived: list[Any] = [None]
            source = groups.rank_at(move.source)
            dist.recv_object_list(arrived, group=groups.agreements, group_src=source)
            _take(stack, move.layer, _unpacked(arrived[0], groups.device), optimizer)


def check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer whose parameters can't be changed."""
    # It rebuilds its dict of parameters each time.
    if isinstance(optimizer, CombinedOptimizer):
        raise UnsupportedError(
            "recut can't change the parameters of a CombinedOptimizer; give it the "
            "torch.optim optimizer of the dense parameters, or its KeyedOptimizerWrapper"
        )


def sort_groups(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    """Put each group's parameters into the model's order."""
    places = {id(param): place for place, param in enumerate(model.parameters())}
    for group in optimizer.param_groups:
        group["params"].sort(key=lambda param: places.get(id(param), -1))


def packed_layer(
    name: str, stack: LayerStack, number: int, optimizer: torch.optim.Optimizer
) -> bytes:
    """Pack a layer that leaves this rank, with its optimizer state."""
    layer = stack.layers[number]
    params = list(layer.parameters())
    own = {id(param) for param in params}
    others = [*(module for place, module in enumerate(stack.layers) if place != number), stack.loss]
    for other in others:
        if any(id(param) in own for param in other.parameters()):
            raise ConfigError(
                f"layer {number} of {name!r} shares a parameter with another layer, so it can't be "
                "moved; save a checkpoint, choose other cuts, and load it"
            )
    # Zero gradients are left by `zero_grad(set_to_none=False)`.
    if any(param.grad is not None and bool(param.grad.any()) for param in params):
        raise ConfigError(
            f"layer {number} of {name!r} has gradients, which a move would lose; call recut after "
            "optimizer.step() and optimizer.zero_grad()"
        )
    places = {
        id(param): place
        for place, group in enumerate(optimizer.param_groups)
        for param in group["params"]
    }
    names = {id(param): key for key, param in _named_params(optimizer).items()}
    content = _PackedLayer(
        layer,
        [places.get(id(param)) for param in params],
        [names.get(id(param)) for param in params],
        [optimizer.state.get(param, {}) for param in params],
    )
    file = io.BytesIO()
    try:
        torch.save(content, file)
    except (AttributeError, TypeError, pickle.PicklingError) as error:
        raise UnsupportedError(
            f"layer {number} of {name!r} can't be sent to another rank: {error}; keep what can't "
            "be pickled, such as a lambda, out of layers, or choose cuts that leave it here"
        ) from error
    return file.getvalue()


def _unpacked(packed: bytes, device: torch.device) -> _PackedLayer:
    return torch.load(
        io.BytesIO(packed),
        # The other rank's accelerator becomes this one's; step counts stay on the CPU.
        map_location=lambda storage, place: (
            storage if place == "cpu" else cast(Any, storage).to(device=device)
        ),
        # It comes from a rank of this job, and is a user's module.
        weights_only=False,
    )


def _drop(stack: LayerStack, number: int, optimizer: torch.optim.Optimizer) -> None:
    gone = {id(param) for param in stack.layers[number].parameters()}
    for group in optimizer.param_groups:
        group["params"] = [param for param in group["params"] if id(param) not in gone]
    named = _named_params(optimizer)
    for key in [key for key, param in named.items() if id(param) in gone]:
        del named[key]
    for param in stack.layers[number].parameters():
        optimizer.state.pop(param, None)
    stack.layers[number] = LayerElsewhere()


def _take(
    stack: LayerStack, number: int, content: _PackedLayer, optimizer: torch.optim.Optimizer
) -> None:
    stack.layers[number] = content.layer
    params = list(content.layer.parameters())
    named = _named_params(optimizer)
    for param, place, key, state in zip(
        params, content.groups, content.names, content.states, strict=True
    ):
        if place is not None:
            optimizer.param_groups[place]["params"].append(param)
        if key is not None:
            named[key] = param
        if state:
            optimizer.state[param] = state


def _named_params(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return a TorchRec optimizer's parameters by name."""
    return cast(dict[str, Any], optimizer.params) if isinstance(optimizer, KeyedOptimizer) else {}
