"""Weights written between construction and the first lookup become equal on all replicas."""

import logging

import pytest
import torch

import torchrec_2dsp as tdsp
from tests.support.models import make_batch
from tests.support.parity import TWO, Cell, local_world_size, make_parallel
from tests.support.ranks import RankPool


def weights_after_lookup(
    rank: int, world_size: int, cell: Cell, equal: bool
) -> tuple[list[torch.Tensor], list[str]]:
    """Return this rank's shards after its own initialisation and a lookup, and the log."""
    parallel = make_parallel(cell, world_size, local_world_size())
    assert isinstance(parallel, tdsp.ModelParallel2D)
    (module,) = parallel.sharded_tables()
    shards = [shard.tensors["weight"] for kernel in module.kernels() for shard in kernel.shards()]
    for weight in shards:
        rows = torch.arange(weight.shape[0], dtype=weight.dtype)
        # The second group has the same rows in another order.
        rows = rows if equal or TWO.group_of(rank) == 0 else rows.flip(0)
        weight.copy_(rows[:, None].expand_as(weight))
    logged: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("torchrec_2dsp")
    logger.addHandler(handler)
    parallel(make_batch(cell.spec, rank))
    logger.removeHandler(handler)
    return [weight.clone() for weight in shards], logged


@pytest.mark.parametrize("equal", [True, False])
@pytest.mark.parametrize("sharding", ["row_wise", "table_wise"])
def test_the_first_group_wins(ranks4: RankPool, sharding: str, equal: bool) -> None:
    results = ranks4.run(weights_after_lookup, Cell(TWO, sharding), equal)
    for rank, (shards, logged) in enumerate(results):
        expected, _ = results[TWO.replica_peers(rank)[0]]
        assert all(map(torch.equal, shards, expected))
        assert all(weight[0, 0] == 0 for weight in shards)
        differed = bool(shards) and not equal
        assert bool(logged) == differed, logged
