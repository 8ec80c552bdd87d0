"""Whatever happens to a rank, the others end soon, with an error that names it."""

import json
from pathlib import Path

from tests.support.fault_cases import chosen_cases
from tests.support.programs import python
from tests.support.slices import Deal


def test_the_other_ranks_name_the_one_that_failed(tmp_path: Path, dealt: Deal) -> None:
    """Some of each kind; ``python -m tests.support.faults`` runs all cases."""
    reported = tmp_path / "outcomes.json"
    cases = dealt(chosen_cases())
    names = [f"--case={case}" for case in cases]
    done = python("-m", "tests.support.faults", *names, "--json", str(reported), timeout_s=280)
    assert done.returncode == 0, done.stdout + done.stderr
    outcomes = json.loads(reported.read_text())
    assert len(outcomes) == len(cases)
    for outcome in outcomes:
        # Each case had its fault, and every other rank an error.
        assert [end["rank"] for end in outcome["ends"] if end["error"] is None] in ([], [1]), (
            outcome
        )
