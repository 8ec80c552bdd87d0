"""Tests. Where ranks compute on CPUs, pytest's process interprets Triton's kernels."""

import os
import sys

# Triton reads it when it is imported. What times a GPU is run without pytest.
if "pytest" in sys.modules and os.environ.get("TESTS_DEVICE", "cpu") == "cpu":
    os.environ.setdefault("TRITON_INTERPRET", "1")
