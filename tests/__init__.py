"""Tests. Triton's kernels are interpreted where there is no GPU."""

import os

if os.environ.get("TESTS_DEVICE", "cpu") == "cpu":
    os.environ.setdefault("TRITON_INTERPRET", "1")  # It is read when Triton is imported.
