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
        (
            contestant
            for contestant in result.measured()
            if is_reference(config.contestants[contestant.name])
        ),
        None,
    )
    if reference is None:
        failed = "; ".join(
            f"{contestant.name} {contestant.outcome}" for contestant in result.contestants
        )
        raise ConfigError(f"no stock contestant in fp32 was measured: {failed}")
    judged_ones = tuple(_judged(contestant, reference, config) for contestant in result.contestants)
    return result.model_copy(update={"contestants": judged_ones, "reference": reference.name})


def _judged(
    measured: ContestantResult, reference: ContestantResult, config: BenchConfig
) -> ContestantResult:
    contestant = config.contestants[measured.name]
    if isinstance(contestant, CeilingContestant) or measured.outcome is not Outcome.MEASURED:
        return measured
    pairs = list(zip(measured.losses, reference.losses, strict=False))[: config.loss.num_steps]
    gap = max(
        abs(loss - reference_loss) if math.isfinite(loss) else math.inf
        for loss, reference_loss in pairs
    )
    bound = loss_bound(contestant, measured.sharding, config)
    update: dict[str, object] = {"loss_gap": gap, "loss_bound": bound}
    if not gap <= bound:
        update |= {
            "outcome": Outcome.DISQUALIFIED,
            "reason": f"its loss is up to {gap:.2g} from that of {reference.name} in {len(pairs)} "
            f"steps; at most {bound:.2g} would be the same training",
        }
    return measured.model_copy(update=update)


def loss_bound(
    contestant: PlannedContestant, sharding: dict[str, int], config: BenchConfig
) -> float:
    """How far the losses of a contestant may be from the reference's."""
    if contestant.loss_bound != "by_kind":
        return contestant.loss_bound
    averages = not isinstance(contestant, StockContestant) and contestant.sync == "WeightSync"
    # TorchRec keeps a row-wise moment for each column shard of a row.
    by_columns = any("column" in name or "grid" in name for name in sharding)
    rounded = [contestant.qcomms]
    if not isinstance(contestant, StockContestant):
        rounded += [contestant.transport.value, contestant.row_transport.value]
    by_arithmetic = max(config.loss.bound_of(arithmetic) for arithmetic in rounded)
    return max(by_arithmetic, config.loss.nearly_bound) if averages or by_columns else by_arithmetic
