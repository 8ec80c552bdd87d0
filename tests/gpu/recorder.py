"""A pytest plugin that records each test as it ends, and skips tests that have passed.

The file ``GPU_QUEUE_TESTS`` gets a line for each test. Tests in the file ``GPU_QUEUE_PASSED``
don't run again.
"""

import json
import os
from pathlib import Path

import pytest

TESTS, PASSED = "GPU_QUEUE_TESTS", "GPU_QUEUE_PASSED"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect tests that have passed."""
    path = Path(os.environ[PASSED])
    passed = set(path.read_text().splitlines()) if path.exists() else set()
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid in passed])
    items[:] = [item for item in items if item.nodeid not in passed]


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Record a test's outcome, or its setup's if that failed."""
    if report.when == "call" or report.outcome != "passed":
        line = json.dumps([report.nodeid, report.outcome])
        with Path(os.environ[TESTS]).open("a") as file:
            file.write(f"{line}\n")
