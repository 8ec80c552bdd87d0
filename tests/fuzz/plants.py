"""Faults that are planted on purpose, which the machine must find."""

import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import torchrec_2dsp as tdsp
from torchrec_2dsp.codecs.rows import IntegerRows
from torchrec_2dsp.codecs.sparse import ErrorFeedback
from torchrec_2dsp.dense.delayed_dense import LateGradients
from torchrec_2dsp.dense.gradient_sums import UnusedParameters
from torchrec_2dsp.dense.pipelined.engine import LayerStage
from torchrec_2dsp.dense.sharded_dense import _OwnRows
from torchrec_2dsp.dense.thresholded_gradients import BucketLayout
from torchrec_2dsp.replicas.exchange import ArrivingRows, Hop
from torchrec_2dsp.replicas.synced_shard import TableShard
from torchrec_2dsp.rows.rounding import StochasticRounding
from torchrec_2dsp.rows.update import DirectUpdater
from torchrec_2dsp.shard import initial_tables
from torchrec_2dsp.shard.managed_collisions import IdsOfWorld
from torchrec_2dsp.shard.position_weights import PositionWeights, ShardedFeatureProcessors2D

Patch = AbstractContextManager[Any]
_apply, _sync_now = DirectUpdater.apply, tdsp.ModelParallel2D.sync_now
_start, _scales = Hop.start, IntegerRows._scales
_arrived, _take_off = LateGradients._arrived, ErrorFeedback.take_off
_mean, _layout_of = tdsp.LocalDense.mean, BucketLayout.of
_gathered, _draws = IdsOfWorld.gathered, StochasticRounding.draws
_slots, _weights = PositionWeights._layout, ShardedFeatureProcessors2D._weights
_stage_backward, _rows_backward = LayerStage.backward, _OwnRows.backward


def updates_applied_twice() -> Patch:
    """Rows whose gradients travel are updated twice."""

    def apply_twice(updater: DirectUpdater, gradients: Any) -> None:
        _apply(updater, gradients)
        _apply(updater, gradients)

    return mock.patch.object(DirectUpdater, "apply", apply_twice)


def a_rank_that_skips_updates() -> Patch:
    """Rank 1 updates no row whose gradient travels."""

    def apply_elsewhere(updater: DirectUpdater, gradients: Any) -> None:
        if dist.get_rank() != 1:
            _apply(updater, gradients)

    return mock.patch.object(DirectUpdater, "apply", apply_elsewhere)


def a_rank_that_rounds_otherwise() -> Patch:
    """Rank 1's moments are off by a bit."""

    def apply_and_round(updater: DirectUpdater, gradients: Any) -> None:
        _apply(updater, gradients)
        if dist.get_rank() == 1:
            for states in updater._tbe.split_optimizer_states():
                for state in states:
                    state.copy_(torch.nextafter(state, torch.full_like(state, 9.0)))

    return mock.patch.object(DirectUpdater, "apply", apply_and_round)


def a_rank_that_draws_otherwise() -> Patch:
    """Rank 1 rounds at random by draws of its own."""

    def draws(rounding: StochasticRounding, *key: Any) -> torch.Tensor:
        return _draws(rounding, *key).add_(dist.get_rank() << 12)

    return mock.patch.object(StochasticRounding, "draws", draws)


def a_rank_that_keeps_its_own_numbers() -> Patch:
    """Rank 1 adds its own gradients to those of its peers without rounding them."""

    def start(hop: Hop, rows: Any, sizes: Any, key_dtype: Any, codec: Any) -> Any:
        arriving = _start(hop, rows, sizes, key_dtype, codec)
        rank = dist.get_rank(hop.group)
        if dist.get_rank() != 1 or hop.stride or not isinstance(arriving, ArrivingRows):
            return arriving
        first = sum(of_rank[0] for of_rank in sizes[:rank])
        places = slice(first, first + len(rows.grads))

        def decode(encoded: torch.Tensor, dim: int) -> torch.Tensor:
            decoded = codec.decode(encoded, dim).clone()
            decoded[places] = rows.grads
            return decoded

        return replace(arriving, codec=mock.Mock(decode=decode))

    return mock.patch.object(Hop, "start", start)


def a_rank_with_coarser_scales() -> Patch:
    """Rank 1 sends integers in units that are larger by a 64th, which all ranks read right."""

    def scales(codec: IntegerRows, rows: torch.Tensor) -> torch.Tensor:
        factor = 1 + 1 / 64 if dist.is_initialized() and dist.get_rank() == 1 else 1.0
        return (_scales(codec, rows).float() * factor).to(torch.bfloat16)

    return mock.patch.object(IntegerRows, "_scales", scales)


def late_gradients_that_are_lost() -> Patch:
    """Dense gradients of the step before never arrive: there are zeros in their place."""

    def arrived(gradients: LateGradients, names: Any, sizes: Any, like: Any) -> torch.Tensor:
        return torch.zeros_like(_arrived(gradients, names, sizes, like))

    return mock.patch.object(LateGradients, "_arrived", arrived)


def stages_that_forget_a_micro_batch() -> Patch:
    """Drop a batch's second micro-batch from the gradients of pipelined layers."""

    def backward(stage: LayerStage, micro_batch: int, gradient: Any) -> list[torch.Tensor]:
        before = [param.grad for param in stage.params]
        grads = _stage_backward(stage, micro_batch, gradient)
        if micro_batch == 1:
            for param, grad in zip(stage.params, before, strict=True):
                param.grad = grad
        return grads

    return mock.patch.object(LayerStage, "backward", backward)


def ranks_of_a_layer_that_add_their_losses() -> Patch:
    """Layers that two ranks compute together get the sum of their gradients, not the mean."""

    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        rows, *others = _rows_backward(ctx, *grads)
        return (2 * rows, *others)

    return mock.patch.object(_OwnRows, "backward", staticmethod(backward))


def a_rank_that_forgets_what_it_left_out() -> Patch:
    """Rank 1 takes more off its residuals than it has sent."""

    def take_off(feedback: ErrorFeedback, name: str, positions: Any, sent: Any) -> None:
        _take_off(feedback, name, positions, 1.01 * sent if dist.get_rank() == 1 else sent)

    return mock.patch.object(ErrorFeedback, "take_off", take_off)


def ranks_that_send_twice_as_much() -> Patch:
    """All ranks choose twice the elements of dense gradients that they were asked for."""

    def layout_of(params: Any, *, density: float, dense_below: int) -> BucketLayout:
        return _layout_of(params, density=min(0.99, 2 * density), dense_below=dense_below)

    return mock.patch.object(BucketLayout, "of", layout_of)


def unused_parameters_without_gradients() -> Patch:
    """Leave parameters that no rank used without gradients, even if one has arrived."""
    return mock.patch.object(UnusedParameters, "give", lambda unused, means: means)


def ranks_that_meet_without_rank_1() -> Patch:
    """Drop rank 1's changes from the mean when ranks meet."""

    def mean(dense: tdsp.LocalDense, changes: Any) -> dict[torch.Tensor, torch.Tensor]:
        kept = 0.0 if dist.get_rank() == 1 else 1.0
        return _mean(dense, {param: kept * change for param, change in changes.items()})

    return mock.patch.object(tdsp.LocalDense, "mean", mean)


def evicted_rows_with_moments() -> Patch:
    """Rows that get another id keep their moments."""

    def write(shard: TableShard, places: torch.Tensor, values: torch.Tensor) -> None:
        columns = slice(shard.column, shard.column + shard.tensors["weight"].shape[1])
        shard.tensors["weight"].data[places] = values[:, columns]

    return mock.patch.object(initial_tables, "_write", write)


def maps_of_groups() -> Patch:
    """Id maps see half of the ids, as if each of two groups had its own."""

    def gathered(
        ids: IdsOfWorld, own: Any, maps: Any, **facts: Any
    ) -> tuple[int, dict[str, torch.Tensor]]:
        hour, of_world = _gathered(ids, own, maps, **facts)
        return hour, {name: feature[: len(feature) // 2] for name, feature in of_world.items()}

    return mock.patch.object(IdsOfWorld, "gathered", gathered)


def slots_off_by_one() -> Patch:
    """Ids travel with the slot before that of their position's weight."""

    def layout(stage: PositionWeights, features: Any) -> list[torch.Tensor]:
        firsts, *others = _slots(stage, features)
        return [(firsts - 1).clamp(min=0), *others]

    return mock.patch.object(PositionWeights, "_layout", layout)


def a_rank_that_counts_position_weights_twice() -> Patch:
    """Rank 1 gives position weights twice their gradients, which aren't the ranks' mean then."""

    def weights(module: ShardedFeatureProcessors2D) -> Any:
        by_feature = _weights(module).items()
        if dist.get_rank() != 1:
            return dict(by_feature)
        return {name: 2 * weight - weight.detach() for name, weight in by_feature}

    return mock.patch.object(ShardedFeatureProcessors2D, "_weights", weights)


def _hang() -> None:
    time.sleep(3_600)


def _on_rank_1(act: Callable[[], object]) -> Callable[[Any], object]:
    def sync_now(model: Any) -> object:
        return act() if dist.get_rank() == 1 else _sync_now(model)

    return sync_now


def a_rank_that_hangs() -> Patch:
    """Rank 1 never comes back from `sync_now`."""
    return mock.patch.object(tdsp.ModelParallel2D, "sync_now", _on_rank_1(_hang))


def a_rank_that_dies() -> Patch:
    """Rank 1 aborts in `sync_now`."""
    return mock.patch.object(tdsp.ModelParallel2D, "sync_now", _on_rank_1(os.abort))


def _refuse() -> None:
    raise tdsp.errors.PlanError("rank 1 doesn't like the plan")


def a_rank_that_refuses_alone() -> Patch:
    """Rank 1 raises one of our errors in `sync_now`."""
    return mock.patch.object(tdsp.ModelParallel2D, "sync_now", _on_rank_1(_refuse))
