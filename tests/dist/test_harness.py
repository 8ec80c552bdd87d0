"""Helpers on which all distributed tests depend: they must fail loudly and never hang."""

import atexit
import os
import signal
import time
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.support.ranks import RankPool, RanksFailed, run_ranks
from torchrec_2dsp.comms.counting import Collective, count_collectives

ENVIRONMENT = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")


def sum_of_ranks(rank: int, world_size: int) -> int:
    total = torch.tensor(rank)
    dist.all_reduce(total)
    return int(total)


def environment(rank: int, world_size: int) -> tuple[list[str], int]:
    return [os.environ[name] for name in ENVIRONMENT], torch.get_num_threads()


def raise_on(
    rank: int, world_size: int, raising: tuple[int, ...], hanging: tuple[int, ...]
) -> None:
    if rank in raising:
        raise ValueError(f"rank {rank} has a reason")
    if rank in hanging:
        time.sleep(600)


def hang_after_writing_pid(rank: int, world_size: int, folder: Path) -> None:
    (folder / str(rank)).write_text(str(os.getpid()))
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)


def die(rank: int, world_size: int) -> None:
    if rank == 1:
        os._exit(3)


def die_at_exit(rank: int, world_size: int) -> None:
    if rank == 1:
        atexit.register(os._exit, 7)


def die_when_leaving(rank: int, world_size: int) -> None:
    if rank == 1:
        dist.destroy_process_group = lambda: os._exit(7)


def warn(rank: int, world_size: int) -> None:
    warnings.warn("nobody expects this", UserWarning, stacklevel=1)


def failure_of(pool: RankPool, *args: object, **options: float) -> RanksFailed:
    with pytest.raises(RanksFailed) as caught:
        pool.run(*args, **options)  # type: ignore[arg-type]
    return caught.value


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_results_come_in_rank_order(ranks2: RankPool) -> None:
    assert ranks2.run(sum_of_ranks) == [1, 1]
    assert [answer[0][0] for answer in ranks2.run(environment)] == ["0", "1"]


def test_ranks_see_the_environment_of_their_hosts(ranks8: RankPool) -> None:
    answers = ranks8.run(environment)
    assert answers == [([str(rank), str(rank % 2), "8", "2"], 1) for rank in range(8)]


def test_a_pool_survives_an_exception_that_all_ranks_raise(ranks2: RankPool) -> None:
    ranks2.run(sum_of_ranks)
    starts = ranks2.num_starts
    error = failure_of(ranks2, raise_on, (0, 1), ())
    for rank in range(2):
        assert f"ValueError: rank {rank} has a reason" in error.reports[rank]
        assert "in raise_on" in error.reports[rank]
        assert f"rank {rank} has a reason" in str(error)
    assert ranks2.run(sum_of_ranks) == [1, 1]
    assert ranks2.num_starts == starts


def test_a_pool_restarts_when_ranks_are_out_of_step(ranks2: RankPool) -> None:
    ranks2.run(sum_of_ranks)
    starts = ranks2.num_starts
    error = failure_of(ranks2, raise_on, (1,), ())
    assert error.reports[0] == "returned None"
    assert "rank 1 has a reason" in error.reports[1]
    assert ranks2.run(sum_of_ranks) == [1, 1]
    assert ranks2.num_starts == starts + 1


def test_the_deadline_shows_where_a_rank_hangs(ranks2: RankPool) -> None:
    error = failure_of(ranks2, raise_on, (), (1,), timeout_s=3)
    assert error.reports[0] == "returned None"
    assert error.reports[1].startswith("missed the deadline of 3 s, in")
    assert "in raise_on" in error.reports[1]
    assert ranks2.run(sum_of_ranks) == [1, 1]


def test_the_others_are_stopped_soon_after_one_rank_failed(ranks2: RankPool) -> None:
    start = time.monotonic()
    error = failure_of(ranks2, raise_on, (0,), (1,), grace_s=0.5)
    assert time.monotonic() - start < 60
    assert "rank 0 has a reason" in error.reports[0]
    assert error.reports[1].startswith("still running, in")


def test_a_stopped_process_is_killed(ranks2: RankPool, tmp_path: Path) -> None:
    error = failure_of(ranks2, hang_after_writing_pid, tmp_path, timeout_s=3)
    assert "doesn't take signals" in error.reports[1]
    assert [is_running(int((tmp_path / rank).read_text())) for rank in "01"] == [False, False]


def test_a_dead_rank_is_named_with_its_exit_code(ranks2: RankPool) -> None:
    assert failure_of(ranks2, die).reports[1] == "died with exit code 3"
    assert ranks2.run(sum_of_ranks) == [1, 1]


def test_warnings_are_errors_in_ranks(ranks2: RankPool) -> None:
    assert "UserWarning: nobody expects this" in str(failure_of(ranks2, warn))


def test_closing_reports_exit_codes() -> None:
    pool = RankPool(2)
    pool.run(die_when_leaving)
    with pytest.raises(RanksFailed, match="rank 1: died with exit code 7"):
        pool.close()


@pytest.mark.dealt_suite(seconds=25)
def test_fresh_processes_for_one_call() -> None:
    assert run_ranks(sum_of_ranks, 2) == [1, 1]
    with pytest.raises(RanksFailed, match="rank 1: died with exit code 7"):
        run_ranks(die_at_exit, 2)


def world_collectives(rank: int, world_size: int) -> tuple[list[Collective], int]:
    """Run each collective by Python calls, functional ones and on the process group itself."""
    four = torch.ones(4)
    world = dist.group.WORLD
    assert world is not None
    with count_collectives() as seen:
        with count_collectives():  # It counts the same, and its end leaves the outer one open.
            dist.all_reduce(four)
        dist.broadcast(four, 0)
        dist.all_gather_object([None] * world_size, "x")
        dist.all_gather_single(torch.empty(4 * world_size), four)
        dist.reduce_scatter_single(torch.empty(4), torch.ones(4 * world_size))
        dist.all_to_all_single(torch.empty(4), four)
        world.allreduce_coalesced([torch.ones(3), torch.ones(2)]).wait()
        functional.all_reduce(four, "sum", world).sum().item()
        leaf = torch.ones(4, requires_grad=True)
        functional.all_to_all_single_autograd(leaf, None, None, world).sum().backward()
        dist.barrier()
    before = len(seen.records)
    dist.all_reduce(four)
    return seen.records, len(seen.records) - before


def test_collectives_are_counted_with_their_bytes(ranks2: RankPool) -> None:
    for rank, (records, num_after) in enumerate(ranks2.run(world_collectives)):
        counted = [(record.op, record.num_bytes) for record in records if record.op != "all_gather"]
        assert counted == [
            ("all_reduce", 16),
            ("broadcast", 16 if rank == 0 else 0),
            ("all_gather_into_tensor", 16),
            ("reduce_scatter_tensor", 32),
            ("all_to_all_single", 16),
            ("all_reduce_coalesced", 20),
            ("all_reduce", 16),
            ("all_to_all_single", 16),
            ("all_to_all_single", 16),
            ("barrier", 0),
        ]
        assert [record.op for record in records].count("all_gather") == 2
        assert {record.ranks for record in records} == {(0, 1)}
        assert num_after == 0


def reducer_and_group_collectives(rank: int, world_size: int) -> tuple[object, object]:
    module = DistributedDataParallel(nn.Linear(3, 2))
    group = dist.new_group([rank], use_local_synchronization=True, group_desc="alone")
    with count_collectives() as seen:
        module(torch.ones(1, 3)).sum().backward()
        dist.all_reduce(torch.ones(1), group=group)
    return seen.records, (seen.counts(), seen.total_bytes())


def test_the_ddp_reducer_and_groups_are_counted(ranks2: RankPool) -> None:
    for rank, (records, totals) in enumerate(ranks2.run(reducer_and_group_collectives)):
        reduced, alone = records
        assert (reduced.op, reduced.ranks, reduced.num_bytes) == ("all_reduce", (0, 1), 32)
        assert alone == Collective("all_reduce", (rank,), "alone", 4)
        assert totals == ({"all_reduce": 2}, 36)
