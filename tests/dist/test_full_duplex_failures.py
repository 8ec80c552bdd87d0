"""A rank that dies in the middle of a full-duplex exchange: the others hear of it and end."""

import os
import time
from datetime import timedelta
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from tests.support.ranks import RankPool, RanksFailed, run_ranks
from torchrec_2dsp.comms.full_duplex import full_duplex_backend

pytestmark = pytest.mark.dealt_file

TIMEOUT_S = 5
"""Gloo tells of a lost connection at once, unless it was lost in the middle of a message."""


def lose_a_rank(rank: int, world_size: int) -> None:
    timeout = timedelta(seconds=TIMEOUT_S)
    group = cast(dist.ProcessGroup, dist.new_group(backend=full_duplex_backend(), timeout=timeout))
    parts = torch.zeros(world_size * 3_000_000)
    dist.all_to_all_single(torch.zeros(world_size), torch.zeros(world_size), group=group)
    if rank == 2:
        # Once the others wait for what it never sends.
        time.sleep(0.5)
        os._exit(7)
    work: Any = dist.all_to_all_single(torch.zeros_like(parts), parts, group=group, async_op=True)
    start = time.monotonic()
    try:
        work.wait()
    finally:
        assert time.monotonic() - start < TIMEOUT_S + 10
        del work
        dist.destroy_process_group(group)


def test_a_dead_peer_is_named_by_all_others() -> None:
    with pytest.raises(RanksFailed) as caught:
        run_ranks(lose_a_rank, 3, timeout_s=100, start_method="forkserver")
    assert "exit code 7" in caught.value.reports[2]
    for rank in (0, 1):
        assert "RuntimeError: all-to-all with rank" in caught.value.reports[rank]


def leave_with_work(rank: int, world_size: int, way: str) -> None:
    """End a program with an exchange that nobody waited for."""
    parts = torch.ones(world_size * 1_000_000)
    group = cast(dist.ProcessGroup, dist.new_group(backend=full_duplex_backend()))
    work: Any = dist.all_to_all_single(torch.zeros_like(parts), parts, group=group, async_op=True)
    if way == "kept":
        leave_with_work.work = work  # type: ignore[attr-defined]
    elif way == "destroyed":
        dist.destroy_process_group(group)
        work.wait()


@pytest.mark.parametrize("way", ["kept", "dropped", "destroyed"])
def test_a_program_may_end_with_an_exchange_in_flight(way: str) -> None:
    with RankPool(2, start_method="spawn") as pool:
        pool.run(leave_with_work, way)
    assert pool.exit_codes == [0, 0]
