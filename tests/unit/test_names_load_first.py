"""Every public name can be the first one that a program uses."""

import os
import subprocess
import sys
from pathlib import Path

import torchrec_2dsp
from tests.support.slices import Deal

ROOT = Path(__file__).parents[2]
PROGRAM = """
import os
import sys

import torchrec

import torchrec_2dsp

for name in sys.argv[1:]:
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        getattr(torchrec_2dsp, name)
        print(name, "is there", flush=True)
        os._exit(0)
    os.waitpid(child, 0)
"""


def test_every_public_name_can_be_used_first(dealt: Deal) -> None:
    names = dealt(torchrec_2dsp.__all__)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *names],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.stdout.splitlines() == [f"{name} is there" for name in names], done.stderr
