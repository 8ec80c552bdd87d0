"""Ranks that train their dense parts independently for some steps, against one process."""

from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn
from torchrec.optim import SemisyncOptimizer
from torchrec.optim.keyed import KeyedOptimizerWrapper

import torchrec_2dsp as tdsp
from tests.support.dense_training import (
    TowerModel,
    Trained,
    batch_of,
    cell_of,
    copied_weights,
    dense_of,
    model_of,
)
from tests.support.loops import shard
from tests.support.parity import Cell
from tests.support.ranks import RankPool, error_text
from torchrec_2dsp.errors import ConfigError, SyncError

pytestmark = pytest.mark.dealt_file

LR, OUTER_LR, MOMENTUM = 0.05, 0.7, 0.9
NUM_LOCAL, NUM_STEPS = 3, 9


def train(
    rank: int, world_size: int, cell: Cell, options: dict[str, Any], scale_first: bool = True
) -> Trained:
    """Train from half of seed 0's weights, set before the optimizers are built, or after."""
    dense = tdsp.LocalDense(**options)
    model = model_of(cell, dense)
    params = dense_of(model)

    def scale() -> None:
        with torch.no_grad():
            for value in params.values():
                value.mul_(0.5)

    if scale_first:
        scale()
    local = KeyedOptimizerWrapper(params, lambda values: torch.optim.SGD(values, lr=LR))
    outer = KeyedOptimizerWrapper(
        params, lambda values: tdsp.DiLoCo(values, dense, OUTER_LR, momentum=MOMENTUM)
    )
    optimizer = SemisyncOptimizer(params.values(), local, outer, num_local_steps=NUM_LOCAL)
    if not scale_first:
        scale()
    trained = Trained()
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        model(batch_of(cell, step, rank)).backward()
        optimizer.step()
        trained.weights.append(copied_weights(params))
        trained.reports.append(dense.total)
    trained.residual_norm = dense.residual_norm()
    return trained


@pytest.mark.parametrize("density", [1.0, 0.1])
@pytest.mark.parametrize("groups", [1, 2])
def test_ranks_are_equal_when_they_meet_and_send_what_is_asked_for(
    ranks4: RankPool, density: float, groups: int
) -> None:
    options = {"density": density, "values": "fp32"}
    trained = ranks4.run(train, cell_of(4, groups=groups), options)
    for step in range(NUM_STEPS):
        weights = [rank.weights[step] for rank in trained]
        are_equal = all(
            torch.equal(of_rank[name], value)
            for of_rank in weights
            for name, value in weights[0].items()
        )
        assert are_equal == ((step + 1) % NUM_LOCAL == 0)
    report = trained[0].reports[-1]
    if density < 1:
        assert 0.09 < report.density < 0.12
        assert report.num_bytes < 0.4 * report.dense_bytes
        assert trained[0].residual_norm > 0


def test_weights_may_be_loaded_after_the_optimizers_were_made(ranks4: RankPool) -> None:
    cell = cell_of(4)
    before, after = (ranks4.run(train, cell, {}, scale_first) for scale_first in (True, False))
    for name, value in before[0].weights[-1].items():
        assert torch.equal(after[0].weights[-1][name], value), name


def meet_with_nan(rank: int, world_size: int) -> str:
    dense = tdsp.LocalDense()
    model = model_of(cell_of(world_size), dense)
    params = list(dense_of(model).values())
    outer = tdsp.DiLoCo(params, dense)
    before = [param.detach().clone() for param in params]
    if rank == 1:
        with torch.no_grad():
            params[2].view(-1)[0] = torch.nan
    text = error_text(lambda: outer.global_step(torch.tensor(1)), SyncError)
    assert all(torch.equal(param, old) for param, old in zip(params, before, strict=True)) or rank
    return text


def test_a_nan_of_one_rank_stops_all(ranks2: RankPool) -> None:
    (message,) = set(ranks2.run(meet_with_nan))
    assert message.startswith("'tower.2.weight' has changed by numbers that are not finite")
    assert message.endswith("(found on rank 1)")


def save_and_load_apart(rank: int, world_size: int, folder: Path, trains: bool) -> list[str]:
    cell, dense = cell_of(world_size), tdsp.LocalDense()
    model = model_of(cell, dense).train(trains)
    if not trains:
        # An evaluation that doesn't disable gradients leaves ranks together.
        model(batch_of(cell, 0, rank))
    tdsp.save_checkpoint(folder / "together", model)
    model(batch_of(cell, 0, rank)).backward()
    errors = [
        error_text(lambda: tdsp.save_checkpoint(folder / "apart", model), SyncError),
        error_text(lambda: tdsp.load_checkpoint(folder / "together", model), SyncError),
    ]
    tdsp.DiLoCo(dense_of(model).values(), dense).global_step(torch.tensor(1))
    tdsp.load_checkpoint(folder / "together", model)
    return errors


@pytest.mark.parametrize("trains", [True, False])
def test_ranks_are_together_when_they_save_and_load(
    ranks2: RankPool, tmp_path: Path, trains: bool
) -> None:
    for errors in ranks2.run(save_and_load_apart, tmp_path, trains):
        assert all("after a multiple of num_local_steps" in message for message in errors)


def misuse(rank: int, world_size: int) -> tuple[str, ...]:
    dense = tdsp.LocalDense(density=0.5)
    errors = [
        error_text(lambda: tdsp.LocalDense(density=0.0), ConfigError),
        error_text(lambda: tdsp.LocalDense(values="int3"), ConfigError),
        error_text(lambda: tdsp.LocalDense(residual_decay=1.5), ConfigError),
        error_text(lambda: dense.mean({}), SyncError),
    ]
    cell = cell_of(world_size)
    model = model_of(cell, dense)
    dense.state_dict()
    model(batch_of(cell, 0, rank)).backward()
    errors.append(error_text(dense.state_dict, SyncError))
    outer = tdsp.DiLoCo(dense_of(model).values(), dense)
    errors.append(error_text(outer.step, ConfigError))
    outer.global_step(torch.tensor(1))
    dense.state_dict()
    params = dense_of(model).values()
    errors.append(error_text(lambda: tdsp.DiLoCo(params, dense, momentum=1.0), ConfigError))
    for dtype in (torch.float64, torch.complex64):
        unsharded = TowerModel(cell.spec)
        weight = cast(nn.Linear, unsharded.tower[0]).weight
        weight.data = weight.data.to(dtype)
        wrap = partial(shard, cell, model=unsharded, data_parallel_wrapper=tdsp.LocalDense())
        errors.append(error_text(wrap, ConfigError))
    return tuple(errors)


def test_what_cannot_be_is_said(ranks2: RankPool) -> None:
    (errors,) = set(ranks2.run(misuse))
    density, values, decay, no_model, apart, step, rates, wide, is_complex = errors
    assert density == "LocalDense(density=0.0) is no share; use one of 0 to 1"
    assert "is unknown; use one of 'fp32'" in values
    assert "no factor" in decay
    assert "no model yet" in no_model
    assert "save and load after a multiple of num_local_steps" in apart
    assert "outer optimizer" in step
    assert "momentum" in rates
    assert wide.startswith("'tower.0.weight' is trained in torch.float64, which LocalDense would")
    assert is_complex.startswith("'tower.0.weight' is trained in torch.complex64, which LocalDense")


def meet_with_loaded_changes(rank: int, world_size: int) -> tuple[float, float, bool]:
    """Load unsent changes into a model that sends all; return norms, and whether weights moved."""
    cell = cell_of(world_size)
    few, every = tdsp.LocalDense(density=0.1), tdsp.LocalDense()
    model = model_of(cell, few)
    params = dense_of(model)
    outer = tdsp.DiLoCo(params.values(), few)
    model(batch_of(cell, 0, rank)).backward()
    torch.optim.SGD(params.values(), lr=LR).step()
    outer.global_step(torch.tensor(1))
    params = dense_of(model_of(cell, every))
    outer = tdsp.DiLoCo(params.values(), every)
    every.load_state_dict(few.state_dict())
    before = copied_weights(params)
    outer.global_step(torch.tensor(1))
    has_moved = any(not torch.equal(before[name], value) for name, value in params.items())
    return few.residual_norm(), every.residual_norm(), has_moved


def test_unsent_changes_are_sent_where_all_are(ranks2: RankPool) -> None:
    for unsent, unsent_after, has_moved in ranks2.run(meet_with_loaded_changes):
        assert unsent > 0
        assert unsent_after == 0
        assert has_moved


def train_by_layers(
    rank: int, world_size: int, density: float, layers: list[list[str]]
) -> dict[str, torch.Tensor]:
    """Train with one `DiLoCo` per list of layers; all meet in every second step."""
    cell, dense = cell_of(world_size), tdsp.LocalDense(density=density, values="fp32")
    model = model_of(cell, dense)
    params = dense_of(model)
    outers = [
        tdsp.DiLoCo([params[name] for name in params if name.startswith(tuple(of_one))], dense)
        for of_one in layers
    ]
    local = torch.optim.SGD(params.values(), lr=LR)
    for step in range(4):
        local.zero_grad()
        model(batch_of(cell, step, rank)).backward()
        local.step()
        for outer in outers if step % 2 else ():
            outer.global_step(torch.tensor(step))
    dense.state_dict()
    return copied_weights(params)


@pytest.mark.parametrize("density", [1.0, 0.1])
def test_layers_may_meet_each_in_a_call_of_their_own(ranks2: RankPool, density: float) -> None:
    (together, again), (apart, _) = (
        ranks2.run(train_by_layers, density, layers)
        for layers in ([["tower", "last"]], [["tower.2"], ["tower.0", "last"]])
    )
    for name, value in together.items():
        assert torch.equal(value, again[name]), name
        torch.testing.assert_close(apart[name], value, rtol=0, atol=1e-6)


def meet_in_part(rank: int, world_size: int, folder: Path) -> list[str]:
    """Return errors where the last layer is in no `DiLoCo`, and where it meets less often."""
    cell, errors = cell_of(world_size), []
    for parts in (["tower"], ["tower", "last"]):
        dense = tdsp.LocalDense()
        model = model_of(cell, dense)
        params = dense_of(model)
        first, *_ = (
            tdsp.DiLoCo([params[name] for name in params if name.startswith(part)], dense)
            for part in parts
        )
        if len(parts) > 1:
            model(batch_of(cell, 0, rank)).backward()
            first.global_step(torch.tensor(1))
        errors += [
            error_text(lambda: model(batch_of(cell, 1, rank)), ConfigError),  # noqa: B023
            error_text(lambda: tdsp.save_checkpoint(folder, model), ConfigError),  # noqa: B023
        ]
    last = [params[name] for name in params if name.startswith("last")]
    for param in last:
        param.requires_grad_(False)
    model(batch_of(cell, 2, rank)).backward()
    alien = tdsp.DiLoCo([torch.nn.Parameter(torch.ones(2))], dense)
    return [*errors, error_text(lambda: alien.global_step(torch.tensor(1)), ConfigError)]


def test_parameters_that_do_not_meet_are_refused(ranks2: RankPool, tmp_path: Path) -> None:
    for *errors, alien in ranks2.run(meet_in_part, tmp_path / "checkpoint"):
        assert len(errors) == 4
        for text in errors:
            assert text.startswith("'last.weight' is trained, but in no DiLoCo that meets when the")
        assert alien.startswith("parameter 0 of the outer optimizer isn't in the dense part of")
