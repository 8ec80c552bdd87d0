"""Judge which contestants trained what the reference trained.

All contestants train on the same batches, so mean losses over the same steps can be compared
without the data's noise: their relative difference equals the one in normalized entropy. Exact
contestants are also compared step by step over the first steps, where rounding has had no time to
grow. The NE gap over all steps tells drift from rounding.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

from torchrec_2dsp.errors import ConfigError
from torchrec_2dsp.plan.parameter_sharding import RowStorage
from torchrec_2dsp.programs.bench.config import (
    BenchConfig,
    PlannedContestant,
    StockContestant,
    is_reference,
)
from torchrec_2dsp.programs.bench.results import BenchResult, ContestantResult, Outcome


class LossBounds(NamedTuple):
    """A contestant's largest permitted gaps."""

    loss: float | None
    """The largest difference in a first step's loss; None where the arithmetic differs."""
    ne: float
    """The largest relative NE difference, in either direction."""


class LossGaps(NamedTuple):
    """A contestant's gaps."""

    loss: float
    """The largest difference in a first step's loss; infinite where a loss isn't finite."""
    ne: float
    """The NE over all steps relative to the reference's, minus 1: above 0 is worse. Infinite where
    a loss isn't finite."""
    num_steps: int


def judged(result: BenchResult, config: BenchConfig) -> BenchResult:
    """Return the result with all gaps; contestants with too large a gap are disqualified.

    Raises:
        ConfigError: no contestant is left to compare the others with.
    """
    reference = _reference(result, config)
    trained = [measured for measured in result.measured() if measured.name in config.planned]
    gaps = {
        measured.name: gaps_between(measured.losses, reference.losses, config.loss.num_steps)
        for measured in trained
    }
    bounds = {
        measured.name: loss_bounds(config.planned[measured.name], measured.sharding, config)
        for measured in trained
    }
    bounds = _widened(bounds, gaps, reference.name, config)

    def judge(contestant: ContestantResult) -> ContestantResult:
        if contestant.name not in gaps:
            return contestant
        own_gaps, own_bounds = gaps[contestant.name], bounds[contestant.name]
        update: dict[str, object] = {
            "loss_gap": own_gaps.loss,
            "loss_bound": own_bounds.loss,
            "ne_gap": own_gaps.ne,
            "ne_bound": own_bounds.ne,
        }
        if reason := _reason(contestant, reference, own_gaps, own_bounds, config.loss.num_steps):
            update |= {"outcome": Outcome.DISQUALIFIED, "reason": reason}
        return contestant.model_copy(update=update)

    contestants = tuple(map(judge, result.contestants))
    return result.model_copy(update={"contestants": contestants, "reference": reference.name})


def gaps_between(
    losses: tuple[float, ...], reference_losses: tuple[float, ...], num_first_steps: int
) -> LossGaps:
    """Compute the gaps to a reference with finite losses, over the steps that both trained.

    Example:
        The second step is 0.01 apart, and the mean of both is 1 % higher.

        >>> from torchrec_2dsp.programs.bench.judge import gaps_between
        >>> gaps = gaps_between((0.505, 0.505), (0.505, 0.495), num_first_steps=10)
        >>> print(f"{gaps.loss:.3f} {gaps.ne:.1%} {gaps.num_steps}")
        0.010 1.0% 2
    """
    pairs = list(zip(losses, reference_losses, strict=False))
    if not all(map(math.isfinite, losses)):
        return LossGaps(math.inf, math.inf, len(pairs))
    differences = [loss - reference_loss for loss, reference_loss in pairs]
    total = math.fsum(reference_loss for _, reference_loss in pairs)
    return LossGaps(
        loss=max(map(abs, differences[:num_first_steps])),
        ne=math.fsum(differences) / total if total else 0.0,
        num_steps=len(pairs),
    )


def loss_bounds(
    contestant: PlannedContestant, sharding: Mapping[str, int], config: BenchConfig
) -> LossBounds:
    """Return the bounds that the config states for a contestant."""
    if contestant.ne_bound != "by_kind":
        return LossBounds(None, contestant.ne_bound)
    rounded = {contestant.qcomms, "fp16" if contestant.dense.kind == "fp16" else "fp32"}
    rounded.add(getattr(contestant.dense, "autocast", "fp32"))
    # TorchRec keeps a moment of a row for each of its column shards.
    has_moments_by_column = any("column" in name or "grid" in name for name in sharding)
    is_other_algorithm = has_moments_by_column or contestant.dense.is_other_algorithm
    if not isinstance(contestant, StockContestant):
        rounded |= {contestant.transport.value, contestant.row_transport.value}
        rounded |= {"int8"} if contestant.stored_as is RowStorage.INT8 else set()
        rounded |= set() if contestant.precision == "exact" else {"int4"}
        is_other_algorithm |= contestant.sync == "WeightSync" or contestant.delay > 0
    is_exact = rounded == {"fp32"} and not is_other_algorithm
    ne_bound = max(config.loss.ne_bound_of(arithmetic) for arithmetic in rounded)
    if is_other_algorithm:
        ne_bound = max(ne_bound, config.loss.nearly_ne_bound)
    return LossBounds(config.loss.exact_bound if is_exact else None, ne_bound)


def _reference(result: BenchResult, config: BenchConfig) -> ContestantResult:
    """Return the contestant that the others are compared with."""
    candidates = [
        measured
        for measured in result.measured()
        if is_reference(config.contestants[measured.name])
    ]
    if not candidates:
        failed = "; ".join(
            f"{contestant.name} {contestant.outcome}" for contestant in result.contestants
        )
        raise ConfigError(f"no stock contestant in fp32 was measured: {failed}")
    for candidate in candidates:
        if all(map(math.isfinite, candidate.losses)):
            return candidate
    step = _first_without_number(candidates[0].losses)
    raise ConfigError(
        f"the loss of {candidates[0].name} is {candidates[0].losses[step]} at step {step + 1}, so "
        "there is nothing to hold the others against; lower optimizer.lr and optimizer.dense_lr"
    )


def _widened(
    bounds: Mapping[str, LossBounds],
    gaps: Mapping[str, LossGaps],
    reference: str,
    config: BenchConfig,
) -> dict[str, LossBounds]:
    """Widen bounds where TorchRec's own exact contestants differ by more than the config says.

    Each is judged only by the others, and counts for everyone else only if it passed, so none
    excuses itself. A contestant's own `ne_bound` stays.
    """
    repeats = [
        name
        for name, bound in bounds.items()
        if name != reference
        and isinstance(config.contestants[name], StockContestant)
        and bound.loss is not None
        and gaps[name].loss <= bound.loss
    ]

    def widened(name: str, witnesses: list[str]) -> LossBounds:
        spread = max((abs(gaps[witness].ne) for witness in witnesses), default=0.0)
        bound = bounds[name]
        if config.planned[name].ne_bound != "by_kind":
            return bound
        return bound._replace(ne=max(bound.ne, config.loss.spread_factor * spread))

    by_others = {
        name: widened(name, [other for other in repeats if other != name]) for name in repeats
    }
    passed = [name for name in repeats if abs(gaps[name].ne) <= by_others[name].ne]
    return {name: by_others.get(name) or widened(name, passed) for name in bounds}


def _reason(
    measured: ContestantResult,
    reference: ContestantResult,
    gaps: LossGaps,
    bounds: LossBounds,
    num_first_steps: int,
) -> str:
    """Return the reason to disqualify a contestant; empty without one."""
    if math.isinf(gaps.ne):
        step = _first_without_number(measured.losses)
        return (
            f"its loss is {measured.losses[step]} at step {step + 1}; all losses of "
            f"{reference.name} are finite"
        )
    if bounds.loss is not None and gaps.loss > bounds.loss:
        num_steps = min(num_first_steps, gaps.num_steps)
        return (
            f"its loss is up to {gaps.loss:.2g} from that of {reference.name} in the first "
            f"{num_steps} steps; at most {bounds.loss:.2g} would be rounding, so it trains "
            "something else"
        )
    if abs(gaps.ne) > bounds.ne:
        direction = "above" if gaps.ne > 0 else "below"
        return (
            f"its normalized entropy over {gaps.num_steps} steps is {100 * abs(gaps.ne):.2g} % "
            f"{direction} that of {reference.name}; at most {100 * bounds.ne:.2g} % would be the "
            "same quality"
        )
    return ""


def _first_without_number(losses: tuple[float, ...]) -> int:
    return next(step for step, loss in enumerate(losses) if not math.isfinite(loss))
