"""Tests that need an emulated cluster ask for one of these."""

import pytest

from torchrec_2dsp.programs.cluster.kernel import available


@pytest.fixture(scope="session")
def needs_cluster() -> None:
    """Skips the test where clusters can't be made, and says why they can't."""
    if reason := available():
        pytest.skip(f"no emulated cluster: {reason}")
