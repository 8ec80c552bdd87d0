"""Whatever happens to a rank, the others end soon with an error that names it."""

from tests.support.fault_cases import chosen_cases
from tests.support.programs import python
from tests.support.slices import Deal


def test_the_other_ranks_name_the_one_that_failed(dealt: Deal) -> None:
    """This runs some cases of each kind; ``python -m tests.support.faults`` runs all."""
    cases = dealt(chosen_cases())
    names = [f"--case={case}" for case in cases]
    done = python("-m", "tests.support.faults", *names, timeout_s=280)
    # In each case there was a fault, and every other rank has named it.
    assert done.returncode == 0, done.stdout + done.stderr
    passed = {line.rpartition(": ok (")[0] for line in done.stdout.splitlines()}
    assert passed >= set(map(str, cases)), done.stdout
