"""A world whose backend is the full-duplex one: what TorchRec and torch ask of a group works."""

import gc
import os
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import _functional_collectives as functional
from torch.distributed.distributed_c10d import _coalescing_manager

from tests.dist.test_one_group import ONE_GROUP, make_stock
from tests.support.models import ModelSpec, make_batch
from tests.support.oracle import local_loss
from tests.support.parity import Cell, local_shards, make_optimizer
from tests.support.ranks import RankPool, run_ranks
from torchrec_2dsp import Mesh2D
from torchrec_2dsp.comms.counting import count_collectives
from torchrec_2dsp.comms.full_duplex import FullDuplexGroup, full_duplex_backend
from torchrec_2dsp.comms.mesh_groups import MeshGroups


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
    one, two = torch.tensor([float(rank)]), torch.tensor([rank, rank])

    dist.barrier()
    with _coalescing_manager():
        dist.all_reduce(one)
        dist.all_reduce(two.float())
    assert one.item() == total
    gathered = torch.zeros(2 * world_size, dtype=torch.int64)
    dist.all_gather_single(gathered, two)
    assert gathered.tolist() == [peer for peer in range(world_size) for _ in (0, 1)]
    scattered = torch.zeros(2, dtype=torch.int64)
    dist.reduce_scatter_single(scattered, gathered)
    assert scattered.tolist() == [world_size * rank] * 2

    objects: list[Any] = [None] * world_size
    dist.all_gather_object(objects, {"rank": rank})
    assert objects == [{"rank": peer} for peer in range(world_size)]
    said = [rank]
    dist.broadcast_object_list(said, src=1)
    assert said == [1]

    after, before = (rank + 1) % world_size, (rank - 1) % world_size
    received = torch.zeros(2, dtype=torch.int64)
    operations = [dist.P2POp(dist.isend, two, after), dist.P2POp(dist.irecv, received, before)]
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
        dist.all_to_all([torch.zeros(1)] * world_size, [one] * world_size)
    assert swapped.tolist() == [rank] * world_size
    assert parts.grad is not None
    assert parts.grad.tolist() == [peer + 1 for peer in range(world_size)]
    assert seen.counts() == {"all_to_all_single": 3, "all_to_all": 1}
    assert seen.total_bytes() == 4 * 4 * world_size
    return total


def test_a_world_does_what_gloo_does(tmp_path: Path) -> None:
    assert run_ranks(use_every_operation, 2, tmp_path, start_method="forkserver") == [1, 1]


def make_and_destroy_groups(rank: int, world_size: int, folder: Path) -> dict[str, int]:
    """What is left of groups that were made, used and destroyed."""
    start_world(rank, world_size, folder / "store")
    groups = MeshGroups.for_mesh(Mesh2D(2, 1), "cpu")
    assert isinstance(groups.replica_peers, FullDuplexGroup)
    groups.close()

    before = resources()
    made: list[weakref.ref[dist.ProcessGroup]] = []
    for _ in range(5):
        group = dist.new_group()
        assert isinstance(group, FullDuplexGroup)
        made.append(weakref.ref(group))
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
    return left | {"groups": sum(one() is not None for one in made)}


def resources() -> dict[str, int]:
    """What this process has open, once the threads that wait for dropped exchanges are done."""
    gc.collect()
    while any("finish" in thread.name for thread in threading.enumerate()):
        time.sleep(0.01)
    return {name: len(os.listdir(f"/proc/self/{name}")) for name in ("task", "fd")}


def test_destroyed_groups_leave_nothing(tmp_path: Path) -> None:
    left = run_ranks(make_and_destroy_groups, 2, tmp_path, start_method="forkserver")
    assert left == [{"task": 0, "fd": 0, "groups": 0}] * 2


def train(rank: int, world_size: int, folder: Path | None) -> list[torch.Tensor]:
    """The weights after some steps of stock TorchRec, in a gloo world or in ours."""
    if folder is not None:
        start_world(rank, world_size, folder / "store")
    weights = []
    for sharding in ("table_wise", "row_wise"):
        cell = Cell(ONE_GROUP, sharding, ModelSpec())
        model = make_stock(cell, world_size)
        optimizer = make_optimizer(model)
        with count_collectives() as seen:
            for step in range(2):
                optimizer.zero_grad()
                local_loss(model(make_batch(cell.spec, seed=10 * step + rank))).backward()
                optimizer.step()
        assert seen.counts()["all_to_all_single"] > 0
        for value in model.state_dict().values():
            weights += [shard for shard, _ in local_shards(value)]
    return weights


def test_torchrec_trains_to_the_same_bits(ranks4: RankPool, tmp_path: Path) -> None:
    expected = ranks4.run(train, None)
    found = run_ranks(train, 4, tmp_path, start_method="forkserver")
    for ours, stock in zip(found, expected, strict=True):
        assert len(ours) == len(stock) > 0
        assert all(torch.equal(*pair) for pair in zip(ours, stock, strict=True))
