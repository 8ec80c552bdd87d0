"""The example scripts run on four ranks. Their ranks are forks; torchrun starts the demo's."""

import os
import subprocess
import sys
from pathlib import Path

from tests.support.slices import Deal, patient

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "docs" / "examples"
NEED_A_MODEL = {"serve.py", "serve_next_items.py"}
"""The examples that read what `export` writes; the tests of the export run them."""


def test_the_examples_run(dealt: Deal) -> None:
    every = sorted(EXAMPLES.glob("*.py"))
    scripts = dealt([str(script) for script in every if script.name not in NEED_A_MODEL])
    assert scripts
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.forks", "scripts", *scripts],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=patient(200),
        check=False,
    )
    assert done.returncode == 0, done.stderr[-5000:]
    for script in scripts:
        assert f"done\n{script} 0 0 0 0\n" in done.stdout, done.stdout
