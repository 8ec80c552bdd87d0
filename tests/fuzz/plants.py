"""Faults planted on purpose, which the machine must find."""

import functools
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
from torchrec_2dsp.dense.joint_batch import _OwnRows
from torchrec_2dsp.dense.pipelined.engine import LayerStage
from torchrec_2dsp.dense.thresholded_gradients import BucketLayout
from torchrec_2dsp.replicas.exchange import ArrivingRows, Hop
from torchrec_2dsp.replicas.synced_shard import TableShard
from torchrec_2dsp.rows.rounding import StochasticRounding
from torchrec_2dsp.rows.update import DirectUpdater
from torchrec_2dsp.shard import initial_tables
from torchrec_2dsp.shard.ids_of_world import Gathered, IdsOfWorld
from torchrec_2dsp.shard.position_weights import PositionWeights, ShardedFeatureProcessors2D

Patch = AbstractContextManager[Any]
_apply, _sync_now = DirectUpdater.apply, tdsp.ModelParallel2D.sync_now
_start, _scales = Hop.start, IntegerRows._scales
_arrived, _take_off = LateGradients._arrived, ErrorFeedback.take_off
_mean, _layout_of = tdsp.LocalDense.mean, BucketLayout.of
_gathered, _draws = IdsOfWorld.gathered, StochasticRounding.draws
_slots, _weights = PositionWeights._layout, ShardedFeatureProcessors2D._weights
_stage_backward, _rows_backward = LayerStage.backward, _OwnRows.backward


def planted(owner: Any, name: str) -> Callable[[Callable[..., Any]], Callable[[], Patch]]:
    """Make a fault a plant that replaces this method or function."""

    def plant_of(fault: Callable[..., Any]) -> Callable[[], Patch]:
        # Workers import the plant by the fault's name.
        @functools.wraps(fault)
        def enter() -> Patch:
            return mock.patch.object(owner, name, fault)

        return enter

    return plant_of


@planted(DirectUpdater, "apply")
def updates_applied_twice(updater: DirectUpdater, gradients: Any) -> None:
    """Update rows whose gradients travel twice."""
    _apply(updater, gradients)
    _apply(updater, gradients)


@planted(DirectUpdater, "apply")
def a_rank_that_skips_updates(updater: DirectUpdater, gradients: Any) -> None:
    """Update no row whose gradient travels, on rank 1."""
    if dist.get_rank() != 1:
        _apply(updater, gradients)


@planted(DirectUpdater, "apply")
def a_rank_that_rounds_otherwise(updater: DirectUpdater, gradients: Any) -> None:
    """Change rank 1's moments by a bit."""
    _apply(updater, gradients)
    if dist.get_rank() == 1:
        for states in updater._tbe.split_optimizer_states():
            for state in states:
                state.copy_(torch.nextafter(state, torch.full_like(state, 9.0)))


@planted(StochasticRounding, "draws")
def a_rank_that_draws_otherwise(rounding: StochasticRounding, *key: Any) -> torch.Tensor:
    """Give rank 1 its own random draws for rounding."""
    return _draws(rounding, *key).add_(dist.get_rank() << 12)


@planted(Hop, "start")
def a_rank_that_keeps_its_own_numbers(
    hop: Hop, rows: Any, sizes: Any, key_dtype: Any, codec: Any
) -> Any:
    """Leave rank 1's own gradients unrounded when they are added to its peers'."""
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


@planted(IntegerRows, "_scales")
def a_rank_with_coarser_scales(codec: IntegerRows, rows: torch.Tensor) -> torch.Tensor:
    """Send rank 1's integers in units that are larger by a 64th, which all ranks read right."""
    factor = 1 + 1 / 64 if dist.is_initialized() and dist.get_rank() == 1 else 1.0
    return (_scales(codec, rows).float() * factor).to(torch.bfloat16)


@planted(LateGradients, "_arrived")
def late_gradients_that_are_lost(
    gradients: LateGradients, names: Any, sizes: Any, like: Any
) -> torch.Tensor:
    """Replace the previous step's dense gradients by zeros."""
    return torch.zeros_like(_arrived(gradients, names, sizes, like))


@planted(LayerStage, "backward")
def stages_that_forget_a_micro_batch(
    stage: LayerStage, micro_batch: int, gradient: Any
) -> list[torch.Tensor]:
    """Drop a batch's second micro-batch from pipelined layers' gradients."""
    before = [param.grad for param in stage.params]
    grads = _stage_backward(stage, micro_batch, gradient)
    if micro_batch == 1:
        for param, grad in zip(stage.params, before, strict=True):
            param.grad = grad
    return grads


@planted(_OwnRows, "backward")
@staticmethod
def ranks_of_a_layer_that_add_their_losses(ctx: Any, *grads: torch.Tensor) -> Any:
    """Sum, rather than average, gradients in layers that two ranks compute together."""
    rows, *others = _rows_backward(ctx, *grads)
    return (2 * rows, *others)


@planted(ErrorFeedback, "take_off")
def a_rank_that_forgets_what_it_left_out(
    feedback: ErrorFeedback, name: str, positions: Any, sent: Any
) -> None:
    """Take more off rank 1's residuals than it has sent."""
    _take_off(feedback, name, positions, 1.01 * sent if dist.get_rank() == 1 else sent)


@planted(BucketLayout, "of")
def ranks_that_send_twice_as_much(sizes: Any) -> BucketLayout:
    """Send twice as many dense gradient elements as the density allows."""
    return _layout_of((name, size, min(size, 2 * capacity)) for name, size, capacity in sizes)


def unused_parameters_without_gradients() -> Patch:
    """Leave parameters that no rank used without gradients, even if a gradient arrived."""
    return mock.patch.object(UnusedParameters, "give", lambda unused, means: means)


@planted(tdsp.LocalDense, "mean")
def ranks_that_meet_without_rank_1(
    dense: tdsp.LocalDense, changes: Any
) -> dict[torch.Tensor, torch.Tensor]:
    """Drop rank 1's changes from the mean when ranks meet."""
    share = 0.0 if dist.get_rank() == 1 else 1.0
    return _mean(dense, {param: share * change for param, change in changes.items()})


@planted(initial_tables, "_write")
def evicted_rows_with_moments(
    shard: TableShard, places: torch.Tensor, values: torch.Tensor
) -> None:
    """Keep a row's moments when it is given to another id."""
    columns = slice(shard.column, shard.column + shard.tensors["weight"].shape[1])
    shard.tensors["weight"].data[places] = values[:, columns]


@planted(IdsOfWorld, "gathered")
def maps_of_groups(ids: IdsOfWorld, own: Any, **facts: Any) -> Gathered:
    """Show id maps only half the ranks' ids, as if each of two groups had its own maps."""
    gathered = _gathered(ids, own, **facts)
    of_group = {
        table: batch._replace(
            messages=batch.messages[: len(batch.messages) // 2],
            counts=[counts[: len(counts) // 2] for counts in batch.counts],
        )
        for table, batch in gathered.batches.items()
    }
    return gathered._replace(batches=of_group)


@planted(PositionWeights, "_layout")
def slots_off_by_one(stage: PositionWeights, features: Any) -> list[torch.Tensor]:
    """Send ids with the slot before their position weight's."""
    firsts, *others = _slots(stage, features)
    return [(firsts - 1).clamp(min=0), *others]


@planted(ShardedFeatureProcessors2D, "_weights")
def a_rank_that_counts_position_weights_twice(module: ShardedFeatureProcessors2D) -> Any:
    """Double rank 1's position weight gradients, so that they aren't the ranks' mean."""
    by_feature = _weights(module).items()
    if dist.get_rank() != 1:
        return dict(by_feature)
    return {name: 2 * weight - weight.detach() for name, weight in by_feature}


def _hang() -> None:
    time.sleep(3_600)


def _on_rank_1(act: Callable[[], object]) -> Callable[[Any], object]:
    def sync_now(model: Any) -> object:
        return act() if dist.get_rank() == 1 else _sync_now(model)

    return sync_now


def a_rank_that_hangs() -> Patch:
    """Let rank 1 hang in `sync_now`."""
    return mock.patch.object(tdsp.ModelParallel2D, "sync_now", _on_rank_1(_hang))


def a_rank_that_dies() -> Patch:
    """Let rank 1 abort in `sync_now`."""
    return mock.patch.object(tdsp.ModelParallel2D, "sync_now", _on_rank_1(os.abort))


def _refuse() -> None:
    raise tdsp.errors.PlanError("rank 1 doesn't like the plan")


def a_rank_that_refuses_alone() -> Patch:
    """Let rank 1 raise one of our errors in `sync_now`."""
    return mock.patch.object(tdsp.ModelParallel2D, "sync_now", _on_rank_1(_refuse))
