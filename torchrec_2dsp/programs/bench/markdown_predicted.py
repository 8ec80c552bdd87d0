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
    known = predicted_in(result)
    if not known:
        return ""
    costs = [_cost(one) for one in known]
    parts = [
        name
        for name, _ in StepCost().parts()
        if any(abs(dict(cost.parts())[name]) >= 5e-5 for cost in costs)
    ]
    rows = [
        [
            escaped(one.name),
            ms(measured_s(one)),
            ms(cost.total_s),
            f"{cost.total_s / measured_s(one) - 1:+.0%}",
            *(ms(dict(cost.parts())[name]) for name in parts),
        ]
        for one, cost in zip(known, costs, strict=True)
    ]
    headings = ["contestant", "measured ms", "predicted ms", "error"]
    headings += [name.replace("_", " ") for name in parts]
    return f"{_how_good(known)}{_beside(result, known, costs)}\n\n{table(headings, rows)}"


def predicted_together(results: Sequence[BenchResult]) -> str:
    """How good predictions are over several settings; empty unless several have any."""
    settings = [known for result in results if (known := predicted_in(result))]
    if len(settings) < 2:
        return ""
    everyone = [one for known in settings for one in known]
    text = f"{len(everyone)} plans of {len(settings)} settings. {_how_good(everyone)}"
    common = set.intersection(*({one.name for one in known} for known in settings))
    some = [one for one in everyone if one.name in common]
    if 0 < len(some) < len(everyone):
        names = ", ".join(escaped(one.name) for one in settings[0] if one.name in common)
        text += f"\n\n{len(some)} of them are of contestants that all settings have: {names}. "
        text += _how_good(some)
    return text


def predicted_in(result: BenchResult) -> list[ContestantResult]:
    """The measured contestants whose steps were predicted."""
    return [one for one in result.measured() if one.predicted is not None]


def measured_s(one: ContestantResult) -> float:
    """The median step of a contestant that was measured."""
    return statistics.median(block.step_s for block in one.blocks)


def predicted_s(one: ContestantResult) -> float:
    """The step of a contestant that was predicted."""
    return _cost(one).total_s


def _beside(
    result: BenchResult, known: Sequence[ContestantResult], costs: Sequence[StepCost]
) -> str:
    """Where the dense part is from, and how good the rest is: that part is measured, too."""
    if not result.dense_from:
        return ""
    names = " and ".join(result.dense_from)
    text = f" Dense: what {names} took in the same rounds, less lookups and updates as predicted."
    pairs = [
        (cost.tables_s, measured_s(one) - cost.dense_s)
        for one, cost in zip(known, costs, strict=True)
    ]
    errors = [predicted / measured - 1 for predicted, measured in pairs if measured > 0]
    if errors:
        text += f" Without it, median error of the rest: {statistics.median(errors):+.0%}."
    return text


def _how_good(known: Sequence[ContestantResult]) -> str:
    measured = [measured_s(one) for one in known]
    predicted = [predicted_s(one) for one in known]
    errors = [abs(a / b - 1) for a, b in zip(predicted, measured, strict=True)]
    text = f"Median error: {statistics.median(errors):.0%}; largest: {max(errors):.0%}."
    if len(known) >= _ENOUGH_TO_RANK:
        # Equal plans have equal predictions.
        ranks = np.corrcoef(rankdata(measured), rankdata(predicted))[0, 1]
        text += f" Rank correlation: {ranks:.2f}."
    return text


def _cost(one: ContestantResult) -> StepCost:
    assert one.predicted is not None
    return StepCost(**one.predicted)
