"""Who trained what the reference trained."""

import math

from torchrec_2dsp.errors import ConfigError
from torchrec_2dsp.programs.bench.config import (
    BenchConfig,
    CeilingContestant,
    PlannedContestant,
    StockContestant,
    is_reference,
)
from torchrec_2dsp.programs.bench.results import BenchResult, ContestantResult, Outcome


def judged(result: BenchResult, config: BenchConfig) -> BenchResult:
    """The result with loss gaps; contestants with too large a gap are disqualified.

    Raises:
        ConfigError: no contestant is left to hold the others against.
    """
    reference = next(
        (one for one in result.measured() if is_reference(config.contestants[one.name])), None
    )
    if reference is None:
        failed = "; ".join(f"{one.name} {one.outcome}" for one in result.contestants)
        raise ConfigError(f"no stock contestant in fp32 was measured: {failed}")
    judged_ones = tuple(_judged(one, reference, config) for one in result.contestants)
    return result.model_copy(update={"contestants": judged_ones, "reference": reference.name})


def _judged(
    one: ContestantResult, reference: ContestantResult, config: BenchConfig
) -> ContestantResult:
    contestant = config.contestants[one.name]
    if isinstance(contestant, CeilingContestant) or one.outcome is not Outcome.MEASURED:
        return one
    pairs = list(zip(one.losses, reference.losses, strict=False))[: config.loss.num_steps]
    gap = max(abs(mine - theirs) if math.isfinite(mine) else math.inf for mine, theirs in pairs)
    bound = loss_bound(contestant, one.sharding, config)
    update: dict[str, object] = {"loss_gap": gap, "loss_bound": bound}
    if not gap <= bound:
        update |= {
            "outcome": Outcome.DISQUALIFIED,
            "reason": f"its loss is up to {gap:.2g} from that of {reference.name} in {len(pairs)} "
            f"steps; at most {bound:.2g} would be the same training",
        }
    return one.model_copy(update=update)


def loss_bound(one: PlannedContestant, sharding: dict[str, int], config: BenchConfig) -> float:
    """How far the losses of a contestant may be from the reference's."""
    if one.loss_bound != "by_kind":
        return one.loss_bound
    averages = not isinstance(one, StockContestant) and one.sync == "WeightSync"
    # TorchRec keeps a row-wise moment for each column shard of a row.
    by_columns = any("column" in name or "grid" in name for name in sharding)
    rounded = [one.qcomms]
    if not isinstance(one, StockContestant):
        rounded.append(one.transport.value)
    by_arithmetic = max(config.loss.bound_of(arithmetic) for arithmetic in rounded)
    return max(by_arithmetic, config.loss.nearly_bound) if averages or by_columns else by_arithmetic
