"""A long run with all that may happen between steps, and what it takes of the machine meanwhile.

    python -m tests.support.soak [--steps 3000]

prints a row for every tenth of the run: a rank's resident memory, threads, process groups and open
files, the most of any rank. It fails if one of them has grown in the second half.
"""

import argparse
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.distributed import distributed_c10d

import torchrec_2dsp as tdsp
from tests.support.loops import shard
from tests.support.oracle import batches_of, local_loss
from tests.support.parity import Cell, make_optimizer
from tests.support.ranks import run_ranks
from torchrec_2dsp.programs.bench.machine import resident_bytes

HOT_ROWS = (("t0", (0, 1, 5)), ("t1", (0, 2)))
CELLS = {
    "exact": Cell(tdsp.Mesh2D(2, 2), exchange="row", owners="hash", hot_rows=HOT_ROWS),
    "averaged": Cell(
        tdsp.Mesh2D(2, 2), optimizer="sgd", sync=tdsp.WeightSync(policy=tdsp.every(3))
    ),
}
SIZES = (6, 4, 0, 5)
MAX_GROWTH_BYTES = 8 * 2**20
"""How much memory may grow in the second half, by what an allocator keeps."""


class Usage(NamedTuple):
    """A rank's use of the machine."""

    resident_bytes: int
    num_threads: int
    num_tasks: int
    """Threads of all kinds, also gloo's."""
    num_groups: int
    num_files: int

    @classmethod
    def now(cls) -> "Usage":
        """Measure this process."""
        return cls(
            resident_bytes=resident_bytes() or 0,
            num_threads=threading.active_count(),
            num_tasks=len(list(Path("/proc/self/task").iterdir())),
            # `get_pg_count` counts those that were destroyed as well.
            num_groups=len(distributed_c10d._world.pg_names),
            num_files=len(list(Path("/proc/self/fd").iterdir())),
        )


class Soak:
    """One rank's run."""

    def __init__(self, rank: int, cell: Cell, folder: Path) -> None:
        self._rank, self._cell, self._folder = rank, cell, folder
        self._model: Any = shard(cell)
        self._optimizer = make_optimizer(self._model)
        self._state = tdsp.TrainState(self._model, self._optimizer)
        self._last = ""

    def events(self) -> dict[int, Callable[[int], object]]:
        """Return what happens, by how many steps lie between."""
        events: dict[int, Callable[[int], object]] = {
            40: lambda step: self._model.state_dict(),
            50: self._evaluate,
            70: lambda step: self._model.sync_now(),
            110: lambda step: self._optimizer.state_dict(),
            150: self._save,
            300: self._load,
        }
        if self._cell.hot_rows:
            events[30] = self._refresh
        return events

    def train(self, step: int) -> None:
        batch = batches_of(self._cell.spec, 0, SIZES, self._cell.max_length, step)[self._rank]
        self._optimizer.zero_grad()
        local_loss(self._model(batch)).backward()
        self._model.sync()
        self._optimizer.step()
        self._state.step += 1

    def _evaluate(self, step: int) -> None:
        self._model.eval()
        with torch.no_grad():
            batch = batches_of(self._cell.spec, 1, SIZES, self._cell.max_length, step)[self._rank]
            self._model(batch)
        self._model.train()

    def _refresh(self, step: int) -> None:
        self._model.refresh_hot_sets(
            {"t0": [(step + place) % 40 for place in (0, 3, 7)], "t1": [step % 24, (step + 5) % 24]}
        )

    def _save(self, step: int) -> None:
        self._last = str(self._folder / str(step))
        options: dict[str, Any] = {"train_state": self._state}
        if step % 300:
            tdsp.save_checkpoint(
                self._last, self._model, self._optimizer, asynchronous=True, **options
            )
        else:
            tdsp.save_checkpoint(self._last, self._model, self._optimizer, **options)
        tdsp.drop_old_checkpoints(self._folder, keep=2)

    def _load(self, step: int) -> None:
        tdsp.load_checkpoint(self._last, self._model, self._optimizer, train_state=self._state)


def soak(rank: int, world_size: int, name: str, steps: int, folder: Path) -> list[Usage]:
    """Return a rank's usage after each tenth of the run."""
    run = Soak(rank, CELLS[name], folder)
    events, usages = run.events(), []
    for step in range(1, steps + 1):
        run.train(step)
        for every, event in events.items():
            if step % every == 0:
                event(step)
        if step % (steps // 10) == 0:
            usages.append(Usage.now())
    return usages


def main() -> int:
    """Print the tables; 1 if something has grown."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=3_000)
    steps = parser.parse_args().steps
    grown = []
    for name in CELLS:
        with tempfile.TemporaryDirectory() as folder:
            by_rank = run_ranks(soak, 4, name, steps, Path(folder), timeout_s=3_600)
        print(f"{name}: step, resident MiB, Python threads, tasks, process groups, files")
        for number, usages in enumerate(zip(*by_rank, strict=True), start=1):
            most = Usage(*map(max, zip(*usages, strict=True)))
            print(f"  {number * steps // 10:6} {most.resident_bytes / 2**20:8.1f}", *most[1:])
        for rank, usages in enumerate(by_rank):
            half, end = usages[len(usages) // 2 - 1], usages[-1]
            if end.resident_bytes > half.resident_bytes + MAX_GROWTH_BYTES or end[1:] > half[1:]:
                grown.append(f"{name}, rank {rank}: {half} at half of the run, {end} at its end")
    print("\n".join(grown or ["nothing has grown"]))
    return bool(grown)


if __name__ == "__main__":
    sys.exit(main())
