"""How far predicted steps are from measured ones, as Markdown."""

import statistics
from collections.abc import Sequence

import numpy as np
from scipy.stats import rankdata

from torchrec_2dsp.cost.step_cost import StepCost
from torchrec_2dsp.programs.bench.markdown_tables import escaped, ms, table
from torchrec_2dsp.programs.bench.results import BenchResult, ContestantResult

_ENOUGH_TO_RANK = 3


def predicted_section(result: BenchResult) -> str:
    """A table of contestants whose steps were predicted, and how good it was; empty without any."""
    predicted = predicted_in(result)
    if not predicted:
        return ""
    costs = [_cost(contestant) for contestant in predicted]
    parts = [
        name
        for name, _ in StepCost().parts()
        if any(abs(dict(cost.parts())[name]) >= 5e-5 for cost in costs)
    ]
    rows = [
        [
            escaped(contestant.name),
            ms(measured_s(contestant)),
            ms(cost.total_s),
            f"{cost.total_s / measured_s(contestant) - 1:+.0%}",
            *(ms(dict(cost.parts())[name]) for name in parts),
        ]
        for contestant, cost in zip(predicted, costs, strict=True)
    ]
    headings = ["contestant", "measured ms", "predicted ms", "error"]
    headings += [name.replace("_", " ") for name in parts]
    return f"{_how_good(predicted)}{_beside(result, predicted, costs)}\n\n{table(headings, rows)}"


def predicted_together(results: Sequence[BenchResult]) -> str:
    """How good predictions are over several settings; empty unless several have any."""
    settings = [predicted for result in results if (predicted := predicted_in(result))]
    if len(settings) < 2:
        return ""
    everyone = [contestant for setting in settings for contestant in setting]
    text = f"{len(everyone)} plans of {len(settings)} settings. {_how_good(everyone)}"
    common = set.intersection(
        *({contestant.name for contestant in setting} for setting in settings)
    )
    in_all_settings = [contestant for contestant in everyone if contestant.name in common]
    if 0 < len(in_all_settings) < len(everyone):
        names = ", ".join(
            escaped(contestant.name) for contestant in settings[0] if contestant.name in common
        )
        text += f"\n\n{len(in_all_settings)} of them are of contestants that all settings have: "
        text += f"{names}. "
        text += _how_good(in_all_settings)
    return text


def predicted_in(result: BenchResult) -> list[ContestantResult]:
    """The measured contestants whose steps were predicted."""
    return [contestant for contestant in result.measured() if contestant.predicted is not None]


def measured_s(contestant: ContestantResult) -> float:
    """The median step of a contestant that was measured."""
    return statistics.median(block.step_s for block in contestant.blocks)


def predicted_s(contestant: ContestantResult) -> float:
    """The step of a contestant that was predicted."""
    return _cost(contestant).total_s


def _beside(
    result: BenchResult, predicted: Sequence[ContestantResult], costs: Sequence[StepCost]
) -> str:
    """The origin of the dense part, and how good the rest is: that part is measured, too."""
    if not result.dense_from:
        return ""
    names = " and ".join(result.dense_from)
    text = f" Dense: what {names} took in the same rounds, less lookups and updates as predicted."
    pairs = [
        (cost.tables_s, measured_s(contestant) - cost.dense_s)
        for contestant, cost in zip(predicted, costs, strict=True)
    ]
    errors = [predicted / measured - 1 for predicted, measured in pairs if measured > 0]
    if errors:
        text += f" Without it, median error of the rest: {statistics.median(errors):+.0%}."
    return text


def _how_good(contestants: Sequence[ContestantResult]) -> str:
    measured = [measured_s(contestant) for contestant in contestants]
    predicted = [predicted_s(contestant) for contestant in contestants]
    errors = [abs(a / b - 1) for a, b in zip(predicted, measured, strict=True)]
    text = f"Median error: {statistics.median(errors):.0%}; largest: {max(errors):.0%}."
    if len(contestants) >= _ENOUGH_TO_RANK:
        # Equal plans have equal predictions.
        ranks = np.corrcoef(rankdata(measured), rankdata(predicted))[0, 1]
        text += f" Rank correlation: {ranks:.2f}."
    return text


def _cost(contestant: ContestantResult) -> StepCost:
    assert contestant.predicted is not None
    return StepCost(**contestant.predicted)
