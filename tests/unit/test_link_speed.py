"""From times to speeds, and from a probe to a payload."""

import pytest
from hypothesis import given, strategies as st

from torchrec_2dsp.programs.calibrate.collectives import (
    SECONDS_PER_REPEAT,
    LinkSpeeds,
    bytes_per_s,
    payload_bytes,
)

seconds = st.floats(1e-6, 1e3)
sizes = st.integers(1, 2**40)


@pytest.mark.parametrize(
    ("num_ranks", "num_passes", "expected"),
    # Each rank keeps its own part of an all-to-all, and passes each part but one on, twice over.
    [(2, 1, 500.0), (4, 1, 750.0), (2, 2, 1000.0), (4, 2, 1500.0)],
)
def test_the_bytes_are_those_on_the_wire(num_ranks: int, num_passes: int, expected: float) -> None:
    found = bytes_per_s([1.0, 2.0, 0.0], num_bytes=1000, num_ranks=num_ranks, num_passes=num_passes)
    assert found == expected


@given(st.lists(seconds, min_size=1), sizes)
def test_twice_the_time_is_half_the_speed(times: list[float], num_bytes: int) -> None:
    speed = bytes_per_s(times, num_bytes=num_bytes, num_ranks=2, num_passes=1)
    doubled = [2 * time for time in times]
    slower = bytes_per_s(doubled, num_bytes=num_bytes, num_ranks=2, num_passes=1)
    assert slower == pytest.approx(speed / 2)


@given(sizes, seconds, sizes)
def test_a_payload_takes_its_time_or_is_the_largest(
    probe_bytes: int, probe_seconds: float, max_bytes: int
) -> None:
    found = payload_bytes(probe_bytes, probe_seconds, max_bytes)
    assert 1 <= found <= max_bytes
    if found < max_bytes:
        wanted = probe_bytes / probe_seconds * SECONDS_PER_REPEAT
        assert wanted <= found * (1 + 1e-9) <= (wanted + 1) * (1 + 2e-9)


def test_a_host_sends_what_its_ranks_send() -> None:
    speeds = LinkSpeeds(
        local_world_size=4,
        intra_host_all_to_all_bytes_per_s=1.0,
        intra_host_all_reduce_bytes_per_s=2.0,
        cross_host_all_to_all_bytes_per_s=3.0,
        cross_host_all_reduce_bytes_per_s=None,
    )
    assert speeds.host_all_to_all_bytes_per_s == 12.0
    assert speeds.host_all_reduce_bytes_per_s is None
