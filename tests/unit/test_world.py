"""What all programs do to the processes that torchrun started."""

import os
import subprocess
import sys

import pytest

from tests.support.slices import patient

_STEPS = """
import resource, sys
import torch

def step():
    return [torch.ones(2**21) for _ in range(6)]

if sys.argv[1] == "keep":
    from torchrec_2dsp.programs.launch import keep_freed_memory

    keep_freed_memory()
for _ in range(5):
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    step()
print((resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) // 10)
"""


@pytest.mark.dealt_suite
@pytest.mark.skipif(sys.platform != "linux", reason="glibc")
def test_memory_that_a_step_frees_is_there_for_the_next() -> None:
    # As small as they are before glibc has seen larger ones.
    thresholds = {f"MALLOC_{name}_THRESHOLD_": str(2**17) for name in ("MMAP", "TRIM")}
    eager = os.environ | thresholds
    faults = {
        what: int(
            subprocess.run(
                [sys.executable, "-c", _STEPS, what],
                check=True,
                capture_output=True,
                text=True,
                timeout=patient(100),
                env=eager,
            ).stdout
        )
        for what in ("leave", "keep")
    }

    # 48 MiB have 12,288 pages.
    assert faults["leave"] > 1_000
    assert faults["keep"] < 100
