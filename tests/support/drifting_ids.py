"""Train a model on a long stream of drifting ids while it is killed, resumed and moved.

    python -m tests.support.drifting_ids [--steps 100000] [--rows 50000]

Half the ids change every twentieth of the stream, and a table has half as many rows as ids are in
use. Two groups of two ranks train until they are killed, then resume from a checkpoint; one group
of four goes on, then TorchRec's unsharded module. Prints each leg's largest loss gap to an
uninterrupted twin. It fails unless the maps are equal in the end.
"""

import argparse
import os
import signal
import tempfile
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import torchrec_2dsp as tdsp
from tests.support.managed_collisions import FAR, Case, Twin, sharded
from tests.support.models import ModelSpec, TableSpec
from tests.support.parity import ONE, TWO, Cell, make_optimizer, relative_gap, shards_of
from tests.support.ranks import RankPool, RanksFailed
from torchrec_2dsp.parallel.checkpoint.load import load_weights

NUM_RANKS, SIZE = 4, 16
EVERY = 20
"""The times that half of the ids change."""


@dataclass(frozen=True)
class Stream:
    """Ids by Zipf's law; from time to time every second id is replaced by a new one."""

    num_steps: int
    num_rows: int
    interval: int

    @property
    def case(self) -> Case:
        """The model behind the map, in two exact copies."""
        table = TableSpec("t0", self.num_rows, 8, ("f0",))
        cell = Cell(TWO, spec=ModelSpec((table,)), exchange="row", owners="hash")
        return Case(cell, "lfu", self.interval)

    @property
    def killed_at(self) -> int:
        """The step at which the ranks die."""
        return self.num_steps // 3

    @property
    def saved_at(self) -> tuple[int, int, int]:
        """The checkpoints' step numbers.

        The last one follows an eviction: TorchRec's module doesn't load what its map has seen.
        """
        killed, last = self.killed_at, self.num_steps * 9 // 10
        return killed - killed // 10, killed * 2, last // self.interval * self.interval

    @property
    def num_ids(self) -> int:
        """An upper bound for ids."""
        return 2 * self.num_rows * EVERY

    def ids(self, step: int, seed: int, size: int) -> torch.Tensor:
        """Draw ids at a step."""
        generator = torch.Generator().manual_seed(seed)
        draws = torch.rand(size, generator=generator, dtype=torch.float64)
        places = torch.searchsorted(_zipf(2 * self.num_rows), draws)
        age = step * EVERY // self.num_steps
        return torch.where(places % 2 == 0, places, places + age * 2 * self.num_rows)

    def batch(self, step: int, rank: int) -> KeyedJaggedTensor:
        """Draw a rank's batch."""
        ids = self.ids(step, NUM_RANKS * step + rank, SIZE)
        return KeyedJaggedTensor(["f0"], ids * FAR, lengths=torch.ones(SIZE, dtype=torch.int64))


@cache
def _zipf(num_ids: int) -> torch.Tensor:
    weights = torch.arange(1, num_ids + 1, dtype=torch.float64).pow(-1.05)
    return weights.cumsum(0) / weights.sum()


@dataclass
class StreamTwin(Twin):
    """TorchRec's unsharded module on the stream."""

    stream: Stream = field(kw_only=True)

    def batches(self, step: int) -> list[KeyedJaggedTensor]:
        return [self.stream.batch(step, rank) for rank in range(NUM_RANKS)]


class Leg(NamedTuple):
    """One rank's results from a leg."""

    losses: list[float]
    moments: dict[int, torch.Tensor]
    """The moments of the rank's rows, by the first row."""


def train_leg(
    rank: int, world_size: int, stream: Stream, cell: Cell, folder: Path, steps: range
) -> Leg:
    """Train these steps from the first one's checkpoint; save on the way, or die."""
    parallel = sharded(replace(stream.case, cell=cell))
    optimizer = make_optimizer(parallel)
    state = tdsp.TrainState(parallel, optimizer)
    if steps.start:
        tdsp.load_checkpoint(folder / str(steps.start), parallel, optimizer, train_state=state)
    losses = []
    for step in steps:
        if step == stream.killed_at and not steps.start:
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.zero_grad()
        loss, _ = parallel(stream.batch(step, rank))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step + 1 in stream.saved_at:
            path = folder / str(step + 1)
            tdsp.save_checkpoint(path, parallel, optimizer, train_state=state)
    (shard,) = shards_of(parallel)
    (moment,) = (tensor for name, tensor in shard.tensors.items() if name != "weight")
    return Leg(losses, {shard.row: moment.clone()})


@dataclass(frozen=True)
class Compared:
    """A stream's legs compared with the uninterrupted twin."""

    gaps: dict[str, float]
    """Each leg's largest loss difference from the twin, relative to the twin's loss."""
    maps_are_equal: bool
    """True if the unsharded module's map ends as the twin's."""
    num_evicted: int
    """The number of rows that the map has given to other ids."""


def compare(stream: Stream, folder: Path, timeout_s: float) -> Compared:
    """Train on the stream in legs and uninterrupted, and compare them."""
    saved, moved, unsharded = stream.saved_at
    cell = stream.case.cell
    legs = {
        "two groups of two": (cell, range(unsharded)),
        "resumed": (cell, range(saved, moved)),
        "one group of four": (replace(cell, mesh=ONE, owners="block"), range(moved, unsharded)),
    }
    losses: dict[str, tuple[range, list[list[float]]]] = {}
    trained: list[Leg] = []
    for name, (of_leg, steps) in legs.items():
        with RankPool(NUM_RANKS) as ranks:
            args = (train_leg, stream, of_leg, folder, steps)
            if not steps.start:
                with pytest.raises(RanksFailed, match="died"):
                    ranks.run(*args, timeout_s=timeout_s)
                continue
            trained = ranks.run(*args, timeout_s=timeout_s)
        losses[name] = steps, [leg.losses for leg in trained]
    twin, alone = StreamTwin(stream.case, stream=stream), StreamTwin(stream.case, stream=stream)
    load_weights(folder / str(unsharded), alone.model)
    moments = {row: part for leg in trained for row, part in leg.moments.items()}
    stored = torch.cat([moments[row] for row in sorted(moments)])
    alone.oracle.moments["t0"].copy_(stored.view_as(alone.oracle.moments["t0"]))
    alone.num_steps = unsharded
    expected = [twin.step(step) for step in range(stream.num_steps)]
    steps = range(unsharded, stream.num_steps)
    by_rank = zip(*(alone.step(step) for step in steps), strict=True)
    losses["TorchRec's unsharded module"] = steps, list(map(list, by_rank))
    gaps = {
        name: max(
            relative_gap(of_rank, [expected[step][rank] for step in steps])
            for rank, of_rank in enumerate(of_ranks)
        )
        for name, (steps, of_ranks) in losses.items()
    }
    ours, theirs = (of.model.mc._managed_collision_collection.state_dict() for of in (alone, twin))
    is_equal = all(torch.equal(value, theirs[name]) for name, value in ours.items())
    return Compared(gaps, is_equal, twin.num_evicted)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--rows", type=int, default=50_000)
    parser.add_argument("--interval", type=int, default=100, help="steps between evictions")
    arguments = parser.parse_args()
    stream = Stream(arguments.steps, arguments.rows, arguments.interval)
    with tempfile.TemporaryDirectory() as folder:
        compared = compare(stream, Path(folder), timeout_s=4 * 3600)
    for name, gap in compared.gaps.items():
        print(f"{name}: losses differ by {gap:.1e} of them at most")
    print(f"{compared.num_evicted:,} rows were given to other ids")
    print("the maps are equal" if compared.maps_are_equal else "THE MAPS DIFFER")
    return 0 if compared.maps_are_equal else 1


if __name__ == "__main__":
    raise SystemExit(main())
