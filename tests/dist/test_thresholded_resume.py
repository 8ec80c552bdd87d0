"""Residuals of dense gradients in train states: on other ranks, and where nobody takes them."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import torchrec_2dsp as tdsp
from tests.support.parity import Cell
from tests.support.ranks import RankPool
from tests.support.resuming import VARIANTS, Run, Variant
from torchrec_2dsp._compat.ddp import data_parallel_wrapper
from torchrec_2dsp.codecs.sparse import ErrorFeedback
from torchrec_2dsp.errors import CheckpointError, ConfigError

pytestmark = pytest.mark.dealt_file

NUM_STEPS = 3


def variant_on(world_size: int) -> Variant:
    return replace(VARIANTS["thresholded owners"], cell=Cell(tdsp.Mesh2D(1, world_size)))


def wrapper_of(run: Run) -> tdsp.ThresholdedDataParallel:
    wrapper = data_parallel_wrapper(run.model)
    assert isinstance(wrapper, tdsp.ThresholdedDataParallel)
    return wrapper


def sums_of_residuals(run: Run) -> dict[str, torch.Tensor]:
    """The residuals of all ranks, added up."""
    own = wrapper_of(run).state_dict()["residuals"]
    by_rank = [own] * dist.get_world_size()
    # A rank may have none.
    dist.all_gather_object(by_rank, own)
    joined = ErrorFeedback()
    joined.load_sum(by_rank)
    return joined.state_dict()


def save(rank: int, world_size: int, folder: Path) -> dict[str, torch.Tensor]:
    run = Run(variant_on(world_size))
    for _ in range(NUM_STEPS):
        run.step()
    run.losses.sum = 0.0
    run.save(folder)
    return sums_of_residuals(run)


def load(rank: int, world_size: int, path: Path) -> tuple[dict[str, torch.Tensor], float]:
    run = Run(variant_on(world_size))
    run.step()
    run.load(path)
    sums = sums_of_residuals(run)
    run.step()
    return sums, run.step()


def test_other_ranks_take_over_the_sum(ranks4: RankPool, ranks2: RankPool, tmp_path: Path) -> None:
    saved = ranks4.run(save, tmp_path)[0]
    assert any(residual.any() for residual in saved.values())
    for sums, _ in ranks2.run(load, tmp_path / str(NUM_STEPS)):
        assert sums.keys() == saved.keys()
        for name, residual in saved.items():
            # A rank's gradients count for a half now, and not for a quarter.
            torch.testing.assert_close(sums[name], residual / 2)


def test_more_ranks_take_over_the_sum(ranks4: RankPool, ranks2: RankPool, tmp_path: Path) -> None:
    saved = ranks2.run(save, tmp_path)[0]
    for sums, loss in ranks4.run(load, tmp_path / str(NUM_STEPS)):
        for name, residual in saved.items():
            torch.testing.assert_close(sums[name], residual * 2)
        assert loss > 0


def load_without_wrapper(rank: int, world_size: int, path: Path) -> str:
    run = Run(Variant(Cell(tdsp.Mesh2D(1, world_size))))
    with pytest.raises(CheckpointError) as raised:
        run.load(path)
    return str(raised.value)


def test_a_model_that_would_lose_residuals_is_refused(ranks2: RankPool, tmp_path: Path) -> None:
    ranks2.run(save, tmp_path)
    (message,) = set(ranks2.run(load_without_wrapper, tmp_path / str(NUM_STEPS)))
    assert message.startswith("the train state holds dense gradients that weren't sent")


def change_wrapper(rank: int, world_size: int, folder: Path) -> float:
    """Go on with thresholds after a run without them."""
    plain = Run(Variant(Cell(tdsp.Mesh2D(1, world_size))))
    plain.step()
    plain.save(folder)
    run = Run(variant_on(world_size))
    run.step()
    run.load(folder / "1")
    assert wrapper_of(run).residual_norm() == 0
    return run.step()


def test_a_run_may_begin_to_threshold_at_a_checkpoint(ranks2: RankPool, tmp_path: Path) -> None:
    assert all(loss > 0 for loss in ranks2.run(change_wrapper, tmp_path))


def take_name(rank: int, world_size: int) -> None:
    run = Run(variant_on(world_size))
    with pytest.raises(
        ConfigError, match="dense_gradients is the name of the state of the model's"
    ):
        tdsp.TrainState(run.model, run.optimizer, dense_gradients={})


def test_the_name_of_the_state_is_taken(ranks2: RankPool) -> None:
    ranks2.run(take_name)
