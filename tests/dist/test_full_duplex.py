"""The full-duplex group: gloo's results bit for bit, its errors, and no message lost."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, cast
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from tests.support.ranks import RankPool
from torchrec_2dsp.comms.full_duplex import full_duplex_backend

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
    """A group of all ranks, destroyed by all of them together."""
    group = cast(
        dist.ProcessGroup, dist.new_group(backend=backend or full_duplex_backend(), **options)
    )
    yield group
    dist.barrier()
    dist.destroy_process_group(group)


def random_rows(rank: int, num_rows: int, dtype: torch.dtype) -> torch.Tensor:
    """Rows of any bytes, not-a-numbers included; of zeros and ones for bools."""
    generator = torch.Generator().manual_seed(rank)
    top = 2 if dtype == torch.bool else 256
    shape = (num_rows, 3 * dtype.itemsize)
    return torch.randint(top, shape, dtype=torch.uint8, generator=generator).view(dtype)


def exchange(
    rank: int, group: dist.ProcessGroup, matrix: list[list[int]], dtype: torch.dtype
) -> torch.Tensor:
    """The bytes that this rank gets if rank i sends ``matrix[i][j]`` rows to rank j."""
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
                found = exchange(rank, ours, matrix, dtype)
                assert torch.equal(found, exchange(rank, gloo, matrix, dtype))
                num_bytes += found.numel()
        output = torch.zeros(8)
        dist.all_to_all_single(output, torch.arange(8.0) + 10 * rank, group=ours)
        assert output.tolist() == [10 * peer + 2 * rank + i for peer in range(4) for i in (0, 1)]
    return num_bytes


def test_results_are_those_of_gloo(ranks4: RankPool) -> None:
    assert min(ranks4.run(exchange_on_both)) > 1000


def exchange_lists(rank: int, world_size: int) -> bool:
    # Rank i sends i + j + 1 rows to rank j; odd ranks send and receive columns of larger tensors.
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
    """Several large exchanges at once: waited for backwards, polled, or never looked at again."""
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
    for found in ranks4.run(fly):
        assert found == [True] * 6


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
    """Seconds until rank 0 gives up on rank 1, by several timeouts."""
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
