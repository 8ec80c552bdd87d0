"""Thresholded gradients lose nothing, even across resumes; and tables' touched rows."""

import random
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import torchrec_2dsp as tdsp
from tests.support.loops import largest_gap, snapshot
from tests.support.parity import Cell
from tests.support.ranks import RankPool, error_of
from tests.support.resuming import VARIANTS, Run, Variant
from tests.support.slices import Deal
from torchrec_2dsp._compat.ddp import data_parallel_wrapper
from torchrec_2dsp.codecs.rows import FlatCodec
from torchrec_2dsp.codecs.sparse import ErrorFeedback, ThresholdRule
from torchrec_2dsp.dense.gradient_sums import GradientRoute
from torchrec_2dsp.dense.thresholded_gradients import ThresholdedGradients, ThresholdSettings
from torchrec_2dsp.errors import CheckpointError, ConfigError
from torchrec_2dsp.parallel.train_state import state

SIZES = (1, 7, 100, 1_023, 1_024, 5_000, 70_000)
"""The last one takes two blocks of a sparse message."""
KINDS = ("normal", "heavy", "sparse", "zero", "equal", "tiny", "one rank")
NUM_STEPS = 4


@dataclass(frozen=True)
class Case:
    """A random case, by its seed."""

    seed: int

    @property
    def drawn(self) -> dict[str, Any]:
        rng = random.Random(self.seed)
        return {
            "sizes": rng.choices(SIZES, k=rng.randint(1, 5)),
            "kinds": rng.choices(KINDS, k=3),
            "settings": ThresholdSettings(
                density=10 ** rng.uniform(-3.5, 0),
                warm_up=rng.choice([0, 0, 1]),
                dense_below=rng.choice([0, 256, 1_024]),
                values=FlatCodec(rng.choice(list(tdsp.Transport)).codec),
                rule=ThresholdRule(refresh=rng.randint(1, 3), is_exact=rng.random() < 0.3),
                route=rng.choice([None, *GradientRoute]),
            ),
            "bucket_cap_mb": rng.choice([0.0005, 0.02, 25]),
        }

    def gradients(self, step: int, rank: int) -> list[torch.Tensor]:
        """Return each parameter's gradient, on one rank in one step."""
        drawn = self.drawn
        generator = torch.Generator().manual_seed(1_000 * self.seed + 10 * step + rank)
        return [
            self._gradient(drawn["kinds"][place % 3], size, rank, generator)
            for place, size in enumerate(drawn["sizes"])
        ]

    def _gradient(
        self, kind: str, size: int, rank: int, generator: torch.Generator
    ) -> torch.Tensor:
        normal = torch.randn(size, generator=generator)
        match kind:
            case "heavy":
                return normal * torch.rand(size, generator=generator).clamp(min=1e-3) ** -1
            case "sparse":
                return normal * (torch.rand(size, generator=generator) < 0.01)
            case "zero":
                return torch.zeros(size)
            case "equal":
                return torch.full((size,), 0.5)
            case "tiny":
                return normal * 1e-30
            case "one rank":
                return normal if rank == 1 else torch.zeros(size)
            case _:
                return normal


class Linear(nn.Module):
    """Sums its parameters times its input, so the input is their gradient."""

    def __init__(self, sizes: list[int]) -> None:
        super().__init__()
        self.layers = nn.ParameterList([torch.zeros(size) for size in sizes])

    def forward(self, gradients: list[torch.Tensor]) -> torch.Tensor:
        pairs = zip(self.layers, gradients, strict=True)
        return torch.stack([(layer * gradient).sum() for layer, gradient in pairs]).sum()


@dataclass
class Outcome:
    """A rank's results for a case."""

    gaps: list[float] = field(default_factory=list)
    """By step, applied sums plus residuals against all gradients, in units of rounding."""
    applied: list[list[bytes]] = field(default_factory=list)
    """Each step's means, bit for bit."""
    entries: int = 0
    most_entries: int = 0
    left_after_flush: float = 0.0


def run_case(rank: int, world_size: int, case: Case) -> Outcome:
    drawn = case.drawn
    group = dist.group.WORLD
    assert group is not None
    model = Linear(drawn["sizes"])
    ddp = DistributedDataParallel(
        model,
        gradient_as_bucket_view=True,
        static_graph=True,
        bucket_cap_mb=drawn["bucket_cap_mb"],
    )
    names = {id(value): name for name, value in model.named_parameters()}
    hook = ThresholdedGradients(drawn["settings"], names, group)
    ddp.register_comm_hook(None, hook.reduce)
    outcome = Outcome()
    applied = [torch.zeros(size, dtype=torch.float64) for size in drawn["sizes"]]
    due = [torch.zeros(size, dtype=torch.float64) for size in drawn["sizes"]]
    largest = [torch.zeros(()) for _ in drawn["sizes"]]
    for step in range(NUM_STEPS):
        if step == NUM_STEPS - 1:
            hook.flush()
        ddp.zero_grad()
        before = hook.total
        hook.begin_batch(is_first=True)
        ddp(case.gradients(step, rank)).backward()
        means = [gradient_of(layer) for layer in model.layers]
        outcome.applied.append([mean.numpy().tobytes() for mean in means])
        sent = hook.total - before
        outcome.entries += sent.num_entries
        assert sent.num_thresholded_steps == int(sent.num_elements > 0)
        if sent.num_thresholded_steps:
            density, below = drawn["settings"].density, drawn["settings"].dense_below
            outcome.most_entries += sum(
                -int(-density * size // 1) for size in drawn["sizes"] if size >= below
            )
        residuals = hook.state_dict()["residuals"]
        gap = 0.0
        for place, mean in enumerate(means):
            applied[place] += mean.double() * world_size
            for peer in range(world_size):
                gradient = case.gradients(step, peer)[place]
                due[place] += gradient.double()
                largest[place] = torch.maximum(largest[place], gradient.abs().max())
            left = residuals.get(f"layers.{place}", torch.zeros_like(mean)).clone()
            lefts = [torch.empty_like(left) for _ in range(world_size)]
            dist.all_gather(lefts, left)
            whole = applied[place] + torch.stack(lefts).double().sum(dim=0)
            unit = float(largest[place]) * torch.finfo(torch.float32).eps
            distance = float((whole - due[place]).abs().max())
            gap = max(gap, distance / unit if unit else distance)
        outcome.gaps.append(gap)
    outcome.left_after_flush = hook.residual_norm()
    return outcome


def gradient_of(layer: nn.Parameter) -> torch.Tensor:
    assert layer.grad is not None
    return layer.grad.detach().clone()


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_nothing_is_lost_whatever_is_sent(
    ranks2: RankPool, ranks4: RankPool, num_ranks: int, dealt: Deal
) -> None:
    pool = ranks2 if num_ranks == 2 else ranks4
    for seed in dealt(range(1_000 * num_ranks, 1_000 * num_ranks + 40)):
        of_ranks = pool.run(run_case, Case(seed))
        assert len({str(outcome.applied) for outcome in of_ranks}) == 1, seed
        for outcome in of_ranks:
            # Sums over four ranks and four steps, with numbers about as large as the largest.
            assert max(outcome.gaps) < 64, (seed, outcome.gaps)
            assert outcome.left_after_flush == 0.0, seed
            assert outcome.entries <= outcome.most_entries, seed


pytestmark = pytest.mark.dealt_file

NUM_RESUMED_STEPS = 3


def run_on(world_size: int, name: str = "thresholded owners") -> Run:
    """Build a variant's run on ``world_size`` ranks."""
    return Run(replace(VARIANTS[name], cell=Cell(tdsp.Mesh2D(1, world_size))))


def wrapper_of(run: Run) -> tdsp.ThresholdedDataParallel:
    wrapper = data_parallel_wrapper(run.model)
    assert isinstance(wrapper, tdsp.ThresholdedDataParallel)
    return wrapper


def sums_of_residuals(run: Run) -> dict[str, torch.Tensor]:
    """Add up all ranks' residuals."""
    own = wrapper_of(run).state_dict()["residuals"]
    by_rank = [own] * dist.get_world_size()
    # A rank may have none.
    dist.all_gather_object(by_rank, own)
    joined = ErrorFeedback()
    joined.load_sum(by_rank)
    return joined.state_dict()


def save(
    rank: int, world_size: int, folder: Path, name: str = "thresholded owners"
) -> dict[str, torch.Tensor]:
    run = run_on(world_size, name)
    for _ in range(NUM_RESUMED_STEPS):
        run.step()
    run.losses.sum = 0.0
    run.save(folder)
    return sums_of_residuals(run)


def load(rank: int, world_size: int, path: Path) -> tuple[dict[str, torch.Tensor], float]:
    run = run_on(world_size)
    run.step()
    run.load(path)
    sums = sums_of_residuals(run)
    run.step()
    return sums, run.step()


@pytest.mark.parametrize("grows", [False, True])
def test_other_ranks_take_over_the_sum(
    ranks4: RankPool, ranks2: RankPool, tmp_path: Path, grows: bool
) -> None:
    before, after = (ranks2, ranks4) if grows else (ranks4, ranks2)
    saved = before.run(save, tmp_path)[0]
    assert any(residual.any() for residual in saved.values())
    for sums, loss in after.run(load, tmp_path / str(NUM_RESUMED_STEPS)):
        assert sums.keys() == saved.keys()
        for name, residual in saved.items():
            # With two ranks each gradient counts for a half, with four for a quarter.
            torch.testing.assert_close(sums[name], residual * (2 if grows else 0.5))
        assert loss > 0


def resume_moments(rank: int, world_size: int, path: Path) -> tuple[list[bytes], list[bytes], int]:
    """Return the dense weights after two more steps, the full parameters' moments, and steps."""
    run = run_on(world_size, "preconditioned")
    run.load(path)
    run.step()
    run.step()
    moments = wrapper_of(run).state_dict()["moments"]
    weights = {name: value for name, value in run.model.named_parameters() if "tower" in name}
    assert weights
    shared = [moments[name] for name in moments if "tower" in name and "bias" in name]
    return (
        [value.detach().numpy().tobytes() for value in weights.values()],
        [state["second"].numpy().tobytes() for state in shared],
        min(state["num_steps"] for state in moments.values()),
    )


@pytest.mark.parametrize("grows", [False, True])
def test_other_ranks_go_on_with_the_mean_of_the_moments(
    ranks4: RankPool, ranks2: RankPool, tmp_path: Path, grows: bool
) -> None:
    before, after = (ranks2, ranks4) if grows else (ranks4, ranks2)
    before.run(save, tmp_path, "preconditioned")
    resumed = after.run(resume_moments, tmp_path / str(NUM_RESUMED_STEPS))
    for weights, moments, num_steps in resumed:
        assert moments
        assert (weights, moments) == resumed[0][:2]
        assert num_steps == NUM_RESUMED_STEPS + 2


def load_without_wrapper(rank: int, world_size: int, path: Path) -> str:
    run = Run(Variant(Cell(tdsp.Mesh2D(1, world_size))))
    with pytest.raises(CheckpointError) as raised:
        run.load(path)
    return str(raised.value)


def test_a_model_that_would_lose_residuals_is_refused(ranks2: RankPool, tmp_path: Path) -> None:
    ranks2.run(save, tmp_path)
    (message,) = set(ranks2.run(load_without_wrapper, tmp_path / str(NUM_RESUMED_STEPS)))
    assert message.startswith("the train state holds dense gradients that weren't sent")


def change_wrapper(rank: int, world_size: int, name: str, folder: Path) -> float:
    """Resume with another wrapper after a run with TorchRec's own."""
    plain = Run(Variant(Cell(tdsp.Mesh2D(1, world_size))))
    plain.step()
    plain.save(folder)
    run = run_on(world_size, name)
    run.step()
    run.load(folder / "1")
    wrapper: Any = data_parallel_wrapper(run.model)
    state = wrapper.state_dict()
    kept = state.get("residuals", state.get("in_flight"))
    assert not any(gradients.any() for gradients in kept.values())
    return run.step()


@pytest.mark.parametrize("name", ["thresholded owners", "delayed"])
def test_a_run_may_begin_to_keep_gradients_at_a_checkpoint(
    ranks2: RankPool, tmp_path: Path, name: str
) -> None:
    assert all(loss > 0 for loss in ranks2.run(change_wrapper, name, tmp_path))


WRAPPERS = {name: VARIANTS[name].dense for name in ("thresholded", "delayed", "powersgd")} | {
    "fp16": lambda: tdsp.HookedDataParallel("fp16")
}


def resume_otherwise(
    rank: int, world_size: int, before: str, after: str, folder: Path, release: str
) -> str:
    """Save a run, and load it under another wrapper; return the error.

    Old releases' saves don't name the wrapper; "flushed" ones hold no gradients.
    """
    cell = Cell(tdsp.Mesh2D(1, world_size))
    run = Run(Variant(cell, dense=WRAPPERS[before]))
    for _ in range(NUM_RESUMED_STEPS + 2):
        run.step()
    if release == "flushed":
        wrapper_of(run).flush()
        run.step()
    with pytest.MonkeyPatch.context() as patch:
        if release == "old":
            patch.setattr(state, "kind_of_wrapper", lambda wrapper: None)
        run.save(folder)
    other = Run(Variant(cell, dense=WRAPPERS[after]))
    other.step()
    weights = snapshot(other.model)
    text = error_of(partial(other.load, folder / str(run.state.step)))
    if text:
        assert largest_gap(weights, snapshot(other.model)) == 0
    assert other.step() > 0
    return text


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("thresholded", "delayed"),
        ("thresholded", "powersgd"),
        ("delayed", "thresholded"),
        ("delayed", "fp16"),
        ("powersgd", "thresholded"),
        ("powersgd", "fp16"),
    ],
)
def test_another_wrapper_is_refused_before_anything_is_written(
    ranks2: RankPool, tmp_path: Path, before: str, after: str
) -> None:
    (text,) = set(ranks2.run(resume_otherwise, before, after, tmp_path, "new"))
    kind = type(WRAPPERS[before]()).__name__  # type: ignore[misc]
    if {before, after} == {"powersgd", "fp16"}:
        assert "'dense_gradients' in the train state can't be loaded: it holds what Powe" in text
        return
    assert text.startswith("CheckpointError: the train state holds dense gradients that weren't")
    assert f"make it with {kind} as data_parallel_wrapper" in text


def test_another_wrapper_goes_on_after_a_flush(ranks2: RankPool, tmp_path: Path) -> None:
    where = "thresholded", "delayed", tmp_path
    assert ranks2.run(resume_otherwise, *where, "flushed") == ["", ""]


@pytest.mark.parametrize("name", ["thresholded", "delayed", "powersgd"])
def test_saves_that_do_not_name_the_wrapper_are_loaded(
    ranks2: RankPool, tmp_path: Path, name: str
) -> None:
    assert ranks2.run(resume_otherwise, name, name, tmp_path, "old") == ["", ""]


def take_name(rank: int, world_size: int) -> None:
    run = run_on(world_size)
    with pytest.raises(
        ConfigError, match="dense_gradients is the name of the state of the model's"
    ):
        tdsp.TrainState(run.model, run.optimizer, dense_gradients={})


def test_the_name_of_the_state_is_taken(ranks2: RankPool) -> None:
    ranks2.run(take_name)
