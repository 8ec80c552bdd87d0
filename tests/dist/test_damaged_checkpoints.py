"""Random damage to checkpoints: nothing wrong is loaded, no code runs, all ranks agree."""

from pathlib import Path

from tests.support.damaged_checkpoints import load_damaged, summary
from tests.support.ranks import RankPool


def test_damage_is_refused_or_harmless(ranks2: RankPool, tmp_path: Path) -> None:
    by_rank = ranks2.run(load_damaged, tmp_path, 40, 0, timeout_s=280)
    counts, wrong = summary(by_rank)
    assert not wrong, "\n".join(wrong)
    assert counts["refused"] > 25
    assert counts["right"] > 0
