"""Measure the machine's resources during long runs.

    python -m tests.support.soak [--kind exact] [--steps 3000]

Library kinds do everything that may happen between steps; program kinds train two equal runs, one
after the other, with evaluations, saves, records and scalars. Prints a row for each fifth of a
run: median resident memory, threads, process groups and open files, maximized over ranks. It
fails if any has grown from the second fifth to the last in a run, or from one run to the next.
"""

import argparse
import statistics
import sys
import tempfile
import threading
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.distributed import distributed_c10d

import torchrec_2dsp as tdsp
from tests.support.loops import shard
from tests.support.models import HOT_ROWS
from tests.support.oracle import batches_of, local_loss
from tests.support.parity import Cell, make_optimizer
from tests.support.ranks import RankPool
from tests.support.train_runs import config_with
from torchrec_2dsp.programs.bench.machine import resident_bytes
from torchrec_2dsp.programs.launch import keep_freed_memory
from torchrec_2dsp.programs.train.program import train
from torchrec_2dsp.programs.train.results import (
    RunFolder,
    StepsTrained,
    TensorBoardWatcher,
    TrainWatcher,
)

LIBRARY = {
    "exact": Cell(tdsp.Mesh2D(2, 2), exchange="row", owners="hash", hot_rows=HOT_ROWS),
    "averaged": Cell(
        tdsp.Mesh2D(2, 2), optimizer="sgd", sync=tdsp.WeightSync(policy=tdsp.every(3))
    ),
}
PROGRAM: dict[str, dict[str, Any]] = {
    "program rows": {
        "sharding_types": ["row_wise"],
        "exchange": "row",
        "hot_rows": 8,
        "prefetch_rows": True,
    },
    "program exact": {"num_groups": 2},
    "program averaged": {"num_groups": 2, "sync": "WeightSync", "sync_policy": "every(3)"},
}
RUNS = ("first", "second")
SIZES = (6, 4, 0, 5)
NUM_PARTS = 5
SAMPLES_PER_PART = 25
SAVES_PER_RUN = 20
MAX_GROWTH_BYTES = 8 * 2**20
"""The most by which a fifth's median may exceed an earlier one: what an allocator keeps, and the
run's history, which is 300 bytes a step."""


class Usage(NamedTuple):
    """A rank's resource usage."""

    resident_bytes: int
    num_threads: int
    num_tasks: int
    """All threads, including gloo's."""
    num_groups: int
    num_files: int

    @classmethod
    def now(cls) -> "Usage":
        """Measure this process."""
        return cls(
            resident_bytes=resident_bytes() or 0,
            num_threads=threading.active_count(),
            num_tasks=len(list(Path("/proc/self/task").iterdir())),
            # `get_pg_count` counts destroyed groups as well.
            num_groups=len(distributed_c10d._world.pg_names),
            num_files=len(list(Path("/proc/self/fd").iterdir())),
        )


Runs = dict[str, list[list[Usage]]]
"""Each run's samples, by fifths."""


class Soak:
    """One rank's library run."""

    def __init__(self, rank: int, cell: Cell, folder: Path) -> None:
        self._rank, self._cell, self._folder = rank, cell, folder
        self._model: Any = shard(cell)
        self._optimizer = make_optimizer(self._model)
        self._state = tdsp.TrainState(self._model, self._optimizer)
        self._last = ""

    def events(self) -> dict[int, Callable[[int], object]]:
        """Return actions by the interval between them, in steps."""
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
        options: dict[str, Any] = {"train_state": self._state, "asynchronous": step % 300 != 0}
        tdsp.save_checkpoint(self._last, self._model, self._optimizer, **options)
        tdsp.drop_old_checkpoints(self._folder, keep=2)

    def _load(self, step: int) -> None:
        tdsp.load_checkpoint(self._last, self._model, self._optimizer, train_state=self._state)


def soak_library(rank: int, kind: str, steps: int, folder: Path) -> Runs:
    run, usages = Soak(rank, LIBRARY[kind], folder), []
    events = run.events()
    for step in range(1, steps + 1):
        run.train(step)
        for every, event in events.items():
            if step % every == 0:
                event(step)
        if step % max(1, steps // (NUM_PARTS * SAMPLES_PER_PART)) == 0:
            usages.append(Usage.now())
    return {RUNS[0]: _parts(usages)}


class Sampler(TrainWatcher):
    """Samples this rank's resource usage at each progress report."""

    def __init__(self) -> None:
        self.usages: dict[str, list[Usage]] = {}
        """Each run's samples, in order."""

    def steps_trained(self, name: str, progress: StepsTrained) -> None:
        self.usages.setdefault(name, []).append(Usage.now())


def soak_program(rank: int, kind: str, steps: int, folder: Path) -> Runs:
    keep_freed_memory()
    every = steps // SAVES_PER_RUN
    config = config_with(
        data={"features": [{"name": "user", "num_rows": 20_000}, {"name": "page", "num_rows": 33}]},
        optimizer={"dense_optimizer": "adam"},
        loop={
            "steps": steps,
            "eval_every": every,
            "report_every": steps // (NUM_PARTS * SAMPLES_PER_PART),
        },
        checkpoint={"folder": str(folder / "saved"), "every": every, "asynchronous": True},
        # The profiler keeps tens of megabytes per trace.
        output={"folder": str(folder / "out"), "traced_steps": 0},
        runs=dict.fromkeys(RUNS, PROGRAM[kind]),
    )
    sampler = Sampler()
    watchers: list[TrainWatcher] = [sampler]
    if rank == 0:
        watchers += [
            RunFolder(config.output.folder, config),
            TensorBoardWatcher(folder / "scalars"),
        ]
    result = train(config, watchers)
    assert [len(run.losses) for run in result.runs] == [steps] * len(RUNS)
    return {name: _parts(usages) for name, usages in sampler.usages.items()}


def soak(rank: int, world_size: int, kind: str, steps: int, folder: Path) -> Runs:
    """Run a soak; return this rank's samples for each run, by fifths."""
    run = soak_library if kind in LIBRARY else soak_program
    return run(rank, kind, steps, folder)


def _parts(usages: list[Usage]) -> list[list[Usage]]:
    size = len(usages) // NUM_PARTS
    return [usages[start : start + size] for start in range(0, NUM_PARTS * size, size)]


def typical(usages: list[Usage]) -> Usage:
    """Return the medians: a sample taken during a save has one more thread and file."""
    return Usage(*(statistics.median_low(numbers) for numbers in zip(*usages, strict=True)))


def growth(before: Usage, after: Usage) -> list[str]:
    grown = [
        name
        for name, count, later in zip(Usage._fields[1:], before[1:], after[1:], strict=True)
        if later > count
    ]
    is_larger = after.resident_bytes > before.resident_bytes + MAX_GROWTH_BYTES
    return ["resident_bytes", *grown] if is_larger else grown


def findings(runs: Runs) -> list[str]:
    """Describe each resource that has grown on a rank."""
    parts = {name: [typical(part) for part in run] for name, run in runs.items()}
    pairs = {
        f"from the second fifth of the {name} run to its last": (run[1], run[-1])
        for name, run in parts.items()
    } | {
        f"from the {name} run to the {later}": (parts[name][-1], parts[later][-1])
        for name, later in pairwise(parts)
    }
    return [
        f"{', '.join(grown)} {when}: {before} and then {after}"
        for when, (before, after) in pairs.items()
        if (grown := growth(before, after))
    ]


def main() -> int:
    """Print the tables; return 1 if any resource has grown."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=3_000)
    parser.add_argument("--kind", choices=[*LIBRARY, *PROGRAM], default="exact")
    options = parser.parse_args()
    num_ranks = 4 if options.kind in LIBRARY else 2
    with tempfile.TemporaryDirectory() as folder, RankPool(num_ranks) as ranks:
        by_rank = ranks.run(soak, options.kind, options.steps, Path(folder), timeout_s=7_200)
    for name in by_rank[0]:
        print(f"{name}: step, resident MiB, Python threads, tasks, process groups, files")
        for number in range(NUM_PARTS):
            each = [typical(runs[name][number]) for runs in by_rank]
            most = Usage(*map(max, zip(*each, strict=True)))
            step = (number + 1) * options.steps // NUM_PARTS
            print(f"  {step:6} {most.resident_bytes / 2**20:8.1f}", *most[1:])
    grown = [f"rank {rank}: {text}" for rank, runs in enumerate(by_rank) for text in findings(runs)]
    print("\n".join(grown or ["nothing has grown"]))
    return bool(grown)


if __name__ == "__main__":
    sys.exit(main())
