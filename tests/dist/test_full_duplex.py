"""The full-duplex group: gloo's results bit for bit, its errors, and no message lost."""

import gc
import os
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from itertools import product
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import _functional_collectives as functional
from torch.distributed.distributed_c10d import _coalescing_manager

from tests.support.loops import largest_gap, make_stream, train
from tests.support.models import HOT_ROWS, SEQUENCES
from tests.support.parity import FOUR, ONE, TWO, Cell
from tests.support.ranks import RankPool, RanksFailed, run_ranks
from tests.support.slices import Deal
from torchrec_2dsp import Mesh2D, WeightSync
from torchrec_2dsp.comms.counting import count_collectives
from torchrec_2dsp.comms.full_duplex import FullDuplexGroup, full_duplex_backend
from torchrec_2dsp.comms.groups import MeshGroups, release_groups

DTYPES = [
    torch.int64,
    torch.int32,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.uint8,
    torch.bool,
]
SPLITS = {
    "equal": [[2] * 4] * 4,
    "different": [[1, 2, 3, 4], [4, 0, 7, 1], [0, 0, 0, 9], [2, 2, 0, 0]],
    "only to oneself": [[3, 0, 0, 0], [0, 1, 0, 0], [0, 0, 2, 0], [0, 0, 0, 4]],
    "one rank is silent": [[0, 0, 0, 0], [1, 1, 1, 1], [0, 5, 0, 5], [2, 0, 1, 0]],
    "nothing at all": [[0] * 4] * 4,
}


@contextmanager
def new_group(backend: str = "", **options: Any) -> Iterator[Any]:
    """Yield a group with all ranks, and destroy it on all at once."""
    group = cast(
        dist.ProcessGroup, dist.new_group(backend=backend or full_duplex_backend(), **options)
    )
    yield group
    dist.barrier()
    dist.destroy_process_group(group)


def random_rows(rank: int, num_rows: int, dtype: torch.dtype) -> torch.Tensor:
    """Return rows with random bytes, including NaNs, or random zeros and ones for bools."""
    generator = torch.Generator().manual_seed(rank)
    top = 2 if dtype == torch.bool else 256
    shape = (num_rows, 3 * dtype.itemsize)
    return torch.randint(top, shape, dtype=torch.uint8, generator=generator).view(dtype)


def exchange(
    rank: int, group: dist.ProcessGroup, matrix: list[list[int]], dtype: torch.dtype
) -> torch.Tensor:
    """Return what this rank receives if rank i sends ``matrix[i][j]`` rows to rank j."""
    received = [row[rank] for row in matrix]
    output = torch.zeros((sum(received), 3), dtype=dtype)
    sent = random_rows(rank, sum(matrix[rank]), dtype)
    dist.all_to_all_single(output, sent, received, matrix[rank], group=group)
    return output.view(torch.uint8)


def exchange_on_both(rank: int, world_size: int) -> int:
    num_bytes = 0
    with new_group() as ours, new_group("gloo") as gloo:
        for matrix in SPLITS.values():
            for dtype in DTYPES:
                actual = exchange(rank, ours, matrix, dtype)
                assert torch.equal(actual, exchange(rank, gloo, matrix, dtype))
                num_bytes += actual.numel()
        output = torch.zeros(8)
        dist.all_to_all_single(output, torch.arange(8.0) + 10 * rank, group=ours)
        assert output.tolist() == [10 * peer + 2 * rank + i for peer in range(4) for i in (0, 1)]
    return num_bytes


def test_results_are_those_of_gloo(ranks4: RankPool) -> None:
    assert min(ranks4.run(exchange_on_both)) > 1000


def exchange_lists(rank: int, world_size: int) -> bool:
    # Rank i sends i + j + 1 rows to rank j; odd ranks send and receive larger tensors' columns.
    def rows(num_rows: int) -> torch.Tensor:
        return torch.zeros(num_rows, 4)[:, ::2] if rank % 2 else torch.zeros(num_rows, 2)

    sent, received = ([rows(rank + peer + 1) for peer in range(world_size)] for _ in range(2))
    for peer, part in enumerate(sent):
        part.copy_(torch.arange(part.numel()).view_as(part) + 100 * rank + 1000 * peer)
    with new_group() as group:
        dist.all_to_all(received, sent, group=group)
    return all(
        torch.equal(part, torch.arange(part.numel()).view_as(part) + 100.0 * peer + 1000 * rank)
        for peer, part in enumerate(received)
    )


def test_lists_may_be_of_different_sizes_and_strided(ranks4: RankPool) -> None:
    assert all(ranks4.run(exchange_lists))


def messages_in_order(rank: int, world_size: int) -> list[tuple[str, int]]:
    messages = []
    with new_group() as group:
        gloo = group._gloo

        class Spy:
            options = gloo.options

            def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> dist.Work:
                messages.append(("recv", peer))
                return gloo.recv(tensors, peer, tag)

            def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> dist.Work:
                messages.append(("send", peer))
                return gloo.send(tensors, peer, tag)

        with patch.object(group, "_gloo", Spy()):
            exchange(rank, group, SPLITS["equal"], torch.float32)
            exchange(rank, group, SPLITS["only to oneself"], torch.float32)
    return messages


def test_receives_come_first_and_every_rank_starts_with_another_peer(ranks4: RankPool) -> None:
    for rank, messages in enumerate(ranks4.run(messages_in_order)):
        before, after = (rank + 3) % 4, (rank + 1) % 4
        across = (rank + 2) % 4
        receives = [("recv", peer) for peer in (before, across, after)]
        assert messages == receives + [("send", peer) for peer in (after, across, before)]


def fly(rank: int, world_size: int) -> list[bool]:
    """Start large exchanges at once; wait for them backwards, poll them or leave them."""
    size = world_size * 500_000
    with new_group() as group:
        sent = [torch.full((size,), 10.0 * number + rank) for number in range(6)]
        outputs = [torch.zeros(size) for _ in sent]
        works: list[Any] = [
            dist.all_to_all_single(output, part, group=group, async_op=True)
            for output, part in zip(outputs, sent, strict=True)
        ]
        expected = [
            torch.cat([torch.full((500_000,), 10.0 * number + peer) for peer in range(world_size)])
            for number in range(6)
        ]
        del works[0], sent
        future = works[-1].get_future()
        assert all(isinstance(work, dist.Work) for work in works)
        for work in reversed(works[1:]):
            assert work.wait()
            assert work.wait()
        while not works[0].is_completed():
            time.sleep(0.001)
        assert all(work.is_success() for work in works)
        assert future.wait()[0] is outputs[-1]
    return [torch.equal(*pair) for pair in zip(outputs, expected, strict=True)]


def test_exchanges_in_flight_end_in_any_order(ranks4: RankPool) -> None:
    for actual in ranks4.run(fly):
        assert actual == [True] * 6


REFUSED = {
    "sums": ([1, 1], [2, 2], RuntimeError, "Split sizes doesn't match total dim 0 size"),
    "negative": ([5, -1], [5, -1], RuntimeError, "pass sizes of zero or more that add up"),
    "one size": ([4], [4], RuntimeError, "Number of tensor splits not equal to group size"),
    "own": ([1, 3], [2, 2], RuntimeError, "sends 2 elements to itself and expects 1"),
}


def refuse(rank: int, world_size: int) -> None:
    four = torch.zeros(4)
    with new_group() as group:
        for outputs, inputs, error, text in REFUSED.values():
            # The mirror image on the other rank, so that "own" is about own parts on both.
            turn = slice(None, None, -1 if rank else 1)
            with pytest.raises(error, match=text):
                dist.all_to_all_single(four.clone(), four, outputs[turn], inputs[turn], group=group)
        with pytest.raises(
            RuntimeError, match=r"\(5,\) does not divide equally across group size 2"
        ):
            dist.all_to_all_single(torch.zeros(5), torch.zeros(5), group=group)
        strided = torch.zeros(4, 2).t()
        for output, sent in ((strided, torch.zeros(2, 4)), (torch.zeros(2, 4), strided)):
            with pytest.raises(ValueError, match=r"must be contiguous.*call \.contiguous\(\)"):
                dist.all_to_all_single(output, sent, group=group)
        with pytest.raises(RuntimeError, match="list size 1 does not match world size 2"):
            dist.all_to_all([four], [four], group=group)
        with pytest.raises(ValueError, match=r"dtypes: torch\.float32 and torch\.int64"):
            group.all_to_all_single(four, four.long())
        # Nothing was sent, so the group goes on.
        exchange(rank, group, [[1, 2], [3, 4]], torch.float32)


def test_bad_arguments_are_refused_before_anything_is_sent(ranks2: RankPool) -> None:
    ranks2.run(refuse)


def wait_in_vain(rank: int, world_size: int) -> list[float]:
    """Return the seconds until rank 0 gives up on rank 1, for several timeouts."""
    seconds = []
    for options, patience in (
        ({"timeout": timedelta(seconds=1)}, None),
        ({"timeout": timedelta(minutes=1)}, timedelta(seconds=1)),
        ({"timeout": timedelta(minutes=1)}, "set_timeout"),
    ):
        with new_group(**cast(dict[str, Any], options)) as group:
            if patience == "set_timeout":
                group.set_timeout(timedelta(seconds=1))
            if rank == 0:
                work = group.all_to_all_single(torch.zeros(2), torch.ones(2))
                start = time.monotonic()
                for _ in range(2):
                    with pytest.raises(RuntimeError, match=r"all-to-all with rank 1 .* Timed out"):
                        work.wait(*[patience] * isinstance(patience, timedelta))
                seconds.append(time.monotonic() - start)
                assert work.is_completed()
                assert not work.is_success()
                with pytest.raises(RuntimeError, match="Timed out"):
                    work.get_future().wait()
    return seconds


def test_a_late_peer_is_given_up_on(ranks2: RankPool) -> None:
    seconds, _ = ranks2.run(wait_in_vain)
    assert len(seconds) == 3
    assert all(0.9 < passed < 10 for passed in seconds)


def start_world(rank: int, world_size: int, store: Path) -> Any:
    """Replace the ranks' gloo world."""
    dist.destroy_process_group()
    dist.init_process_group(
        full_duplex_backend(),
        store=dist.FileStore(str(store), world_size),
        rank=rank,
        world_size=world_size,
    )
    assert dist.get_backend() == full_duplex_backend()
    return dist.group.WORLD


def use_every_operation(rank: int, world_size: int, folder: Path) -> int:
    world = start_world(rank, world_size, folder / "store")
    total = sum(range(world_size))
    left, right = torch.tensor([float(rank)]), torch.tensor([rank, rank])

    dist.barrier()
    with _coalescing_manager():
        dist.all_reduce(left)
        dist.all_reduce(right.float())
    assert left.item() == total
    gathered = torch.zeros(2 * world_size, dtype=torch.int64)
    dist.all_gather_single(gathered, right)
    assert gathered.tolist() == [peer for peer in range(world_size) for _ in (0, 1)]
    scattered = torch.zeros(2, dtype=torch.int64)
    dist.reduce_scatter_single(scattered, gathered)
    assert scattered.tolist() == [world_size * rank] * 2

    objects: list[Any] = [None] * world_size
    dist.all_gather_object(objects, {"rank": rank})
    assert objects == [{"rank": peer} for peer in range(world_size)]
    message = [rank]
    dist.broadcast_object_list(message, src=1)
    assert message == [1]

    after, before = (rank + 1) % world_size, (rank - 1) % world_size
    received = torch.zeros(2, dtype=torch.int64)
    operations = [dist.P2POp(dist.isend, right, after), dist.P2POp(dist.irecv, received, before)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    assert received.tolist() == [before] * 2

    model = nn.parallel.DistributedDataParallel(nn.Linear(1, 1, bias=False))
    model(torch.tensor([[float(rank)]])).sum().backward()
    assert model.module.weight.grad.item() == total / world_size

    with count_collectives() as seen:
        parts = torch.arange(float(world_size), requires_grad=True)
        sizes = [1] * world_size
        swapped = functional.all_to_all_single_autograd(parts, sizes, sizes, world)
        (swapped * (rank + 1)).sum().backward()
        dist.all_to_all_single(torch.zeros(world_size), parts.detach())
        dist.all_to_all([torch.zeros(1)] * world_size, [left] * world_size)
    assert swapped.tolist() == [rank] * world_size
    assert parts.grad is not None
    assert parts.grad.tolist() == [peer + 1 for peer in range(world_size)]
    assert seen.counts() == {"all_to_all_single": 3, "all_to_all": 1}
    assert seen.total_bytes() == 4 * 4 * world_size
    return total


def test_a_world_does_what_gloo_does(tmp_path: Path) -> None:
    assert run_ranks(use_every_operation, 2, tmp_path, start_method="forkserver") == [1, 1]


def make_and_destroy_groups(rank: int, world_size: int, folder: Path) -> dict[str, int]:
    """Count resources left after groups were created, used and destroyed."""
    start_world(rank, world_size, folder / "store")
    groups = MeshGroups.for_mesh(Mesh2D(2, 1), "cpu")
    assert MeshGroups.for_mesh(Mesh2D(2, 1), "cpu", full_duplex=True) is groups
    assert isinstance(groups.replica_peers, FullDuplexGroup)
    del groups
    release_groups()

    before = resources()
    created: list[weakref.ref[dist.ProcessGroup]] = []
    for _ in range(5):
        group = dist.new_group()
        assert isinstance(group, FullDuplexGroup)
        created.append(weakref.ref(group))
        parts = torch.zeros(world_size)
        dist.all_to_all_single(parts, parts, group=group, async_op=True)
        work: Any = dist.all_to_all_single(parts, parts, group=group, async_op=True)
        work.wait()
        dist.barrier(group)
        group.abort()
        dist.destroy_process_group(group)
        del group, work
    left = {name: number - before[name] for name, number in resources().items()}
    start_world(rank, world_size, folder / "another")
    dist.barrier()
    return left | {"groups": sum(entry() is not None for entry in created)}


def resources() -> dict[str, int]:
    """Count this process's open resources, once no thread waits for a dropped exchange."""
    gc.collect()
    while any("finish" in thread.name for thread in threading.enumerate()):
        time.sleep(0.01)
    return {name: len(os.listdir(f"/proc/self/{name}")) for name in ("task", "fd")}


def test_destroyed_groups_leave_nothing(tmp_path: Path) -> None:
    left = run_ranks(make_and_destroy_groups, 2, tmp_path, start_method="forkserver")
    assert left == [{"task": 0, "fd": 0, "groups": 0}] * 2


PLANS = [
    *(
        replace(cell, mesh=mesh, stock_wrapper=stock_wrapper)
        for mesh, stock_wrapper in product((ONE, TWO, FOUR), (False, True))
        for cell in (
            Cell(ONE, "table_wise", hot_rows=HOT_ROWS),
            Cell(ONE, "table_wise", exchange="nonempty", hot_rows=HOT_ROWS),
            Cell(ONE, "column_wise", variable=True),
            Cell(ONE, "row_wise"),
            Cell(ONE, "row_wise", SEQUENCES),
            Cell(ONE, "table_row_wise"),
            Cell(ONE, exchange="row", hot_rows=HOT_ROWS),
            Cell(ONE, exchange="row", spec=SEQUENCES),
        )
    ),
    Cell(ONE, exchange="row_per_host"),
    Cell(ONE, exchange="row_per_host", stock_wrapper=True, variable=True),
    Cell(TWO, exchange="row", in_world=("t1",), sync=WeightSync()),
    Cell(TWO, "table_wise", sync=WeightSync()),
]


def train_both_ways(rank: int, world_size: int, cell: Cell) -> tuple[float, set[str]]:
    """Return the gap between the two all-to-alls, and the groups that got only one."""
    stream = make_stream(cell, 3)
    trained, groups = [], []
    for full_duplex in (False, True):
        exchange = FullDuplexGroup._exchange
        with patch.object(FullDuplexGroup, "_exchange", autospec=True) as exchanges:
            exchanges.side_effect = exchange
            trained.append(train(replace(cell, full_duplex=full_duplex), rank, stream))
        groups.append({call.args[0].group_desc for call in exchanges.mock_calls})
    return largest_gap(*trained), groups[1] - groups[0]


def test_plans_in_full_duplex_train_to_the_same_bits(two_hosts: RankPool, dealt: Deal) -> None:
    for cell in dealt(PLANS):
        for gap, groups in two_hosts.run(train_both_ways, cell):
            assert gap == 0.0, f"{cell}: {gap}"
            # A rank alone exchanges nothing.
            used = groups & {"mesh_shard", "sharding_cross_pg"}
            assert used or cell.mesh.group_size == 1, f"{cell}: only {groups} are in full duplex"


TIMEOUT_S = 5
"""Gloo tells of a lost connection at once, unless it was lost in the middle of a message."""


def lose_a_rank(rank: int, world_size: int) -> None:
    timeout = timedelta(seconds=TIMEOUT_S)
    group = cast(dist.ProcessGroup, dist.new_group(backend=full_duplex_backend(), timeout=timeout))
    parts = torch.zeros(world_size * 3_000_000)
    dist.all_to_all_single(torch.zeros(world_size), torch.zeros(world_size), group=group)
    if rank == 2:
        # Once the others wait for rows that it never sends.
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


@pytest.mark.dealt_file
def test_a_dead_peer_is_named_by_all_others() -> None:
    with pytest.raises(RanksFailed) as caught:
        run_ranks(lose_a_rank, 3, timeout_s=100, start_method="forkserver")
    assert "exit code 7" in caught.value.reports[2]
    for rank in (0, 1):
        assert "RuntimeError: all-to-all with rank" in caught.value.reports[rank]


def leave_with_work(rank: int, world_size: int, way: str) -> None:
    """End a program while nobody has waited for an exchange."""
    parts = torch.ones(world_size * 1_000_000)
    group = cast(dist.ProcessGroup, dist.new_group(backend=full_duplex_backend()))
    work: Any = dist.all_to_all_single(torch.zeros_like(parts), parts, group=group, async_op=True)
    if way == "kept":
        leave_with_work.work = work  # type: ignore[attr-defined]
    elif way == "destroyed":
        dist.destroy_process_group(group)
        work.wait()


@pytest.mark.dealt_file
@pytest.mark.parametrize("way", ["kept", "dropped", "destroyed"])
def test_a_program_may_end_with_an_exchange_in_flight(way: str) -> None:
    with RankPool(2, start_method="spawn") as pool:
        pool.run(leave_with_work, way)
    assert pool.exit_codes == [0, 0]
