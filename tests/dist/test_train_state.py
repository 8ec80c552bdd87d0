"""A run resumed from a checkpoint has bitwise the losses of one that never stopped."""

import random
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torchrec.optim import SemisyncOptimizer
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.warmup import WarmupOptimizer, WarmupPolicy, WarmupStage

import torchrec_2dsp as tdsp
from tests.support.models import HOT_ROWS
from tests.support.parity import ONE, TWO, Cell, make_optimizer, shard, shards_of
from tests.support.ranks import RankPool, error_of
from tests.support.resuming import (
    VARIANTS,
    Run,
    Variant,
    batch_of,
    final_state,
    go_on_everywhere,
)
from tests.support.slices import Deal
from torchrec_2dsp._compat.ddp import data_parallel_wrapper
from torchrec_2dsp._compat.fbgemm import iteration_of, set_iteration
from torchrec_2dsp.shard.parted import sharded_tables


def check_variants(
    pool: RankPool, folder: Path, saves: list[int], steps: int, names: Iterable[str] = VARIANTS
) -> None:
    for name in names:
        variant = VARIANTS[name]
        for seen in pool.run(go_on_everywhere, name, folder / name, saves, steps, timeout_s=280):
            assert seen.num_compared == sum(steps - save for save in saves), name
            assert seen.different == [], name
            assert seen.different_tensors == [], name
            if variant.refresh_every and len(saves) > 2:
                assert seen.hot_sets[0] != seen.hot_sets[-1], name


def test_runs_go_on_with_the_same_bits(ranks4: RankPool, tmp_path: Path, dealt: Deal) -> None:
    # Hot rows change after four steps, and pipelines hold a batch that goes by the old ones then.
    check_variants(ranks4, tmp_path, [5], 8, dealt(list(VARIANTS)))


@pytest.mark.dealt_file
def test_runs_go_on_from_their_first_steps(ranks4: RankPool, tmp_path: Path) -> None:
    """In which DDP adds gradients in another order than later."""
    check_variants(ranks4, tmp_path, [1, 2, 3], 5, ["gradient"])
    # DDP's buckets change once more three steps after the last save, and PowerSGD draws again.
    check_variants(ranks4, tmp_path, [1, 2, 3, 4, 5], 9, ["powersgd"])
    # PowerSGD keeps residuals for buckets that DDP has only just arranged.
    check_variants(ranks4, tmp_path, [3], 6, ["powersgd at once"])
    # A resumed run's first step has several buckets, each of which torch calls the first.
    check_variants(ranks4, tmp_path / "arranged", [5], 7, ["thresholded", "delayed", "powersgd"])


@pytest.mark.slow
def test_runs_go_on_from_any_step(ranks4: RankPool, tmp_path: Path) -> None:
    check_variants(ranks4, tmp_path, [1, 2, 3, 4, 5, 9, 10], 14)


def differences_without(rank: int, world_size: int, folder: Path) -> list[str]:
    """Compare runs without a train state and without saves; return the first one's differences."""
    variant = replace(VARIANTS["every 3"], draws=False)
    through, alone, other = Run(variant), Run(variant), Run(variant)
    for step in range(1, 5):
        through.step()
        alone.step()
        if step == 4:
            through.save(folder)
    tdsp.load_checkpoint(folder / "4", other.model, other.optimizer)
    other.position["batch"] = 4
    for _ in range(4):
        through.step()
        alone.step()
        other.step()
    end, actual, unsaved = final_state(through), final_state(other), final_state(alone)
    assert any(not torch.equal(end[key], unsaved[key]) for key in end if "ebc" in key)
    return [key for key in end if not torch.equal(end[key], actual[key])]


@pytest.mark.dealt_file
def test_the_comparison_sees_what_a_train_state_restores(ranks4: RankPool, tmp_path: Path) -> None:
    """It also sees that a save averages replicas, which a run without saves doesn't do."""
    for different in ranks4.run(differences_without, tmp_path):
        for part in ("ebc.", "tower.", "counter ", "sum of losses", "learning rates", "sync step"):
            assert any(key.startswith(part) for key in different), (part, different)


def shared_state(run: Run) -> dict[str, Any]:
    stats = run.counter.gather()
    return {
        "counts": {name: stats[name].counts.tolist() for name in run.counter.tables},
        "hot": {name: rows.row_ids for name, rows in run.model.hot_sets.items()},
        "rates": [group["lr"] for group in run.optimizer.param_groups],
        "draw": torch.rand(1).item(),
    }


def save_four(rank: int, world_size: int, folder: Path, is_losses_equal: bool) -> dict[str, Any]:
    """Save four ranks' run; return the state that they share."""
    run = Run(Variant(Cell(TWO, hot_rows=HOT_ROWS, sync=tdsp.WeightSync(policy=tdsp.every(3))), 2))
    for _ in range(4):
        run.step()
    if is_losses_equal:
        run.losses.sum = 1.5
    (part,) = run.model.sharded_tables()
    part.num_bad_ids = 10 + rank
    run.save(folder)
    return shared_state(run)


def load_two(rank: int, world_size: int, path: Path) -> dict[str, Any]:
    sync = tdsp.WeightSync(policy=tdsp.every(3))
    run = Run(Variant(Cell(tdsp.Mesh2D(2, 1), hot_rows=HOT_ROWS, sync=sync), refresh_every=2))
    try:
        run.load(path)
    except tdsp.errors.CheckpointError as error:
        return {"error": str(error), "step": run.state.step, "sync step": run.model.sync_step}
    (part,) = run.model.sharded_tables()
    return shared_state(run) | {
        "state": (run.state.step, run.position["batch"], run.losses.sum, run.model.sync_step),
        "bad ids": part.num_bad_ids,
    }


def test_what_belongs_to_the_run_goes_to_any_number_of_ranks(
    ranks4: RankPool, ranks2: RankPool, tmp_path: Path
) -> None:
    saved = ranks4.run(save_four, tmp_path, True)
    for rank, loaded in enumerate(ranks2.run(load_two, tmp_path / "4")):
        assert loaded["state"] == (4, 4, 1.5, 4)
        for key in ("counts", "hot"):
            assert loaded[key] == saved[0][key], key
        assert set(loaded["rates"]) == set(saved[0]["rates"])
        assert loaded["draw"] == saved[rank]["draw"]
        assert loaded["bad ids"] == (10 + rank) + (12 + rank)


def test_what_was_another_on_each_rank_is_refused_elsewhere(
    ranks4: RankPool, ranks2: RankPool, tmp_path: Path
) -> None:
    ranks4.run(save_four, tmp_path, False)
    for refused in ranks2.run(load_two, tmp_path / "4"):
        assert "'losses' was another on each of 4 ranks and can't be spread" in refused["error"]
        assert (refused["step"], refused["sync step"]) == (0, 0)


def synced_steps(rank: int, world_size: int, start: int) -> list[int]:
    """Return the sync steps of a model whose policy resumes at ``start``."""
    cell = Cell(tdsp.Mesh2D(2, 1), sync=tdsp.WeightSync(policy=tdsp.every(3)))
    model: Any = shard(cell)
    optimizer = make_optimizer(model)
    model.set_sync_step(start)
    results = []
    for step in range(start + 1, start + 6):
        optimizer.zero_grad()
        model(batch_of(cell.spec, step, rank)).sum().backward()
        if model.sync().num_rows:
            results.append(step)
    assert model.sync_step == start + 5
    with pytest.raises(
        tdsp.errors.ConfigError, match=r"step=-1 is no number of steps; give 0 or more"
    ):
        model.set_sync_step(-1)
    return results


def test_a_policy_goes_on_at_a_step(ranks2: RankPool) -> None:
    assert ranks2.run(synced_steps, 10) == [[12, 15]] * 2
    assert ranks2.run(synced_steps, 0) == [[3]] * 2


def counted(rank: int, world_size: int, folder: Path) -> list[Any]:
    """Return iterations, kernel learning rates and random draws, before a save and after a load."""
    seen = []
    for is_load in (False, True):
        cell = Cell(ONE)
        model = shard(cell)
        optimizer = make_optimizer(model)
        state = tdsp.TrainState(model, optimizer)
        tbes = [tbe for part in sharded_tables(model) for tbe in part.tbes()]
        if is_load:
            tdsp.load_checkpoint(folder, model, optimizer, train_state=state)
        else:
            for step in range(3):
                optimizer.zero_grad()
                model(batch_of(cell.spec, step, rank)).sum().backward()
                optimizer.step()
            for group in model.fused_optimizer.param_groups:  # type: ignore[union-attr]
                group["lr"] = 0.25  # type: ignore[index]
            for tbe in tbes:
                set_iteration(tbe, 7)
            np.random.seed(rank)
            random.seed(rank)
            tdsp.save_checkpoint(folder, model, optimizer, train_state=state)
        seen.append(
            (
                [iteration_of(tbe) for tbe in tbes],
                [float(tbe.learning_rate_tensor) for tbe in tbes],
                [group["lr"] for group in model.fused_optimizer.param_groups],  # type: ignore[union-attr, index]
                torch.rand(1).item(),
                float(np.random.rand()),
                random.random(),
            )
        )
    return seen


def test_iterations_learning_rates_and_random_numbers_come_back(
    ranks4: RankPool, tmp_path: Path
) -> None:
    answers = ranks4.run(counted, tmp_path / "c")
    for saved, loaded in answers:
        assert saved == loaded
        assert set(saved[0]) == {7}
        # The kernels get the new learning rate at the next step only.
        assert set(saved[2]) == {0.25}
        assert 0.25 not in saved[1]
    assert len({saved[3:] for saved, _ in answers}) == 4


def refusals(rank: int, world_size: int, folder: Path) -> dict[str, str]:
    """Return the errors for impossible saves and loads."""
    cell = Cell(ONE)
    model = shard(cell)
    optimizer = make_optimizer(model)
    reported: dict[str, str] = {}

    def refuse(name: str, action: Callable[[], object]) -> None:
        reported[name] = error_of(action)

    def load(state: tdsp.TrainState, path: Path = folder / "with") -> object:
        return tdsp.load_checkpoint(path, model, optimizer, train_state=state)

    position = {"row": 7}
    state = tdsp.TrainState(model, optimizer, position=position)
    state.step = 3
    tdsp.save_checkpoint(folder / "with", model, optimizer, train_state=state)
    tdsp.save_checkpoint(folder / "without", model, optimizer)
    before = {name: value.clone() for name, value in _local(model).items()}
    with torch.no_grad():
        for value in _local(model).values():
            value += 1
    changed = {name: value.clone() for name, value in _local(model).items()}
    position["row"], state.step = 0, 0
    refuse("no train state", lambda: load(state, folder / "without"))
    refuse("too few", lambda: load(tdsp.TrainState(model, optimizer)))
    refuse("too many", lambda: load(tdsp.TrainState(model, optimizer, position={}, more={})))
    refuse("no dense", lambda: _save_without_dense(folder, model, optimizer))
    assert all(torch.equal(value, changed[name]) for name, value in _local(model).items())
    assert (position, state.step) == ({"row": 0}, 0)
    load(state)
    assert all(torch.equal(value, before[name]) for name, value in _local(model).items())
    assert (position, state.step) == ({"row": 7}, 3)

    other = shard(cell)
    refuse("other model", lambda: load(tdsp.TrainState(other)))
    both = cast(Any, nn.ModuleList([model, other]))
    refuse("same names", lambda: tdsp.TrainState(both))
    save = tdsp.save_checkpoint
    refuse("not plain", lambda: tdsp.TrainState(model, things={"a": {1, 2}}).state_dict())
    share = DTensor.from_local(torch.ones(1), init_device_mesh("cpu", (world_size,)))
    refuse("a share", lambda: tdsp.TrainState(model, ema={"a": share}).state_dict())
    refuse("no member", lambda: tdsp.TrainState(model, things=[1]))  # type: ignore[arg-type]
    state.step = 3 + (rank == 1)
    refuse("other step", lambda: save(folder / "x", model, optimizer, train_state=state))
    state.step = 3
    optimizer.param_groups[-1]["lr"] = 0.5 + rank  # type: ignore[index]
    refuse("other rate", lambda: save(folder / "x", model, optimizer, train_state=state))
    assert not (folder / "x").exists()
    return reported


def _save_without_dense(folder: Path, model: Any, optimizer: Any) -> None:
    tdsp.save_checkpoint(folder / "fused", model, train_state=tdsp.TrainState(model))
    state = tdsp.TrainState(model, optimizer)
    tdsp.load_checkpoint(folder / "fused", model, train_state=state)


def _local(model: Any) -> dict[str, torch.Tensor]:
    return {
        f"{number} {part.table} {name}": tensor
        for number, part in enumerate(shards_of(model))
        for name, tensor in part.tensors.items()
    }


TEXTS = {
    "no train state": "CheckpointError: {folder}/without has no train state, because it was saved "
    "without train_state=...; load it without one, and set the TrainState's step yourself",
    "same names": "ConfigError: a TrainState saves state by table name, and several tables are "
    "called 't0'; rename one",
    "too few": "CheckpointError: the train state was saved with 'position'; make the TrainState "
    "with position=...",
    "too many": "CheckpointError: the train state was saved without 'more'; make the TrainState "
    "without it",
    "no dense": "CheckpointError: the train state has no hyper-parameters of 'over.",
    "other model": "CheckpointError: the train state is that of another model; make it by",
    "not plain": "CheckpointError: things can't be stored: a is a set, which a train state can't "
    "hold without a pickle; use dicts",
    "a share": "CheckpointError: ema can't be stored: a is a DTensor, of which each rank has a "
    "part; let state_dict() give the whole, a DTensor's full_tensor() on all ranks",
    "no member": "ConfigError: things=[1] has no state_dict() and load_state_dict()",
    "other step": "ConfigError: the number of steps done differs between ranks: rank 0 has 3, rank "
    "1 has 4",
    "other rate": "CheckpointError: rank 1 has the hyper-parameters",
}


def test_what_cannot_be_saved_or_loaded_is_refused_before_anything_changes(
    ranks4: RankPool, tmp_path: Path
) -> None:
    for reported in ranks4.run(refusals, tmp_path):
        assert reported.keys() == TEXTS.keys()
        for name, text in TEXTS.items():
            assert reported[name].startswith(text.format(folder=tmp_path)), reported[name]


def optimizer_of(model: Any, kind: str) -> Any:
    """Combine the tables' optimizer with a dense one of this kind."""
    params = dict(in_backward_optimizer_filter(model.named_parameters()))

    def keyed(make: Callable[[Any], torch.optim.Optimizer]) -> KeyedOptimizerWrapper:
        return KeyedOptimizerWrapper(params, make)

    if kind == "local":
        wrapper: Any = data_parallel_wrapper(model)
        local = keyed(lambda values: torch.optim.SGD(values, lr=0.05))
        outer = keyed(lambda values: tdsp.DiLoCo(values, wrapper, 0.7))
        dense: Any = SemisyncOptimizer(params.values(), local, outer, num_local_steps=1)
    elif kind == "sgd":
        dense = keyed(lambda values: torch.optim.SGD(values, lr=0.5))
    else:
        dense = keyed(lambda values: torch.optim.Adam(values, lr=0.01))
    stages = [WarmupStage(WarmupPolicy.LINEAR, max_iters=9)]
    if kind == "warm":
        dense = WarmupOptimizer(dense, stages)
    joined = CombinedOptimizer([model.fused_optimizer, dense])
    return WarmupOptimizer(joined, stages) if kind == "all warm" else joined


def rates_after_a_load(
    rank: int, world_size: int, folder: Path, saved: str, loaded: str
) -> list[float]:
    """Save changed learning rates; return another model's rates after a load."""
    states = []
    for kind in (saved, loaded):
        wrapper = tdsp.LocalDense() if kind == "local" else None
        model = shard(Cell(tdsp.Mesh2D(1, world_size)), data_parallel_wrapper=wrapper)
        optimizer = optimizer_of(model, kind)
        states.append((model, optimizer, tdsp.TrainState(model, optimizer)))
    (model, optimizer, state), (other, other_optimizer, other_state) = states
    for group in optimizer.param_groups:
        group["lr"] /= 2
    tdsp.save_checkpoint(folder, model, train_state=state)
    tdsp.load_checkpoint(folder, other, train_state=other_state)
    return [group["lr"] for group in other_optimizer.param_groups]


def test_an_optimizer_with_two_groups_of_a_parameter_gets_back_both(
    ranks2: RankPool, tmp_path: Path
) -> None:
    for fused, local, outer in ranks2.run(rates_after_a_load, tmp_path, "local", "local"):
        assert (local, outer) == (0.025, 0.35)
        assert fused > 0


def travel(rank: int, world_size: int, folder: Path, cells: tuple[Cell, Cell]) -> list[float]:
    """Save changed hyper-parameters in one cell; return another cell's after a load."""
    saved, loaded = (cast(tdsp.ModelParallel2D, shard(cell)) for cell in cells)
    saved.fused_optimizer.update_hyper_parameters({"lr": 0.0625, "eps": 0.125})
    tdsp.save_checkpoint(folder, saved, train_state=tdsp.TrainState(saved))
    tdsp.load_checkpoint(folder, loaded, train_state=tdsp.TrainState(loaded))
    rates = [group["lr"] for group in loaded.fused_optimizer.param_groups]
    kernels = [tbe for tables in loaded.sharded_tables() for tbe in tables.tbes()]
    return rates + [tbe.optimizer_args.eps / 2 for tbe in kernels]


def test_tables_may_have_another_class_of_fused_optimizer(ranks2: RankPool, tmp_path: Path) -> None:
    """Data-parallel tables have another class."""
    mesh = tdsp.Mesh2D(1, 2)
    cells = (Cell(mesh, "row_wise"), Cell(mesh, "data_parallel"))
    for rates in ranks2.run(travel, tmp_path, cells):
        assert set(rates) == {0.0625}


REFUSED = {
    ("sgd", "adam"): "CheckpointError: 'over.weight' was trained by SGD, and is by Adam now; pass",
    ("adam", "local"): "CheckpointError: the train state has hyper-parameters of 1 groups with "
    "'over.weight', and the optimizer has 2; pass the optimizer that was saved",
    ("all warm", "warm"): "ConfigError: a WarmupOptimizer around a CombinedOptimizer keeps "
    "'__warmup', which TorchRec's state dicts leave out, so it would begin anew after a resume",
}


@pytest.mark.parametrize(("saved", "loaded"), REFUSED)
def test_an_optimizer_that_would_go_on_otherwise_is_refused(
    ranks2: RankPool, tmp_path: Path, saved: str, loaded: str
) -> None:
    (text,) = set(ranks2.run(error_of_load, tmp_path, saved, loaded))
    assert text.startswith(REFUSED[saved, loaded])


def error_of_load(rank: int, world_size: int, folder: Path, saved: str, loaded: str) -> str:
    return error_of(lambda: rates_after_a_load(rank, world_size, folder, saved, loaded))
