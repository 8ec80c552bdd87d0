"""A worker is killed under torchrun, and the run goes on with the losses of one that wasn't.

``python -m tests.support.kills`` does it many times, in many variants.
"""

import random

import pytest

from tests.support.kills import run_variant
from tests.support.ranks import RankPool


@pytest.mark.slow
def test_a_killed_run_goes_on_with_the_same_losses(ranks2: RankPool) -> None:
    outcome = run_variant(ranks2, "every 3", kills=1, steps=14, chance=random.Random(1))
    assert outcome.is_good, outcome
    assert len(outcome.kills) == 1
    assert outcome.num_lives == 2
    assert outcome.num_losses >= 2 * 14
