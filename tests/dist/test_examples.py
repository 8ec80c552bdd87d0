"""The example scripts run on four ranks, the first of them as a user would start it."""

import os
import subprocess
import sys
from pathlib import Path

from tests.support.patience import patient

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "docs" / "examples"
FIRST = EXAMPLES / "swap.py"


def said(*command: str) -> str:
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        timeout=patient(200),
        check=False,
    )
    assert done.returncode == 0, done.stderr[-5000:]
    return done.stdout


def test_the_first_example_runs_under_torchrun() -> None:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    assert said(*launcher, str(FIRST)).endswith("done\n")


def test_the_other_examples_run() -> None:
    others = sorted(str(script) for script in EXAMPLES.glob("*.py") if script != FIRST)
    assert others
    output = said("-m", "tests.support.forked_scripts", *others)
    for script in others:
        assert f"done\n{script} 0 0 0 0\n" in output, output
