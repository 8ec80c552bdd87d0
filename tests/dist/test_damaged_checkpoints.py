"""Random damage to checkpoints: nothing wrong is loaded, no code runs, all ranks agree."""

import random
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.damaged_checkpoints import load_damaged, summary
from tests.support.kills import SUBJECTS, launch
from tests.support.ranks import RankPool
from tests.support.soak import MAX_GROWTH_BYTES, NUM_PARTS, PROGRAM, RUNS, Usage, findings, soak


def test_damage_is_refused_or_harmless(ranks2: RankPool, tmp_path: Path) -> None:
    by_rank = ranks2.run(load_damaged, tmp_path, 40, 0, timeout_s=280)
    counts, wrong = summary(by_rank)
    assert not wrong, "\n".join(wrong)
    assert counts["refused"] > 25
    assert counts["right"] > 0


@pytest.mark.slow
def test_a_killed_run_goes_on_with_the_same_losses(tmp_path: Path) -> None:
    library, chance = replace(SUBJECTS["library"], num_steps=14, num_ranks=2), random.Random(1)
    through, killed = (
        launch(library, "every 3", tmp_path / str(kills), kills=kills, chance=chance)
        for kills in (0, 1)
    )
    assert killed.differences(through) == []
    assert (killed.exit_code, len(killed.kills), len(killed.numbers)) == (0, 1, 2 * 14)
    assert len(list((tmp_path / "1").glob("log_*"))) == 2 * 2, "two lives of two ranks"


FEW = Usage(100 * 2**20, 4, 19, 5, 37)


@pytest.mark.slow
@pytest.mark.parametrize("kind", PROGRAM)
def test_nothing_grows_while_two_runs_train(kind: str, ranks2: RankPool, tmp_path: Path) -> None:
    for runs in ranks2.run(soak, kind, 250, tmp_path):
        assert [len(parts) for parts in runs.values()] == [NUM_PARTS] * len(RUNS)
        assert findings(runs) == []


@pytest.mark.parametrize(
    ("after", "name"),
    [
        (FEW._replace(resident_bytes=FEW.resident_bytes + MAX_GROWTH_BYTES + 1), "resident_bytes"),
        (FEW._replace(num_tasks=28, num_files=49), "num_tasks, num_files"),
    ],
)
def test_what_grows_is_found_within_a_run_and_between_two(after: Usage, name: str) -> None:
    steady, growing = [[FEW]] * NUM_PARTS, [[FEW]] * 2 + [[after]] * 3
    assert findings({"first": steady, "second": steady}) == []
    assert findings({"first": growing, "second": [[after]] * NUM_PARTS})[0].startswith(
        f"{name} from the second fifth of the first run to its last"
    )
    (between,) = findings({"first": steady, "second": [[after]] * NUM_PARTS})
    assert between.startswith(f"{name} from the first run to the second")
