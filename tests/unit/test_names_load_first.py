"""Every public name can be the first one that a program uses."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROGRAM = """
import os
import sys

import torchrec

import torchrec_2dsp

for name in torchrec_2dsp.__all__:
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        getattr(torchrec_2dsp, name)
        print(name, "is there", flush=True)
        os._exit(0)
    os.waitpid(child, 0)
print(len(torchrec_2dsp.__all__), "names")
"""


def test_every_public_name_can_be_used_first() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    *there, last = done.stdout.splitlines()
    num_names = int(last.split()[0])
    assert num_names > 30
    assert len([line for line in there if line.endswith(" is there")]) == num_names, done.stderr
