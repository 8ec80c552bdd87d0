"""Fixtures for tests that need an emulated cluster."""

import pytest

from torchrec_2dsp.programs.cluster.kernel import available


@pytest.fixture(scope="session")
def needs_cluster() -> None:
    """Skip the test, with the reason, where clusters can't be emulated."""
    if reason := available():
        pytest.skip(f"no emulated cluster: {reason}")
