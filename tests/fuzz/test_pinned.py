"""Pinned cases: combinations that must stay right and that a draw may miss."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.fuzz.case import Case
from tests.fuzz.judge import judge
from tests.fuzz.run import run_case
from tests.fuzz.seen import RankReport
from tests.support.devices import on_gpus
from tests.support.ranks import RankPool

PINNED = Path(__file__).with_name("pinned.jsonl").read_text().splitlines()
"""A line for each case."""
POOLS = {(2, 2): "ranks2", (4, 4): "ranks4", (4, 2): "two_hosts", (8, 2): "ranks8"}
"""The ranks by their number, and by that on a host."""


@pytest.mark.dealt_file
@pytest.mark.parametrize("number", range(1, len(PINNED) + 1), ids="line{}".format)
def test_pinned_cases_are_right(
    request: pytest.FixtureRequest, number: int, tmp_path: Path
) -> None:
    case = Case.from_json(PINNED[number - 1])
    pool = POOLS[case.world_size, case.local_world_size]
    ranks: RankPool = request.getfixturevalue(pool)
    if on_gpus():
        # FBGEMM's CUDA kernel can't cut a batch without samples.
        sizes = tuple(max(1, size) for size in case.sizes)
        case = replace(case, local=ranks.local_world_size, sizes=sizes)
    seen = ranks.run(run_case, case, tmp_path)
    verdict = judge(case, [RankReport("returned", of_rank) for of_rank in seen])
    assert verdict.outcome == "ok", f"{case.to_json()}: {verdict.text}"
    assert verdict.counts.moved_weights > 0
    # Those without a bound are rounded where they travel, and one rounding more shows.
    assert case.bound or verdict.counts.rounded > 0
    assert verdict.counts.synced_rows > 0 or case.groups == 1 or case.wrapper == "stock"
