"""A stream of ids that drift, through a model that is killed, resumed, moved and taken home."""

from pathlib import Path

import pytest

from tests.support.drifting_ids import Stream, compare


@pytest.mark.slow
def test_a_stream_trains_as_if_nothing_had_happened(tmp_path: Path) -> None:
    compared = compare(Stream(400, 300, 7), tmp_path, timeout_s=120)
    assert len(compared.gaps) == 3
    assert max(compared.gaps.values()) < 1e-6
    assert compared.maps_are_equal
    assert compared.num_evicted > 300
