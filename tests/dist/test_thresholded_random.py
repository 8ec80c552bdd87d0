"""Thresholded gradients with random parameters, options and gradients: nothing is lost."""

import random
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import torchrec_2dsp as tdsp
from tests.support.ranks import RankPool
from tests.support.slices import Deal
from torchrec_2dsp.codecs.rows import FlatCodec
from torchrec_2dsp.codecs.sparse import ThresholdRule
from torchrec_2dsp.dense.gradient_sums import GradientRoute
from torchrec_2dsp.dense.thresholded_gradients import ThresholdedGradients, ThresholdSettings

SIZES = (1, 7, 100, 1_023, 1_024, 5_000, 70_000)
"""The last one takes two blocks of a sparse message."""
KINDS = ("normal", "heavy", "sparse", "zero", "equal", "tiny", "one rank")
NUM_STEPS = 4


@dataclass(frozen=True)
class Case:
    """A random case; the same for the same seed."""

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
        """The gradient of each parameter, on one rank in one step."""
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
    """The sum of its parameters times what it is given, so that this is their gradient."""

    def __init__(self, sizes: list[int]) -> None:
        super().__init__()
        self.layers = nn.ParameterList([torch.zeros(size) for size in sizes])

    def forward(self, gradients: list[torch.Tensor]) -> torch.Tensor:
        pairs = zip(self.layers, gradients, strict=True)
        return torch.stack([(layer * gradient).sum() for layer, gradient in pairs]).sum()


@dataclass
class Outcome:
    """What a rank saw of a case."""

    seed: int
    gaps: list[float] = field(default_factory=list)
    """The distance of what was applied and all residuals from the sum of all gradients, by step,
    in units of rounding."""
    applied: list[list[bytes]] = field(default_factory=list)
    """The means of each step, bit for bit."""
    entries: int = 0
    most_entries: int = 0
    left_after_flush: float = 0.0


def run_cases(rank: int, world_size: int, seeds: list[int]) -> list[Outcome]:
    return [run_case(rank, world_size, Case(seed)) for seed in seeds]


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
    outcome = Outcome(case.seed)
    applied = [torch.zeros(size, dtype=torch.float64) for size in drawn["sizes"]]
    due = [torch.zeros(size, dtype=torch.float64) for size in drawn["sizes"]]
    largest = [torch.zeros(()) for _ in drawn["sizes"]]
    for step in range(NUM_STEPS):
        if step == NUM_STEPS - 1:
            hook.flush()
        ddp.zero_grad()
        before = hook.total
        ddp(case.gradients(step, rank)).backward()
        means = [gradient_of(layer) for layer in model.layers]
        outcome.applied.append([mean.numpy().tobytes() for mean in means])
        sent = hook.total - before
        outcome.entries += sent.num_entries
        if sent.num_thresholded_steps or sent.num_elements:
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
    seeds = dealt(range(1_000 * num_ranks, 1_000 * num_ranks + 40))
    ranks = pool.run(run_cases, seeds)
    for of_ranks in zip(*ranks, strict=True):
        seed = of_ranks[0].seed
        assert len({str(outcome.applied) for outcome in of_ranks}) == 1, seed
        for outcome in of_ranks:
            # Sums of four ranks over four steps, of numbers of about the largest one's size.
            assert max(outcome.gaps) < 64, (seed, outcome.gaps)
            assert outcome.left_after_flush == 0.0, seed
            assert outcome.entries <= outcome.most_entries, seed
