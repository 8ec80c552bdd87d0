"""Dense gradients applied one step late: in training, across resumes, and the hook alone."""

import math
from collections import Counter
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torchrec.optim.keyed import KeyedOptimizerWrapper

import torchrec_2dsp as tdsp
from tests.support import dense_training
from tests.support.dense_training import (
    batch_of,
    cell_of,
    dense_of,
    model_of,
    with_nan,
)
from tests.support.devices import copied, rank_device
from tests.support.parity import Cell
from tests.support.ranks import RankPool, error_text
from tests.support.resuming import Run, Variant
from tests.support.slices import patient
from torchrec_2dsp._compat.c10d import store_of_world
from torchrec_2dsp._compat.ddp import data_parallel_wrapper
from torchrec_2dsp.comms.counting import count_collectives
from torchrec_2dsp.comms.groups import world_group
from torchrec_2dsp.dense.delayed_dense import LateGradients
from torchrec_2dsp.errors import CheckpointError, ConfigError, SyncError

pytestmark = pytest.mark.dealt_file

NUM_STEPS = 6


def flush(rank: int, world_size: int) -> tuple[list[bool], int, float, int]:
    """Return whether flushes applied gradients, the late steps, and bytes besides parameters."""
    cell, dense = cell_of(world_size), tdsp.DelayedDense(warm_up=2)
    model = model_of(cell, dense)
    params = dense_of(model)
    optimizer = torch.optim.SGD(params.values(), lr=0.05)
    flushed = []
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        model(batch_of(cell, step, rank)).backward()
        optimizer.step()
        if step == 3:
            flushed = [dense.flush(optimizer), dense.flush(optimizer)]
    size = sum(value.numel() for value in params.values())
    return flushed, dense.num_late_steps, dense.total.num_bytes, size


def test_steps_and_bytes_are_counted_and_a_second_flush_applies_nothing(ranks4: RankPool) -> None:
    for flushed, num_late_steps, num_bytes, size in ranks4.run(flush):
        assert flushed == [True, False]
        assert num_late_steps == NUM_STEPS - 2
        assert num_bytes == pytest.approx(NUM_STEPS * 2 * 3 / 4 * 4 * size)


def count(rank: int, world_size: int) -> tuple[dict[str, int], bool]:
    """Count a late backward's collectives beside DDP's, and check whether it waits for them."""
    counts = []
    for wrapper in (None, tdsp.DelayedDense()):
        cell = cell_of(world_size)
        model = model_of(cell, wrapper)
        model(batch_of(cell, 0, rank)).backward()
        model.zero_grad()
        loss = model(batch_of(cell, 1, rank))
        with count_collectives() as seen:
            loss.backward()
        counts.append(Counter(seen.counts()))
    assert counts[0]["all_reduce"] >= 1
    gradients = [value.grad for value in dense_of(model).values()]
    return dict(counts[1] - counts[0] + (counts[0] - counts[1])), any(
        gradient is not None and bool(gradient.any()) for gradient in gradients
    )


def test_a_late_step_has_the_collectives_of_ddp(ranks2: RankPool) -> None:
    for differences, has_gradients in ranks2.run(count):
        assert differences == {}
        # The first late step has nothing to apply yet.
        assert not has_gradients


def test_warm_steps_are_those_of_ddp_bit_for_bit(ranks4: RankPool) -> None:
    warm = partial(tdsp.DelayedDense, warm_up=NUM_STEPS)
    digests = {
        trained.digest
        for wrapper in (None, warm)
        for trained in ranks4.run(dense_training.train, cell_of(4), wrapper, NUM_STEPS)
    }
    assert len(digests) == 1


def fail_with_nan(rank: int, world_size: int) -> tuple[str, list[float]]:
    """Return the error, and the weights' sums after each step, including steps after the error."""
    cell = cell_of(world_size)
    # Several buckets; the failing one isn't the first.
    model = model_of(cell, tdsp.DelayedDense(bucket_cap_mb=cast(int, 0.005)))
    params, sums, message = dense_of(model), list[float](), ""
    optimizer = torch.optim.SGD(params.values(), lr=0.05)
    layer = dict(model.named_parameters())["tower.0.weight"]
    for step in range(7):
        optimizer.zero_grad()
        loss = model(batch_of(cell, step, rank))
        hook = layer.register_hook(with_nan) if rank == 1 and step == 2 else None
        try:
            loss.backward()
            optimizer.step()
        except SyncError as error:
            assert step == 3
            message = str(error)
        if hook is not None:
            hook.remove()
        sums.append(sum(value.detach().sum().item() for value in params.values()))
    return message, sums


def test_a_nan_of_one_rank_stops_all_before_it_is_applied(ranks4: RankPool) -> None:
    first, *others = ranks4.run(fail_with_nan)
    assert others == [first] * 3
    message, sums = first
    assert message == (
        "gradients of 'tower.0.weight' are not finite in the step before step 3; no dense weight "
        "has changed by them. Lower the learning rate, or clip gradients (found on rank 1)"
    )
    # The fourth step is left out, nothing is in flight in the fifth, and then training goes on.
    assert sums[2] == sums[3] == sums[4]
    assert len({sums[2], *sums[5:]}) == 3
    assert all(map(math.isfinite, sums))


def misuse(rank: int, world_size: int) -> list[str]:
    wrong: list[Any] = [0, True, 1.5]
    errors = [
        error_text(lambda value=value: tdsp.DelayedDense(warm_up=value), ConfigError)
        for value in wrong
    ]
    cell, dense = cell_of(world_size), tdsp.DelayedDense()
    other = tdsp.DelayedDense(warm_up=1 + rank)
    errors.append(error_text(lambda: model_of(cell, other), ConfigError))
    assert dense.state_dict() == {}
    model = model_of(cell, dense)
    errors.append(error_text(lambda: model_of(cell, dense), ConfigError))
    # In the first step DDP reduces in each backward, as accumulate() does there.
    for _ in range(2):
        model(batch_of(cell, 0, rank)).backward()
    model.zero_grad()
    for step in (1, 2):
        model.zero_grad()
        model(batch_of(cell, step, rank)).backward()
    errors.append(error_text(lambda: model(batch_of(cell, 3, rank)).backward(), ConfigError))
    with torch.no_grad():  # Evaluation leaves gradients alone.
        model(batch_of(cell, 3, rank))
    return errors


def test_what_cannot_be_is_said(ranks2: RankPool) -> None:
    (errors,) = {tuple(errors) for errors in ranks2.run(misuse)}
    for warm_up, error in zip(("0", "True", "1.5"), errors, strict=False):
        assert error == f"DelayedDense(warm_up={warm_up}) is no count; use 1 or more"
    differing, twice, accumulated = errors[3:]
    assert differing.startswith("the settings of DelayedDense differs between ranks")
    assert "has a model already; make another one" in twice
    assert "would send them twice; call optimizer.zero_grad() in each step" in accumulated


def refuse_a_batch(rank: int, world_size: int, trains: bool) -> list[int]:
    """Count late steps after each of three steps; before the second a batch is refused."""
    cell, dense = cell_of(world_size), tdsp.DelayedDense(warm_up=2)
    model, counts = model_of(cell, dense).train(trains), list[int]()
    for step in range(3):
        model.zero_grad()
        if step == 1:
            model(batch_of(cell, 9, rank))
        model(batch_of(cell, step, rank)).backward()
        counts.append(dense.num_late_steps)
    return counts


@pytest.mark.parametrize("trains", [True, False])
def test_a_forward_without_a_backward_is_no_step_of_the_warm_up(
    ranks2: RankPool, trains: bool
) -> None:
    assert ranks2.run(refuse_a_batch, trains) == [[0, 0, 1]] * 2


def run_of(world_size: int, *, is_delayed: bool = True) -> Run:
    cell = Cell(tdsp.Mesh2D(1, world_size))
    return Run(Variant(cell, draws=False, dense=tdsp.DelayedDense if is_delayed else None))


def in_flight(run: Run) -> dict[str, torch.Tensor]:
    wrapper = data_parallel_wrapper(run.model)
    assert isinstance(wrapper, tdsp.DelayedDense)
    return {name: copied(mean) for name, mean in wrapper.state_dict()["in_flight"].items()}


def save(rank: int, world_size: int, folder: Path) -> dict[str, torch.Tensor]:
    run = run_of(world_size)
    for _ in range(3):
        run.step()
    run.losses.sum = 0.0
    run.save(folder)
    means = in_flight(run)
    dense = data_parallel_wrapper(run.model)
    assert isinstance(dense, tdsp.DelayedDense)
    inner = KeyedOptimizerWrapper(dict(run.optimizer.params), torch.optim.SGD)
    assert dense.flush(inner)
    run.save(folder / "flushed")
    return means


def load(rank: int, world_size: int, path: Path) -> dict[str, torch.Tensor]:
    run = run_of(world_size)
    for _ in range(2):
        run.step()
    run.load(path)
    means = in_flight(run)
    assert run.step() > 0
    plain = run_of(world_size, is_delayed=False)
    with pytest.raises(CheckpointError, match="holds dense gradients that weren't sent"):
        plain.load(path)
    plain.load(path.parent / "flushed" / path.name)
    assert plain.step() > 0
    return means


def test_other_ranks_take_over_what_was_in_flight(
    ranks4: RankPool, ranks2: RankPool, tmp_path: Path
) -> None:
    saved = ranks4.run(save, tmp_path)
    assert any(mean.any() for mean in saved[0].values())
    for means in (*saved[1:], *ranks2.run(load, tmp_path / "3")):
        assert means.keys() == saved[0].keys()
        assert all(torch.equal(mean, saved[0][name]) for name, mean in means.items())


@dataclass
class Bucket:
    """A DDP bucket, as far as hooks look at it."""

    params: list[nn.Parameter]
    flat: torch.Tensor

    def parameters(self) -> list[nn.Parameter]:
        return self.params

    def buffer(self) -> torch.Tensor:
        return self.flat

    def gradients(self) -> list[torch.Tensor]:
        sizes = [param.numel() for param in self.params]
        parts = zip(self.params, self.flat.split(sizes), strict=True)
        return [part.view_as(param) for param, part in parts]


def reduced(late: LateGradients, params: list[nn.Parameter], *gradients: float) -> list[float]:
    flat = [
        param.new_full((param.numel(),), value)
        for param, value in zip(params, gradients, strict=True)
    ]
    bucket: Any = Bucket(params, torch.cat(flat))
    return cast(torch.Tensor, late.reduce(None, bucket).wait()).tolist()


def run_ahead(rank: int, world_size: int) -> list[list[float]]:
    param = nn.Parameter(torch.zeros(2, device=rank_device()))
    late = LateGradients(1, {id(param): "weight"}, world_group(), rank_device())
    store, means = store_of_world(), []
    for step in range(4):
        late.begin_step()
        if rank == 1 and step == 3:
            # Rank 0 comes back from its hook while this one hasn't begun.
            store.wait(["rank 0 has gone on"], timedelta(seconds=patient(20)))
        means.append(reduced(late, [param], 10.0 * step + rank))
        if rank == 0 and step == 3:
            store.set("rank 0 has gone on", "")
    assert late.drain()["weight"].tolist() == [30.5, 30.5]
    assert late.drain() == {}
    return means


def test_nobody_waits_for_the_gradients_of_the_step(ranks2: RankPool) -> None:
    for means in ranks2.run(run_ahead):
        assert means == [[0.5, 0.5], [0.0, 0.0], [10.5, 10.5], [20.5, 20.5]]


def change_buckets(rank: int, world_size: int) -> list[list[float]]:
    sizes = (1, 2, 1)
    first, second, third = (nn.Parameter(torch.zeros(n, device=rank_device())) for n in sizes)
    names = {id(param): name for param, name in ((first, "a"), (second, "b"), (third, "c"))}
    late = LateGradients(0, names, world_group(), rank_device())
    late.begin_step()
    means = [reduced(late, [first, second], 1.0, 2.0), reduced(late, [third], 3.0)]
    late.begin_step()
    means += [reduced(late, [third, first], 4.0, 5.0), reduced(late, [second], 6.0)]
    state = late.state_dict()
    dist.barrier()
    late.load_state_dict(state)
    late.begin_step()
    return [*means, reduced(late, [second, first, third], 0.0, 0.0, 0.0)]


def test_gradients_find_their_parameters_in_other_buckets(ranks2: RankPool) -> None:
    for means in ranks2.run(change_buckets):
        assert means == [[0, 0, 0], [0], [3, 1], [2, 2], [6, 6, 5, 4]]


def load_elsewhere(rank: int, world_size: int) -> bool:
    late = LateGradients(1, {}, world_group(), torch.device("meta"))
    late.load_state_dict({"step": 3, "in_flight": {"weight": torch.ones(2)}})
    return late.state_dict()["in_flight"]["weight"].is_meta


def test_loaded_means_go_to_the_device_of_the_parameters(ranks2: RankPool) -> None:
    assert ranks2.run(load_elsewhere) == [True, True]
